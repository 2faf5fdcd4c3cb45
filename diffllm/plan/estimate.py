"""The plan of a run on a cluster: gibibytes, seconds and days, and the nearest change that fits."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from diffllm.config import Precision, TrainConfig, load_config
from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError, did_you_mean
from diffllm.distributed.mesh import Reduce
from diffllm.metrics.profiling import DEVICES, Device
from diffllm.model import Transformer, without_storage
from diffllm.plan.memory import Call, Collective
from diffllm.plan.simulate import Step, simulate

POSITIVE = {"above": 0, "below": float("inf")}


@dataclass
class Cluster:
    """The cluster's description, by the keys of `diffllm plan` that no training run has."""

    gpus: int = bounded(8, help="ranks, one a GPU", least=1, most=2**17)
    gpu: str = bounded("h200", help="its name, for peak and memory")
    tokens: float | None = bounded(None, help="to train on, for days and GPU-hours", **POSITIVE)
    mfu: float = bounded(0.4, help="model FLOPs utilisation that a step reaches", above=0, most=1)
    nvlink_gbs: float = bounded(
        450.0, help="GB/s that a GPU sends inside its node; NVLink of H100, H200", **POSITIVE
    )
    network_gbs: float = bounded(50.0, help="GB/s of each GPU's network card", **POSITIVE)
    gpus_per_node: int = bounded(8, help="GPUs that share a node", least=1, most=2**17)
    reserve_gib: float = bounded(
        6.0, help="GiB for CUDA's context, NCCL, fragments", least=0, most=1e6
    )
    peak_flops: float | None = bounded(
        None, help="dense bf16 FLOP/s of the GPU, if not the table's", **POSITIVE
    )
    memory_gib: float | None = bounded(
        None, help="GiB of the GPU, if not the table's", above=0, most=1e6
    )
    rank: int = bounded(0, help="the rank whose memory is planned; rank 0 holds most", least=0)

    def __post_init__(self) -> None:
        check_bounds("", self)
        if self.rank >= self.gpus:
            raise ConfigError(f"rank={self.rank} must be less than gpus={self.gpus}")

    @property
    def device(self) -> Device:
        """The GPU's numbers, the user's where stated; raises ConfigError if one is unknown."""
        by_name = {re.sub(r"\W", "", device.name.lower()): device for device in DEVICES}
        known = by_name.get(re.sub(r"[\W_]", "", self.gpu.lower()))
        peak = self.peak_flops or (known and known.peak_flops)
        memory = self.memory_gib or (known and known.memory_gib)
        if not peak or not memory:
            names = ", ".join(device.name for device in DEVICES)
            raise ConfigError(
                f"gpu={self.gpu} is not known; choose from {names}, "
                "or give peak_flops= and memory_gib="
            )
        return Device(known.name if known else self.gpu, peak, memory)

    def fewest_in_a_node(self, ranks: tuple[int, ...]) -> int:
        """Count the given ranks in the node that has fewest of them; ranks fill nodes in order."""
        return min(Counter(rank // self.gpus_per_node for rank in ranks).values())

    def seconds(self, call: Call) -> float:
        """Return the seconds of a collective at the stated bandwidths.

        A ring enters and leaves a node once, and a group has as many rings, each with its own
        network card, as the node with the fewest of its ranks has ranks of it.
        """
        n, near = len(call.ranks), self.fewest_in_a_node(call.ranks)
        nvlink, network = 1e9 * self.nvlink_gbs, 1e9 * self.network_gbs
        sent = call.kind.on_the_wire(call.size, n)
        if near == n:
            return sent / nvlink
        if call.kind is Collective.all_to_all:
            outside = call.size * (n - near) / n
            return max((sent - outside) / nvlink, outside / network)
        return sent / min(nvlink, network * near)


OWN_KEYS = {f.name: f for f in fields(Cluster)}
GIB = 2**30
DAY = 86400


class Flow(NamedTuple):
    """The collectives of one kind and number of ranks, per rank and step."""

    kind: Collective
    ranks: int
    in_a_node: int
    """Ranks in the node that has fewest of them."""
    calls: int
    sent: float
    """Bytes that leave the rank."""
    seconds: float


class Assumption(NamedTuple):
    key: str
    value: Any
    why: str
    given: bool = False


Say = Callable[[str], None]
"""Reports the current stage."""


@dataclass
class RunPlan:
    """The needs of a run: memory, time and traffic."""

    cfg: TrainConfig
    overrides: list[str]
    cluster: Cluster
    assumptions: list[Assumption]
    words: tuple[str, ...] = ()
    steps: dict[bool, Step] = field(default_factory=dict)
    """The simulated step by activation checkpointing; `simulated` adds them."""

    def simulated(self, policy: bool, say: Say) -> "RunPlan":
        """Return this plan with the simulated step of an activation checkpointing policy."""
        what = self.words or [f"activation_checkpointing={str(policy).lower()}"]
        say(f"simulating a step with {' '.join(what)}")
        cfg = replace(self.cfg, activation_checkpointing=policy)
        step = simulate(cfg, self.cluster.gpus, self.cluster.rank)
        return replace(self, steps={**self.steps, policy: step})

    @cached_property
    def model(self) -> Transformer:
        """The whole model, without storage."""
        return without_storage(self.cfg.model)

    @property
    def n_params(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    @property
    def mesh(self) -> dict[str, int]:
        sizes = self.cfg.parallel.sizes(self.cluster.gpus)
        return dict(zip(("replicate", "shard", "expert"), sizes, strict=True))

    @property
    def step(self) -> Step:
        return self.steps[self.cfg.activation_checkpointing]

    @property
    def reserve(self) -> int:
        return round(self.cluster.reserve_gib * GIB)

    @property
    def memory(self) -> int:
        return round(self.cluster.device.memory_gib * GIB)

    def free(self, step: Step) -> int:
        return self.memory - self.reserve - step.peak.total

    @property
    def fits(self) -> bool:
        return self.free(self.step) >= 0

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.global_batch_size * self.cfg.seq_len

    @property
    def flops_per_token(self) -> float:
        return self.model.flops_per_token(self.cfg.visible_keys)

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def compute_seconds(self) -> float:
        cluster = self.cluster
        return self.flops_per_step / (cluster.gpus * cluster.device.peak_flops * cluster.mfu)

    @property
    def step_seconds(self) -> float:
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def mfu(self) -> float:
        return self.cluster.mfu * self.compute_seconds / self.step_seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def seconds(self) -> float | None:
        return self.cluster.tokens and self.cluster.tokens / self.tokens_per_s

    @property
    def flows(self) -> list[Flow]:
        """The step's collectives, grouped by kind and ranks, the longest group first."""
        groups: dict[tuple[Collective, int, int], list[Call]] = defaultdict(list)
        for call in self.step.calls:
            near = self.cluster.fewest_in_a_node(call.ranks)
            groups[call.kind, len(call.ranks), near].append(call)
        found = []
        for (kind, ranks, near), members in groups.items():
            sent = sum(kind.on_the_wire(call.size, ranks) for call in members)
            seconds = sum(map(self.cluster.seconds, members))
            found.append(Flow(kind, ranks, near, len(members), sent, seconds))
        return sorted(found, key=lambda flow: -flow.seconds)

    @property
    def communication_seconds(self) -> float:
        return sum(flow.seconds for flow in self.flows)


def plan(cluster: Cluster, given: set[str], overrides: list[str]) -> RunPlan:
    """Plan a training config on a cluster, without simulated steps.

    `given` are the keys of `cluster` that the user set. Raises ConfigError.
    """
    cfg, assumed = planned_config(cluster, overrides)
    return RunPlan(cfg, overrides, cluster, [*assumptions(cfg, cluster, given), *assumed])


def key_of_word(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def planned_config(cluster: Cluster, overrides: list[str]) -> tuple[TrainConfig, list[Assumption]]:
    """Return the training config, and the assumptions that completing it took.

    Without a given batch, each rank has one micro-batch per step, by default of one sequence.
    """
    keys = set(map(key_of_word, overrides))
    try:
        cfg = load_config(overrides)
    except ConfigError as error:
        unknown = re.match(r"unknown key (\w+);", str(error))
        if unknown and (close := did_you_mean(unknown[1], OWN_KEYS)):
            raise ConfigError(f"unknown key {unknown[1]}{close}") from error
        raise
    assumed = []
    if not keys & {"global_batch_size", "experiment"}:
        micro = cfg.micro_batch_size or 1
        batch = micro * cluster.gpus
        cfg = replace(cfg, micro_batch_size=micro, global_batch_size=batch)
        if "micro_batch_size" not in keys:
            assumed.append(Assumption("micro_batch_size", micro, "sequences a rank"))
        assumed.append(Assumption("global_batch_size", batch, "one micro-batch a rank and step"))
    cfg.check_world(cluster.gpus)
    return cfg, assumed


def assumptions(cfg: TrainConfig, cluster: Cluster, given: set[str]) -> list[Assumption]:
    device = cluster.device
    values = {
        "peak_flops": (device.peak_flops, f"dense bf16 FLOP/s of {device.name}, data sheet"),
        "memory_gib": (device.memory_gib, f"GiB that {device.name} has"),
    }
    names = [name for name in ("gpu", "gpus") if name not in given]
    names += ["mfu", "reserve_gib", "nvlink_gbs", "network_gbs", "gpus_per_node", *values]
    found = []
    for name in names:
        value, why = values.get(name, (getattr(cluster, name), OWN_KEYS[name].metadata["help"]))
        found.append(Assumption(name, value, why, name in given))
    if cfg.precision is Precision.auto:
        found.append(Assumption("precision", "bf16", "what auto chooses on a GPU"))
    if cfg.compile is None:
        found.append(Assumption("compile", True, "what null chooses on a GPU"))
    if cfg.data.mask_documents:
        keys, why = cfg.visible_keys, "mean keys that a query sees; FLOPs follow"
        if keys is None:
            keys, why = (
                (cfg.seq_len + 1) / 2,
                "whole sequences; masked documents have fewer FLOPs",
            )
        given_keys = cfg.visible_keys is not None
        found.append(Assumption("data.visible_keys", keys, why, given_keys))
    return found


def idealised(cfg: TrainConfig) -> dict[str, str]:
    """List what the plan leaves out, and no key changes."""
    found = {
        "collectives": "at line rate, without latency, one after the other, all hidden behind the "
        "computation while they take less",
    }
    if cfg.data.mask_documents:
        found["documents"] = "memory is planned without their masks"
    if cfg.model.moe.n_experts:
        found["routing"] = "assumed balanced: every expert gets equally many tokens"
    return found


MORE_GPUS = (2, 4, 8, 16)
"""Multiples of the number of GPUs that are tried."""

Words = tuple[str, ...]
"""The words that a change puts on the command line, in place of words with the same keys."""


def nearest_change(plan: RunPlan, say: Say) -> RunPlan | None:
    """Return `plan` with the fewest changes with which it fits; None if no tried change fits.

    Of equally many changes, prefer the order of `options`.
    """
    outcome_of = cache(partial(outcome, plan, say))
    kinds = options(plan)
    for count in range(1, len(kinds) + 1):
        for chosen in combinations(kinds, count):
            tried = [merged(values) for values in product(*chosen)]
            # Valid values with the smallest micro-batch are the farthest of all that are valid.
            farthest = next(filter(None, map(outcome_of, reversed(tried))), None)
            if farthest and farthest.fits:
                return next(made for made in map(outcome_of, tried) if made and made.fits)
    return None


def options(plan: RunPlan) -> list[list[Words]]:
    """List the kinds of possible changes, each with its values from near to far."""
    cfg, gpus = plan.cfg, plan.cluster.gpus
    micro, count = cfg.micro_batches(gpus)
    waits = count > 1 and cfg.parallel.reduce is not Reduce.every
    batch = any(word.startswith("global_batch_size=") for word in plan.overrides)
    same = () if batch else (f"global_batch_size={cfg.global_batch_size}",)
    shard, replicas = cfg.parallel.shard, cfg.parallel.replicate

    def shards(times: int) -> Words:  # more replicas would save nothing
        if shard == -1:
            return ()
        return (f"parallel.shard={times * shard if replicas == -1 else -1}",)

    kinds: list[list[Words]] = [
        [(f"micro_batch_size={micro // 2**k}", *same) for k in range(1, micro.bit_length())],
        [("parallel.reduce=every",)] if waits else [],
        [] if cfg.activation_checkpointing else [("activation_checkpointing=true",)],
        [("parallel.replicate=1", "parallel.shard=-1")] if cfg.parallel.sizes(gpus)[0] > 1 else [],
        [(f"gpus={times * gpus}", *shards(times)) for times in MORE_GPUS],
    ]
    return [kind for kind in kinds if kind]


def merged(values: Iterable[Words]) -> Words:
    """Join words; of words with one key, the first counts."""
    by_key: dict[str, str] = {}
    for word in chain.from_iterable(values):
        by_key.setdefault(key_of_word(word), word)
    return tuple(by_key.values())


def outcome(plan: RunPlan, say: Say, words: Words) -> RunPlan | None:
    """Plan with other words; None if no such number of ranks can have this batch or mesh.

    Return `plan` without a simulation if the state of a rank is too large and the words keep it.
    """
    step = plan.step
    state = step.parameters + step.gradients + step.optimizer
    spreads = any(word.startswith(("parallel.", "gpus=")) for word in words)
    if not spreads and state > plan.memory - plan.reserve:
        return plan
    gpus = [int(word.removeprefix("gpus=")) for word in words if word.startswith("gpus=")]
    cluster = replace(plan.cluster, gpus=gpus[0]) if gpus else plan.cluster
    added = [word for word in words if not word.startswith("gpus=")]
    keys = set(map(key_of_word, added))
    overrides = [*(word for word in plan.overrides if key_of_word(word) not in keys), *added]
    try:
        cfg, assumed = planned_config(cluster, overrides)
        changed = RunPlan(cfg, overrides, cluster, assumed, words)
        if words == ("activation_checkpointing=true",):
            return replace(changed, steps=plan.steps)
        return changed.simulated(cfg.activation_checkpointing, say)
    except ConfigError:
        return None
