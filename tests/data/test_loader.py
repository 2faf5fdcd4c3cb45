import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from processes import PATIENCE_S
from tiers import slow_but

from diffllm.core.errors import CheckpointError, ConfigError, DataError
from diffllm.data.heldout import HeldoutSample
from diffllm.data.loader import TrainLoader
from diffllm.data.samples import ShuffledSequences, permute
from diffllm.data.sequences import StreamSequences
from diffllm.data.streams import TokenStream

SEQ_LEN, SEED, GLOBAL_BATCH = 8, 5, 12
TOKENS = 8 * 50 + 5
SAMPLES = 50

MakeLoader = Callable[..., TrainLoader]


@pytest.fixture
def stream(make_stream: Callable[..., TokenStream]) -> TokenStream:
    """A stream in which token i is i, so that a batch shows its place."""
    return make_stream(list(range(TOKENS)))


@pytest.fixture
def make_loader(stream: TokenStream, open_loader: Callable[..., TrainLoader]) -> MakeLoader:
    def make(seq_len: int = SEQ_LEN, **options: Any) -> TrainLoader:
        return open_loader(ShuffledSequences(StreamSequences(stream, seq_len), SEED), **options)

    return make


def samples_of(inputs: torch.Tensor) -> list[int]:
    return (inputs[:, 0] // SEQ_LEN).tolist()


def expected_step(step: int) -> list[int]:
    """Return the samples of optimizer step `step` by the definition of the order."""
    indices = range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    return [int(permute(np.array([g % SAMPLES]), SAMPLES, SEED, g // SAMPLES)[0]) for g in indices]


def global_steps(
    make_loader: MakeLoader,
    steps: int,
    world_size: int,
    state: dict[str, int] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Return the samples of each step, ordered by micro-step, then by rank."""
    loaders = [make_loader(rank=r, world_size=world_size, **options) for r in range(world_size)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    micro_steps = GLOBAL_BATCH // (world_size * options.get("micro_batch_size", 4))
    return [
        [s for _ in range(micro_steps) for loader in loaders for s in samples_of(next(loader)[0])]
        for _ in range(steps)
    ]


def test_loader_targets_are_inputs_shifted_by_one_token(make_loader):
    inputs, targets = next(make_loader())
    assert inputs.shape == targets.shape == (4, SEQ_LEN)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert (inputs[:, 0] % SEQ_LEN == 0).all()


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "num_workers"),
    [(1, 12, 0), (1, 1, 2), (1, 4, 1), (2, 3, 0), (2, 2, 1), (3, 4, 0), (4, 1, 0), (6, 2, 0)],
)
def test_loader_step_reads_same_samples_for_any_world_size_and_micro_batch(
    make_loader, world_size, micro_batch_size, num_workers
):
    """Nine steps cross two borders of epochs; the first border is inside a batch."""
    layout = {"micro_batch_size": micro_batch_size, "num_workers": num_workers}
    steps = global_steps(make_loader, 9, world_size, **layout)
    assert steps == [expected_step(step) for step in range(9)]


@pytest.mark.parametrize("consumed", [0, 1, 4, 11])
@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "num_workers"), [(1, 4, 0), (1, 6, 2), (3, 2, 0)]
)
def test_loader_resumes_at_any_step_with_any_world_size_and_micro_batch(
    make_loader, consumed, world_size, micro_batch_size, num_workers
):
    loader = make_loader(num_workers=1, prefetch_factor=8)
    for _ in range(consumed * 3):
        next(loader)
    state = loader.state_dict()
    layout = {"micro_batch_size": micro_batch_size, "num_workers": num_workers}
    resumed = global_steps(make_loader, 3, world_size, state, **layout)
    assert resumed == [expected_step(consumed + step) for step in range(3)]


def test_loader_state_does_not_count_prefetched_batches(make_loader):
    loader = make_loader(num_workers=2, prefetch_factor=8)
    assert loader.state_dict() == {"seed": SEED, "epoch": 0, "sample": 0}
    for _ in range(3 * 4 + 2):
        next(loader)
    assert loader.state_dict() == {"seed": SEED, "epoch": 0, "sample": 48}
    next(loader)
    assert loader.state_dict() == {"seed": SEED, "epoch": 1, "sample": 10}


def test_load_state_dict_rewinds_a_running_loader(make_loader):
    loader = make_loader(num_workers=1)
    first = samples_of(next(loader)[0])
    loader.load_state_dict({"seed": SEED, "epoch": 0, "sample": 0})
    assert samples_of(next(loader)[0]) == first


def test_loader_refuses_state_with_other_seed_or_corpus_size(make_loader):
    with pytest.raises(CheckpointError, match=r"seed=6, but this run has seed=5"):
        make_loader().load_state_dict({"seed": 6, "epoch": 0, "sample": 0})
    with pytest.raises(CheckpointError, match=r"sequence 50 .* this corpus has 50"):
        make_loader().load_state_dict({"seed": SEED, "epoch": 0, "sample": 50})
    with pytest.raises(CheckpointError, match=r"invalid: its sample number .* must be below"):
        make_loader().load_state_dict({"seed": SEED, "epoch": 2**52, "sample": 0})


def test_loader_refuses_invalid_seq_len_or_global_batch_size(make_loader):
    with pytest.raises(DataError, match=r"train split has 405 tokens, but seq_len=405 needs 406"):
        make_loader(seq_len=405)
    make_loader(seq_len=404)
    with pytest.raises(
        ConfigError, match=r"global_batch_size=12 .* micro_batch_size=4 times world"
    ):
        make_loader(world_size=2)


def test_loader_does_not_change_torch_random_state(make_loader):
    before = torch.get_rng_state()
    next(make_loader(num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("sequences", [1, 10, 50, 1000])
def test_heldout_sample_assigns_every_sequence_to_exactly_one_rank(stream, world_size, sequences):
    read = []
    sample = HeldoutSample(stream, SEQ_LEN, sequences, eos_id=0)
    for rank in range(world_size):
        batches = list(sample.batches(4, rank, world_size))
        assert all(len(inputs) == 4 for inputs, _ in batches[:-1])
        assert all(torch.equal(targets, inputs + 1) for inputs, targets in batches)
        read += [s for inputs, _ in batches for s in samples_of(inputs)]
    count = min(sequences, SAMPLES)
    assert sorted(read) == [i * SAMPLES // count for i in range(count)]


def test_heldout_sample_refuses_split_shorter_than_a_sequence(prepared):
    stream = prepared.split("heldout")
    with pytest.raises(DataError, match=rf"its heldout split has {len(stream)} tokens, but seq"):
        HeldoutSample(stream, len(stream), 1, eos_id=0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_raises_one_line_error_for_damaged_shard(make_loader, stream, tmp_path, num_workers):
    loader = make_loader(num_workers=num_workers)
    (tmp_path / "stream" / "train-00002.bin").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        list(islice(loader, 20))
    assert "train-00002.bin: damaged: its sha256 is not" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loader_close_ends_loader_processes_that_ignore_stop_signals(make_loader):
    loader = make_loader(num_workers=2)
    next(loader)
    started = multiprocessing.active_children()
    assert len(started) == 2
    for worker in started:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(worker.pid or 0, number)
    read = [s for inputs, _ in islice(loader, 8) for s in samples_of(inputs)]
    assert read == [*expected_step(0)[4:], *expected_step(1), *expected_step(2)]
    loader.close()
    assert not any(worker.is_alive() for worker in started)


SCRIPT = """
import sys, time
from pathlib import Path
from diffllm.data.loader import TrainLoader
from diffllm.data.streams import TokenStream
from diffllm.data.samples import ShuffledSequences
from diffllm.data.sequences import StreamSequences
from diffllm.data.shards import Manifest
directory = Path(sys.argv[1])
stream = TokenStream(directory, Manifest.load(directory), "train")
loader = TrainLoader(ShuffledSequences(StreamSequences(stream, 8), 0), 4, 4, num_workers=2)
next(loader)
print("here", flush=True)
if sys.argv[2] == "hang":
    time.sleep(600)
"""


@pytest.mark.parametrize("end", slow_but(["return"], ["hang", "return"]))
def test_loader_processes_end_silently_after_parent_process_ends(stream, tmp_path, end):
    """The trainer is killed, or returns without close()."""
    trainer = subprocess.Popen(
        # Torchdata warns about fewer cores than workers.
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path / "stream"), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == "here\n"
    if end == "hang":
        trainer.kill()
    # Standard error closes when the last process with this pipe ends.
    _, stderr = trainer.communicate(timeout=PATIENCE_S)
    assert stderr == ""
    assert trainer.returncode == (-signal.SIGKILL if end == "hang" else 0)
