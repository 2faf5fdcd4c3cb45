"""Calls of tests/benchmarks/test_gpu_harness.py; few imports, so that processes start fast."""

import os
import signal
import subprocess
import sys
import time


def measure(how, child=None):
    if how == "raises":
        raise MemoryError("CUDA out of memory\nTried to allocate 2 GiB")
    if how == "dies":
        print("a last word", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        with open(child, "w", encoding="utf-8") as file:
            file.write(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(600)
    print("not the result", flush=True)
    return {"ms": 500.0 if how == "fast" else 1000.0, "rounds_ms": [1.0]}


def scheduled_kernels(words, reads=None):
    from harness.machine import join_alone
    from harness.roofline import scheduled
    from harness.steps import build_step

    with scheduled() as kernels:
        _, step = build_step(join_alone(), words)
        step()
    return kernels
