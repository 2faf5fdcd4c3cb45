"""Targets of positions that the loss ignores; every negative target is ignored."""

CONTEXT_TARGET = -1
"""Target at which the loss mask excludes a token, such as a token of a prompt."""
PADDING_TARGET = -2
"""Target of a training position that has no token. Routers of experts do not count it."""
