"""Output of `diffllm plan`: memory, communication, time, and assumptions."""

from collections.abc import Sequence
from typing import Any

from diffllm.config.overrides import key_of_word
from diffllm.core.printing import Table, echo, echo_json
from diffllm.data.progress import stages
from diffllm.distributed.recompute import ActivationCheckpointing
from diffllm.plan.cluster import Cluster
from diffllm.plan.estimate import DAY, RunPlan, idealised, plan
from diffllm.plan.search import LENGTH_UNIT, longest_sequence, nearest_change
from diffllm.plan.step import Kind, Step
from diffllm.training.memory import GIB


def print_plan(
    cluster: Cluster, named: set[str], overrides: list[str], as_json: bool, with_longest: bool
) -> None:
    """Simulate a step of the plan and print the numbers, as text or as JSON.

    `named` contains the names of the keys on the command line. If `with_longest` is true, also
    search the longest sequence that fits.
    """
    made = plan(cluster, named, overrides)
    if not as_json:
        echo(head_text(made), flush=True)
    chosen, change = made.cfg.activation_checkpointing, None
    with stages() as say:
        made = made.simulated(chosen, say)
    if not as_json:
        echo(speed_text(made), flush=True)
    with stages() as say:
        for policy in ActivationCheckpointing:
            if policy is not chosen:
                made = made.simulated(policy, say)
    if not as_json:
        echo(memory_text(made), flush=True)
    with stages() as say:
        change = None if made.fits else nearest_change(made, say)
        longest = longest_sequence(made, say) if with_longest else None
    if as_json:
        numbers = plan_numbers(made, change)
        if with_longest:
            numbers["longest_sequence"] = longest
        echo_json(numbers)
        return
    echo(fit_text(made, change))
    echo(longest_text(longest) if with_longest else LONGEST_HINT)
    print_assumptions(made)


def plan_numbers(made: RunPlan, change: RunPlan | None) -> dict[str, Any]:
    """Return memory (bytes), times (seconds), FLOPs and settings of the plan `made`, for JSON.

    If `made` does not fit into memory, `change` is a plan with other settings that fits, or None
    if no plan fits. If `made` fits, `change` is None.
    """
    cfg, cluster = made.cfg, made.cluster
    micro, count = cfg.micro_batches(cluster.gpus)
    return {
        **{group: cfg.resolved.choices[group] for group in ("model", "attention")},
        "parameters": made.n_params,
        "gpus": cluster.gpus,
        "gpu": cluster.device.name,
        "rank": cluster.rank,
        "mesh": made.mesh,
        **values(cfg, "seq_len", "global_batch_size"),
        "micro_batch_size": micro,
        "micro_batches": count,
        "memory": {
            **made.state._asdict(),
            "activation_checkpointing": cfg.activation_checkpointing.name,
            "policies": {
                policy.name: policy_numbers(made, made.steps[policy])
                for policy in ActivationCheckpointing
            },
            "reserve": made.reserve,
            "device": made.memory,
            "fits": made.fits,
        },
        "communication": [{**flow._asdict(), "kind": flow.kind.value} for flow in made.flows],
        "time": {
            **values(made, "flops_per_token", "flops_per_step", "tokens_per_step"),
            **values(made, "tokens_per_s", "compute_seconds"),
            **values(made, "communication_seconds", "step_seconds", "mfu"),
            "tokens": cluster.tokens,
            "days": made.seconds and made.seconds / DAY,
            "gpu_hours": made.seconds and made.seconds / 3600 * cluster.gpus,
        },
        "nearest_change": change
        and {
            "overrides": list(change.words),
            **policy_numbers(change, change.step),
            **values(change, "communication_seconds", "step_seconds", "tokens_per_s"),
        },
        "assumptions": [assumption._asdict() for assumption in made.assumptions],
        "idealised": idealised(cfg),
    }


def values(of: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(of, name) for name in names}


def policy_numbers(made: RunPlan, step: Step) -> dict[str, Any]:
    return {
        "activations": step.activations,
        "peak": step.peak.total,
        "peak_in": step.when,
        "at_peak": {kind.value: size for kind, size in step.peak.by_kind.items()},
        "free": made.free(step),
        "fits": made.free(step) >= 0,
    }


def sizes_text(made: RunPlan) -> str:
    """Return the sequence length and the micro-batch of a plan, and how they were chosen."""
    cfg = made.cfg
    micro, _ = cfg.micro_batches(made.cluster.gpus)
    length = f"seq_len={cfg.seq_len} ({origin(made, 'seq_len')})"
    batch = f"micro_batch_size={micro} ({origin(made, 'micro_batch_size')})"
    context = cfg.parallel.context
    place = "rank" if context == 1 else f"group of {context} ranks"
    return f"{length}, {batch}: {micro} x {cfg.seq_len:,} tokens per {place} and forward pass"


def origin(made: RunPlan, key: str) -> str:
    """Return how the value of `seq_len` or `micro_batch_size` was chosen."""
    if key in (assumption.key for assumption in made.assumptions):
        return "assumed"
    if getattr(made.cfg, key) is None:
        return "from global_batch_size"
    if key in map(key_of_word, made.overrides):
        return "set"
    return f"experiment={made.cfg.resolved.choices['experiment']}"


