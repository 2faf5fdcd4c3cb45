"""benchmarks/gpu.py: who fails is recorded and the rest goes on, and nothing is measured twice."""

import json
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from harness import decoding, steps
from harness.kernels import part_of, span_and_busy
from harness.machine import test_outcomes as outcomes_of
from harness.plain_llama import PlainLlama
from harness.records import Records, newest, read
from harness.running import Group, Measurement, Runner
from harness.stages import GPU, SMALL, STAGES, stage
from harness.table import table

from diffllm import build_model, load_config
from diffllm.model.attention.base import KVCache

STAMP = {"code": "c", "torch": "t", "device": "d"}


def runner(folder, contestants="harness_calls", resume=False, **changes):
    records = Records(folder / "B.jsonl", {**STAMP, **changes}, resume)
    return Runner(records, "cpu", folder / "logs", time.monotonic() + 1000, contestants=contestants)


def group(*hows, **options):
    contestants = {how: {"how": how} for how in hows}
    return Group("steps", contestants, rounds=2, repeats=1, **options)


def outcomes(folder):
    return {line["name"]: line["status"] for line in read(folder / "B.jsonl")}


# Contestants that fail


@pytest.mark.slow
def test_contestants_that_die_hang_or_raise_are_recorded_and_the_others_take_turns(tmp_path):
    runner(tmp_path).run([group("slow", "raises", "dies", "hangs", "fast", at_once=2, limit=30)])
    lines = newest(read(tmp_path / "B.jsonl"))
    assert {name.removeprefix("steps: "): line["status"] for name, line in lines.items()} == {
        "raises": "error", "hangs": "timeout", "dies": "died", "slow": "ok", "fast": "ok",
    }  # fmt: skip
    assert lines["steps: raises"]["result"] == "MemoryError: CUDA out of memory"
    assert lines["steps: dies"]["result"] == "SIGKILL; a last word"
    fast = lines["steps: fast"]["result"]
    assert fast["rounds_ms"] == [500, 500]
    assert fast["time"]["median"] == 0.5
    assert fast["tokens_per_s"] == 16
    assert fast["mfu_causal"] == pytest.approx(0.4)
    written = table(tmp_path)
    assert "| fast | 500.0 | 16 | 0.50 (0.50 to 0.50) | 40.0% |" in written
    assert "| steps: hangs | timeout | after 30 s" in written


def test_without_the_contestant_that_others_are_compared_with_there_is_no_ratio(tmp_path):
    runner(tmp_path).run([group("dies", "fast")])
    assert newest(read(tmp_path / "B.jsonl"))["steps: fast"]["result"]["time"] is None


def test_a_measurement_that_dies_leaves_the_next_one_alone(tmp_path):
    items = [
        Measurement(how, "harness_calls.once", {"how": how}) for how in ("dies", "raises", "fast")
    ]
    runner(tmp_path).run(items)
    assert outcomes(tmp_path) == {"dies": "died", "raises": "error", "fast": "ok"}


def test_what_the_time_of_a_stage_does_not_reach_is_named(tmp_path):
    late = runner(tmp_path)
    late.deadline = time.monotonic() + 20  # less than a measurement is expected to take
    late.run([Measurement("fast", "harness_calls.once", {"how": "fast"})])
    assert late.left == ["fast"]
    assert outcomes(tmp_path) == {}


# Going on


def test_resuming_skips_what_has_succeeded_with_the_same_key_only(tmp_path):
    items = [Measurement(how, "harness_calls.once", {"how": how}) for how in ("fast", "raises")]
    runner(tmp_path).run(items)
    for words, made in (
        ({"resume": True}, ["raises"]),
        ({"resume": False}, ["fast", "raises"]),
        ({"resume": True, "code": "other"}, ["fast", "raises"]),
        ({"resume": True, "torch": "other"}, ["fast", "raises"]),
        ({"resume": True, "device": "other"}, ["fast", "raises"]),
    ):
        before = len(read(tmp_path / "B.jsonl"))
        runner(tmp_path, **words).run(items)
        assert [line["name"] for line in read(tmp_path / "B.jsonl")[before:]] == made
    changed = [Measurement("fast", "harness_calls.once", {"how": "slow"})]
    assert list(runner(tmp_path, resume=True).missing(changed)) == changed


