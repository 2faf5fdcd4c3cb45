"""Checkpoints of a training on one rank: exact tensors, atomic saves, and error messages."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.one_rank import resume
from tiers import slow_but
from torch.distributed.checkpoint import FileSystemWriter

from diffllm import load_config
from diffllm.checkpoint.manifest import check_parameters, read_state
from diffllm.checkpoint.reader import load_tensors
from diffllm.checkpoint.run_checkpoints import CheckpointConfig
from diffllm.checkpoint.writer import Checkpointer
from diffllm.core.errors import AgreedByAll, CheckpointError
from diffllm.core.run_files import list_checkpoints, step_of
from diffllm.distributed.gradients import local
from diffllm.training.build import Training, build
from diffllm.training.state import LoopState, save
from diffllm.training.step import train_step

pytestmark = pytest.mark.usefixtures("gloo")

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
MIXTURE = (
    *("model.moe.n_experts=4", "model.moe.top_k=2", "model.moe.expert_dim=16"),
    *("model.moe.balance_loss=0.01", "model.moe.bias_update_rate=0.01"),
)


@pytest.fixture
def checkpointer(tmp_path):
    made = Checkpointer(tmp_path, CheckpointConfig(keep_last=2))
    yield made
    made.close()


def training_of(variant: str = "diff_v1", *overrides: str) -> Training:
    cfg = load_config(
        [
            *("model=tiny", f"attention={variant}", "seq_len=8", "global_batch_size=2"),
            *("model.dim=32", "model.ffn_dim=32", "model.vocab_size=64", "precision=fp32"),
            *("optim.warmup_steps=0", "optim.lr=0.1", *overrides),
        ]
    )
    return build(cfg, torch.device("cpu"))


def train_on_random_tokens(t: Training, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 64, (2, 9), generator=generator)
    out = train_step(t, iter([(tokens[:, :-1], tokens[:, 1:])]), number)
    return out.nll


def local_tensors(t: Training) -> dict[str, torch.Tensor]:
    return {name: local(tensor).clone() for name, tensor in t.tensors().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def small() -> dict[str, torch.Tensor]:
    return {"model.w": torch.arange(6.0).view(2, 3), "optim.w.step": torch.tensor(3.0)}


STATE: dict[str, Any] = {"parameters": {"w": [2, 3]}, "ranks": 1, "loop": {"step": 1}}


def saved_checkpoint(checkpointer: Checkpointer, number: int = 1) -> Path:
    checkpointer.save(number, small(), STATE)
    checkpointer.wait()
    return checkpointer.directory / f"step-{number:08d}"


def test_resume_restores_loss_history_for_spike_detection(checkpointer):
    spike = ["train.skip_step=spike"]
    t, state = training_of("diff_v2", *spike), LoopState()
    for i in range(130):
        values_of_step = 4 + 0.1 * (i % 3), 1 + 0.1 * (i % 2)
        state.spikes.update(*values_of_step)
        t.guard.judge(*(torch.tensor(value) for value in values_of_step))
    save(t, state, checkpointer)
    checkpointer.wait()
    fresh = training_of("diff_v2", *spike)
    resume(fresh, checkpointer.directory / "step-00000000")
    torch.testing.assert_close(fresh.guard.windows, t.guard.windows)
    assert fresh.guard.judge(torch.tensor(6.0), torch.tensor(1.0)) == 1
    assert fresh.guard.judge(torch.tensor(4.1), torch.tensor(1.0)) == 0


@pytest.mark.parametrize(
    ("variant", "overrides"),
    slow_but(
        [("diff_v1", ()), ("diff_v2", MIXTURE)],
        [*((variant, ()) for variant in VARIANTS), ("diff_v2", MIXTURE)],
    ),
)
def test_checkpoint_is_not_affected_by_training_steps_during_write(
    checkpointer, tmp_path, variant, overrides
):
    t, state = training_of(variant, *overrides), LoopState()
    for number in range(2):
        train_on_random_tokens(t, number)
    state.step, state.data, state.wandb_id = 2, {"seed": 0, "epoch": 0, "sample": 4}, "abc"
    state.spikes.update(3.5, 0.25)
    at_save, rng, loop = local_tensors(t), torch.get_rng_state(), state.state_dict()
    loop = json.loads(json.dumps(loop))
    save(t, state, checkpointer)
    # Training changes the tensors in place during the write.
    after = [train_on_random_tokens(t, number) for number in (2, 3)]
    state.spikes.update(9.0, 9.0)
    checkpointer.wait()
    moved = local_tensors(t)
    assert all(not torch.equal(moved[n], at_save[n]) for n in moved if n.endswith("wq.weight"))

    if overrides:
        assert {"bias", "load"} <= {name.rpartition("router.")[2] for name in moved}

    fresh = training_of(variant, *overrides, "seed=1")
    torch.manual_seed(12345)
    loaded = resume(fresh, tmp_path / "step-00000002")
    assert_equal(local_tensors(fresh), at_save)
    assert torch.equal(torch.get_rng_state(), rng)
    assert json.loads(json.dumps(loaded.state_dict())) == loop
    assert [train_on_random_tokens(fresh, number).item() for number in (2, 3)] == [
        loss.item() for loss in after
    ]
    assert_equal(local_tensors(fresh), moved)


def test_checkpoint_preserves_nan_and_dtype_of_tensors(checkpointer):
    tensors = {
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "bf16": torch.randn(5).bfloat16(),
        "double": torch.randn(3, dtype=torch.float64),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 4),
    }
    checkpointer.save(1, tensors, STATE)
    checkpointer.wait()
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(checkpointer.directory / "step-00000001", back)
    for name, tensor in tensors.items():
        bits = [t.reshape(-1).view(torch.uint8).tolist() for t in (tensor, back[name])]
        assert bits[0] == bits[1], name


@pytest.fixture
def gate(monkeypatch):
    """Block every write of tensor files until `set()`; then fail the writes if `broken` is True."""

    class Gate(threading.Event):
        reached = threading.Event()
        broken = False

    made, real = Gate(), FileSystemWriter.write_data
    made.reached.clear()

    def write_data(self: Any, *args: Any, **kwargs: Any) -> Any:
        made.reached.set()
        assert made.wait(60)
        if made.broken:
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_data)
    yield made
    made.set()


def visible_names(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("*") if not path.name.startswith(".")]


def test_checkpoint_is_visible_only_when_complete(checkpointer, gate, tmp_path):
    checkpointer.save(1, small(), STATE)
    assert gate.reached.wait(60)
    assert list_checkpoints(tmp_path) == []
    assert visible_names(tmp_path) == []
    gate.set()
    checkpointer.wait()
    assert visible_names(tmp_path) == ["step-00000001"]
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    assert list(tmp_path.glob(".*")) == []


def test_failed_checkpoint_save_leaves_no_files_in_directory(checkpointer, gate, tmp_path, capfd):
    gate.broken = True
    gate.set()
    checkpointer.save(1, small(), STATE)
    checkpointer.wait()
    assert capfd.readouterr().err == (
        f"warning: step 1 could not be saved under {tmp_path}: rank 0: No space left on device; "
        "there is no checkpoint yet; training continues\n"
    )
    assert list(tmp_path.iterdir()) == []
    gate.broken = False
    saved_checkpoint(checkpointer, 2)
    assert visible_names(tmp_path) == ["step-00000002"]
    assert capfd.readouterr().err == ""


def test_failed_final_save_raises_error_that_names_newest_checkpoint(checkpointer, gate, tmp_path):
    gate.set()
    saved_checkpoint(checkpointer, 1)
    gate.broken = True
    checkpointer.save(2, small(), STATE, final=True)
    with pytest.raises(AgreedByAll) as caught:
        checkpointer.wait()
    assert str(caught.value) == (
        f"step 2 could not be saved under {tmp_path}: rank 0: No space left on device; "
        "the newest checkpoint is step-00000001; free disk space, then the same command resumes "
        "from it"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_checkpoint_save_waits_for_previous_save(checkpointer, gate, tmp_path):
    checkpointer.save(1, small(), STATE)
    assert gate.reached.wait(60)
    threading.Timer(0.2, gate.set).start()
    checkpointer.save(2, small(), STATE)
    assert "step-00000001" in visible_names(tmp_path)
    checkpointer.close()
    assert sorted(visible_names(tmp_path)) == ["step-00000001", "step-00000002"]


def test_list_checkpoints_returns_only_complete_checkpoints_in_step_order(checkpointer, tmp_path):
    for name in ("step-00000003", ".step-00000004.incomplete", "step-x", "step-5.bak"):
        (tmp_path / name).mkdir()
    for name in (".step-00000004.incomplete", "step-x", "step-5.bak"):
        (tmp_path / name / "state.json").write_text("{}", encoding="utf-8")
    (tmp_path / "step-00000006").write_text("a file", encoding="utf-8")
    for name in ("step-100000000", "step-99999999", "step-00000020"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}", encoding="utf-8")
    found = list_checkpoints(tmp_path)
    assert [step_of(path) for path in found] == [3, 20, 99999999, 100000000]
    assert list_checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [("model.other", (2,), r"model\.other"), ("model.w", (5, 3), "cannot read the checkpoint")],
)
def test_load_tensors_refuses_missing_tensor_or_wrong_shape(checkpointer, name, shape, said):
    path = saved_checkpoint(checkpointer)
    with pytest.raises(CheckpointError, match=said):
        load_tensors(path, {name: torch.zeros(shape)})


def test_load_from_directory_without_checkpoint_fails(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="is not a checkpoint"):
            check_parameters(path, read_state(path), {})
