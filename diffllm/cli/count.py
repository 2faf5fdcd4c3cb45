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
    first = next(iter(configs))
    if args.json:
        echo_json(counts if args.compare else counts[first])
        return
    cfg = configs[first]
    model = cfg.resolved.choices["model"]
    print_counts(f"{model}, seq_len {cfg.seq_len}{keys_text(cfg)}", counts)


def compared(values: list[str], overrides: list[str]) -> list[str]:
    """Convert the value of `--compare`, such as ["standard,diff_v2"], to a list of variant names.

    Raises ConfigError for an unknown or repeated variant, for fewer than two variants, for more
    than one `--compare`, and for attention= in `overrides`.
    """
    from diffllm.config.compose import variants
    from diffllm.config.overrides import check_choice

    text = " --compare ".join(values)
    names = text.split(",")
    are_unique = len(set(names)) == len(names)
    if len(values) > 1 or not all(names) or len(names) < 2 or not are_unique:
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
        # A Counter gives 0 for a component that the model lacks.
        if name in by_component or name != "router":
            ordered[name] = by_component[name]
    total = by_group.total()
    embedding = model.tok_embeddings.weight.numel()
    moe = cfg.model.moe
    matched = cfg.resolved.matched
    return {
        "total_params": total,
        "active_params": model.active_parameters(),
        "non_embedding_params": total - embedding,
        "attention_params": attention_params,
        "ffn_dim": cfg.model.ffn_dim,
        "expert_dim": moe.expert_dim if moe.n_experts else None,
        "flops_per_token": model.flops_per_token(cfg.visible_keys),
        "kv_cache_bytes_per_token": model.kv_cache_bytes_per_token(),
        "by_group": by_group,
        "by_component": ordered,
        "matched": matched.numbers() if matched else None,
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
    matched = counts[first]["matched"]
    if matched:
        quantity = matched["by"]
        target_value = matched[f"target_{quantity}"]
        echo(
            f"matched to {matched['target']}: {target_value:,.0f} "
            f"{UNITS[quantity]} at {matched['key']} {matched['target_ffn_dim']:,}"
        )
    heads = ["", first]
    for name in others:
        heads += [name, ""]
    rows: list[Row] = []
    for section in count_sections(list(counts.values())):
        section_rows = [row for row in section if has_numbers(row)]
        if rows and section_rows:
            rows.append(("",) * len(heads))
        rows += section_rows
    echo(f"\n{Table.of(heads, rows)}")


def has_numbers(row: Row) -> bool:
    """Return whether a row has more than zeros."""
    return not set(row[1:]) <= {"0", "=", ""}


def count_sections(columns: list[dict[str, Any]]) -> list[list[Row]]:
    """Return the rows of the table in four sections; `columns` are results of `count`."""
    from diffllm.model.stats import OTHER_COMPONENTS

    def component(name: str) -> Row:
        # A variant can lack a component of another variant.
        return number_row(name, [column["by_component"].get(name, 0) for column in columns])

    def quantity(label: str, key: str) -> Row:
        return number_row(label, [column[key] for column in columns])

    # A dict instead of a set, because the rows follow the order of the variants.
    components: dict[str, None] = {}
    for column in columns:
        components |= dict.fromkeys(column["by_component"])
    attention_rows = []
    for name in components:
        if name not in OTHER_COMPONENTS:
            attention_rows.append(component(name))
    attention_rows.append(quantity("attention", "attention_params"))
    other_rows = [component(name) for name in OTHER_COMPONENTS]
    total_rows = [
        quantity("total", "total_params"),
        quantity("active", "active_params"),
        quantity("without embedding", "non_embedding_params"),
    ]
    if columns[0]["matched"]:
        total_rows.append(matched_row(columns))
    width = "expert_dim" if columns[0]["expert_dim"] else "ffn_dim"
    megaflops = [column["flops_per_token"] / 1e6 for column in columns]
    size_rows = [
        quantity(width, width),
        number_row("MFLOPs per token", megaflops, ",.1f"),
        quantity("KV bytes per token", "kv_cache_bytes_per_token"),
    ]
    return [attention_rows, other_rows, total_rows, size_rows]


def matched_row(columns: list[dict[str, Any]]) -> Row:
    cells = ["over target"]
    for i, column in enumerate(columns):
        difference = column["matched"]["difference_percent"]
        cells.append(f"{difference:+.3f}%")
        if i > 0:  # only the first variant has no column of changes
            cells.append("")
    return tuple(cells)


def number_row(label: str, values: list[Any], number_format: str = ",") -> Row:
    """Return a row: the first value, then each other value with its change from the first."""
    first, *others = values
    is_integer = number_format == ","
    cells = [label, f"{first:{number_format}}"]
    for value in others:
        if value == first:
            cells += ["=", ""]
            continue
        change = short_difference(value - first) if is_integer else f"{value / first - 1:+.1%}"
        cells += [f"{value:{number_format}}", change]
    return tuple(cells)


def short_difference(difference: int) -> str:
    """Format a difference in at most 6 characters: +1,408, -24.6K, +537M, +1.07B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        # From 0.9995 on, three digits round up to 1 of the larger unit.
        if abs(difference) >= max(10_000, 0.9995 * size):
            return f"{difference / size:+.3g}{unit}"
    return f"{difference:+,}"
