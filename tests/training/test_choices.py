"""Automatic settings: precision, compilation and gradient reduction follow device and model."""

import os
import subprocess
import sys

import pytest
import torch

from diffllm.config import Precision, load_config
from diffllm.distributed import fsdp
from diffllm.distributed.experts import expert_ranks
from diffllm.distributed.fsdp import chosen_reduce
from diffllm.distributed.mesh import Reduce
from diffllm.plan.simulate import fake_world
from diffllm.training import build as building
from diffllm.training.build import WORTH_COMPILING, chosen_compile, chosen_precision, sharded_model

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_auto_precision_is_bf16_only_on_bf16_hardware(device, fast, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: fast)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: fast)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    chosen = chosen_precision(Precision.auto, device)
    assert chosen.value is (torch.bfloat16 if fast else torch.float32)
    assert ("has bf16 units" in chosen.reason) == fast
    assert chosen_precision(Precision.fp32, device) == (torch.float32, "asked for")
    assert chosen_precision(Precision.bf16, device) == (torch.bfloat16, "asked for")


def test_torch_compile_is_enabled_by_default_only_on_gpu():
    assert chosen_compile(None, GPU, was_compiled=False).value is True
    assert chosen_compile(None, CPU).value is False
    assert chosen_compile(True, CPU) == (True, "asked for")
    assert chosen_compile(False, GPU) == (False, "asked for")


@pytest.mark.parametrize(
    ("flops", "kept", "fault", "expected"),
    [
        (0.9 * WORTH_COMPILING, None, "", False),
        (WORTH_COMPILING, None, "", True),
        (WORTH_COMPILING, None, "torch.compile fails: no g++", False),
        (WORTH_COMPILING, False, "", False),
        (1.0, True, "", True),
        (1.0, True, "torch.compile fails: no g++", False),
    ],
)
def test_default_compile_setting_on_cpu_depends_on_run_length_and_compiler(
    flops, kept, fault, expected, monkeypatch
):
    monkeypatch.setattr(building, "compiler_fault", lambda: fault)
    value, reason = chosen_compile(None, CPU, flops, kept)
    assert value is expected
    assert reason == fault if fault else reason
    assert chosen_compile(False, CPU, flops, kept) == (False, "asked for")


@pytest.mark.slow
def test_broken_cpp_compiler_gives_single_line_error(tmp_path):
    code = "from diffllm.training.build import compiler_fault; print(compiler_fault())"
    env = {**os.environ, "CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8")
    (line,) = done.stdout.splitlines()
    assert line.startswith("torch.compile fails: ")
    assert "/bin/false" in line


def test_gradient_reduction_runs_once_per_step_for_small_models(monkeypatch):
    params = [torch.empty(3, 1000), torch.empty(96)]
    chosen = chosen_reduce(None, params)
    assert chosen.value is Reduce.last
    assert "1.2e-05 GiB" in chosen.reason
    monkeypatch.setattr(fsdp, "LAST_UP_TO", 4 * 3096 - 1)
    assert chosen_reduce(None, params).value is Reduce.every
    assert chosen_reduce(Reduce.last, params) == (Reduce.last, "asked for")


@pytest.mark.parametrize(("words", "share"), [([], 1), (["parallel.expert=2"], 2)])
def test_only_expert_parameters_have_more_than_one_expert_rank(words, share):
    cfg = load_config(["model=moe_tiny", "precision=fp32", *words])
    with fake_world(0, 2):
        model, *_ = sharded_model(cfg, CPU)
        for name, param in model.named_parameters():
            assert expert_ranks(param) == (share if ".experts." in name else 1), name
