"""The measurements of ../gpu.py; each runs in a process of its own."""
