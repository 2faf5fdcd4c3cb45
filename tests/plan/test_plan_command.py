"""`diffllm plan`: output, assumptions, suggestions and errors."""

import json

import pytest
from torch._dynamo.backends import common

from diffllm import cli as tools
from diffllm.cli.plan_text import head_text
from diffllm.plan.cluster import Cluster
from diffllm.plan.estimate import plan
from diffllm.plan.step import Call, Collective

SMALL = ["model=tiny", "data.vocab_size=512", "seq_len=128", "compile=false"]
LONGEST = "longest=true"


def plan_json(capsys, *words):
    assert tools.main(["plan", "--json", *words]) == 0
    out, progress = capsys.readouterr()
    simulated = [line.rpartition("=")[2] for line in progress.splitlines()]
    assert simulated[:3] == ["none", "selective", "full"]
    lengths = progress.splitlines()[3:]
    assert all("seq_len=" in line for line in lengths)
    assert bool(lengths) == ("longest=true" in words)
    return json.loads(out)


@pytest.mark.slow
def test_plan_json_contains_memory_communication_time_and_assumptions(capsys):
    fast = ("nvlink_gbs=1e9", "network_gbs=1e9")
    out = plan_json(
        capsys, *SMALL, "gpus=4", "gpus_per_node=2", "tokens=1e9", "mfu=0.5", *fast, LONGEST
    )
    memory, time = out["memory"], out["time"]
    assert out["longest_sequence"] == 2**20  # the largest that is tried
    assert memory["optimizer"] > 2 * memory["parameters"] > 0
    for policy in ("none", "selective", "full"):
        numbers = memory["policies"][policy]
        assert sum(numbers["at_peak"].values()) == numbers["peak"]
        assert numbers["free"] == memory["device"] - memory["reserve"] - numbers["peak"]
    kept = [policy["activations"] for policy in memory["policies"].values()]
    assert kept[0] > kept[1] > kept[2]
    assert {flow["kind"] for flow in out["communication"]} == {
        "all-gather",
        "reduce-scatter",
        "all-reduce",
    }
    assert (out["global_batch_size"], out["micro_batch_size"], out["micro_batches"]) == (4, 1, 1)
    assert time["tokens_per_step"] == 4 * 128
    assert time["flops_per_step"] == time["flops_per_token"] * 512
    assert time["tokens_per_s"] == pytest.approx(4 * 989.4e12 * 0.5 / time["flops_per_token"])
    assert time["days"] == pytest.approx(1e9 / time["tokens_per_s"] / 86400)
    assert time["gpu_hours"] == pytest.approx(time["days"] * 24 * 4)
    given = {a["key"]: a["given"] for a in out["assumptions"]}
    said_so = {key for key, value in given.items() if value}
    assert said_so == {"mfu", "gpus_per_node", "nvlink_gbs", "network_gbs"}
    assert {"gpu", "reserve_gib", "global_batch_size"} < given.keys()
    assert "seq_len" not in given


def test_visible_keys_setting_reduces_planned_flops_for_masked_documents():
    words = ["model=dense_7b", "attention=diff_v2", "seq_len=4096"]
    masked = [*words, "data.mask_documents=true"]
    whole, unstated, stated = (
        plan(Cluster(), set(), each)
        for each in (words, masked, [*masked, "data.visible_keys=512.5"])
    )
    assert whole.flops_per_step == unstated.flops_per_step == 1458828591759360
    assert whole.compute_seconds == unstated.compute_seconds == 0.4607680765360825
    assert stated.flops_per_token == stated.model.flops_per_token(512.5) < whole.flops_per_token
    ratio = stated.flops_per_token / whole.flops_per_token
    assert stated.compute_seconds == pytest.approx(ratio * whole.compute_seconds)
    shown = {
        name: [(each.value, each.given) for each in made.assumptions if "visible" in each.key]
        for name, made in (("whole", whole), ("unstated", unstated), ("stated", stated))
    }
    assert shown == {"whole": [], "unstated": [(2048.5, False)], "stated": [(512.5, True)]}
    (said,) = [each.why for each in unstated.assumptions if each.key == "data.visible_keys"]
    assert said == "whole sequences; masked documents need fewer FLOPs"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["model=tiny"],
            "seq_len=512 (assumed), micro_batch_size=1 (assumed): 1 x 512 tokens per rank",
        ),
        (
            ["seq_len=1024", "micro_batch_size=4"],
            "seq_len=1024 (set), micro_batch_size=4 (set): 4 x 1,024 tokens per rank",
        ),
        (
            ["global_batch_size=16"],
            "seq_len=512 (assumed), micro_batch_size=2 (from global_batch_size): 2 x 512 tokens",
        ),
        (
            ["model=tiny", "parallel.context=2"],
            "seq_len=512 (assumed), micro_batch_size=1 (assumed): 1 x 512 tokens per group of 2",
        ),
        (
            ["experiment=quickstart"],
            "seq_len=256 (experiment=quickstart), micro_batch_size=2 (from global_batch_size)",
        ),
    ],
)
def test_first_line_of_plan_names_sequence_length_and_micro_batch(words, line):
    assert head_text(plan(Cluster(), set(), words)).startswith(line)


