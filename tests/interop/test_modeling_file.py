"""The modelling file supports the features of transformers with equal results: all attention
implementations, continuous batching, torch.export and compilation."""

import subprocess
import sys

import pytest
import torch
from exported_runs import CASES
from runs.json_files import read_json
from tiers import slow_but
from torch import nn

import diffllm
from diffllm.checkpoint.hf.config_json import Config as ForeignConfig
from diffllm.checkpoint.hf.config_json import rope_of
from diffllm.checkpoint.hf.layout import VARIANTS, json_settings, rope_parameters
from diffllm.cli import main
from diffllm.model.ffn.router import MoEConfig
from diffllm.model.rope import RopeConfig, RopeScaling, YarnRamp
from diffllm.model.rope import RotaryEmbedding as RunRotaryEmbedding

transformers = pytest.importorskip("transformers", "5.4")

from diffllm.interop.modeling_diffllm import (  # noqa: E402
    SETTINGS,
    DiffLLMConfig,
    DiffLLMForCausalLM,
    RotaryEmbedding,
)

NAMES = (
    "standard", "gated", "diff_v1", "diff_v2", "standard_sink", "standard_off_by_one",
    "diff_v1_clamped", "mixture",
)  # fmt: skip
"""Cases that run different code of the modelling file."""
WITH_MAPS = ("standard_sink", "standard_off_by_one", "diff_v1_clamped")
IDS = torch.randint(2, 400, (2, 24), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


@pytest.fixture
def export_of(make_run, tmp_path):
    """Return a function that exports the run of a case and loads the export."""

    def make(name: str, **options: object) -> nn.Module:
        if not (tmp_path / "hf" / name).exists():
            run = make_run(name, *CASES[name][1])
            assert main(["export", f"run={run}", f"out={tmp_path / 'hf' / name}", "own=true"]) == 0
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf" / name, trust_remote_code=True, **options
        )
        assert type(model).__name__ == "DiffLLMForCausalLM"
        return model.eval()

    return make


def assert_close_logits(found: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5, msg=str(what))


def greedy(model: nn.Module, **options: object) -> list[list[int]]:
    mask = torch.ones_like(IDS)
    found = model.generate(IDS, attention_mask=mask, **GREEDY, **options)
    return found[:, IDS.shape[1] :].tolist()


@pytest.mark.parametrize("name", slow_but(["standard_sink", "diff_v1_clamped"], NAMES))
@torch.no_grad()
def test_exported_model_returns_same_logits_as_original_run(export_of, tmp_path, name):
    model = export_of(name)
    expected = diffllm.load_model(tmp_path / name)[0](IDS)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), IDS), dim=1)
    mask = (torch.arange(27) >= 3).long().expand(2, -1)
    for implementation in ("sdpa", "eager"):
        chosen = export_of(name, attn_implementation=implementation)
        model.set_attn_implementation(implementation)
        for each in (chosen, model):
            assert_close_logits(each(IDS).logits, expected, (name, implementation))
            found = each(padded, attention_mask=mask).logits[:, 3:]
            assert_close_logits(found, expected, (name, implementation, "padded"))
        model.config._attn_implementation = "eager" if implementation == "sdpa" else "sdpa"
        assert_close_logits(
            model(IDS).logits, expected, (name, implementation, "changed in the config")
        )


@pytest.mark.parametrize("name", WITH_MAPS)
def test_exported_model_refuses_unsupported_attn_implementation(export_of, name):
    with pytest.raises(ValueError, match="does not support Flash Attention"):
        export_of(name, attn_implementation="flash_attention_2")
    model = export_of(name)
    for implementation in ("flash_attention_2", "flex_attention"):  # set directly, as users may do
        model.config._attn_implementation = implementation
        with pytest.raises(ValueError, match=f"attn_implementation='{implementation}' cannot"):
            model(IDS)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", slow_but(["standard_sink", "diff_v1_clamped"], NAMES))
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_continuous_batching_returns_same_tokens_as_generate(export_of, name, implementation):
    model = export_of(name, attn_implementation=implementation)
    found = model.generate_batch(
        IDS.tolist(),
        generation_config=transformers.GenerationConfig(**GREEDY),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=16, max_batch_tokens=64
        ),
        progress_bar=False,
    )
    assert [each.generated_tokens for each in found.values()] == greedy(model)


