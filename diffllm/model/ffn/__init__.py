"""Feed-forward layers."""
