"""Search for the longest sequence that fits in memory, and for config changes that save memory."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product

from diffllm.config.overrides import key_of_word
from diffllm.core.errors import ConfigError
from diffllm.distributed.mesh import Reduce
from diffllm.distributed.recompute import ActivationCheckpointing
from diffllm.plan.estimate import RECOMPUTE, RunPlan, Say, planned_config

LENGTH_UNIT, MOST_TOKENS = 1024, 2**20
"""Lengths of `longest_sequence` are multiples of the first number, and at most the second."""


def longest_sequence(plan: RunPlan, say: Say) -> int | None:
    """Return the longest sequence that fits into memory, with one sequence per forward pass.

    Return None if no length fits. `say` receives a message before each simulation.
    """
    from diffllm.plan.simulate import simulate  # takes a second

    cfg, cluster = plan.cfg, plan.cluster
    # Keep the number of micro-batches per step, because gradients are accumulated between them.
    _, micro_batches = cfg.micro_batches(cluster.gpus)
    groups = cluster.gpus // cfg.parallel.context
    batch = groups * micro_batches

    def peak(length: int) -> int:
        say(f"simulating a step with seq_len={length}")
        model = replace(cfg.model, seq_len=length)
        longer = replace(
            cfg, seq_len=length, model=model, micro_batch_size=1, global_batch_size=batch
        )
        step = simulate(longer, cluster.gpus, cluster.rank)
        return step.peak.total

    # Each rank of a context group gets an equal part of a sequence.
    unit = math.lcm(LENGTH_UNIT, cfg.parallel.context)
    return longest(peak, plan.memory - plan.reserve, unit)


def longest(peak: Callable[[int], int], room: float, unit: int) -> int | None:
    """Return the longest multiple of `unit`, up to MOST_TOKENS, whose peak is at most `room`.

    The peak must not decrease with the length. The result can be up to 2% too short. Return None if
    `unit` does not fit. The search uses the Illinois method, since a peak is close to linear.
    """
    low = unit
    high = MOST_TOKENS // unit * unit
    above = peak(high) - room
    if above <= 0:
        return high
    below = peak(low) - room
    if below > 0:
        return None
    last_fits = None
    while high - low > max(unit, low // 50):
        root = low + (high - low) * below / (below - above)
        length = int(root) // unit * unit
        length = min(max(length, low + unit), high - unit)
        over = peak(length) - room
        fits = over <= 0
        # If the same end moves twice, halve the value of the other end, so that both ends move.
        is_repeated = fits == last_fits
        if fits:
            low, below = length, over
            above = above / 2 if is_repeated else above
        else:
            high, above = length, over
            below = below / 2 if is_repeated else below
        last_fits = fits
    return low


MORE_GPUS = (2, 4, 8, 16)
"""Factors on the number of GPUs to try."""

Words = tuple[str, ...]
"""Overrides of a change; they replace overrides of the same keys on the command line."""


def nearest_change(plan: RunPlan, say: Say) -> RunPlan | None:
    """Return a changed plan that fits into GPU memory, or None if no tried change fits.

    The function `options` lists the kinds of change. First try each kind alone, then two kinds
    together, and so on. Within a kind, prefer the smallest change that fits. `say` receives a
    message before each simulated step.
    """
    # Each simulation takes seconds, and the search needs some outcomes twice.
    outcome_of = cache(partial(outcome, plan, say))
    kinds = options(plan)
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            changes = [merged(values) for values in product(*chosen)]
            # Try the largest valid change first: if it does not fit, smaller changes do not either.
            largest = None
            for change in reversed(changes):
                largest = outcome_of(change)
                if largest:
                    break
            if largest is None or not largest.fits:
                continue
            for change in changes:
                changed = outcome_of(change)
                if changed and changed.fits:
                    return changed
    return None


def options(plan: RunPlan) -> list[list[Words]]:
    """List changes of settings that may reduce the memory of a run, in one list per kind of change.

    Preferred kinds come first. Each list starts with the smallest change. A change is a tuple of
    overrides.
    """
    cfg = plan.cfg
    gpus = plan.cluster.gpus
    micro, count = cfg.micro_batches(gpus)
    # Without a given batch size, a smaller micro-batch would reduce the batch.
    batch_words: Words = ()
    if not any(word.startswith("global_batch_size=") for word in plan.overrides):
        batch_words = (f"global_batch_size={cfg.global_batch_size}",)
    smaller_batches: list[Words] = []
    smaller = micro // 2
    while smaller >= 1:
        smaller_batches.append((f"micro_batch_size={smaller}", *batch_words))
        smaller //= 2
    kinds = [smaller_batches]
    # A single micro-batch is also the last one, whose gradients are summed with any setting.
    if count > 1 and cfg.parallel.reduce is not Reduce.every:
        kinds.append([("parallel.reduce=every",)])
    policies = list(ActivationCheckpointing)
    # The order of the policies is from no recomputation to most recomputation.
    stronger = policies[policies.index(cfg.activation_checkpointing) + 1 :]
    kinds.append([(f"{RECOMPUTE}={policy.name}",) for policy in stronger])
    replicas, _, _ = cfg.parallel.sizes(gpus)
    if replicas > 1:
        kinds.append([("parallel.replicate=1", "parallel.shard=-1")])
    kinds.append([more_gpus(plan, times) for times in MORE_GPUS])
    return [kind for kind in kinds if kind]


def more_gpus(plan: RunPlan, times: int) -> Words:
    gpus = f"gpus={times * plan.cluster.gpus}"
    shard = plan.cfg.parallel.shard
    # With shard=-1 the shards grow with the GPUs. Otherwise the shards must grow here, because
    # more replicas save no memory.
    if shard == -1:
        return (gpus,)
    new_shard = times * shard if plan.cfg.parallel.replicate == -1 else -1
    return (gpus, f"parallel.shard={new_shard}")


def merged(values: Iterable[Words]) -> Words:
    """Join tuples of overrides; keep only the first override of each key."""
    by_key: dict[str, str] = {}
    for words in values:
        for word in words:
            by_key.setdefault(key_of_word(word), word)
    return tuple(by_key.values())


def outcome(plan: RunPlan, say: Say, words: Words) -> RunPlan | None:
    """Return a copy of `plan` with the additional overrides `words` and a simulated step.

    If the changed config is invalid for the number of GPUs, return None. If parameters, gradients
    and optimizer state alone exceed the GPU memory, only changes of `gpus` or of a key of
    `parallel` can help; for other `words`, return `plan` itself. `say` receives a message before
    the simulation.
    """
    can_spread = any(word.startswith(("parallel.", "gpus=")) for word in words)
    usable_memory = plan.memory - plan.reserve
    if not can_spread and plan.state.total > usable_memory:
        return plan
    cluster = plan.cluster
    added = []
    for word in words:
        if word.startswith("gpus="):
            cluster = replace(cluster, gpus=int(word.removeprefix("gpus=")))
        else:
            added.append(word)
    added_keys = {key_of_word(word) for word in added}
    overrides = [word for word in plan.overrides if key_of_word(word) not in added_keys]
    overrides += added
    try:
        cfg, assumed = planned_config(cluster, overrides)
        changed = RunPlan(cfg, overrides, cluster, assumed, words)
        if len(words) == 1 and key_of_word(words[0]) == RECOMPUTE:
            # A complete plan already contains the step of each policy.
            return replace(changed, steps=plan.steps)
        return changed.simulated(cfg.activation_checkpointing, say)
    except ConfigError:
        return None
