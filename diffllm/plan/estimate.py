"""The plan of a run: from a simulated step to gibibytes, seconds and days."""

import difflib
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from diffllm.config import Precision, TrainConfig, load_config
from diffllm.core.errors import ConfigError
from diffllm.plan.cluster import OWN_KEYS, Cluster
from diffllm.plan.simulate import Step, simulate
from diffllm.plan.traffic import Call, Collective

GIB = 2**30
DAY = 86400


class Flow(NamedTuple):
    """The collectives of one kind over one number of ranks, of one rank and one step."""

    kind: Collective
    ranks: int
    in_a_node: int
    """The number of those ranks that share a node, in the node that has fewest."""
    calls: int
    sent: float
    """Bytes that leave the rank."""
    seconds: float
    """Seconds at the stated bandwidths, one collective after the other."""


class Assumption(NamedTuple):
    """A value that the plan takes as given and nobody measured."""

    key: str
    value: Any
    why: str
    given: bool = False
    """True if the user stated it."""


@dataclass
class Plan:
    """The needs of a run: memory, time and traffic."""

    cfg: TrainConfig
    overrides: list[str]
    cluster: Cluster
    steps: dict[bool, Step]
    """The simulated step by activation checkpointing; the configured policy first."""
    assumptions: list[Assumption]
    words: tuple[str, ...] = ()
    """The words that changed another plan to this one."""

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
        """Return the bytes that a step leaves free, negative where it does not fit."""
        return self.memory - self.reserve - step.peak.total

    @property
    def fits(self) -> bool:
        return self.free(self.step) >= 0

    @property
    def tokens_per_step(self) -> int:
        return self.cfg.global_batch_size * self.cfg.seq_len

    @property
    def flops_per_step(self) -> float:
        return self.step.flops_per_token * self.tokens_per_step

    @property
    def compute_seconds(self) -> float:
        """Seconds that a step computes at the stated MFU."""
        cluster = self.cluster
        return self.flops_per_step / (cluster.gpus * cluster.device.peak_flops * cluster.mfu)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: computation at the stated MFU, or communication if that is longer."""
        return max(self.compute_seconds, self.communication_seconds)

    @property
    def mfu(self) -> float:
        """MFU that is left of the stated one where communication takes longer."""
        return self.cluster.mfu * self.compute_seconds / self.step_seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def seconds(self) -> float | None:
        """Seconds of the whole run, or None where the number of tokens is not stated."""
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
        """Seconds that a step communicates, if one collective runs after the other."""
        return sum(flow.seconds for flow in self.flows)


def plan(cluster: Cluster, given: set[str], overrides: list[str]) -> Plan:
    """Plan a training config on a cluster, with and without activation checkpointing.

    Raises ConfigError for a wrong key or value, and where the cluster cannot run the config.

    Args:
        given: keys of `cluster` that the user set.
        overrides: those that train.py would get.
    """
    cfg, assumed = planned_config(cluster, overrides)
    policies = (cfg.activation_checkpointing, not cfg.activation_checkpointing)
    taken = assumptions(cfg, cluster, given)
    steps = {
        policy: simulate(replace(cfg, activation_checkpointing=policy), cluster.gpus, cluster.rank)
        for policy in policies
    }
    return Plan(cfg, overrides, cluster, steps, [*taken, *assumed])


def changed(made: Plan, words: tuple[str, ...], step: Step | None = None) -> Plan:
    """Plan with other words, simulated unless `step` is given; raises ConfigError as `plan`."""
    gpus = [int(word.removeprefix("gpus=")) for word in words if word.startswith("gpus=")]
    cluster = replace(made.cluster, gpus=gpus[0]) if gpus else made.cluster
    added = [word for word in words if not word.startswith("gpus=")]
    keys = set(map(key_of, added))
    overrides = [*(word for word in made.overrides if key_of(word) not in keys), *added]
    cfg, assumed = planned_config(cluster, overrides)
    step = step or simulate(cfg, cluster.gpus, cluster.rank)
    return Plan(cfg, overrides, cluster, {cfg.activation_checkpointing: step}, assumed, words)


def key_of(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def planned_config(cluster: Cluster, overrides: list[str]) -> tuple[TrainConfig, list[Assumption]]:
    """Return the training config, and the assumptions that completing it took.

    The batch of the default experiment is for one small machine: where no batch is given, each rank
    has one micro-batch a step, of one sequence unless the user says more.
    """
    keys = set(map(key_of, overrides))
    try:
        cfg = load_config(overrides)
    except ConfigError as error:
        unknown = re.match(r"unknown key (\w+);", str(error))
        if unknown and (close := difflib.get_close_matches(unknown[1], OWN_KEYS, n=1)):
            raise ConfigError(f"unknown key {unknown[1]}; did you mean {close[0]}?") from error
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
    """List what the plan takes for granted, with the keys that say otherwise."""
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
    return found


def idealised(cfg: TrainConfig) -> dict[str, str]:
    """List what the plan leaves out, and no key changes."""
    found = {
        "collectives": "at line rate, without latency, one after the other, all hidden behind the "
        "computation while they take less",
    }
    if cfg.data.mask_documents:
        found["documents"] = "planned without their masks"
    if cfg.model.moe.n_experts:
        found["routing"] = "assumed balanced: every expert gets equally many tokens"
    return found
