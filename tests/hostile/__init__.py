"""Hostile cases, drawn: what is done to runs, corpora and commands, and the rules that hold."""
