"""If a rank hangs, dies or differs, the other ranks stop in time and name the rank."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from processes import PATIENCE_S, state_of
from runs.command import ForkedRun, overrides_of
from runs.planted_train import Fault

from diffllm.distributed.stop import StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.world import World
from diffllm.metrics.events import read_events

TIMEOUT = 12
"""distributed.timeout in seconds, in tests with a missing rank."""
SLOW = pytest.mark.slow
GONE = "killed, stopped or disconnected"


@contextlib.contextmanager
def ranks(
    corpus: Path, directory: Path, fault: Fault, *more: str, number: int = 2
) -> Iterator[ForkedRun]:
    words = overrides_of(corpus, directory, "global_batch_size=6", "steps=40", "log_interval=5")
    missing = fault.kind in ("die", "freeze", "hang", "start", "slow save", "slow end")
    words += [f"distributed.timeout={TIMEOUT if missing else 600}", *more]
    run = ForkedRun(words, number, directory, fault)
    try:
        yield run
    finally:
        run.kill()


def error_of_ranks(run: ForkedRun, *but: int, code: int = 1) -> str:
    """Wait until all ranks except `but` have ended with `code`; return the only error line."""
    for rank, process in enumerate(run.processes):
        if rank not in but:
            process.join(PATIENCE_S)
            assert process.exitcode == code, (rank, process.exitcode, run.text())
    lines = [line for line in run.text().splitlines() if line.startswith("error: ")]
    # Without rank 0, which has the store, ranks cannot agree on a single rank that prints.
    assert len(lines) == 1 or 0 in but, run.text()
    return lines[0]


@pytest.mark.parametrize(
    ("kind", "rank", "said"),
    [
        pytest.param("die", 0, f"rank 0 is missing: {GONE}", marks=SLOW),
        pytest.param("die", 1, f"rank 1 is missing: {GONE}", marks=SLOW),
        pytest.param("freeze", 0, f"rank 0 is missing: {GONE}", marks=SLOW),
        pytest.param("freeze", 2, f"rank 2 is missing: {GONE}", marks=SLOW),
        pytest.param("hang", 0, "rank 0 is missing: it hangs at step 8", marks=SLOW),
        pytest.param("hang", 2, "rank 2 is missing: it hangs at step 8", marks=SLOW),
        pytest.param(
            "start", 1, "rank 1 is missing: it hangs at the construction of the model", marks=SLOW
        ),
    ],
)
def test_error_message_names_missing_rank_and_waiting_ranks(corpus, tmp_path, kind, rank, said):
    run_directory = tmp_path / "run"
    with ranks(corpus, run_directory, Fault(kind, rank, 8), number=3) as run:
        error = error_of_ranks(run, *([rank] if kind in ("die", "freeze") else []))
    assert said in error
    assert "Traceback" not in run.text()
    others = {0, 1, 2} - {rank}
    place = "step 8" if kind != "start" else "the construction of the model"
    if rank:  # without rank 0's store, ranks cannot read where other ranks wait
        assert all(f"rank {r} waits at {place} in gloo:" in error for r in others), error
    (stall,) = read_events(run_directory)
    assert (stall.kind, stall.step) == ("stall", 7 if kind != "start" else 0)
    assert f"error: {stall.detail}" in run.text()
    traces = run_directory / "traces"
    assert f"stack traces in {traces}" in error
    for other in others:
        text = (traces / f"rank-{other:05d}.txt").read_text(encoding="utf-8")
        assert text.startswith(f"rank {other} at {place}\n")
        assert "train_step" in text or kind == "start"
    if kind in ("hang", "start"):
        assert "planted_train.py" in (traces / f"rank-{rank:05d}.txt").read_text(encoding="utf-8")


def test_failure_of_one_rank_prints_only_one_traceback(corpus, tmp_path):
    with ranks(corpus, tmp_path / "run", Fault("raise", 1, 8)) as run:
        error = error_of_ranks(run)
    assert "rank 1 failed at step 8: ValueError: a planted error" in error
    assert "rank 0 waits at step 8 in gloo:" in error
    assert Path(run.said[1]).read_text(encoding="utf-8").count("Traceback") == 1
    assert "Traceback" not in Path(run.said[0]).read_text(encoding="utf-8")


@SLOW
@pytest.mark.parametrize("frozen", [0, 1])
def test_signal_stops_rank_that_waits_for_frozen_rank(corpus, tmp_path, frozen):
    directory = tmp_path / "run"
    with ranks(corpus, directory, Fault("freeze", frozen, 8), "distributed.timeout=3000") as run:
        run.wait_for(lambda: state_of(run.processes[frozen].pid) == "T", "frozen rank")
        run.signal(signal.SIGTERM, 1 - frozen)
        error = error_of_ranks(run, frozen)
    assert f"rank {frozen} is missing" in error
    assert not (directory / "requeue").exists(), "no step was saved"


class WatchOfFrozenStore(Watch):
    """A watch whose store freezes after the first heartbeat; `message` is its error."""

    message = ""

    def _talk(self) -> None:
        self.closed.wait()

    def _end(self, message: str) -> None:
        self.message = message
        self.closed.set()


def test_rank_0_whose_store_freezes_before_first_read_is_reported_as_stopped():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with contextlib.closing(StopRequest()) as request:
        rank_0 = WatchOfFrozenStore(World(0, 2, 0, store), 600, request)
        assert store.check(["watch/beat/0"])
        rank_1 = WatchOfFrozenStore(World(1, 2, 1, store), 1, request)
        assert rank_1.closed.wait(PATIENCE_S)
        rank_0.closed.set()
    assert rank_1.message.startswith(f"rank 0 is missing: {GONE}")


# A slow rank is not missing


@pytest.mark.slow
def test_rank_is_not_reported_as_missing_during_slow_checkpoint_save(corpus, tmp_path):
    words = ("steps=6", "checkpoint.interval=6")  # each save takes 20 s
    with ranks(corpus, tmp_path / "run", Fault("slow save", 1), *words) as run:
        assert "held-out loss" in run.finish()
    assert (tmp_path / "run" / "checkpoints" / "step-00000006").is_dir()


@SLOW
def test_rank_that_ends_after_rank_0_causes_no_error(corpus, tmp_path):
    with ranks(corpus, tmp_path / "run", Fault("slow end", 1), "steps=6") as run:
        assert "error" not in run.finish()


# Config, code, corpus and values must be equal on all ranks


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("seed", "the ranks differ in their config: seed is 1 on rank 2, 0 on ranks 0, 1"),
        pytest.param(
            "code", "the ranks differ in their code: diffllm is another on rank 2, ", marks=SLOW
        ),
        ("corpus", "the ranks differ in their corpus: tokens is others on rank 2, "),
    ],
)
def test_training_is_refused_if_ranks_differ_in_config_code_or_corpus(corpus, tmp_path, kind, said):
    with ranks(corpus, tmp_path / "run", Fault(kind, 2), number=3) as run:
        error = error_of_ranks(run, code=2)
    assert said in error
    assert "Traceback" not in run.text()
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_error_message_contains_tensor_that_differs_between_replicas(corpus, tmp_path):
    more = ["distributed.check_interval=4", "parallel.replicate=2", "parallel.shard=1"]
    more += ["global_batch_size=4", "parallel=hsdp"]
    with ranks(corpus, tmp_path / "run", Fault("perturb", 1, 8), *more) as run:
        error = error_of_ranks(run, code=2)
    assert "replicas of the model: model.layers.1.attention.wq.weight on rank" in error
