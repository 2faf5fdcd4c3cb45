"""Mixtures: several sources of text in one run, in an order that is a pure function."""
