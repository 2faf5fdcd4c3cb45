"""Calls for workers of tests/test_gpu_harness.py; imports little, so that processes start fast."""

import os
import signal
import sys
import time


def build_step(state, how):
    state["how"] = how
    if how == "raises":
        raise MemoryError("CUDA out of memory")


def warm(state):
    if state["how"] == "hangs":
        time.sleep(600)
    return {"seconds": 0.1, "tokens": 8, "shape": "", "mfu_of_a_second": {"mfu_causal": 0.2}}


def turn(state, repeats):
    if state["how"] == "dies":
        print("a last word", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return {"seconds": 0.5 if state["how"] == "fast" else 1.0, "peak": None}


def profile(state):
    return {"loss": 1.0, "idle": 0.5, "step": 1.5}


def once(state, how):
    build_step(state, how)
    return {"ms": turn(state, 1)["seconds"]}
