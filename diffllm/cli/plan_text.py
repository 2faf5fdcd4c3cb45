"""Output of `diffllm plan`: memory, communication, time, and assumptions."""

from typing import Any

from diffllm.config.overrides import key_of_word
from diffllm.core.console import stages
from diffllm.core.printing import Table, echo, echo_json
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
    # Simulations take seconds, so each text is printed as soon as its numbers are known.
    run_plan = plan(cluster, named, overrides)
    if not as_json:
        echo(head_text(run_plan), flush=True)
    chosen = run_plan.cfg.activation_checkpointing
    # Times need only the chosen policy, so it is simulated first.
    with stages() as say:
        run_plan = run_plan.simulated(chosen, say)
    if not as_json:
        echo(speed_text(run_plan), flush=True)
    with stages() as say:
        for policy in ActivationCheckpointing:
            if policy is not chosen:
                run_plan = run_plan.simulated(policy, say)
    if not as_json:
        echo(memory_text(run_plan), flush=True)
    change = None
    longest = None
    with stages() as say:
        if not run_plan.fits:
            change = nearest_change(run_plan, say)
        if with_longest:
            longest = longest_sequence(run_plan, say)
    if as_json:
        numbers = plan_numbers(run_plan, change)
        if with_longest:
            numbers["longest_sequence"] = longest
        echo_json(numbers)
        return
    echo(fit_text(run_plan, change))
    echo(longest_text(longest) if with_longest else LONGEST_HINT)
    print_assumptions(run_plan)


def plan_numbers(run_plan: RunPlan, change: RunPlan | None) -> dict[str, Any]:
    """Return memory (bytes), times (seconds), FLOPs and settings of a plan, for JSON.

    If `run_plan` does not fit into memory, `change` is a plan with other settings that fits, or
    None if no plan fits. If `run_plan` fits, `change` is None.
    """
    cfg, cluster = run_plan.cfg, run_plan.cluster
    micro, count = cfg.micro_batches(cluster.gpus)
    policies = {}
    for policy in ActivationCheckpointing:
        policies[policy.name] = policy_numbers(run_plan, run_plan.steps[policy])
    flows = []
    for flow in run_plan.flows:
        flows.append({**flow._asdict(), "kind": flow.kind.value})
    days = None
    gpu_hours = None
    # The duration of a run is unknown without tokens=.
    if run_plan.seconds is not None:
        days = run_plan.seconds / DAY
        gpu_hours = run_plan.seconds / 3600 * cluster.gpus
    return {
        "model": cfg.resolved.choices["model"],
        "attention": cfg.resolved.choices["attention"],
        "parameters": run_plan.n_params,
        "gpus": cluster.gpus,
        "gpu": cluster.device.name,
        "rank": cluster.rank,
        "mesh": run_plan.mesh,
        **attributes(cfg, "seq_len", "global_batch_size"),
        "micro_batch_size": micro,
        "micro_batches": count,
        "memory": {
            **run_plan.state._asdict(),
            "activation_checkpointing": cfg.activation_checkpointing.name,
            "policies": policies,
            "reserve": run_plan.reserve,
            "device": run_plan.memory,
            "fits": run_plan.fits,
        },
        "communication": flows,
        "time": {
            **attributes(run_plan, "flops_per_token", "flops_per_step", "tokens_per_step"),
            **attributes(run_plan, "tokens_per_s", "compute_seconds"),
            **attributes(run_plan, "communication_seconds", "step_seconds", "mfu"),
            "tokens": cluster.tokens,
            "days": days,
            "gpu_hours": gpu_hours,
        },
        "nearest_change": None if change is None else change_numbers(change),
        "assumptions": [assumption._asdict() for assumption in run_plan.assumptions],
        "idealised": idealised(cfg),
    }


def change_numbers(change: RunPlan) -> dict[str, Any]:
    return {
        "overrides": list(change.words),
        **policy_numbers(change, change.step),
        **attributes(change, "communication_seconds", "step_seconds", "tokens_per_s"),
    }


def attributes(instance: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(instance, name) for name in names}


def policy_numbers(run_plan: RunPlan, step: Step) -> dict[str, Any]:
    return {
        "activations": step.activations,
        "peak": step.peak.total,
        "peak_in": step.when,
        "at_peak": {kind.value: size for kind, size in step.peak.by_kind.items()},
        "free": run_plan.free(step),
        "fits": run_plan.free(step) >= 0,
    }


def sizes_text(run_plan: RunPlan) -> str:
    """Return the sequence length and the micro-batch of a plan, and how they were chosen."""
    cfg = run_plan.cfg
    micro, _ = cfg.micro_batches(run_plan.cluster.gpus)
    length = f"seq_len={cfg.seq_len} ({origin(run_plan, 'seq_len')})"
    batch = f"micro_batch_size={micro} ({origin(run_plan, 'micro_batch_size')})"
    # With parallel.context, the ranks of a group share each sequence.
    context = cfg.parallel.context
    place = "rank" if context == 1 else f"group of {context} ranks"
    return f"{length}, {batch}: {micro} x {cfg.seq_len:,} tokens per {place} and forward pass"


def origin(run_plan: RunPlan, key: str) -> str:
    """Return how the value of `seq_len` or `micro_batch_size` was chosen."""
    assumed_keys = [assumption.key for assumption in run_plan.assumptions]
    if key in assumed_keys:
        return "assumed"
    if getattr(run_plan.cfg, key) is None:
        return "from global_batch_size"
    if key in map(key_of_word, run_plan.overrides):
        return "set"
    return f"experiment={run_plan.cfg.resolved.choices['experiment']}"


