"""Planned memory, time and traffic of a run on a cluster."""

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from diffllm.config import Precision, TrainConfig, load_config
from diffllm.config.overrides import key_of_word
from diffllm.core.errors import ConfigError, did_you_mean
from diffllm.distributed.recompute import ActivationCheckpointing
from diffllm.model import Transformer, without_storage
from diffllm.plan.cluster import CLUSTER_KEYS, Cluster
from diffllm.plan.step import Call, Collective, Step
from diffllm.training.memory import GIB, TrainingState, training_state

RECOMPUTE = "activation_checkpointing"
DAY = 86400


class Flow(NamedTuple):
    """Totals of the collectives in one step that have equal `kind`, `ranks` and `in_a_node`."""

    kind: Collective
    ranks: int
    in_a_node: int
    """Number of participating ranks in the node that has the fewest of them."""
    calls: int
    sent: float
    """Bytes that each rank sends in all these collectives."""
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
    """Planned memory, time and traffic of a run on a cluster."""

    cfg: TrainConfig
    overrides: list[str]
    cluster: Cluster
    assumptions: list[Assumption]
    words: tuple[str, ...] = ()
    """Overrides that `nearest_change` added; empty in the original plan."""
    steps: dict[ActivationCheckpointing, Step] = field(default_factory=dict)
    """Simulated steps."""

    def simulated(self, policy: ActivationCheckpointing, say: Say) -> "RunPlan":
        """Return a copy of this plan with a newly simulated training step.

        The step uses `policy`. `say` receives a message before the simulation.
        """
        words = self.words or [f"{RECOMPUTE}={policy.name}"]
        say(f"simulating a step with {' '.join(words)}")
        from diffllm.plan.simulate import simulate  # takes a second

        cfg = replace(self.cfg, activation_checkpointing=policy)
        step = simulate(cfg, self.cluster.gpus, self.cluster.rank)
        return replace(self, steps={**self.steps, policy: step})

    @cached_property
    def model(self) -> Transformer:
        """The model of the run on the meta device, with shapes but without values."""
        return without_storage(self.cfg.model)

    @property
    def n_params(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    @property
    def state(self) -> TrainingState:
        sizes = self.cfg.parallel.sizes(self.cluster.gpus)
        return training_state(self.model, sizes, self.cluster.rank)

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
        flops_per_s = cluster.gpus * cluster.device.peak_flops * cluster.mfu
        return self.flops_per_step / flops_per_s

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
        """Duration of the run; None if its number of tokens is not set."""
        if self.cluster.tokens is None:
            return None
        return self.cluster.tokens / self.tokens_per_s

    @property
    def flows(self) -> list[Flow]:
        """Totals of the collectives of one step, sorted by duration, longest first."""
        groups: dict[tuple[Collective, int, int], list[Call]] = defaultdict(list)
        for call in self.step.calls:
            near = self.cluster.fewest_in_a_node(call.ranks)
            groups[call.kind, len(call.ranks), near].append(call)
        flows = []
        for (kind, ranks, near), members in groups.items():
            sent = sum(kind.on_the_wire(call.size, ranks) for call in members)
            seconds = sum(map(self.cluster.seconds, members))
            flows.append(Flow(kind, ranks, near, len(members), sent, seconds))
        return sorted(flows, key=lambda flow: -flow.seconds)

    @property
    def communication_seconds(self) -> float:
        return sum(flow.seconds for flow in self.flows)


def plan(cluster: Cluster, set_fields: set[str], overrides: list[str]) -> RunPlan:
    """Return the plan of a run on a cluster, without simulated steps.

    `RunPlan.simulated` adds a simulated step. `set_fields` contains the names of the fields of
    `cluster` that the user set. Raises ConfigError for an invalid config or an unknown GPU.
    """
    cfg, assumed_settings = planned_config(cluster, overrides)
    all_assumptions = assumptions(cfg, cluster, set_fields) + assumed_settings
    return RunPlan(cfg, overrides, cluster, all_assumptions)


def planned_config(cluster: Cluster, overrides: list[str]) -> tuple[TrainConfig, list[Assumption]]:
    """Return the training config that `overrides` define, and the assumptions for missing settings.

    Unless `overrides` set these keys or an experiment, assume the default of seq_len and one
    micro-batch per rank and step. A given global_batch_size determines the micro-batch. Raises
    ConfigError if the config is invalid or does not fit the number of GPUs.
    """
    keys = set(map(key_of_word, overrides))
    try:
        cfg = load_config(overrides)
    except ConfigError as error:
        # An unknown key may be a misspelt key of the cluster.
        unknown = re.match(r"unknown key (\w+);", str(error))
        close = did_you_mean(unknown[1], CLUSTER_KEYS) if unknown else ""
        if unknown and close:
            raise ConfigError(f"unknown key {unknown[1]}{close}") from error
        raise
    assumed = []
    if not keys & {"seq_len", "experiment"}:
        assumed.append(Assumption("seq_len", cfg.seq_len, "tokens per sequence"))
    if not keys & {"global_batch_size", "experiment"}:
        micro = cfg.micro_batch_size or 1
        groups = max(1, cluster.gpus // cfg.parallel.context)
        batch = micro * groups
        cfg = replace(cfg, micro_batch_size=micro, global_batch_size=batch)
        unit = "rank" if groups == cluster.gpus else "group of context ranks"
        if "micro_batch_size" not in keys:
            assumed.append(Assumption("micro_batch_size", micro, f"sequences per {unit}"))
        reason = f"one micro-batch per {unit} and step"
        assumed.append(Assumption("global_batch_size", batch, reason))
    cfg.check_world(cluster.gpus)
    return cfg, assumed


def assumptions(cfg: TrainConfig, cluster: Cluster, set_fields: set[str]) -> list[Assumption]:
    device = cluster.device
    device_values = {
        "peak_flops": (device.peak_flops, f"dense bf16 FLOP/s of {device.name} in its data sheet"),
        "memory_gib": (device.memory_gib, f"GiB of {device.name}"),
    }
    names = [name for name in ("gpu", "gpus") if name not in set_fields]
    names += ["mfu", "reserve_gib", "nvlink_gbs", "network_gbs", "gpus_per_node", *device_values]
    assumed = []
    for name in names:
        if name in device_values:
            value, reason = device_values[name]
        else:
            value = getattr(cluster, name)
            reason = CLUSTER_KEYS[name].metadata["help"]
        assumed.append(Assumption(name, value, reason, name in set_fields))
    if cfg.precision is Precision.auto:
        assumed.append(Assumption("precision", "bf16", "choice of auto on a GPU"))
    if cfg.compile is None:
        assumed.append(Assumption("compile", True, "choice of null on a GPU"))
    if cfg.data.mask_documents:
        keys = cfg.visible_keys
        is_set = keys is not None
        reason = "mean keys per query; determines FLOPs"
        if keys is None:
            # The mean over the queries of a sequence, which see 1 to seq_len keys.
            keys = (cfg.seq_len + 1) / 2
            reason = "whole sequences; masked documents need fewer FLOPs"
        assumed.append(Assumption("data.visible_keys", keys, reason, is_set))
    return assumed


def idealised(cfg: TrainConfig) -> dict[str, str]:
    """Return the simplifying assumptions of a plan for `cfg`, as {topic: description}."""
    topics = {
        "collectives": "at line rate, without latency, one at a time; hidden if faster than the "
        "computation",
    }
    if cfg.data.mask_documents:
        topics["documents"] = "memory excludes document masks"
    if cfg.parallel.context > 1:
        topics["probes"] = "not counted; in steps with probes, ranks gather the keys"
    if cfg.model.moe.n_experts:
        topics["routing"] = "assumed balanced: all experts get the same number of tokens"
    return topics
