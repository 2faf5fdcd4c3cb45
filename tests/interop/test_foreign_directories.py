"""Model directories of other libraries with odd files are read or refused with a known error."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs.json_files import write_json
from safetensors.torch import save_file

from diffllm.checkpoint.hf.config_json import VALUE_TYPES, model_of
from diffllm.checkpoint.hf.layout import Layout, layout_of
from diffllm.checkpoint.hf.model_directory import ModelDirectory
from diffllm.config import load_config
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.model import without_storage

SMALL = (
    "model=tiny", "model.dim=32", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=16",
    "model.ffn_dim=64", "model.vocab_size=300", "model.n_layers=2",
)  # fmt: skip
MIXTURE = (
    "attention=standard", "model.qk_norm=true", "model.moe.n_experts=2", "model.moe.top_k=1",
    "model.moe.expert_dim=16", "model.moe.score=softmax", "model.moe.bias_update_rate=0",
)  # fmt: skip
YARN = ("model.rope.scaling=yarn", "model.rope.factor=4", "model.rope.original_seq_len=64")


def layout(*words: str) -> Layout:
    return layout_of(load_config([*SMALL, *words]).model)


LAYOUTS = {
    "llama": layout("attention=standard", *YARN),
    "qwen3_moe": layout(*MIXTURE),
    "own": layout("attention=diff_v2"),
}


def config_of(found: Layout) -> dict[str, Any]:
    return {"architectures": [found.architecture], **found.config}


def keys_of(found: Layout) -> Iterator[tuple[str, ...]]:
    """List the keys of a config and of nested objects, and all keys with a checked type."""
    config = config_of(found)
    for key in sorted({*config, *(key for _, keys in VALUE_TYPES.values() for key in keys)}):
        yield (key,)
        if isinstance(config.get(key), dict):
            yield from ((key, inner) for inner in config[key])


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5)
)
ODD = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=3), SCALARS)


@given(data=st.data(), kind=st.sampled_from(sorted(LAYOUTS)), odd=ODD | st.just([[0]]))
def test_random_value_in_config_json_causes_only_expected_errors(data, kind, odd):
    content = json.loads(json.dumps(config_of(LAYOUTS[kind])))
    *outer, key = data.draw(st.sampled_from(list(keys_of(LAYOUTS[kind]))))
    (content[outer[0]] if outer else content)[key] = odd
    try:
        _, model = model_of(content)
    except (ValueError, ConfigError, ArithmeticError):
        return
    assert math.isfinite(model.norm_eps)
    assert model.n_layers <= 10_000


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("mlp_only_layers", True, "has mlp_only_layers=True, which must be a list of whole number"),
        ("rope_parameters", {"rope_type": ["x"]}, r"has rope_type=\['x'\], which must be text"),
        ("attention", {"variant": "diff_v2", "context_scale": "${oc.env:HOME}"}, "interpolation"),
        ("moe", {"n_experts": "${oc.env:HOME}"}, "has an interpolation in its moe settings"),
        ("rms_norm_eps", math.inf, "has rms_norm_eps=inf, which must be a finite number"),
        ("vocab_size", 0, "has vocab_size=0, which must be a whole number above 0"),
    ],
)
def test_invalid_value_in_config_json_raises_error_with_key_name(key, value, said):
    with pytest.raises(ValueError, match=said):
        model_of({**config_of(LAYOUTS["own"]), key: value})


def write(directory: Path, found: Layout, **changes: Any) -> Path:
    """Write a model directory with tensors of ones."""
    directory.mkdir()
    write_json(directory / "config.json", {**config_of(found), **changes})
    ours = dict(without_storage(model_of(config_of(found))[1]).named_parameters())
    shapes = {tensor.name: tensor.of(ours).shape for tensor in found.exported}
    save_file({n: torch.ones(s) for n, s in shapes.items()}, directory / "model.safetensors")
    return directory


def test_model_directory_accepts_symbolic_links_to_files(tmp_path):
    path, links = write(tmp_path / "hf", LAYOUTS["llama"]), tmp_path / "links"
    links.mkdir()
    for file in path.iterdir():
        (links / file.name).symlink_to(file)
    assert ModelDirectory(links).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("kind", "change", "least"),
    [("llama", {"num_hidden_layers": 90}, 90), ("qwen3_moe", {"num_experts": 65536}, 131072)],
)
def test_model_directory_refuses_config_that_needs_missing_tensors(tmp_path, kind, change, least):
    """Without this check, the names of billions of tensors could be listed."""
    with pytest.raises(CheckpointError, match=f"needs at least {least}"):
        ModelDirectory(write(tmp_path / "hf", LAYOUTS[kind], **change))