def head_text(run_plan: RunPlan) -> str:
    cfg, cluster = run_plan.cfg, run_plan.cluster
    layout = " x ".join(f"{name} {size}" for name, size in run_plan.mesh.items())
    micro, count = cfg.micro_batches(cluster.gpus)
    context = cfg.parallel.context
    place = "rank"
    if context > 1:
        layout += f", context {context}"
        place = f"{context} ranks"
    return (
        f"{sizes_text(run_plan)}\n"
        f"{cfg.resolved.choices['attention']} / {cfg.resolved.choices['model']}: "
        f"{run_plan.n_params / 1e9:,.2f}B parameters, "
        f"{cluster.gpus:,} x {cluster.device.name}, {layout}\n"
        f"{cfg.global_batch_size:,} x {cfg.seq_len:,} tokens per step, "
        f"{count} x {micro} sequences per {place}; numbers of rank {cluster.rank}"
    )


def speed_text(run_plan: RunPlan) -> str:
    heads = ["per rank and step", "ranks", "over", "calls", "GiB sent", "ms"]
    rows = []
    for flow in run_plan.flows:
        over = f"network, {flow.in_a_node} per node"
        if flow.in_a_node == flow.ranks:
            over = "inside a node"
        ranks = f"{flow.ranks:,}"
        calls = f"{flow.calls:,}"
        milliseconds = f"{1e3 * flow.seconds:,.1f}"
        rows.append([flow.kind.value, ranks, over, calls, gib(flow.sent), milliseconds])
    table = Table.of(heads, rows)
    time = "time" if run_plan.fits else "time, if the memory were enough"
    lines = [f"\ncommunication\n{table}\n\n{time}", *time_lines(run_plan)]
    return "\n  ".join(lines)


def print_assumptions(run_plan: RunPlan) -> None:
    echo("\nassumed, not measured; each key can be set")
    for assumption in run_plan.assumptions:
        value = assumption.value
        text = f"{value:.5g}" if isinstance(value, float) else str(value)
        word = f"{assumption.key}={text}"
        source = " (set)" if assumption.given else ""
        echo(f"  {word:<28} {assumption.why}{source}")
    echo("\nidealised")
    for topic, description in idealised(run_plan.cfg).items():
        echo(f"  {topic:<28} {description}")


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def memory_text(run_plan: RunPlan) -> str:
    heads = ["GiB per rank, activation_checkpointing="]
    steps = []
    for policy in ActivationCheckpointing:
        suffix = " (chosen)" if policy is run_plan.cfg.activation_checkpointing else ""
        heads.append(f"{policy.name}{suffix}")
        steps.append(run_plan.steps[policy])
    blank = [""] * len(heads)

    def row(label: str, sizes: list[int]) -> list[str]:
        return [label, *map(gib, sizes)]

    rows = []
    for name, size in run_plan.state._asdict().items():
        # The state does not depend on the policy.
        rows.append(row(name, [size] * len(steps)))
    peaks = [step.peak.total for step in steps]
    rows.append(row("activations of a forward pass", [step.activations for step in steps]))
    rows.append(blank)
    rows.append(row("peak", peaks))
    rows.append(["  in the", *(step.when for step in steps)])
    for kind in Kind:
        rows.append(row(f"  {kind.value}", [step.peak.by_kind[kind] for step in steps]))
    rows.append(blank)
    rows.append(row("peak and reserve", [peak + run_plan.reserve for peak in peaks]))
    rows.append(row(f"of {run_plan.cluster.device.name}", [run_plan.memory] * len(steps)))
    table = Table.of(heads, rows)
    return f"\nmemory\n{table}"


def fit_text(run_plan: RunPlan, change: RunPlan | None) -> str:
    free = run_plan.free(run_plan.step)
    device = run_plan.cluster.device.name
    if free >= 0:
        return f"\nfits {device}, {gib(free)} GiB free"
    text = f"\ndoes not fit {device}: {gib(-free)} GiB too much"
    if change is None:
        return f"{text}; no tried change of the config fits either"
    used = change.step.peak.total + change.reserve
    words = " ".join(change.words)
    return (
        f"{text}\nnearest change: {words}: {gib(used)} GiB, "
        f"{change.step_seconds:.3g} s per step, {change.tokens_per_s:,.0f} tokens per second"
    )


LONGEST_HINT = "set longest=true for the longest sequence that fits"


def longest_text(longest: int | None) -> str:
    length = f"{longest:,} tokens" if longest else f"shorter than {LENGTH_UNIT:,} tokens"
    return f"longest sequence that fits, at 1 sequence per forward pass: {length}"


def time_lines(run_plan: RunPlan) -> list[str]:
    cluster = run_plan.cluster
    lines = [
        f"{run_plan.flops_per_step:.3g} FLOPs per step, {run_plan.flops_per_token:.4g} per token",
        f"{run_plan.compute_seconds:.3g} s to compute a step with mfu={cluster.mfu:g}, "
        f"{run_plan.communication_seconds:.3g} s to send",
    ]
    if run_plan.mfu < cluster.mfu:
        lines.append(
            f"sending limits: {run_plan.step_seconds:.3g} s per step, MFU {run_plan.mfu:.2f}"
        )
    lines.append(f"{run_plan.tokens_per_s:,.0f} tokens per second")
    if run_plan.seconds and cluster.tokens:
        days = run_plan.seconds / DAY
        hours = run_plan.seconds / 3600 * cluster.gpus
        lines.append(f"{days:,.1f} days and {hours:,.0f} GPU-hours for {cluster.tokens:.3g} tokens")
    else:
        lines.append("set tokens= for days and GPU-hours")
    return lines