@pytest.mark.parametrize("name", slow_but(["standard_sink", "diff_v1_clamped"], NAMES))
@torch.no_grad()
def test_output_attentions_option_returns_one_causal_map_per_head(export_of, name):
    model = export_of(name, attn_implementation="eager")
    shape = 2, model.config.num_attention_heads
    sums = []
    for maps in model(IDS, output_attentions=True).attentions:
        assert maps.shape == (*shape, 24, 24)
        assert not maps.triu(1).any()
        sums.append(maps.sum(-1))
    ones = torch.ones_like(sums[0])
    for total in sums:
        if name in ("standard_sink", "standard_off_by_one"):
            assert (total < 1).all()  # the sink has the remaining weight
        else:
            assert_close_logits(total, ones, name)
    again = model.generate(IDS, **GREEDY, output_attentions=True, return_dict_in_generate=True)
    for step, layers in enumerate(again.attentions):
        queries = 24 if step == 0 else 1
        assert [maps.shape for maps in layers] == [(*shape, queries, 24 + step)] * len(layers)


@pytest.mark.parametrize("name", slow_but(["standard_sink"], NAMES[:-1]))
@torch.no_grad()
def test_torch_export_program_returns_same_logits_as_model(export_of, name):
    model = export_of(name, attn_implementation="sdpa")
    program = torch.export.export(
        model, (), {"input_ids": IDS, "use_cache": False},
        dynamic_shapes={"input_ids": {0: torch.export.Dim("batch", max=8)}, "use_cache": None},
    )  # fmt: skip
    for ids in (IDS, IDS[[0, 1, 0]]):
        found = program.module()(input_ids=ids, use_cache=False).logits
        assert_close_logits(found, model(ids).logits, (name, len(ids)))


def compiled(model: nn.Module, backend: str) -> list[list[int]]:
    """Generate with a static cache and one graph per step, also on a CPU."""
    config = transformers.CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    found = greedy(model, cache_implementation="static", compile_config=config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return found


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("diff_v2", "eager"),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in NAMES[:-1]),
    ],
)
def test_exported_model_generates_same_tokens_after_compilation(export_of, name, backend):
    model = export_of(name)
    assert model._can_compile_fullgraph
    assert compiled(model, backend) == greedy(model)


@pytest.mark.slow
def test_exported_moe_model_refuses_compilation_and_torch_export(export_of):
    model = export_of("mixture")
    assert not model._can_compile_fullgraph
    with pytest.raises(Exception, match="data-dependent expression"):
        compiled(model, "eager")
    with pytest.raises(Exception, match="data-dependent expression"):
        torch.export.export(model, (), {"input_ids": IDS, "use_cache": False})


