"""diffllm count [overrides as for train.py] [--compare VARIANT,VARIANT,...] [--json]

What a model costs, without building it.

  --compare   one column a variant, changes against the first
  --json      the counts as JSON, with --compare a mapping from variant to counts

diffllm count model=dense_7b attention=diff_v2
diffllm count --compare standard,gated,diff_v1,diff_v2 model=dense_7b model.match_params_to=diff_v2
"""

import argparse
from collections import Counter
from typing import Any

from diffllm.cli.count_table import print_counts
from diffllm.config import TrainConfig, load_config
from diffllm.config.compose import check_variant
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo, echo_json
from diffllm.model import without_storage
from diffllm.model.stats import ATTENTION_COMPONENTS, OTHER_COMPONENTS, component_of, group_of


def count(cfg: TrainConfig) -> dict[str, Any]:
    """Count parameters, training FLOPs a token at seq_len, KV-cache bytes a token in bf16.

    "by_group" and "by_component" each sum to "total_params"; "matched" is what
    model.match_params_to solved, or None.
    """
    model = without_storage(cfg.model)
    by_group: Counter[str] = Counter()
    by_component: Counter[str] = Counter()
    for name, param in model.named_parameters():
        by_group[group_of(name)] += param.numel()
        by_component[component_of(name)] += param.numel()
    total = by_group.total()
    return {
        "total_params": total,
        "active_params": model.active_parameters(),
        "non_embedding_params": total - model.tok_embeddings.weight.numel(),
        "attention_params": sum(
            params for name, params in by_component.items() if name not in OTHER_COMPONENTS
        ),
        "ffn_dim": cfg.model.ffn_dim,
        "expert_dim": cfg.model.moe.expert_dim if cfg.model.moe.n_experts else None,
        "flops_per_token": model.flops_per_token(),
        "kv_cache_bytes_per_token": model.kv_cache_bytes_per_token(),
        "by_group": by_group,
        "by_component": in_order(by_component),
        "matched": cfg.run.matched.numbers() if cfg.run.matched else None,
    }


def in_order(by_component: Counter[str]) -> dict[str, int]:
    """Sort from wq to the output; every fixed component but the router is there, if only as 0."""
    special = [c for c in by_component if c not in (*ATTENTION_COMPONENTS, *OTHER_COMPONENTS)]
    order = [*ATTENTION_COMPONENTS, *special, *OTHER_COMPONENTS]
    return {c: by_component[c] for c in order if c in by_component or c != "router"}


def main(argv: list[str]) -> None:
    """Print the counts of a training config, or of several, as a table or as JSON."""
    if "-h" in argv or "--help" in argv:
        echo(__doc__)
        return
    parser = argparse.ArgumentParser("diffllm count", allow_abbrev=False)
    parser.add_argument("--compare", action="append", nargs="?", const="")
    parser.add_argument("--json", action="store_true")
    flags, overrides = parser.parse_known_args(argv)
    configs: dict[str, TrainConfig] = {}
    if flags.compare:
        for name in compared(flags.compare, overrides):
            try:
                configs[name] = load_config([*overrides, f"attention={name}"])
            except ConfigError as error:
                raise ConfigError(f"--compare: {name}: {error}") from error
    else:
        cfg = load_config(overrides)
        configs[cfg.run.choices["attention"]] = cfg
    counts = {name: count(cfg) for name, cfg in configs.items()}
    if flags.json:
        echo_json(counts if flags.compare else next(iter(counts.values())))
        return
    cfg = next(iter(configs.values()))
    print_counts(f"{cfg.run.choices['model']}, seq_len {cfg.seq_len}", counts)


def compared(lists: list[str], overrides: list[str]) -> list[str]:
    """Return the variants that `--compare` names; raises ConfigError.

    Args:
        lists: what follows each --compare.
    """
    if len(lists) > 1:
        raise ConfigError("--compare is there twice; name all variants after one")
    text = lists[0]
    names = text.split(",")
    if len(names) < 2 or "" in names:
        raise ConfigError(
            f"--compare={text} needs two or more variants with a comma and no space between, "
            "as in --compare standard,diff_v2"
        )
    for name in names:
        check_variant("--compare: ", name)
    if len(set(names)) < len(names):
        raise ConfigError(f"--compare={text} names a variant twice")
    chosen = [word for word in overrides if word.lstrip("+~").startswith("attention=")]
    if chosen:
        raise ConfigError(f"{chosen[0]} and --compare={text} both choose the variant; drop one")
    return names
