"""Sentences of captions about the highest values and the spikes of a figure."""

import numpy as np

from diffllm.compare.arms.sentences import short
from diffllm.compare.report.curves import Band, Spike
from diffllm.compare.report.scales import value_range
from diffllm.metrics.metric import Curve, Layers


def largest_text(bands: list[Band]) -> str:
    """Describe the largest value of a figure, and its step if the figure shows every step."""
    peaks = [band.peak for band in bands if band.peak]
    if not peaks:
        _, largest = value_range(bands)
        return f"the largest value is {short(largest)}"
    value, step = max(peaks)
    return f"the largest unmarked value is {short(value)}, at step {step:,}"


def spikes_text(plot: Curve | Layers, bands: list[Band]) -> str:
    spikes: list[Spike] = []
    for band in bands:
        spikes += band.spikes
    if not spikes:
        return ""
    highest = max(spikes, key=lambda spike: spike.value)
    value = short(highest.value) if np.isfinite(highest.value) else "not finite"
    text = f" Triangles mark spikes, the highest at step {highest.step:,} ({value})."
    if isinstance(plot, Curve) and plot.smooth:
        text += " The running mean omits marked steps."
    return text
