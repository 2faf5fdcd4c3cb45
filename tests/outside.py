"""Plugins of a user: modules and YAMLs outside the repository."""

from pathlib import Path

MODULE = '''
"""A variant with one scale per head, a corpus of counting texts, and a metric."""

from dataclasses import dataclass

import torch

from diffllm.core.keys import key
from diffllm.data.config import DataConfig
from diffllm.data.text.corpus import Corpus, TextsPart
from diffllm.data.text.file_index import combined_hash
from diffllm.metrics.metric import Curve, Column, Layers, Metric, Section
from diffllm.metrics.table import add_metric
from diffllm.model.attention.base import Attention, AttentionConfig
from diffllm.core.registry import schema, source

SCALES = Section("Scales", "Scales", "The scale multiplies a head's output.")
add_metric(
    Metric(
        "scale_mean/*", SCALES, "Mean scale over heads", "scale", combine="mean",
        plots=(Layers("Mean scale, by layer"),),
        column=Column("last", "max", "mean", "Scale"),
    )
)


@schema(group="attention", name="scaled", package="model.attention")
@dataclass
class ScaledConfig(AttentionConfig):
    context_scale: float = 1.5
    initial: float = 1.0
    temperature: float = key(1.0, effect="numbers", above=0, help="Divisor of the queries.")
    tile: int = key(64, effect="speed", least=1, help="Keys per tile.")

    def build(self, model, layer_idx):
        return ScaledAttention(model, self)


class ScaledAttention(Attention):
    """context = scale * softmax(q k) v, one scale per head."""

    def __init__(self, model, cfg):
        super().__init__(model)
        self.head_scale = torch.nn.Parameter(torch.empty(self.n_heads))
        self.initial, self.temperature = cfg.initial, cfg.temperature

    def project(self, x, rope):
        q, k, v = super().project(x, rope)
        return q / self.temperature, k, v

    def context(self, x, q, k, v, mask, aux):
        if aux is not None:
            aux["scale"] = self.head_scale
        return self.head_scale[:, None] * self.attend(q, k, v, mask)

    def reset_parameters(self, init):
        init.constant_(self.head_scale, self.initial)

    def statistics(self, aux):
        return {"scale_mean": aux["scale"].float().mean()}


@schema(group="data", name="counting")
@dataclass
class CountingConfig(DataConfig):
    source: str = "counting"
    documents: int = key(400, effect="order", least=1, help="Number of texts.")
    readers: int = key(1, effect="speed", help="Number of readers.")


@source("counting")
def counting(cfg, cache_dir):
    """Return documents of multiplication tables."""
    texts = [
        f"{i}: " + ", ".join(f"{i % 7} times {k} is {i % 7 * k}" for k in range(i % 13 + 4))
        for i in range(cfg.documents)
    ]
    identity = combined_hash(["counting", cfg.documents])
    return Corpus("counting", identity, lambda: [TextsPart("counting", texts)])
'''
YAMLS = {
    "attention/scaled": "# @package model.attention\ndefaults:\n  - scaled_schema\n  - _self_\n",
    "attention/scaled_twice": "# @package model.attention\ndefaults:\n  - scaled\n  - _self_\n"
    "initial: 2\n",
    "data/counting": "defaults:\n  - counting_schema\n  - _self_\nvocab_size: 280\n",
    "experiment/count_up": "# @package _global_\ndefaults:\n  - override /attention: scaled\n"
    "  - override /data: counting\n  - override /model: nano\n"
    "steps: 6\nseq_len: 32\nglobal_batch_size: 4\nlog_interval: 2\n"
    "optim: {warmup_steps: 1}\neval: {interval: 3, sequences: 4}\ncheckpoint: {interval: 2}\n"
    "diagnostics: {interval: 2}\n",
    "model/nano": "# @package _global_\nmodel:\n  dim: 64\n  n_layers: 2\n  n_heads: 4\n"
    "  n_kv_heads: 2\n  head_dim: 16\n  ffn_dim: 128\n  vocab_size: 512\n",
}


def write_plugin(directory: Path, module: str = "scaled_attention", conf: str = "") -> Path:
    """Write the module, and the YAMLs into the subdirectory `conf`; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / f"{module}.py").write_text(MODULE, encoding="utf-8")
    for name, text in YAMLS.items():
        file = directory / conf / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return directory


def write_package(site: Path) -> Path:
    """Write an installed package that offers the plugin as the entry point "counted"."""
    write_plugin(site / "counted_package", conf="conf")
    (site / "counted_package" / "__init__.py").write_text("", encoding="utf-8")
    facts = site / "counted_package-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: counted-package\nVersion: 1.0\n", encoding="utf-8"
    )
    points = "[diffllm.plugins]\ncounted = counted_package.scaled_attention\n"
    (facts / "entry_points.txt").write_text(points, encoding="utf-8")
    return site
