"""The measurements of ../gpu.py; each runs in a separate process."""
