"""Sources of text: content, identity by hash, and reading in parts."""
