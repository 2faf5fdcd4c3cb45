"""Events of torch's CPU allocator."""

import os
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def allocations(work: Callable[[], Any]) -> tuple[profile, Any]:
    """Call `work`; return the profiler with its memory events, and the result of `work`."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch reads the level once per process
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    return profiler, result


def kept_bytes(profiler: profile) -> int:
    """Return the allocated bytes less the freed bytes."""
    return sum(event.self_cpu_memory_usage for event in profiler.key_averages())
