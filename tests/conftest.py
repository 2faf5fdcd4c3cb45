"""Settings of all tests: reproducible cases, no network, few threads."""

import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # runs/, tiers.py

os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Must precede the import of torch. Parallel workers and the runs of tests share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # otherwise every process would compile all modules

# A background job of a shell ignores SIGINT, and so would all processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import parsed_yaml  # noqa: F401
import pytest
import torch
from hypothesis.internal.conjecture import providers

from diffllm.cli import main
from diffllm.distributed.launcher import set_variables

set_variables()  # tests fork runs from this process, so MKL must compute here as in train.py
sys.dont_write_bytecode = False

SEED = int(os.environ.get("FUZZ_SEED", "20261124"))
"""Seed of all drawn test cases; `make fuzz` sets FUZZ_SEED."""

# No time limits, because a busy machine must not fail a test.
hypothesis.settings.register_profile(
    "diffllm",
    derandomize=False,  # CI services turn this on, which would ignore the seed
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("diffllm")
# Hypothesis also draws constants of all local modules that are imported so far. Those modules
# depend on the tests that ran before in the same worker, so this turns these constants off.
providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(tryfirst=True)  # before the plugin of Hypothesis reads this option
def pytest_configure(config: pytest.Config) -> None:
    config.option.hypothesis_seed = str(SEED)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random generator for the cases of one test; `make fuzz` runs each test that uses it."""
    return random.Random(f"{SEED} {request.node.nodeid}")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # models are tiny, and tests share cores with processes


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    # wandb sets this variable. Processes of later tests would share the service of this process.
    os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture(scope="module")
def gloo() -> Iterator[None]:
    """Provide a process group of one rank to all tests of a module."""
    from runs.one_rank import gloo_group  # most tests do not need the modules of training

    torch.set_num_threads(1)
    with gloo_group():
        yield


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty directory, and return its path."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def source_tokenizer(tmp_path: Path) -> Path:
    """Write a file that a run directory copies as its tokenizer."""
    path = tmp_path / "source.model"
    path.write_bytes(b"pieces")
    return path


@pytest.fixture
def wandb_server() -> Iterator[Any]:
    """Return a stand-in for wandb's server."""
    from wandb_server import WandbServer

    server = WandbServer()
    yield server
    server.close()


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a `diffllm` command to exit code 0 and returns its stdout.

    With `quiet`, the command must also print nothing to stderr.
    """

    def run(*words: object, quiet: bool = False) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 0
        out, err = capsys.readouterr()
        assert not (quiet and err), err
        return out

    return run


@pytest.fixture
def error_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a failing `diffllm` command and returns its error line."""

    def run(*words: object) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2, words
        out, err = capsys.readouterr()
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return line

    return run


LONG = ("integration", "plan", "distributed")
"""Folders of the longest tests, which start first so that all workers finish together."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in LONG)
    for item in items:
        by_hypothesis = hypothesis.is_hypothesis_test(getattr(item, "obj", None))
        if by_hypothesis or "rng" in getattr(item, "fixturenames", ()):
            item.add_marker("fuzz")
    mark_slow_cases(items)


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of a test as slow after the first N, which `fast_cases(N)` states."""
    fast_cases: Counter[str] = Counter()
    for item in items:
        marker = item.get_closest_marker("fast_cases")
        if marker is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        fast_cases[test] += 1
        if fast_cases[test] > marker.args[0]:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Freeze all objects: repeated garbage collection would take a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
