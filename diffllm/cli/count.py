"""diffllm count [overrides as for train.py] [--compare VARIANT,VARIANT,...] [--json]

Count parameters, training FLOPs and KV cache of a model without allocating tensors.

diffllm count model=dense_7b attention=diff_v2
diffllm count --compare standard,gated,diff_v1,diff_v2 model=dense_7b model.match_params_to=diff_v2
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffllm.cli.arguments import CommandArguments, argument, parse
from diffllm.core.errors import ConfigError
from diffllm.core.printing import Table, echo, echo_json

if TYPE_CHECKING:
    from diffllm.config import TrainConfig

Counts = dict[str, dict[str, Any]]
"""Variant to result of `count`; the first variant is the reference of the comparison."""
Row = tuple[str, ...]


@dataclass
class CountArguments(CommandArguments):
    compare: list[str] = argument(
        "VARIANT,VARIANT,...: one column per variant, with changes from the first", [], flag=True
    )
    overrides: list[str] = argument("overrides of the config", [], words="overrides")


def config_of_variant(name: str, overrides: list[str]) -> "TrainConfig":
    from diffllm.config import load_config

    try:
        return load_config([*overrides, f"attention={name}"])
    except ConfigError as error:
        raise ConfigError(f"variant {name} of --compare: {error}") from error


def count_command(argv: list[str]) -> None:
    args = parse(CountArguments, argv, __doc__)
    from diffllm.config import load_config

    if args.compare:
        names = compared(args.compare, args.overrides)
        configs = {name: config_of_variant(name, args.overrides) for name in names}
    else:
        cfg = load_config(args.overrides)
        configs = {cfg.resolved.choices["attention"]: cfg}
    counts = {name: count(cfg) for name, cfg in configs.items()}
    if args.json:
        echo_json(counts if args.compare else next(iter(counts.values())))
        return
    cfg = next(iter(configs.values()))
    print_counts(f"{cfg.resolved.choices['model']}, seq_len {cfg.seq_len}{keys_text(cfg)}", counts)


def compared(values: list[str], overrides: list[str]) -> list[str]:
    """Convert the value of `--compare`, such as ["standard,diff_v2"], to a list of variant names.

    Raises ConfigError for an unknown or repeated variant, for fewer than two variants, for more
    than one `--compare`, and for attention= in `overrides`.
    """
    from diffllm.config.compose import variants
    from diffllm.config.overrides import check_choice

    text = " --compare ".join(values)
    names = text.split(",")
    if len(values) > 1 or not all(names) or not 2 <= len(names) == len(set(names)):
        raise ConfigError(
            f"--compare={text} needs at least two variants, each only once, "
            "such as standard,diff_v2"
        )
    for name in names:
        check_choice(f"--compare: {name}", name, variants())
    chosen = [word for word in overrides if word.lstrip("+~").startswith("attention=")]
    if chosen:
        raise ConfigError(
            f"{chosen[0]} cannot be combined with --compare={text}; remove one of them"
        )
    return names


def count(cfg: "TrainConfig") -> dict[str, Any]:
    """Count parameters, training FLOPs per token and bytes of KV cache per token (bf16) of a model.

    Return the counts by name, such as "total_params". The FLOPs depend on `cfg.visible_keys`, the
    mean number of tokens that a query sees. If it is None, a query sees all tokens of the sequence
    up to its own position.
    """
    from diffllm.model import without_storage
    from diffllm.model.stats import ATTENTION_COMPONENTS, OTHER_COMPONENTS, component_of, group_of

    model = without_storage(cfg.model)
    by_group: Counter[str] = Counter()
    by_component: Counter[str] = Counter()
    for name, param in model.named_parameters():
        by_group[group_of(name)] += param.numel()
        by_component[component_of(name)] += param.numel()
    # Special components of a variant follow the common ones.
    common = (*ATTENTION_COMPONENTS, *OTHER_COMPONENTS)
    special = [name for name in by_component if name not in common]
    attention_params = 0
    for name, number in by_component.items():
        if name not in OTHER_COMPONENTS:
            attention_params += number
    ordered = {}
    for name in (*ATTENTION_COMPONENTS, *special, *OTHER_COMPONENTS):
        if name in by_component or name != "router":
            ordered[name] = by_component[name]
    total = by_group.total()
    return {
        "total_params": total,
        "active_params": model.active_parameters(),
        "non_embedding_params": total - model.tok_embeddings.weight.numel(),
        "attention_params": attention_params,
        "ffn_dim": cfg.model.ffn_dim,
        "expert_dim": cfg.model.moe.expert_dim if cfg.model.moe.n_experts else None,
        "flops_per_token": model.flops_per_token(cfg.visible_keys),
        "kv_cache_bytes_per_token": model.kv_cache_bytes_per_token(),
        "by_group": by_group,
        "by_component": ordered,
        "matched": cfg.resolved.matched.numbers() if cfg.resolved.matched else None,
    }


def keys_text(cfg: "TrainConfig") -> str:
    """Return a title suffix with the visible keys per query; "" if documents are not masked."""
    if not cfg.data.mask_documents:
        return ""
    if cfg.visible_keys is None:
        keys = "data.visible_keys= or data.document_lengths="
        return f", FLOPs of whole sequences (set {keys} for masked documents)"
    return f", {cfg.visible_keys:,.10g} visible keys per query"


def print_counts(title: str, counts: Counts) -> None:
    from diffllm.config.matching import UNITS

    first, *others = counts
    changes = f"; changes are relative to {first}" if others else ""
    echo(f"{title}\nparameters, training FLOPs, bf16 KV cache{changes}")
    if matched := counts[first]["matched"]:
        quantity = matched["by"]
        echo(
            f"matched to {matched['target']}: {matched[f'target_{quantity}']:,.0f} "
            f"{UNITS[quantity]} at {matched['key']} {matched['target_ffn_dim']:,}"
        )
    heads = ["", first]
    for name in others:
        heads += [name, ""]
    rows: list[Row] = []
    for section in count_sections(list(counts.values())):
        section_rows = [row for row in section if not set(row[1:]) <= {"0", "=", ""}]
        if rows and section_rows:
            rows.append(("",) * len(heads))
        rows += section_rows
    echo(f"\n{Table.of(heads, rows)}")


def count_sections(columns: list[dict[str, Any]]) -> list[list[Row]]:
    from diffllm.model.stats import OTHER_COMPONENTS

    def component(name: str) -> Row:
        return number_row(name, [column["by_component"].get(name, 0) for column in columns])

    def quantity(label: str, key: str) -> Row:
        return number_row(label, [column[key] for column in columns])

    components: dict[str, None] = {}
    for column in columns:
        components |= dict.fromkeys(column["by_component"])
    inside = [component(name) for name in components if name not in OTHER_COMPONENTS]
    names = {"total": "total", "active": "active", "without embedding": "non_embedding"}
    totals = [quantity(label, f"{name}_params") for label, name in names.items()]
    if columns[0]["matched"]:
        cells = ["over target"]
        for i, column in enumerate(columns):
            cells.append(f"{column['matched']['difference_percent']:+.3f}%")
            if i > 0:  # only the first variant has no column of changes
                cells.append("")
        totals.append(tuple(cells))
    width = "expert_dim" if columns[0]["expert_dim"] else "ffn_dim"
    megaflops = [column["flops_per_token"] / 1e6 for column in columns]
    return [
        [*inside, quantity("attention", "attention_params")],
        [component(name) for name in OTHER_COMPONENTS],
        totals,
        [
            quantity(width, width),
            number_row("MFLOPs per token", megaflops, ",.1f"),
            quantity("KV bytes per token", "kv_cache_bytes_per_token"),
        ],
    ]


def number_row(label: str, values: list[Any], number_format: str = ",") -> Row:
    """Return a row: the first value, then each other value with its change from the first."""
    first, *others = values
    cells = [label, f"{first:{number_format}}"]
    for value in others:
        if value == first:
            cells += ["=", ""]
            continue
        is_integer = number_format == ","
        change = short_difference(value - first) if is_integer else f"{value / first - 1:+.1%}"
        cells += [f"{value:{number_format}}", change]
    return tuple(cells)


def short_difference(difference: int) -> str:
    """Format a difference in at most 6 characters: +1,408, -24.6K, +537M, +1.07B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if abs(difference) >= max(10_000, 0.9995 * size):
            return f"{difference / size:+.3g}{unit}"
    return f"{difference:+,}"
