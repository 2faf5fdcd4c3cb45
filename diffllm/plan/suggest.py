"""The search for the nearest change with which a run fits."""

from collections.abc import Iterable
from functools import cache, partial
from itertools import chain, combinations, product

from diffllm.core.errors import ConfigError
from diffllm.distributed.mesh import Reduce
from diffllm.plan.estimate import Plan, changed, key_of

MORE_GPUS = (2, 4, 8, 16)
"""Multiples of the number of GPUs that are tried."""

Words = tuple[str, ...]
"""The words that a change puts on the command line, in place of words with the same keys."""


def nearest_change(plan: Plan) -> Plan | None:
    """Return `plan` with the fewest changes with which it fits; None if none that is tried does.

    Of as many changes, smaller micro-batches come before gradients that are reduced after each of
    them, before checkpointing, before more shards out of replicas, before more GPUs; of one, what
    changes least. All are simulated, none is guessed.
    """
    outcome_of = cache(partial(outcome, plan))
    kinds = options(plan)
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            tried = [merged(values) for values in product(*chosen)]
            # Valid values with the smallest micro-batch are the farthest of all that are valid.
            farthest = next(filter(None, map(outcome_of, reversed(tried))), None)
            if farthest and farthest.fits:
                return next(made for made in map(outcome_of, tried) if made and made.fits)
    return None


def options(plan: Plan) -> list[list[Words]]:
    """List the kinds of changes there are, each with its values from near to far."""
    cfg, gpus = plan.cfg, plan.cluster.gpus
    micro, count = cfg.micro_batches(gpus)
    waits = count > 1 and cfg.parallel.reduce is not Reduce.every
    batch = any(word.startswith("global_batch_size=") for word in plan.overrides)
    same = () if batch else (f"global_batch_size={cfg.global_batch_size}",)
    kinds: list[list[Words]] = [
        [(f"micro_batch_size={micro // 2**k}", *same) for k in range(1, micro.bit_length())],
        [("parallel.reduce=every",)] if waits else [],
        [] if cfg.activation_checkpointing else [("activation_checkpointing=true",)],
        [("parallel.replicate=1", "parallel.shard=-1")] if cfg.parallel.sizes(gpus)[0] > 1 else [],
        [more_gpus(plan, times) for times in MORE_GPUS],
    ]
    return [kind for kind in kinds if kind]


def more_gpus(plan: Plan, times: int) -> Words:
    """Return words for more GPUs, all of which go to shards: more replicas would save nothing."""
    parallel, words = plan.cfg.parallel, (f"gpus={times * plan.cluster.gpus}",)
    if parallel.shard == -1:
        return words
    shard = times * parallel.shard if parallel.replicate == -1 else -1
    return *words, f"parallel.shard={shard}"


def merged(values: Iterable[Words]) -> Words:
    """Join the words of several changes; of words with one key, the first counts."""
    by_key: dict[str, str] = {}
    for word in chain.from_iterable(values):
        by_key.setdefault(key_of(word), word)
    return tuple(by_key.values())


def outcome(plan: Plan, words: Words) -> Plan | None:
    """Plan with other words; None if no such number of ranks can have this batch or mesh.

    Where the state of a rank is too big and stays as it is, nothing is simulated: `plan` fits as
    little.
    """
    step = plan.step
    state = step.parameters + step.gradients + step.optimizer
    spreads = any(word.startswith(("parallel.", "gpus=")) for word in words)
    if not spreads and state > plan.memory - plan.reserve:
        return plan
    known = plan.steps[True] if words == ("activation_checkpointing=true",) else None
    try:
        return changed(plan, words, known)
    except ConfigError:
        return None
