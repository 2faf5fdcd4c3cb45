"""benchmarks/gpu.py: failures are recorded, later measurements run, --resume skips successes."""

import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import has_ended
from torch.autograd import DeviceType

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from harness import compile_cache, kernels, steps
from harness.kernels import PARTS, part_of
from harness.plain_llama import PlainLlama
from harness.process import call
from harness.roofline import Kernel, Rates, predicted
from harness.running import Measurement, read, run, table
from harness.stages import STAGES, stage

from diffllm import build_model, load_config

STAMP = {"code": "c", "torch": "t", "device": "d"}


@pytest.fixture(autouse=True)
def own_calls(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def item(how, **more):
    return Measurement(f"steps: {how}", "harness_calls.measure", {"how": how}, **more)


def results_and_excluded(folder, items, resume=False, seconds=1000, **changes):
    """Run measurements; return result lines by name, and names that the deadline excluded."""
    left = run(items, folder, {**STAMP, **changes}, resume, time.monotonic() + seconds)
    return {line["name"]: line for line in read(folder / "results.jsonl")}, left


@pytest.mark.slow
def test_gpu_harness_runs_remaining_measurements_after_failure_or_timeout(tmp_path):
    child = tmp_path / "child"
    hanging = {"how": "hangs", "child": str(child)}
    items = [item("raises"), item("dies"), item("slow"), item("fast")]
    items.insert(2, Measurement("steps: hangs", "harness_calls.measure", hanging, limit=8))
    lines, left = results_and_excluded(tmp_path, items)
    found = {name.removeprefix("steps: "): line["status"] for name, line in lines.items()}
    assert found == {
        "raises": "error", "dies": "died", "hangs": "timeout", "slow": "ok", "fast": "ok",
    }  # fmt: skip
    assert not left
    assert lines["steps: raises"]["result"] == "MemoryError: CUDA out of memory"
    assert lines["steps: dies"]["result"] == "SIGKILL; a last word"
    assert has_ended(int(child.read_text(encoding="utf-8")))
    assert "not the result" in (tmp_path / "logs" / "steps:-fast.log").read_text(encoding="utf-8")
    written = table(tmp_path)
    assert "| fast | 500 (0.50) |" in written
    assert "| steps: hangs | timeout | after 8 s; no output |" in written


def test_gpu_harness_skips_measurement_that_cannot_end_before_deadline(tmp_path):
    lines, left = results_and_excluded(tmp_path, [item("fast")], seconds=20)
    assert (lines, left) == ({}, ["steps: fast"])


def test_resumed_gpu_harness_repeats_failed_and_changed_measurements(tmp_path):
    items = [item("fast"), item("raises")]
    results_and_excluded(tmp_path, items)
    for words, again in (
        ({"resume": True}, ["raises"]),
        ({"resume": False}, ["fast", "raises"]),
        ({"resume": True, "code": "other"}, ["fast", "raises"]),
        ({"resume": True, "device": "other"}, ["fast", "raises"]),
    ):
        before = len(read(tmp_path / "results.jsonl"))
        results_and_excluded(tmp_path, items, **words)
        names = [line["name"] for line in read(tmp_path / "results.jsonl")[before:]]
        assert names == [f"steps: {how}" for how in again]
    changed = Measurement("steps: fast", "harness_calls.measure", {"how": "slow"})
    lines, _ = results_and_excluded(tmp_path, [changed], resume=True)
    assert lines["steps: fast"]["result"]["ms"] == 1000


def test_compiled_graphs_are_restored_from_archive(tmp_path, capsys):
    used, other = tmp_path / "used", tmp_path / "other"
    for name in ("fxgraph/ab/graph", "triton/kernel"):
        (used / name).parent.mkdir(parents=True)
        (used / name).write_text(name, encoding="utf-8")
    other.mkdir()
    compile_cache.pack(used, other / compile_cache.ARCHIVE)
    compile_cache.restore(other)
    found = {str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()}
    assert found == {compile_cache.ARCHIVE, "fxgraph/ab/graph"}
    (other / "fxgraph/ab/graph").write_text("newer", encoding="utf-8")
    compile_cache.restore(other)
    assert (other / "fxgraph/ab/graph").read_text(encoding="utf-8") == "newer"
    (used / compile_cache.ARCHIVE).write_bytes(b"damaged")
    shutil.rmtree(used / "fxgraph")
    compile_cache.restore(used)
    assert "is damaged" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True])
def test_config_of_every_gpu_measurement_loads(small, tmp_path):
    configs = {
        tuple(words)
        for name in STAGES
        for item in stage(name, small, tmp_path)
        if (words := item.arguments.get("words"))
    }
    assert len(configs) > 30
    for words in configs:
        load_config(list(words))


