"""Our decoders as other libraries lay them out: configs, names and shapes of tensors, files."""
