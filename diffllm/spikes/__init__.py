"""Spikes of loss and gradient norm: counted by three definitions, and kept from updates."""

from diffllm.spikes.events import EventCounter
from diffllm.spikes.monitor import SpikeMonitor
from diffllm.spikes.protection import Guard, ProtectionConfig, SkippedTooOften, SkipStep
from diffllm.spikes.published import SpikeCounter, olmo2, window128

__all__ = [
    "EventCounter",
    "Guard",
    "ProtectionConfig",
    "SkipStep",
    "SkippedTooOften",
    "SpikeCounter",
    "SpikeMonitor",
    "olmo2",
    "window128",
]
