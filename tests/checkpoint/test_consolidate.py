"""`diffllm consolidate` writes safetensors, which rebuild exactly the trained model."""

from pathlib import Path

import pytest
import torch
from runs.json_files import read_json
from runs.one_rank import TOKENS, gloo_group, trained_run
from runs.ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from tiers import slow_but

from diffllm import build_model
from diffllm.cli import main
from diffllm.config.saved import load_run_config
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.model import Transformer

EXPERTS = [
    *("model.moe.n_experts=4", "model.moe.expert_dim=32", "model.moe.n_shared=1"),
    *("model.moe.bias_update_rate=0.01", "parallel.expert=2", "compile=false"),
]


def trained_on_ranks(run: Path, overrides: list[str]) -> tuple:
    logits, values = trained_run(run, overrides)
    return logits.numpy(), {name: value.numpy() for name, value in values.items()}


def rebuilt(directory: Path, files: list[str]) -> Transformer:
    """Rebuild the model from a consolidated directory."""
    model = build_model(load_run_config(directory).model)
    values: dict[str, torch.Tensor] = {}
    for name in files:
        values |= load_file(directory / name)
    model.load_state_dict(values, strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def diff_v1_run(tmp_path_factory):
    """Train a run of DIFF V1, which keeps some parameters in float32."""
    path = tmp_path_factory.mktemp("run")
    with gloo_group():
        return path, *trained_run(path, ["attention=diff_v1"])


@pytest.mark.parametrize(
    "variant", slow_but(["diff_v1", "diff_v2"], ["standard", "gated", "diff_v1", "diff_v2"])
)
def test_consolidated_model_equals_trained_model_exactly(tmp_path, variant, capfd):
    with gloo_group():
        logits, values = trained_run(tmp_path, [f"attention={variant}"])
    assert main(["consolidate", f"run={tmp_path}"]) == 0
    out = tmp_path / "consolidated" / "step-00000003"
    assert {file.name for file in out.iterdir()} == {
        "model.safetensors",
        "config.yaml",
        "tokenizer.model",
    }
    assert str(out / "model.safetensors") in capfd.readouterr().out
    model = rebuilt(out, ["model.safetensors"])
    with torch.no_grad():
        assert torch.equal(model(TOKENS), logits)
    for name, param in model.named_parameters():
        assert torch.equal(param, values[name]), name
    assert (out / "tokenizer.model").read_bytes() == b"pieces"


def test_consolidate_merges_experts_from_two_ranks(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    results = run_ranks(trained_on_ranks, 2, tmp_path, run, EXPERTS)
    assert len(list((run / "checkpoints" / "step-00000003").glob("*.distcp"))) == 2
    assert main(["consolidate", f"run={run}"]) == 0
    model = rebuilt(run / "consolidated" / "step-00000003", ["model.safetensors"])
    logits, values = results[0]
    state = model.state_dict()
    assert state.keys() == values.keys()
    for name, value in values.items():
        assert (state[name].numpy() == value).all(), name
    assert any(name.endswith("router.bias") and value.any() for name, value in values.items())
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), torch.tensor(logits), atol=1e-5, rtol=0)


def test_consolidate_to_bf16_leaves_sensitive_parameters_in_float32(diff_v1_run, tmp_path):
    path, _, values = diff_v1_run
    assert main(["consolidate", f"run={path}", f"out={tmp_path}", "dtype=bf16"]) == 0
    with torch.device("meta"):
        model = Transformer(load_run_config(path).model)
    kept = {name for name, p in model.named_parameters() if p in fp32_parameters(model)}
    assert any("lambda_q1" in name for name in kept)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(written[name], value if name in kept else value.bfloat16()), name


def test_consolidate_splits_large_model_into_several_files(diff_v1_run, tmp_path):
    path, logits, _ = diff_v1_run
    assert main(["consolidate", f"run={path}", f"out={tmp_path}", "max_shard_size=10KB"]) == 0
    index = read_json(tmp_path / "model.safetensors.index.json")
    files = sorted({*index["weight_map"].values()})
    count = len(files)
    assert count > 2
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    total = 0
    for name in files:
        with safe_open(tmp_path / name, "pt") as file:
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
            assert all(index["weight_map"][key] == name for key in file.keys())  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= 10_000
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    with torch.no_grad():
        assert torch.equal(rebuilt(tmp_path, files)(TOKENS), logits)

    # Overwriting with one file must remove all shards.
    assert main(["consolidate", f"run={path}", f"out={tmp_path}", "overwrite=true"]) == 0
    assert {file.name for file in tmp_path.glob("model*")} == {"model.safetensors"}


def test_consolidate_does_not_overwrite_existing_files(diff_v1_run, tmp_path, capfd):
    path, _, _ = diff_v1_run
    for name in ("model.safetensors", "config.yaml", "tokenizer.model"):
        directory = tmp_path / name.replace(".", "-")
        directory.mkdir()
        (directory / name).write_text("mine", encoding="utf-8")
        assert main(["consolidate", f"run={path}", f"out={directory}"]) == 2
        error = capfd.readouterr().err
        assert f"{directory / name} already exists" in error
        assert "overwrite=true" in error
        assert {f.name: f.read_text(encoding="utf-8") for f in directory.iterdir()} == {
            name: "mine"
        }


def test_consolidate_leaves_no_files_after_failed_write(diff_v1_run, tmp_path, monkeypatch, capfd):
    path, _, _ = diff_v1_run

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("diffllm.checkpoint.hf.safetensors.save_file", refuse)
    assert main(["consolidate", f"run={path}", f"out={tmp_path}"]) == 2
    assert f"{tmp_path} cannot be written: No space left on device" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_consolidate_removes_partial_files_left_by_killed_process(diff_v1_run, tmp_path):
    (tmp_path / ".model.partial" / "half").mkdir(parents=True)
    assert main(["consolidate", f"run={diff_v1_run[0]}", f"out={tmp_path}"]) == 0
    assert not list(tmp_path.glob(".*"))
