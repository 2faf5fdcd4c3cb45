"""Plans on a cluster: nearest changes that fit, and times of collectives across nodes."""

from dataclasses import replace

import pytest
from tiers import slow_but

from diffllm.distributed.recompute import ActivationCheckpointing
from diffllm.plan.cluster import Cluster
from diffllm.plan.estimate import plan
from diffllm.plan.search import MOST_TOKENS, longest, longest_sequence, nearest_change, outcome
from diffllm.plan.step import Call, Collective
from diffllm.training.memory import GIB

SMALL = [
    "model=tiny",
    "data.vocab_size=512",
    "seq_len=16",
    "compile=false",
    "activation_checkpointing=full",
]
ONE = "micro_batch_size=1"


def limited(gib, overrides, words=(), gpus=2):
    """Plan a run on GPUs with `gib` of memory, with the overrides of a change."""
    changed = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    gpus = int(changed.pop("gpus", gpus))
    kept = [word for word in overrides if word.partition("=")[0] not in changed]
    cluster = Cluster(gpus=gpus, memory_gib=gib, peak_flops=1e12, reserve_gib=0)
    made = plan(cluster, set(), [*kept, *(f"{key}={value}" for key, value in changed.items())])
    return made.simulated(made.cfg.activation_checkpointing, print)


EAGER = ["seq_len=512", "activation_checkpointing=none"]
CHANGES = [
    (2, EAGER, ("activation_checkpointing=full",)),
    (2, [*EAGER, "micro_batch_size=8"], ("micro_batch_size=4", "global_batch_size=16")),
    (2, [], ("gpus=8",)),
    (2, ["parallel.shard=2"], ("gpus=8", "parallel.shard=-1")),
    (  # the batch has sequences for eight GPUs
        4,
        ["parallel.shard=2", "parallel.replicate=2", "global_batch_size=8", ONE],
        ("parallel.replicate=1", "parallel.shard=-1", "gpus=8"),
    ),
    (4, ["parallel.shard=4", "parallel.replicate=-1"], ("gpus=8", "parallel.shard=8")),
    (2, ["global_batch_size=8", ONE, "parallel.shard=2"], ("gpus=8", "parallel.shard=-1")),
    # More GPUs alone would get less than one micro-batch of 4 sequences each.
    (2, ["global_batch_size=8", "micro_batch_size=4"], ("micro_batch_size=1", "gpus=8")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "overrides", "words"), slow_but(CHANGES[:1], CHANGES))
def test_plan_suggests_smallest_config_change_that_fits_memory(gpus, overrides, words):
    overrides = [*SMALL, *overrides]
    room = limited(1, overrides, words, gpus).step.peak.total / GIB + 1e-9
    made = limited(room, overrides, gpus=gpus)
    assert not made.fits
    for policy in ActivationCheckpointing:
        made = made.simulated(policy, print)
    change = nearest_change(made, print)
    again = limited(room, overrides, change.words, gpus)
    assert again.fits
    assert again.step.peak.by_kind == change.step.peak.by_kind
    assert change.words == words


@pytest.mark.slow
@pytest.mark.parametrize("context", slow_but([2], [1, 2]))
def test_longest_sequence_fits_and_a_slightly_longer_one_does_not(context):
    def fits(gib, length=512):
        words = [*SMALL, "attention=diff_v2", f"parallel.context={context}", ONE]
        made = plan(replace(TWO, memory_gib=gib), set(), [*words, f"seq_len={length}"])
        return made.simulated(made.cfg.activation_checkpointing, print)

    room = fits(1, 6144).step.peak.total / GIB + 1e-3
    made = fits(room)
    found = longest_sequence(made, print)
    assert found % 1024 == 0
    assert fits(room, found).fits
    assert not fits(room, found + 4096).fits


TWO = Cluster(gpus=2, peak_flops=1e12, reserve_gib=0)


PEAKS = {
    "linear": lambda length: 1e6 + 70 * length,
    "update": lambda length: max(9e6, 1e6 + 70 * length),  # the same for all short sequences
    "chunks": lambda length: 1e6 + 70 * length + 500 * min(length, 4096),  # of the loss
    "maps": lambda length: length**2 / 10,
}


@pytest.mark.parametrize("room", [1e5, 3e6, 1e7, 1e8])
@pytest.mark.parametrize("peak", PEAKS)
def test_longest_length_is_at_most_two_percent_too_short(peak, room):
    def counted(length):
        tried.append(length)
        return PEAKS[peak](length)

    tried: list[int] = []
    found = longest(counted, room, 1024)
    fitting = [n for n in range(1024, MOST_TOKENS + 1, 1024) if PEAKS[peak](n) <= room]
    if not fitting:
        assert found is None
    else:
        assert found in fitting
        assert found >= min(fitting[-1] - 1024, 0.98 * fitting[-1])
    assert len(tried) <= 11


@pytest.mark.slow
def test_outcome_function_returns_none_only_for_invalid_change():
    made = limited(1e-6, [*SMALL, "global_batch_size=8"])
    assert outcome(made, print, ("gpus=32",)) is None
    assert not outcome(made, print, ("gpus=8",)).fits


MOE = ["model=moe_tiny", "data.vocab_size=512", "seq_len=32", "compile=false"]


def test_planned_time_of_collective_depends_on_node_with_fewest_ranks():
    cluster = Cluster(gpus=12, nvlink_gbs=400, network_gbs=50, gpus_per_node=8)
    ranks = tuple(range(12))
    assert cluster.fewest_in_a_node(ranks) == 4

    def seconds(kind):
        return cluster.seconds(Call(kind, 12 * 10**9, ranks))

    # The smaller node has 4 network cards; each of its ranks sends 8 of 12 parts out of the node.
    assert seconds(Collective.all_gather) == pytest.approx(11 / (4 * 50))
    assert seconds(Collective.all_to_all) == pytest.approx(8 / 50)


@pytest.mark.slow
def test_only_expert_groups_of_device_mesh_stay_within_one_node():
    cluster = Cluster(gpus=8, gpus_per_node=2)
    made = plan(cluster, set(), [*MOE, "parallel.replicate=2", "parallel.expert=2"])
    made = made.simulated(made.cfg.activation_checkpointing, print)
    groups = {}
    for call in made.step.calls:
        groups.setdefault(call.kind, set()).add(call.ranks)
    everyone, dense = tuple(range(8)), (0, 1, 2, 3)
    assert groups[Collective.all_to_all] == {(0, 1)}
    assert groups[Collective.all_gather] == {dense, (0, 2)}
    assert {(0, 4)} <= groups[Collective.all_reduce]
    inside = {
        ranks: cluster.fewest_in_a_node(ranks) == len(ranks)
        for found in groups.values()
        for ranks in found
    }
    assert {ranks for ranks, near in inside.items() if near} == {(0, 1)}
    assert inside.keys() <= {everyone, dense, (0, 1), (0, 2), (0, 4)}
    near = {(flow.kind, flow.ranks): flow.in_a_node for flow in made.flows}
    assert near[Collective.all_to_all, 2] == 2
    assert near[Collective.all_gather, 4] == 2
    assert near[Collective.all_gather, 2] == 1