@pytest.mark.slow
def test_gpu_harness_measures_duration_of_each_part_of_training_step(tmp_path):
    items = {x.name: x for name in ("A", "B") for x in stage(name, True, tmp_path)}
    names = ["facts", "step at 64: standard", "roofline in ms: standard"]
    lines, _ = results_and_excluded(tmp_path, [items[name] for name in names])
    assert {line["status"] for line in lines.values()} == {"ok"}, lines
    facts, step, roofline = (lines[name]["result"] for name in names)
    assert facts["torch"] == torch.__version__
    assert step["ms"] > 0
    for parts in (roofline["measured"], roofline["predicted"]):
        for part in ("loss", "products", "attention forward", "attention backward", "optimizer"):
            assert parts[part] > 0, parts
        assert parts["idle"] < parts["step"]
    assert "| standard, predicted |" in table(tmp_path)


@pytest.mark.slow
def test_roofline_counts_flops_and_bytes_of_compiled_layer():
    words = ["model=tiny", "model.n_layers=1", "seq_len=64", "global_batch_size=2"]
    words += ["precision=fp32", "compile=true", "attention=diff_v2"]
    status, result = call("harness_calls.scheduled_kernels", {"words": words}, 120)
    assert status == "ok", result
    scheduled = [Kernel(*kernel) for kernel in result]
    cfg = load_config(words)
    model, tokens = cfg.model, cfg.global_batch_size * cfg.seq_len
    with torch.device("meta"):
        built = build_model(model)
    weights = sum(p.numel() for p in built.layers.parameters() if p.ndim == 2)
    scores = 2 * built.layers[0].attention.n_query_heads * model.head_dim * tokens * cfg.seq_len
    found = Counter(dict.fromkeys(PARTS, 0))
    for kernel in scheduled:
        found[kernel.part] += 0 if kernel.loss else kernel.work
    assert found["products"] == 6 * weights * tokens
    assert found["attention forward"] == scores  # two products over half of the keys
    assert found["attention backward"] == 2.5 * scores
    assert found["pointwise"] > 0
    pointwise = [kernel.work for kernel in scheduled if kernel.part == "pointwise"]
    for tensors in (3, 5):  # SwiGLU reads two tensors and writes one; backward, three and two
        assert tensors * 4 * tokens * model.ffn_dim in pointwise
    milliseconds = predicted(cfg, torch.device("cpu"), scheduled, Rates(1e9, 2e9, 1e9))
    assert milliseconds["products"] == pytest.approx(found["products"] / 1e6)
    assert milliseconds["attention backward"] == pytest.approx(found["attention backward"] / 2e6)
    assert milliseconds["pointwise"] == pytest.approx(found["pointwise"] / 1e6)


def test_host_calls_are_counted_from_profiler_events():
    def event(name, start, kind=DeviceType.CPU):
        span = SimpleNamespace(start=start, end=start + 10, elapsed_us=lambda: 10.0)
        return SimpleNamespace(
            name=name, device_type=kind, time_range=span, is_user_annotation=name == kernels.WORK
        )

    events = [event(kernels.WORK, 0), event(kernels.WORK, 20, DeviceType.CUDA)]
    on_gpu = [
        "gemm",
        "softmax",
        "Memcpy DtoH (Device -> Pinned)",
        "Memcpy HtoD (Pageable -> Device)",
    ]
    events += [event(name, 20, DeviceType.CUDA) for name in on_gpu]
    events += [event("cudaStreamSynchronize", 5), event("cudaDeviceSynchronize", 15)]
    assert kernels.host_calls(events, torch.device("cuda")) == {
        "launches": 2, "waits": 1, "copies to host": 1, "pageable copies": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26",
            "attention backward",
        ),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention forward"),
        ("triton_tem_fused_flex_attention_backward_zeros_1", "attention backward"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_clone_3", "pointwise"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT", "products"),
        ("aten::mm", "products"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float>>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "casts and copies"),
        ("void at::native::vectorized_elementwise_kernel<4, MulFunctor<float>>", "pointwise"),
    ],
)
def test_gpu_kernel_name_is_mapped_to_part_of_training_step(kernel, part):
    assert part_of(kernel) == part


def harness_config(*words):
    return load_config(["model=tiny", "seq_len=24", "compile=false", "precision=fp32", *words])


def test_flop_count_for_causal_attention_excludes_masked_keys():
    cfg = harness_config("attention=standard").model
    causal, full = steps.flops_per_token(cfg).values()
    maps = cfg.n_layers * 12 * cfg.n_heads * cfg.head_dim * cfg.seq_len
    products = causal - maps * (cfg.seq_len + 1) / (2 * cfg.seq_len)
    with torch.device("meta"):
        model = build_model(cfg)
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert products == pytest.approx(6 * (weights - model.tok_embeddings.weight.numel()))
    assert full == pytest.approx(products + maps)


def test_plain_llama_model_returns_same_loss_as_diffllm_model():
    cfg = harness_config("attention=standard", "model.init_std=0.2").model
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
    mine = model.loss(inputs, targets).objective / targets.numel()
    torch.testing.assert_close(plain(inputs, targets), mine, rtol=1e-5, atol=1e-5)
