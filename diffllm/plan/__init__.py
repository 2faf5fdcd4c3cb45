"""Estimates of the memory, time and network traffic of a training run, made without a cluster."""