@pytest.mark.slow
def test_planned_step_time_is_maximum_of_computation_and_communication(capsys, output_of):
    words = [*SMALL, "gpus=16", "tokens=1e9"]
    time = plan_json(capsys, *words, "mfu=0.5", "network_gbs=1e-3")["time"]
    assert time["communication_seconds"] > 10 * time["compute_seconds"]
    assert time["step_seconds"] == time["communication_seconds"]
    assert time["mfu"] == pytest.approx(0.5 * time["compute_seconds"] / time["step_seconds"])
    assert time["days"] == pytest.approx(1e9 / (16 * 128) * time["step_seconds"] / 86400)
    assert f"MFU {time['mfu']:.2f}" in output_of("plan", *words, "mfu=0.5", "network_gbs=1e-3")


def test_plan_command_prints_whether_config_fits_gpu_memory(output_of):
    out = output_of("plan", *SMALL, "gpus=2")
    assert out.splitlines()[1].startswith("diff_v2 / tiny: ")
    assert LONGEST in out
    for text in ("fits H200", "mfu=0.4", "global_batch_size=2", "set tokens= for", "optimizer"):
        assert text in out
    assert "balanced" not in out
    assert "assumed balanced" in output_of("plan", "model=moe_tiny", *SMALL[1:], "gpus=2")


@pytest.mark.slow
def test_plan_of_compiled_run_logs_no_warning_of_torch(monkeypatch):
    logged = []
    monkeypatch.setattr(common.log, "warning", lambda *message: logged.append(message))
    assert tools.main(["plan", *SMALL, "gpus=2", "compile=true"]) == 0
    assert not logged


@pytest.mark.slow
def test_plan_command_prints_message_if_no_config_change_fits_memory(capsys):
    words = [*SMALL, "gpus=2", "memory_gib=0.001", "reserve_gib=0"]
    assert tools.main(["plan", *words]) == 0
    out, progress = capsys.readouterr()
    assert "does not fit H200" in out
    assert "no tried change of the config fits" in out
    for change in ("activation_checkpointing=full", "gpus=32"):
        assert f"simulating a step with {change}\n" in progress


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gpu=h300"], "choose from GB200"),
        (["gpus=0"], "gpus=0 must be at least 1"),
        (["tokenz=2"], "did you mean tokens?"),
        (["mfu=2"], "mfu=2.0 must be at most 1"),
        (["rank=8"], "rank=8 must be less than gpus=8"),
        (["gpus=3", "parallel.shard=2"], "needs 2 processes, not 3"),
        (["gpus=3", "global_batch_size=8"], "must be a multiple of 3, the number of ranks"),
    ],
)
def test_plan_command_prints_single_error_line_for_invalid_argument(words, message, error_of):
    error = error_of("plan", *words)
    assert message in error


def test_planned_time_of_collective_equals_closed_form():
    cluster = Cluster(gpus=16, nvlink_gbs=400, network_gbs=50, gpus_per_node=8)
    node, all_ranks, one_a_node = tuple(range(8)), tuple(range(16)), (0, 8)

    def seconds(kind, ranks):
        return cluster.seconds(Call(kind, 16 * 10**9, ranks))

    assert seconds(Collective.all_gather, node) == pytest.approx(14 / 400)
    assert seconds(Collective.all_reduce, node) == pytest.approx(28 / 400)
    assert seconds(Collective.all_gather, all_ranks) == pytest.approx(15 / 400)
    assert seconds(Collective.all_reduce, one_a_node) == pytest.approx(16 / 50)
    assert seconds(Collective.all_to_all, all_ranks) == pytest.approx(8 / 50)
    assert seconds(Collective.all_to_all, node) == pytest.approx(14 / 400)