def test_a_group_is_made_again_until_all_of_it_has_succeeded(tmp_path):
    whole, broken = group("fast", profiled=("fast",)), group("fast", "raises")
    runner(tmp_path).run([whole])
    assert list(outcomes(tmp_path)) == ["steps: fast", "steps, one step of fast"]
    assert not list(runner(tmp_path, resume=True).missing([whole]))
    (tmp_path / "B.jsonl").unlink()
    runner(tmp_path).run([replace(whole, profiled=())])
    assert list(runner(tmp_path, resume=True).missing([whole])) == [whole]
    assert list(runner(tmp_path, resume=True).missing([broken])) == [broken]


def test_a_line_that_was_cut_off_is_not_taken_for_a_measurement(tmp_path):
    records = Records(tmp_path / "A.jsonl", STAMP, resume=False)
    records.add("first", {}, "ok", 1, 0.0)
    with open(records.path, "a") as file:
        file.write(json.dumps({"name": "second", "status": "ok"})[:20])
    assert [line["name"] for line in read(records.path)] == ["first"]
    assert Records(records.path, STAMP, resume=True).has("first", {})


def test_a_table_names_every_code_that_its_measurements_were_made_with(tmp_path):
    for code, name in (("old", "kept"), ("new", "made again")):
        Records(tmp_path / "A.jsonl", {**STAMP, "code": code}, resume=True).add(
            name, {}, "ok", {"ms": 1.0}, 0.0
        )
    assert "\nd, torch t, code old; d, torch t, code new\n" in table(tmp_path)


def test_measured_memory_stands_beside_the_plan(tmp_path):
    records = Records(tmp_path / "C.jsonl", STAMP, resume=False)
    config = {"attention": "diff_v2", "checkpointing": True, "words": []}
    result = {"plan": 2 * 2**30, "measured": 2**30}
    records.add("memory of diff_v2, checkpointing", config, "ok", result, 0.0)
    assert "| `diff_v2` | yes | 2.00 | 1.00 | 0.50 |" in table(tmp_path)


@pytest.mark.parametrize("sizes", [GPU, SMALL])
def test_measurements_have_names_of_their_own(sizes, tmp_path):
    names = []
    for name in STAGES:
        for item in stage(name, sizes, tmp_path):
            own = item.contestants if isinstance(item, Group) else [""]
            names += [f"{item.name}: {contestant}" for contestant in own]
    assert len(names) == len(set(names))
    assert {"standard", "gated", "diff_v2", "Llama, autocast"} < {
        n.partition(": ")[2] for n in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [GPU, SMALL])
def test_every_contestant_has_a_config_that_loads(sizes, tmp_path):
    configs = [
        words
        for name in STAGES
        for item in stage(name, sizes, tmp_path)
        for config in (item.contestants.values() if isinstance(item, Group) else [item.arguments])
        if (words := config.get("words"))
    ]
    assert len(configs) > 30
    for words in configs:
        load_config(words)


# The real thing, small


@pytest.mark.slow
def test_a_step_of_ours_is_measured_and_broken_down_in_a_process_of_its_own(tmp_path):
    whole = next(item for item in stage("B", SMALL, tmp_path) if isinstance(item, Group))
    standard = {"standard": whole.contestants["standard"]}
    small = replace(whole, contestants=standard, profiled=("standard",), rounds=1)
    runner(tmp_path, "harness.contestants").run(
        [Measurement("facts", "harness.machine.facts", {}), small]
    )
    lines = newest(read(tmp_path / "B.jsonl"))
    assert {line["status"] for line in lines.values()} == {"ok"}, lines
    assert lines["facts"]["result"]["torch"] == torch.__version__
    assert lines[f"{whole.name}: standard"]["result"]["ms"] > 0
    parts = lines[f"{whole.name}, one step of standard"]["result"]
    for part in ("loss", "products", "attention forward", "attention backward", "optimizer"):
        assert parts[part] > 0, parts
    assert sum(parts.values()) - parts["step"] == pytest.approx(parts["step"], rel=0.1)
    assert "Milliseconds of a step" in table(tmp_path)


