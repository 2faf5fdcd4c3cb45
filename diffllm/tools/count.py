"""diffllm count [overrides] [--json]: what a model costs, without building it.

With --compare a,b,...: what each variant costs, side by side.
"""

import json
from typing import Any

import torch

from diffllm.config import TrainConfig, load_config
from diffllm.config.compose import check_variant
from diffllm.errors import ConfigError
from diffllm.model import build_model
from diffllm.model.groups import ATTENTION_COMPONENTS, OTHER_COMPONENTS, component_of, group_of
from diffllm.tools.count_table import print_comparison

USAGE = """\
diffllm count [overrides as for train.py] [--compare VARIANT,VARIANT,...] [--json]

  --compare   one column a variant, changes against the first
  --json      the counts as JSON, with --compare a mapping from variant to counts

diffllm count model=dense_7b attention=diff_v2
diffllm count --compare standard,gated,diff_v1,diff_v2 model=dense_7b model.match_params_to=diff_v2\
"""


def count(cfg: TrainConfig) -> dict[str, Any]:
    """Parameters, training FLOPs a token at seq_len, KV-cache bytes a token in bf16.

    "by_group" and "by_component" each sum to "total_params"; "matched" is what
    model.match_params_to solved, or None.
    """
    with torch.device("meta"):
        model = build_model(cfg.model)
    by_group: dict[str, int] = {}
    by_component: dict[str, int] = {}
    for name, param in model.named_parameters():
        group, component = group_of(name), component_of(name)
        by_group[group] = by_group.get(group, 0) + param.numel()
        by_component[component] = by_component.get(component, 0) + param.numel()
    total = sum(by_group.values())
    embedding = model.tok_embeddings.weight.numel()
    return {
        "total_params": total,
        "active_params": model.active_parameters(),
        "non_embedding_params": total - embedding,
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


def in_order(by_component: dict[str, int]) -> dict[str, int]:
    """From wq to the output; every fixed component but the router is there, if only as 0."""
    special = [c for c in by_component if c not in (*ATTENTION_COMPONENTS, *OTHER_COMPONENTS)]
    order = [*ATTENTION_COMPONENTS, *special, *OTHER_COMPONENTS]
    return {c: by_component.get(c, 0) for c in order if c in by_component or c != "router"}


def main(argv: list[str]) -> None:
    """Print the counts of a training config, or of several, as a table or as JSON."""
    if "-h" in argv or "--help" in argv:
        print(USAGE)
        return
    overrides, names = split_compare([word for word in argv if word != "--json"])
    if names:
        compare(overrides, names, as_json="--json" in argv)
        return
    cfg = load_config(overrides)
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
    if cfg.run.matched:
        print(f"matched: {cfg.run.matched.text()}")


def split_compare(words: list[str]) -> tuple[list[str], list[str]]:
    """(overrides, variants named after --compare); raises ConfigError.

    `--compare a,b` and `--compare=a,b` are the same; without it there are no variants.
    """
    places = [i for i, word in enumerate(words) if word.partition("=")[0] == "--compare"]
    if not places:
        return words, []
    if len(places) > 1:
        raise ConfigError("--compare is there twice; name all variants after one")
    at = places[0]
    _, equals, text = words[at].partition("=")
    rest = words[at + 1 :]
    if not equals:
        text, rest = (rest[0], rest[1:]) if rest and "=" not in rest[0] else ("", rest)
    overrides, names = words[:at] + rest, text.split(",")
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
    return overrides, names


def compare(overrides: list[str], names: list[str], as_json: bool) -> None:
    """Print the counts of the same config with each of the variants."""
    configs: dict[str, TrainConfig] = {}
    for name in names:
        try:
            configs[name] = load_config([*overrides, f"attention={name}"])
        except ConfigError as error:
            raise ConfigError(f"--compare: {name}: {error}") from error
    counts = {name: count(cfg) for name, cfg in configs.items()}
    if as_json:
        print(json.dumps(counts, indent=2))
        return
    cfg = configs[names[0]]
    print_comparison(f"{cfg.run.choices['model']}, seq_len {cfg.seq_len}", counts)
