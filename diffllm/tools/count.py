"""diffllm count [overrides] [--json]: what a model costs, without building it."""

import json
from typing import Any

import torch

from diffllm.config import TrainConfig, load_config
from diffllm.model import build_model
from diffllm.model.groups import group_of


def count(cfg: TrainConfig) -> dict[str, Any]:
    """Parameters, training FLOPs a token at seq_len, KV-cache bytes a token in bf16."""
    with torch.device("meta"):
        model = build_model(cfg.model)
    by_group: dict[str, int] = {}
    for name, param in model.named_parameters():
        by_group[group_of(name)] = by_group.get(group_of(name), 0) + param.numel()
    total = sum(by_group.values())
    embedding = model.tok_embeddings.weight.numel()
    return {
        "total_params": total,
        "active_params": total,
        "non_embedding_params": total - embedding,
        "flops_per_token": model.flops_per_token(),
        "kv_cache_bytes_per_token": model.kv_cache_bytes_per_token(),
        "by_group": by_group,
    }


def main(argv: list[str]) -> None:
    """Print the counts of a training config, as a table or as JSON."""
    if "-h" in argv or "--help" in argv:
        print("diffllm count [overrides as for train.py] [--json], e.g. model=dense_7b")
        return
    cfg = load_config([word for word in argv if word != "--json"])
    counts = count(cfg)
    if "--json" in argv:
        print(json.dumps(counts, indent=2))
        return
    print(f"{cfg.run.choices['attention']} / {cfg.run.choices['model']}, seq_len {cfg.seq_len}")
    for group, params in counts["by_group"].items():
        print(f"  {group:<22}{params:>16,}")
    print(f"  {'total':<22}{counts['total_params']:>16,}")
    print(f"  {'active':<22}{counts['active_params']:>16,}")
    print(f"  {'without embedding':<22}{counts['non_embedding_params']:>16,}")
    print(f"  {'training FLOPs a token':<22}{counts['flops_per_token']:>16,.0f}")
    print(f"  {'KV-cache bytes a token':<22}{counts['kv_cache_bytes_per_token']:>16,}")
