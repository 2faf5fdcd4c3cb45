"""The memory check before a run, and the memory limit of this machine."""

from types import SimpleNamespace

import pytest
import torch
from runs.command import ForkedRun, train
from runs.written import study_file

from diffllm import load_config
from diffllm.compare.study.running import check_study_runs
from diffllm.compare.sweep.plan import plan_sweep, split_overrides
from diffllm.core.errors import ConfigError
from diffllm.model import without_storage
from diffllm.training import memory
from diffllm.training.memory import check_memory, machine_memory, training_state

HUGE = ["model=moe_30a3", "model.moe.expert_dim=1000000"]
"""A model that fits into no machine; its state takes about 600 TB."""
SMALL = ["model=tiny", "parallel.shard=-1"]
RANKS = 2


def state_bytes(rank: int, ranks: int) -> int:
    cfg = load_config(SMALL)
    return training_state(without_storage(cfg.model), cfg.parallel.sizes(ranks), rank).total


def memory_error(*words: str, world_size: int = RANKS, ranks_here: int = RANKS) -> str:
    """Return the error of the memory check, or "" if the run passes."""
    try:
        check_memory(load_config([*SMALL, *words]), world_size, ranks_here)
    except ConfigError as error:
        return str(error)
    return ""


def test_run_on_cpu_is_refused_if_state_of_ranks_here_exceeds_memory(monkeypatch):
    needed = state_bytes(0, RANKS) + state_bytes(1, RANKS)
    monkeypatch.setattr(memory, "machine_memory", lambda: needed)
    assert memory_error() == ""
    monkeypatch.setattr(memory, "machine_memory", lambda: needed - 1)
    assert "model=tiny attention=diff_v2 does not fit into memory" in memory_error()
    assert memory_error(world_size=2 * RANKS) == ""
    assert memory_error(ranks_here=0) == memory_error("force=true") == ""


def test_run_on_gpu_is_refused_if_state_of_one_rank_exceeds_its_memory(monkeypatch):
    gpu = SimpleNamespace(name="Small GPU", total_memory=state_bytes(0, RANKS))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    assert memory_error() == ""
    gpu.total_memory -= 1
    assert "the GPU Small GPU has" in memory_error()


@pytest.mark.parametrize("ranks", [1, RANKS])
def test_train_command_refuses_model_that_cannot_fit_and_writes_nothing(ranks, tmp_path):
    words = [*HUGE, f"run.dir={tmp_path / 'run'}"]
    if ranks == 1:
        result = train(words, tmp_path, {})
        code, output = result.code, result.out + result.err
        assert "force=true" in result.err
    else:
        run = ForkedRun(words, ranks, tmp_path / "said")
        (code,) = set(run.codes())
        output = run.text()
    assert code == 2
    assert output.count("\n") == output.count("error: model=moe_30a3") == 1
    assert not (tmp_path / "run").exists()


def test_sweep_and_study_are_refused_before_start_if_a_run_cannot_fit(workplace, monkeypatch):
    (overrides, _) = split_overrides([*HUGE, "run.sweep=mine", "seed=0,1"])
    with pytest.raises(ConfigError, match="does not fit into memory"):
        plan_sweep(overrides, 1, ranks_here=1)
    assert not (workplace / "outputs").exists()
    rule = "{kind: difference, arm: v2, against: half, below: 0.0}"
    study = study_file(workplace / "study.yaml", rule)
    assert not check_study_runs(study, workplace / "out", 1, ranks_here=1)
    monkeypatch.setattr(memory, "machine_memory", lambda: 1)
    with pytest.raises(ConfigError, match=r"arm standard: .* does not fit into memory"):
        check_study_runs(study, workplace / "out", 1, ranks_here=1)


UNLIMITED = 2**63 - 4096


@pytest.mark.parametrize(
    ("group", "limits", "expected"),
    [
        ("0::/job/step", {}, None),
        ("0::/job/step", {"job/step/memory.max": "max"}, None),
        ("0::/job/step", {"job/step/memory.max": "max", "job/memory.max": "4096"}, 4096),
        ("0::/job", {"job/memory.max": "4096", "memory.max": "8192"}, 4096),
        ("4:memory:/job", {"memory/job/memory.limit_in_bytes": UNLIMITED}, None),
        ("4:cpu,memory:/job", {"memory/job/memory.limit_in_bytes": "4096"}, 4096),
        ("4:memory:/docker/a", {"memory/memory.limit_in_bytes": "4096"}, 4096),
        ("4:cpu:/job", {"memory/job/memory.limit_in_bytes": "4096"}, None),
    ],
)
def test_machine_memory_respects_lowest_limit_of_control_groups(group, limits, expected, tmp_path):
    files = {f"sys/fs/cgroup/{name}": f"{limit}\n" for name, limit in limits.items()}
    files["proc/self/cgroup"] = f"3:name=systemd:/\n{group}\n"
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    physical = machine_memory(tmp_path / "missing")
    assert machine_memory(tmp_path) == (expected or physical)
