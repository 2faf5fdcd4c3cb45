"""Packing: documents are kept whole, and laid into sequences where they fit best."""