def head_text(made: RunPlan) -> str:
    cfg, cluster = made.cfg, made.cluster
    layout = " x ".join(f"{name} {size}" for name, size in made.mesh.items())
    micro, count = cfg.micro_batches(cluster.gpus)
    context = cfg.parallel.context
    layout += f", context {context}" * (context > 1)
    of = "rank" if context == 1 else f"{context} ranks"
    return (
        f"{sizes_text(made)}\n"
        f"{cfg.resolved.choices['attention']} / {cfg.resolved.choices['model']}: "
        f"{made.n_params / 1e9:,.2f}B parameters, "
        f"{cluster.gpus:,} x {cluster.device.name}, {layout}\n"
        f"{cfg.global_batch_size:,} x {cfg.seq_len:,} tokens per step, "
        f"{count} x {micro} sequences per {of}; numbers of rank {cluster.rank}"
    )


def speed_text(made: RunPlan) -> str:
    rows = []
    for kind, ranks, near, calls, sent, seconds in made.flows:
        over = "inside a node" if near == ranks else f"network, {near} per node"
        ms = f"{1e3 * seconds:,.1f}"
        rows.append([kind.value, f"{ranks:,}", over, f"{calls:,}", gib(sent), ms])
    table = Table.of(["per rank and step", "ranks", "over", "calls", "GiB sent", "ms"], rows)
    time = "time" if made.fits else "time, if the memory were enough"
    return "\n  ".join([f"\ncommunication\n{table}\n\n{time}", *time_lines(made)])


def print_assumptions(made: RunPlan) -> None:
    echo("\nassumed, not measured; each key can be set")
    for key, value, why, given in made.assumptions:
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        echo(f"  {f'{key}={text}':<28} {why}{' (set)' if given else ''}")
    echo("\nidealised")
    for what, how in idealised(made.cfg).items():
        echo(f"  {what:<28} {how}")


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def memory_text(made: RunPlan) -> str:
    chosen = made.cfg.activation_checkpointing
    names = [f"{p.name}{' (chosen)' if p is chosen else ''}" for p in ActivationCheckpointing]
    steps = [made.steps[policy] for policy in ActivationCheckpointing]
    blank = ("",) * (1 + len(steps))
    rows: list[Sequence[str]] = [
        *([name, *[gib(size)] * len(steps)] for name, size in made.state._asdict().items()),
        ["activations of a forward pass", *(gib(step.activations) for step in steps)],
        blank,
        ["peak", *(gib(step.peak.total) for step in steps)],
        ["  in the", *(step.when for step in steps)],
        *([f"  {kind.value}", *(gib(step.peak.by_kind[kind]) for step in steps)] for kind in Kind),
        blank,
        ["peak and reserve", *(gib(step.peak.total + made.reserve) for step in steps)],
        [f"of {made.cluster.device.name}", *[gib(made.memory)] * len(steps)],
    ]
    table = Table.of(["GiB per rank, activation_checkpointing=", *names], rows)
    return f"\nmemory\n{table}"


def fit_text(made: RunPlan, change: RunPlan | None) -> str:
    free, device = made.free(made.step), made.cluster.device.name
    if free >= 0:
        return f"\nfits {device}, {gib(free)} GiB free"
    text = f"\ndoes not fit {device}: {gib(-free)} GiB too much"
    if change is None:
        return f"{text}; no tried change of the config fits either"
    used = change.step.peak.total + change.reserve
    return (
        f"{text}\nnearest change: {' '.join(change.words)}: {gib(used)} GiB, "
        f"{change.step_seconds:.3g} s per step, {change.tokens_per_s:,.0f} tokens per second"
    )


LONGEST_HINT = "set longest=true for the longest sequence that fits"


def longest_text(longest: int | None) -> str:
    length = f"{longest:,} tokens" if longest else f"shorter than {LENGTH_UNIT:,} tokens"
    return f"longest sequence that fits, at 1 sequence per forward pass: {length}"


def time_lines(made: RunPlan) -> list[str]:
    cluster = made.cluster
    lines = [
        f"{made.flops_per_step:.3g} FLOPs per step, {made.flops_per_token:.4g} per token",
        f"{made.compute_seconds:.3g} s to compute a step with mfu={cluster.mfu:g}, "
        f"{made.communication_seconds:.3g} s to send",
    ]
    if made.mfu < cluster.mfu:
        lines.append(f"sending limits: {made.step_seconds:.3g} s per step, MFU {made.mfu:.2f}")
    lines.append(f"{made.tokens_per_s:,.0f} tokens per second")
    if made.seconds and cluster.tokens:
        days, hours = made.seconds / DAY, made.seconds / 3600 * cluster.gpus
        lines.append(f"{days:,.1f} days and {hours:,.0f} GPU-hours for {cluster.tokens:.3g} tokens")
    else:
        lines.append("set tokens= for days and GPU-hours")
    return lines
