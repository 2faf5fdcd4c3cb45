"""Measurements on one machine, each contestant in a process of its own; see ../gpu.py."""