# Parts of a step


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention forward"),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26",
            "attention backward",
        ),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>", "attention backward"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention forward"),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>",
            "attention backward",
        ),
        ("triton_tem_fused_flex_attention_0", "attention forward"),
        ("triton_tem_fused_flex_attention_backward_zeros_1", "attention backward"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention backward"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_clone_3", "pointwise"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "pointwise"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", "products"),
        ("aten::mm", "products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "casts and copies"),
        (
            "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel",
            "casts and copies",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", "pointwise"),
    ],
)
def test_a_kernel_belongs_to_a_part_of_a_step(kernel, part):
    assert part_of(kernel) == part


def test_what_overlaps_is_busy_once():
    assert span_and_busy([(5, 6), (0, 3), (1, 2), (2.5, 4)]) == (6, 5)
    assert span_and_busy([]) == (0, 0)


def test_outcomes_of_tests_are_read_with_and_without_workers():
    text = """
tests/a.py::test_one[x-1] PASSED                     [ 50%]
tests/a.py::test_two SKIPPED (no CUDA device)        [100%]
[gw1] [ 10%] FAILED tests/a.py::test_three[y]
FAILED tests/a.py::test_three[y] - AssertionError: no
"""
    assert outcomes_of(text) == {
        "tests/a.py::test_one[x-1]": "PASSED",
        "tests/a.py::test_two": "SKIPPED",
        "tests/a.py::test_three[y]": "FAILED",
    }


# Shapes, FLOPs, bytes


def tiny(*words):
    return load_config(["model=tiny", "seq_len=24", "compile=false", "precision=fp32", *words])


def test_full_attention_counts_every_key_and_causal_attention_half():
    cfg = tiny("attention=standard").model
    causal, full = steps.flops_per_token(cfg)
    maps = cfg.n_layers * 12 * cfg.n_heads * cfg.head_dim * cfg.seq_len
    products = causal - maps * (cfg.seq_len + 1) / (2 * cfg.seq_len)
    with torch.device("meta"):
        model = build_model(cfg)
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert products == pytest.approx(6 * (weights - model.tok_embeddings.weight.numel()))
    assert full == pytest.approx(products + maps)


def test_the_plain_llama_is_ours_with_standard_attention():
    cfg = tiny("attention=standard", "model.init_std=0.2").model
    model, plain = build_model(cfg), PlainLlama(cfg)
    with torch.no_grad():
        for name in ("embedding", "output"):
            own = model.tok_embeddings if name == "embedding" else model.output
            getattr(plain, name).weight.copy_(own.weight)
        for block, layer in zip(plain.blocks, model.layers, strict=True):
            attention, ffn = layer.attention, layer.ffn
            three = (attention.wq.weight, attention.wk.weight, attention.wv.weight)
            block.qkv.weight.copy_(torch.cat(three))
            block.wo.weight.copy_(attention.wo.weight)
            block.gate_up.weight.copy_(torch.cat((ffn.w1.weight, ffn.w3.weight)))
            block.down.weight.copy_(ffn.w2.weight)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(0, cfg.vocab_size, (2, 25))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    mine = model(inputs, targets).objective / targets.numel()
    torch.testing.assert_close(plain(inputs, targets), mine, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        ("Llama", ["attention=standard"]),
        ("DiffLlama", ["attention=diff_v1", "model.attention.head_norm=false"]),
        ("Qwen3Moe", ["attention=standard", "model=moe_tiny", "model.qk_norm=true"]),
    ],
)
def test_peers_have_the_shape_of_ours(peer, words, monkeypatch):
    made = []
    monkeypatch.setattr(steps, "peer_step", lambda model, *_: made.append(model))
    cfg = tiny(*words)
    steps.theirs(peer, cfg, "float32", torch.device("cpu"))
    with torch.device("meta"):
        own = sum(p.numel() for p in build_model(cfg.model).parameters())
    assert sum(p.numel() for p in made[0].parameters()) == own


def test_no_context_length_is_decoded_twice(monkeypatch):
    seen = {}
    append = KVCache.append
    monkeypatch.setattr(
        KVCache, "append",
        lambda self, k, v: seen.setdefault(id(self), []).append(self.length) or append(self, k, v),
    )  # fmt: skip
    models = {
        name: build_model(tiny(f"attention={name}").model) for name in ("standard", "diff_v2")
    }
    times = decoding.growing(models, 8, 10, 1, torch.float32)
    assert {name: len(values) for name, values in times.items()} == {"standard": 2, "diff_v2": 2}
    for lengths in seen.values():
        assert lengths == list(range(8 - decoding.WARMUP, 18))


def test_a_decoding_step_reads_weights_and_the_cache():
    model = build_model(tiny("attention=diff_v2").model)
    taken = decoding.cost(model, 20, 1, torch.float32)
    caches = model.new_caches(1, 20)
    cached = sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
    weights = sum(p.nbytes for name, p in model.named_parameters() if "tok_emb" not in name)
    assert taken.bytes == weights + cached


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "--device cpu goes with --small"),
        (["--device", "cpu", "--small", "--stage", "A", "--only", "stepp"], "there are facts, "),
        (["--stage", "D"], "choose from"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    words, said, tmp_path, monkeypatch, capsys
):
    command = ["benchmarks/gpu.py", *words, "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(command[0], run_name="__main__")
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
