"""Search for the longest sequence that fits in memory, and for config changes that save memory."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import chain, combinations, product

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
    batch = cluster.gpus // cfg.parallel.context * cfg.micro_batches(cluster.gpus)[1]

    def peak(length: int) -> int:
        say(f"simulating a step with seq_len={length}")
        model = replace(cfg.model, seq_len=length)
        longer = replace(
            cfg, seq_len=length, model=model, micro_batch_size=1, global_batch_size=batch
        )
        return simulate(longer, cluster.gpus, cluster.rank).peak.total

    return longest(peak, plan.memory - plan.reserve, math.lcm(LENGTH_UNIT, cfg.parallel.context))


def longest(peak: Callable[[int], int], room: float, unit: int) -> int | None:
    """Return the longest multiple of `unit`, up to MOST_TOKENS, whose peak is at most `room`.

    The peak must not decrease with the length. The result can be up to 2% too short. Return None if
    `unit` does not fit. The search uses the Illinois method, since a peak is close to linear.
    """
    low, high = unit, MOST_TOKENS // unit * unit
    above = peak(high) - room
    if above <= 0:
        return high
    below = peak(low) - room
    if below > 0:
        return None
    last_fits = None
    while high - low > max(unit, low // 50):
        root = low + (high - low) * below / (below - above)
        length = min(max(int(root) // unit * unit, low + unit), high - unit)
        over = peak(length) - room
        fits = over <= 0
        # If the same end moves twice, halve the value of the other end, so that both ends move.
        if fits:
            low, below, above = length, over, above / 2 if last_fits is True else above
        else:
            high, above, below = length, over, below / 2 if last_fits is False else below
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
    outcome_of = cache(partial(outcome, plan, say))
    kinds = options(plan)
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            tried = [merged(values) for values in product(*chosen)]
            # Try the largest valid change first: if it does not fit, smaller changes do not either.
            farthest = next(filter(None, map(outcome_of, reversed(tried))), None)
            if farthest and farthest.fits:
                return next(made for made in map(outcome_of, tried) if made and made.fits)
    return None


def options(plan: RunPlan) -> list[list[Words]]:
    """List changes of settings that may reduce the memory of a run, in one list per kind of change.

    Preferred kinds come first. Each list starts with the smallest change. A change is a tuple of
    overrides.
    """
    cfg, gpus = plan.cfg, plan.cluster.gpus
    micro, count = cfg.micro_batches(gpus)
    waits = count > 1 and cfg.parallel.reduce is not Reduce.every
    batch = any(word.startswith("global_batch_size=") for word in plan.overrides)
    # Without a given batch size, a smaller micro-batch would reduce the batch.
    same = () if batch else (f"global_batch_size={cfg.global_batch_size}",)
    shard, replicas = cfg.parallel.shard, cfg.parallel.replicate

    def shards(times: int) -> Words:  # more replicas save no memory
        if shard == -1:
            return ()
        return (f"parallel.shard={times * shard if replicas == -1 else -1}",)

    kinds: list[list[Words]] = [
        [(f"micro_batch_size={micro // 2**k}", *same) for k in range(1, micro.bit_length())],
        [("parallel.reduce=every",)] if waits else [],
        [(f"{RECOMPUTE}={policy.name}",) for policy in stronger(cfg.activation_checkpointing)],
        [("parallel.replicate=1", "parallel.shard=-1")] if cfg.parallel.sizes(gpus)[0] > 1 else [],
        [(f"gpus={times * gpus}", *shards(times)) for times in MORE_GPUS],
    ]
    return [kind for kind in kinds if kind]


def stronger(policy: ActivationCheckpointing) -> list[ActivationCheckpointing]:
    """Return the policies that recompute more than `policy`, the weakest first."""
    every = list(ActivationCheckpointing)
    return every[every.index(policy) + 1 :]


def merged(values: Iterable[Words]) -> Words:
    """Join tuples of overrides; keep only the first override of each key."""
    by_key: dict[str, str] = {}
    for word in chain.from_iterable(values):
        by_key.setdefault(key_of_word(word), word)
    return tuple(by_key.values())


def outcome(plan: RunPlan, say: Say, words: Words) -> RunPlan | None:
    """Return a copy of `plan` with the additional overrides `words` and a simulated step.

    If the changed config is invalid for the number of GPUs, return None. If parameters, gradients
    and optimizer state alone exceed the GPU memory, only changes of `gpus` or of a key of
    `parallel` can help; for other `words`, return `plan` itself. `say` receives a message before
    the simulation.
    """
    spreads = any(word.startswith(("parallel.", "gpus=")) for word in words)
    if not spreads and plan.state.total > plan.memory - plan.reserve:
        return plan
    gpus = [int(word.removeprefix("gpus=")) for word in words if word.startswith("gpus=")]
    cluster = replace(plan.cluster, gpus=gpus[0]) if gpus else plan.cluster
    added = [word for word in words if not word.startswith("gpus=")]
    keys = set(map(key_of_word, added))
    overrides = [*(word for word in plan.overrides if key_of_word(word) not in keys), *added]
    try:
        cfg, assumed = planned_config(cluster, overrides)
        changed = RunPlan(cfg, overrides, cluster, assumed, words)
        if len(words) == 1 and key_of_word(words[0]) == RECOMPUTE:
            return replace(changed, steps=plan.steps)
        return changed.simulated(cfg.activation_checkpointing, say)
    except ConfigError:
        return None
