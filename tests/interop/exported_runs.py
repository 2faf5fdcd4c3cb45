"""Configs of exported runs."""

from pathlib import Path

import diffllm
from diffllm.checkpoint.hf.layout import VARIANTS as EXPORTED

CONF = Path(diffllm.__file__).parents[1] / "conf" / "attention"
VARIANTS = sorted(f.stem for f in CONF.glob("*.yaml") if f.stem.startswith(tuple(EXPORTED)))
MIXTURE = (
    "model.moe.n_experts=4", "model.moe.expert_dim=32", "model.moe.n_shared=1",
    "model.moe.n_dense_layers=1",
)  # fmt: skip
AS_QWEN = (
    "model.moe.n_experts=4", "model.moe.expert_dim=32", "model.moe.score=softmax",
    "model.moe.bias_update_rate=0", "model.qk_norm=true", "model.moe.n_dense_layers=1",
)  # fmt: skip
CASES = {
    **{name: ("DiffLLMForCausalLM", (f"attention={name}",)) for name in VARIANTS},
    "standard": ("LlamaForCausalLM", ("attention=standard",)),
    "standard_2x_heads": ("LlamaForCausalLM", ("attention=standard_2x_heads",)),
    "diff_v1": ("DiffLlamaForCausalLM", ("attention=diff_v1",)),
    "tied": ("LlamaForCausalLM", ("attention=standard", "model.tie_embeddings=true")),
    "qk_norm": ("Qwen3ForCausalLM", ("attention=standard", "model.qk_norm=true")),
    "qwen_mixture": ("Qwen3MoeForCausalLM", ("attention=standard", *AS_QWEN)),
    "mixture": ("DiffLLMForCausalLM", ("attention=diff_v2", *MIXTURE, "model.tie_embeddings=true")),
    "gated_mixture": ("DiffLLMForCausalLM", ("attention=gated", *MIXTURE, "model.qk_norm=true")),
    "yarn": (
        "DiffLLMForCausalLM",
        ("attention=diff_v2", "model.rope.scaling=yarn", "model.rope.factor=4",
         "model.rope.original_seq_len=72"),
    ),
    "yarn_olmo_core": (
        "DiffLlamaForCausalLM",
        ("attention=diff_v1", "model.rope.scaling=yarn", "model.rope.factor=4",
         "model.rope.original_seq_len=20000", "model.rope.theta=1000",
         "model.rope.yarn_ramp=olmo_core"),
    ),
    "yarn_exact": (
        "DiffLLMForCausalLM",
        ("attention=diff_v2", "model.rope.scaling=yarn", "model.rope.factor=4",
         "model.rope.original_seq_len=72", "model.rope.yarn_ramp=exact"),
    ),
    "yarn_qwen": (
        "Qwen3ForCausalLM",
        ("attention=standard", "model.qk_norm=true", "model.rope.scaling=yarn",
         "model.rope.factor=4", "model.rope.original_seq_len=72"),
    ),
    "linear": (
        "DiffLlamaForCausalLM",
        ("attention=diff_v1", "model.rope.scaling=linear", "model.rope.factor=2",
         "model.rope.theta=500000"),
    ),
    "llama3": (
        "LlamaForCausalLM",
        ("attention=standard", "model.rope.scaling=llama3", "model.rope.factor=4",
         "model.rope.original_seq_len=72"),
    ),
}  # fmt: skip
"""The class that loads an export, and the overrides of the run, by case."""