ROPES = {
    "default": RopeConfig(theta=500_000.0),
    "linear": RopeConfig(scaling=RopeScaling.linear, factor=3),
    "llama3": RopeConfig(scaling=RopeScaling.llama3, factor=8, original_seq_len=8192),
    "yarn": RopeConfig(scaling=RopeScaling.yarn, factor=4, original_seq_len=8192),
    "warmer yarn": RopeConfig(
        scaling=RopeScaling.yarn, factor=2, original_seq_len=7, attention_factor=1.3
    ),
    "exact yarn": RopeConfig(
        scaling=RopeScaling.yarn, factor=4, original_seq_len=2048, yarn_ramp=YarnRamp.exact
    ),
    "yarn of OLMo-core": RopeConfig(
        theta=1e3,
        scaling=RopeScaling.yarn,
        factor=4,
        original_seq_len=8192,
        yarn_ramp=YarnRamp.olmo_core,
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_modeling_file_computes_same_rope_tables_as_training(kind):
    ours = RunRotaryEmbedding(64, 70_000, ROPES[kind])
    ours.reset_parameters()
    config = DiffLLMConfig(head_dim=64, rope_parameters=rope_parameters(ROPES[kind], 64))
    theirs = RotaryEmbedding(config)
    for moved in (theirs, theirs.half(), theirs.to(torch.bfloat16)):
        cos, sin = moved(torch.arange(70_000)[None])
        assert torch.equal(cos[0], ours.cos[:, 0, :32])
        assert torch.equal(sin[0], ours.sin[:, 0, :32])


@pytest.mark.parametrize("variant", VARIANTS)
def test_exported_config_uses_training_defaults_for_missing_settings(variant):
    found = DiffLLMConfig(attention={"variant": variant}).attention
    assert found == {"variant": variant, **json_settings(VARIANTS[variant]())}
    config = DiffLLMConfig(
        vocab_size=416, hidden_size=48, intermediate_size=64, head_dim=16,
        attention={"variant": variant}, moe={"n_experts": 4, "expert_dim": 32},
    )  # fmt: skip
    assert config.moe == json_settings(MoEConfig(n_experts=4, expert_dim=32))
    assert DiffLLMForCausalLM(config)(IDS).logits.isfinite().all()


def test_exported_config_refuses_unknown_or_invalid_setting():
    assert set(SETTINGS) == set(VARIANTS)
    for settings, said in (
        ({"attention": {"variant": "diff_v3"}}, "attention.variant='diff_v3' must be one of"),
        (
            {"attention": {"variant": "diff_v2", "lambda_form": "tanh"}},
            "attention.lambda_form='tanh' must be one of sigmoid, raw, scalar, fixed, none",
        ),
        ({"moe": {"n_expert": 4}}, "moe.n_expert=4 is unknown; known: n_experts, "),
        ({"moe": {"n_experts": 4}}, "and moe.expert_dim=0 at least 1"),
        (
            {"attention": {"variant": "diff_v1", "lambda_init": "0.5"}},
            "attention.lambda_init='0.5' must be of type float",
        ),
        (
            {"attention": {"variant": "diff_v2"}, "num_key_value_heads": 4},
            "num_key_value_heads=4 must divide num_attention_heads=4 / 2$",
        ),
        (
            {"sliding_window": 4},
            "sliding_window=4 is not supported: all layers attend to all tokens",
        ),
        ({"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta='1e4' must be a number above 0"),
    ):
        with pytest.raises(ValueError, match=said):
            DiffLLMConfig(**settings)


@pytest.mark.parametrize(
    ("rope", "said"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' must be one of default"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_type": "default", "mrope_section": [2, 3]}, "rope_parameters.mrope_section="),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor, high_freq_factor"),
    ],
)
def test_modeling_file_raises_value_error_for_unsupported_rope_settings(rope, said):
    rope = {"rope_theta": 10_000.0, **rope}
    with pytest.raises(ValueError, match=r"RoPE|partial_rotary_factor|has no"):
        rope_of(ForeignConfig({"rope_parameters": rope}))
    with pytest.raises(ValueError, match=said):
        DiffLLMConfig(rope_parameters=rope)
    config = DiffLLMConfig()
    config.rope_parameters = rope
    with pytest.raises(ValueError, match=said):
        DiffLLMForCausalLM(config)


@pytest.mark.slow
def test_modeling_file_raises_import_error_if_transformers_is_too_old(export_of, tmp_path):
    export_of("diff_v2")
    directory = tmp_path / "hf" / "diff_v2"
    config = read_json(directory / "config.json")
    assert config["transformers_version"] == "5.4.0"
    code = (
        "import sys, transformers; transformers.__version__ = '5.3.1'; "
        "transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    command = [sys.executable, "-c", code, str(directory)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: transformers 5.3.1 is too old for modeling_diffllm.py: "
        "pip install 'transformers>=5.4'"
    )
