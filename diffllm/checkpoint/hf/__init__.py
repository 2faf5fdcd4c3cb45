"""Convert our decoders to and from the parameter formats of other libraries."""
