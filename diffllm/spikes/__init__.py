"""Spikes of loss and gradient norm: counted by three definitions."""

from diffllm.spikes.events import EventCounter
from diffllm.spikes.monitor import SpikeMonitor
from diffllm.spikes.published import SpikeCounter, olmo2, window128

__all__ = [
    "EventCounter",
    "SpikeCounter",
    "SpikeMonitor",
    "olmo2",
    "window128",
]
