"""Sources of text for a corpus: local files, hub datasets, Python packages, generated tasks."""
