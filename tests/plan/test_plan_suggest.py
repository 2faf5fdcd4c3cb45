"""The nearest change where the user fixed a mesh or a batch."""

import pytest

from diffllm.plan.estimate import GIB, Cluster, nearest_change, outcome, plan

SMALL = [
    "model=tiny",
    "data.vocab_size=512",
    "seq_len=16",
    "compile=false",
    "activation_checkpointing=true",
]
ONE = "micro_batch_size=1"


def limited(gib, overrides, words=(), gpus=2):
    """A plan on GPUs of that much memory, with the words of a change."""
    changed = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    gpus = int(changed.pop("gpus", gpus))
    kept = [word for word in overrides if word.partition("=")[0] not in changed]
    cluster = Cluster(gpus=gpus, memory_gib=gib, peak_flops=1e12, reserve_gib=0)
    return plan(cluster, set(), [*kept, *(f"{key}={value}" for key, value in changed.items())])


FIXED = [
    (2, ["parallel.shard=2"], ("gpus=8", "parallel.shard=-1")),
    (
        4,
        ["parallel.shard=2", "parallel.replicate=2"],
        ("parallel.replicate=1", "parallel.shard=-1"),
    ),
    (  # and the batch is enough for eight
        4,
        ["parallel.shard=2", "parallel.replicate=2", "global_batch_size=8", ONE],
        ("parallel.replicate=1", "parallel.shard=-1", "gpus=8"),
    ),
    (
        4,
        ["parallel.shard=4", "parallel.replicate=-1"],
        ("gpus=8", "parallel.shard=8"),
    ),
    (
        4,
        ["parallel.shard=2", "parallel.replicate=-1"],
        ("parallel.replicate=1", "parallel.shard=-1"),
    ),
    (2, ["global_batch_size=8", ONE], ("gpus=8",)),
    (
        2,
        ["global_batch_size=8", ONE, "parallel.shard=2"],
        ("gpus=8", "parallel.shard=-1"),
    ),
    # Alone, more GPUs would have half a micro-batch each; 32 of them not one sequence.
    (
        2,
        ["global_batch_size=8", "micro_batch_size=4"],
        ("micro_batch_size=1", "gpus=8"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "overrides", "words"), FIXED)
def test_what_the_user_fixed_gives_way_to_a_change_that_fits(gpus, overrides, words):
    overrides = [*SMALL, *overrides]
    room = limited(1, overrides, words, gpus).step.peak.total / GIB + 1e-9
    made = limited(room, overrides, gpus=gpus)
    assert not made.fits
    change = nearest_change(made)
    again = limited(room, overrides, change.words, gpus)
    assert again.fits
    assert again.step.peak.by_kind == change.step.peak.by_kind
    assert change.words == words


def test_what_cannot_be_is_not_what_is_too_big():
    made = limited(1e-6, [*SMALL, "global_batch_size=8"])
    assert outcome(made, ("gpus=32",)) is None
    assert not outcome(made, ("gpus=8",)).fits
