"""Save checkpoints in the background; read, check and delete checkpoints."""
