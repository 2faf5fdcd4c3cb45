"""Tokens that other libraries wrote, read where they lie."""
