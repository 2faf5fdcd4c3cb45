"""The nearest change with which a run fits."""

from itertools import combinations, product
from typing import NamedTuple

from diffllm.errors import ConfigError
from diffllm.plan.cluster import Cluster
from diffllm.plan.estimate import Plan, planned_config
from diffllm.plan.simulate import Step, simulate

MORE_GPUS = (2, 4, 8, 16)
"""Times as many that are tried."""

Words = tuple[str, ...]
"""What one change puts on the command line, in place of words with the same keys."""


class Change(NamedTuple):
    """A plan that fits."""

    words: Words
    step: Step


def nearest_change(plan: Plan) -> Change | None:
    """The fewest changes with which `plan` fits; None if none that is tried does.

    Of as many changes, smaller micro-batches come before checkpointing, before more shards out of
    replicas, before more GPUs; of one, what changes least. All are simulated, none is guessed.
    """
    search = Search(plan)
    kinds = options(plan)
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            if search.change(tuple(kind[-1] for kind in chosen)) is None:
                continue  # not even the farthest
            for values in product(*chosen):
                if change := search.change(values):
                    return change
    return None


def options(plan: Plan) -> list[list[Words]]:
    """The kinds of changes there are, each with its values from near to far."""
    cfg, gpus = plan.cfg, plan.cluster.gpus
    micro = cfg.micro_batches(gpus)[0]
    batch = any(word.startswith("global_batch_size=") for word in plan.overrides)
    same = () if batch else (f"global_batch_size={cfg.global_batch_size}",)
    kinds: list[list[Words]] = [
        [(f"micro_batch_size={micro // 2**k}", *same) for k in range(1, micro.bit_length())],
        [] if cfg.activation_checkpointing else [("activation_checkpointing=true",)],
        [("parallel.replicate=1", "parallel.shard=-1")] if cfg.parallel.sizes(gpus)[0] > 1 else [],
        [(f"gpus={times * gpus}",) for times in MORE_GPUS],
    ]
    return [kind for kind in kinds if kind]


class Search:
    """Changes of one plan, each simulated once."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.seen: dict[Words, Change | None] = {}

    def change(self, values: tuple[Words, ...]) -> Change | None:
        """With the words of all `values`; None if it does not fit or cannot be."""
        words = tuple(word for value in values for word in value)
        if words not in self.seen:
            self.seen[words] = self.simulated(words)
        return self.seen[words]

    def simulated(self, words: Words) -> Change | None:
        plan, step = self.plan, self.plan.step
        state = step.parameters + step.gradients + step.optimizer
        spreads = any(word.startswith(("parallel.", "gpus=")) for word in words)
        if not spreads and state > plan.memory - plan.reserve:
            return None
        if words == ("activation_checkpointing=true",):
            return fitting(plan, Change(words, plan.steps[True]))
        gpus = next((int(word[5:]) for word in words if word.startswith("gpus=")), None)
        gpus = gpus or plan.cluster.gpus
        overrides = [word for word in words if not word.startswith("gpus=")]
        keys = {word.partition("=")[0] for word in overrides}
        kept = [word for word in plan.overrides if word.partition("=")[0] not in keys]
        cluster = Cluster(**{**vars(plan.cluster), "gpus": gpus})
        try:
            cfg, _ = planned_config(cluster, [*kept, *overrides])
            return fitting(plan, Change(words, simulate(cfg, gpus, cluster.rank)))
        except ConfigError:  # a batch or a mesh that so many ranks cannot have
            return None


def fitting(plan: Plan, change: Change) -> Change | None:
    """`change`, if it fits the device of `plan`."""
    return change if plan.free(change.step) >= 0 else None
