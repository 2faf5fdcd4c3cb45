"""Shared by all tests: deterministic, offline, few threads."""

import gc
import os
import secrets
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # gloo.py

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "FUZZ_SEED", str(secrets.randbelow(2**32))
)  # workers have that of their parent
# Before torch is imported. Workers side by side share the cores, with the runs that they start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each process would compile all modules anew
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # as train.py, whose imports forked runs share

# A shell that starts this in the background has it ignore Ctrl-C, and all that it starts with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

sys.dont_write_bytecode = False


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tiny models, and cores shared with the processes that tests start


LONG = ("integration", "plan", "distributed")
"""Folders of the tests that take longest; they start first, or one would run alone in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONG)


def pytest_collection_finish() -> None:
    """Freeze the objects made so far: collecting them again and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if "not slow" not in config.option.markexpr:
        terminalreporter.write_line(
            f"FUZZ_SEED={os.environ['FUZZ_SEED']} draws the same cases again"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
