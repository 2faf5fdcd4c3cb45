"""Conversion of our decoders to and from the layouts of other libraries."""
