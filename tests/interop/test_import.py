"""Import of models of transformers, export after import, and conversion to DIFF V2 and back."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported_runs import CASES, MIXTURE
from runs.json_files import read_json, write_json
from safetensors.torch import load_file, save_file
from tiers import slow_but
from torch import Tensor

import diffllm
from diffllm.cli import main
from diffllm.config.saved import load_run_config
from diffllm.data.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers", "5")

SMALL = {
    "vocab_size": 416, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2,
    "max_position_embeddings": 128,
}  # fmt: skip
IDS = torch.randint(2, 400, (2, 40), generator=torch.Generator().manual_seed(0))
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
FOREIGN = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3", {"num_attention_heads": 6}),
    "qwen3_yarn": (
        "Qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0,
                             "original_max_position_embeddings": 32}},
    ),
    "qwen3_exact_yarn": (
        "Qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 300, "truncate": False,
                             "mscale": 2.0, "mscale_all_dim": 0.5}},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "norm_topk_prob": True, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
    "diffllama": ("DiffLlama", {}),
}  # fmt: skip


def save_foreign_model(
    name: str, path: Path, tokenizer: Path, **options: object
) -> torch.nn.Module:
    """Save a model of transformers with random weights and a tokenizer; return the model."""
    family, settings = FOREIGN[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
    model.to(options.pop("dtype", torch.float32)).save_pretrained(path, **options)
    shutil.copy(tokenizer, path / "tokenizer.model")
    return getattr(transformers, f"{family}ForCausalLM").from_pretrained(path, dtype="float32")


@pytest.mark.parametrize("name", slow_but(["llama_tied", "diffllama"], FOREIGN))
@torch.no_grad()
def test_imported_model_computes_same_logits_as_transformers(tmp_path, tokenizer, name):
    theirs = save_foreign_model(name, tmp_path / "hf", tokenizer)
    assert main(["import", f"hf={tmp_path / 'hf'}", f"out={tmp_path / 'run'}"]) == 0
    ours, text = diffllm.load_model(tmp_path / "run")
    expected = theirs(IDS).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(ours(IDS), expected, rtol=0, atol=2e-5)
    assert text.encode("def f(x)") == Tokenizer.from_file(tokenizer).encode("def f(x)")


@pytest.mark.parametrize(
    "options",
    slow_but([{"max_shard_size": "60KB"}], [{"dtype": torch.bfloat16}, {"max_shard_size": "60KB"}]),
)
@torch.no_grad()
def test_import_reads_sharded_files_and_bf16_parameters(tmp_path, tokenizer, options):
    theirs = save_foreign_model("llama", tmp_path / "hf", tokenizer, **options)
    assert main(["import", f"hf={tmp_path / 'hf'}", f"out={tmp_path / 'run'}"]) == 0
    ours, _ = diffllm.load_model(tmp_path / "run")
    torch.testing.assert_close(ours(IDS), theirs(IDS).logits, rtol=0, atol=2e-5)


def test_commands_print_name_and_unknown_corpus_of_imported_run(tmp_path, tokenizer, output_of):
    save_foreign_model("llama", tmp_path / "my llama", tokenizer)
    run, two = tmp_path / "run", tmp_path / "two"
    imported = output_of("import", f"hf={tmp_path / 'my llama'}", f"out={run}")
    assert "my-llama: 0.08M parameters, standard" in imported
    assert main(["import", f"hf={run}", f"out={two}", "attention=diff_v2"]) == 0
    for path in (run, two):
        assert load_run_config(path).resolved.choices["model"] == "my-llama"
        assert "my-llama, seq_len" in output_of("count", f"resume=weights:{path}")
    said = output_of("evaluate", f"run={run}", "tasks=[icl]", "limit=2")
    assert said.startswith(f"{run}, step-00000000, trained on an unknown corpus\n")
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<dt>corpus</dt><dd>unknown</dd>" in page
    assert "stdlib" not in page


def run_parameters(run: Path) -> dict[str, Tensor]:
    model, _ = diffllm.load_model(run)
    return {**dict(model.named_parameters()), **model.router_state()}


ONE_OTHER_VALUE = {
    "diff_v2_2x_context", "diff_v2_no_sigmoid", "gated_init_one", "standard_quarter_context",
    "yarn_exact",
}  # fmt: skip
"""Cases that differ from another case only in the value of one config key."""


@pytest.mark.parametrize("name", slow_but(["mixture"], sorted(CASES.keys() - ONE_OTHER_VALUE)))
def test_export_then_import_keeps_parameters_bit_for_bit(make_run, tmp_path, name):
    architecture, words = CASES[name]
    run, out, back = make_run(name, *words), tmp_path / "hf", tmp_path / "back"
    own = ["own=true"] if architecture == "DiffLlamaForCausalLM" else []
    assert main(["export", f"run={run}", f"out={out}", *own]) == 0
    assert main(["import", f"hf={out}", f"out={back}"]) == 0
    before, after = run_parameters(run), run_parameters(back)
    if architecture == "Qwen3MoeForCausalLM":  # Qwen3MoE has no bias and load of routers
        before = {key: value for key, value in before.items() if ".router.load" not in key}
        before = {key: value for key, value in before.items() if ".router.bias" not in key}
    for key, tensor in before.items():
        assert torch.equal(after[key], tensor), key
    with torch.no_grad():
        one, other = (diffllm.load_model(path)[0](IDS) for path in (run, back))
    assert torch.equal(one, other)


@torch.no_grad()
def test_export_of_reimported_diff_v1_run_equals_first_export(make_run, tmp_path):
    run = make_run("diff_v1", "attention=diff_v1")
    for source, step in ((run, "one"), (tmp_path / "one-run", "two")):
        assert main(["export", f"run={source}", f"out={tmp_path / step}"]) == 0
        assert main(["import", f"hf={tmp_path / step}", f"out={tmp_path / f'{step}-run'}"]) == 0
    files = [tmp_path / step / "model.safetensors" for step in ("one", "two")]
    assert files[0].read_bytes() == files[1].read_bytes()
    one, other = (diffllm.load_model(path)[0](IDS) for path in (run, tmp_path / "two-run"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


KINDS = {
    "dense": (),
    "qk_norm": ("model.qk_norm=true",),
    "mixture": MIXTURE,
    "tied": ("model.tie_embeddings=true",),
}


@pytest.mark.parametrize("kind", slow_but(["qk_norm"], KINDS))
@torch.no_grad()
def test_conversion_from_standard_to_diff_v2_and_back_keeps_logits(make_run, tmp_path, kind):
    run = make_run("source", "attention=standard", *KINDS[kind])
    two, back = tmp_path / "two", tmp_path / "back"
    assert main(["import", f"hf={run}", f"out={two}", "attention=diff_v2"]) == 0
    assert load_run_config(two).resolved.choices["attention"] == "diff_v2"
    assert main(["import", f"hf={two}", f"out={back}", "attention=standard"]) == 0
    assert load_run_config(back).resolved.choices["attention"] == "standard_2x_heads"
    source, converted, again = (diffllm.load_model(path)[0](IDS) for path in (run, two, back))
    assert source.std() > 0.3
    assert torch.equal(source, converted)
    torch.testing.assert_close(source, again, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name", slow_but(["lambda_scalar"], ["lambda_fixed", "lambda_scalar", "no_lambda"])
)
@torch.no_grad()
def test_conversion_to_standard_keeps_logits_if_lambda_is_constant(make_run, tmp_path, name):
    words = ["model.attention.pairing=halves"] if name == "lambda_scalar" else []
    run = make_run(name, f"attention=diff_v2_{name}", *words)
    assert main(["import", f"hf={run}", f"out={tmp_path / 'out'}", "attention=standard"]) == 0
    one, other = (diffllm.load_model(path)[0](IDS) for path in (run, tmp_path / "out"))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@torch.no_grad()
def test_perturb_argument_changes_only_second_query_head_of_each_pair(make_run, tmp_path):
    run, out = make_run("source", "attention=standard"), tmp_path / "out"
    words = ["attention=diff_v2", "perturb=0.1", "seed=3"]
    assert main(["import", f"hf={run}", f"out={out}", *words]) == 0
    source = run_parameters(run)["layers.0.attention.wq.weight"]
    width = load_run_config(run).model.head_dim
    pairs = run_parameters(out)["layers.0.attention.wq.weight"].unflatten(0, (-1, 2, width))
    assert torch.equal(pairs[:, 0].flatten(0, 1), source)
    moved = (pairs[:, 1].flatten(0, 1) - source).square().mean().sqrt()
    assert 0.09 < moved / source.square().mean().sqrt() < 0.11


def changed_config(directory: Path, **values: object) -> None:
    file = directory / "config.json"
    write_json(file, {**read_json(file), **values})


def changed_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


Q = "model.layers.0.self_attn.q_proj.weight"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "architecture": (
        lambda d: changed_config(d, architectures=["GemmaForCausalLM"]),
        "GemmaForCausalLM, which is not one of LlamaForCausalLM, Qwen3ForCausalLM",
    ),
    "rope": (
        lambda d: changed_config(d, rope_parameters={"rope_type": "longrope", "factor": 2.0}),
        "RoPE of type longrope, which is not one of default, linear, llama3, yarn",
    ),
    "two thetas": (
        lambda d: changed_config(d, rope_theta=5.0),
        "has two values of rope_theta: 5.0 and 10000.0",
    ),
    "bias": (lambda d: changed_config(d, attention_bias=True), "only False is supported"),
    "no size": (lambda d: changed_config(d, hidden_size=None), "has no hidden_size"),
    "no config": (lambda d: (d / "config.json").unlink(), "neither a run"),
    "missing": (lambda d: changed_tensors(d, lambda t: t.pop(Q)), f"lacks tensors: {Q}"),
    "extra": (
        lambda d: changed_tensors(d, lambda t: t.update(more=torch.ones(2))),
        "unknown tensors: more",
    ),
    "shape": (
        lambda d: changed_tensors(d, lambda t: t.update({Q: torch.ones(2, 3)})),
        " is F32 [2, 3], but must be F32 or BF16 or F16 [64, 48]",
    ),
    "dtype": (
        lambda d: changed_tensors(d, lambda t: t.update({Q: torch.ones(64, 48, dtype=torch.int8)})),
        " is I8 [64, 48], but must be F32 or BF16 or F16 [64, 48]",
    ),
    "cut": (
        lambda d: (d / "model.safetensors").write_bytes(
            (d / "model.safetensors").read_bytes()[:-100]
        ),
        "model.safetensors is damaged",
    ),
    "pickle": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        "save the model as safetensors",
    ),
    "nothing": (lambda d: (d / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "tokenizer": (
        lambda d: (d / "tokenizer.model").unlink(), "neither tokenizer.model nor tokenizer.json"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", slow_but(["rope", "missing", "cut", "pickle"], SPOILT))
def test_import_of_damaged_model_prints_one_error_line(tmp_path, tokenizer, error_of, what):
    source = tmp_path / "hf"
    save_foreign_model("llama", source, tokenizer)
    spoil, said = SPOILT[what]
    spoil(source)
    error = error_of("import", f"hf={source}", f"out={tmp_path / 'out'}")
    assert said in error
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_import_refuses_tokenizer_larger_than_model(tmp_path, tokenizer, error_of, monkeypatch):
    monkeypatch.setitem(SMALL, "vocab_size", 300)
    save_foreign_model("llama", tmp_path / "hf", tokenizer)
    error = error_of("import", f"hf={tmp_path / 'hf'}", f"out={tmp_path / 'out'}")
    assert "400 tokens, but vocab_size in config.json is 300" in error


def test_import_prints_error_for_invalid_arguments(make_run, tmp_path, error_of):
    run = make_run("two", "attention=diff_v2")
    out = f"out={tmp_path / 'out'}"
    for words, said in (
        ([f"hf={run}", f"out={run}"], "already exists"),
        ([f"hf={run}", out, "attention=diff_v2"], "only attention=standard with sink=none"),
        ([f"hf={run}", out, "attention=standard"], "w_lambda is not zero"),
        ([f"hf={run}", out, "attention=gated"], "attention=gated must be one of"),
        ([f"hf={run}", out, "perturb=0.1"], "perturb=0.1 is only supported with attention=diff_v2"),
    ):
        error = error_of("import", *words)
        assert said in error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["two"]
