"""Which ranks share a node, and what that costs."""

import pytest

from diffllm.plan.estimate import Cluster, plan
from diffllm.plan.memory import Call, Collective

MOE = ["model=moe_tiny", "data.vocab_size=512", "seq_len=32", "compile=false"]


def test_an_uneven_group_waits_for_the_node_with_the_fewest_of_its_ranks():
    cluster = Cluster(gpus=12, nvlink_gbs=400, network_gbs=50, gpus_per_node=8)
    ranks = tuple(range(12))
    assert cluster.fewest_in_a_node(ranks) == 4

    def seconds(kind):
        return cluster.seconds(Call(kind, 12 * 10**9, ranks))

    # Four cards carry the rings of the smaller node, whose ranks send 8 of 12 parts out of it.
    assert seconds(Collective.all_gather) == pytest.approx(11 / (4 * 50))
    assert seconds(Collective.all_to_all) == pytest.approx(8 / 50)


@pytest.mark.slow
def test_experts_share_a_node_before_shards_and_shards_before_replicas():
    cluster = Cluster(gpus=8, gpus_per_node=2)
    made = plan(cluster, set(), [*MOE, "parallel.replicate=2", "parallel.expert=2"])
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
