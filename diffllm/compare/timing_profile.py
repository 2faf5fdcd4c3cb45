"""The timing profile: a JSON file with the step times of several arms on one machine."""

import json
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from diffllm.compare.arms.comparability import exact_text
from diffllm.compare.arms.sentences import plural
from diffllm.config import TrainConfig
from diffllm.config.compose import LENGTHS
from diffllm.config.saved import flatten, yaml_dict
from diffllm.config.schema import MOST_STEPS
from diffllm.core.bounds import check_bounds
from diffllm.core.errors import CheckpointError, ConfigError, choose_from
from diffllm.core.files import read_bytes, read_json, readable, user_path
from diffllm.core.keys import declaration_of, declarations
from diffllm.core.run_facts import RunFacts, machine_facts
from diffllm.core.typed import made

PROFILE_FORMAT = 1
NOISY = 0.1
"""Spread between rounds above which the step time of an arm is uncertain."""
LEAST_SECONDS = 1e-6
"""Least time of a training step, far below the launch of one kernel per layer."""
MACHINE = (*machine_facts(), "compute_dtype")
"""Facts of a run that must agree to compare times."""
KEY_BY_FACT = {"compiled": "compile", "compute_dtype": "precision"}
"""The config key that decides a fact, for facts that a config decides."""
Blocks = list[float]
"""Mean seconds of a training step in each block of steps of one turn."""


@dataclass(frozen=True)
class ArmTiming:
    """Step times of one arm.

    `settings` are the config keys that decide the time of a step, with their values as JSON text;
    see `time_settings`. `facts` are those of the arm's last run, such as its device and world size.
    """

    variant: str
    overrides: list[str]
    settings: dict[str, str]
    facts: RunFacts
    tokens_per_step: int = field(metadata={"least": 1})
    block_seconds: list[Blocks]
    """The blocks of each round."""

    @property
    def round_seconds(self) -> list[float]:
        """Seconds of a training step in the fastest block of each round."""
        return [min(blocks) for blocks in self.block_seconds]

    @property
    def seconds_per_step(self) -> float:
        """Seconds of a training step in the fastest block.

        Other processes of the machine only add time, so the fastest block has least of their
        effect. On a busy machine, medians of two arms compare the load during their turns.
        """
        return min(self.round_seconds)

    @property
    def median_seconds(self) -> float:
        """Median over all blocks of the seconds of a training step."""
        return statistics.median(chain(*self.block_seconds))

    @property
    def mean_seconds(self) -> float:
        return statistics.fmean(chain(*self.block_seconds))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.seconds_per_step

    @property
    def spread(self) -> float:
        """Difference of `round_seconds` between the slowest and the fastest round, relative."""
        return max(self.round_seconds) / min(self.round_seconds) - 1

    @property
    def precision(self) -> str:
        """Data type of the computation, and whether the model is compiled."""
        compiled = "compiled" if self.facts.compiled else "eager"
        return f"{self.facts.compute_dtype or 'unknown precision'}, {compiled}"

    def machine_differences(self, facts: RunFacts) -> list[str]:
        """Return the differences between the machine of a run and that of this measurement."""
        texts = []
        for name in MACHINE:
            value = exact_text(name, getattr(facts, name))
            timed_value = exact_text(name, getattr(self.facts, name))
            if value != timed_value:
                texts.append(f"{name} {value}, not {timed_value}")
        return texts

    def ratio(self, baseline: "ArmTiming") -> float:
        """Return the time of this arm over that of `baseline`."""
        return self.seconds_per_step / baseline.seconds_per_step

    def round_ratios(self, baseline: "ArmTiming") -> list[float]:
        """Return the time of this arm over that of `baseline` in each round."""
        pairs = zip(self.round_seconds, baseline.round_seconds, strict=True)
        # Runs of a round follow each other, so both times have nearly the same load.
        return [seconds / reference for seconds, reference in pairs]


@dataclass(frozen=True)
class TimingProfile:
    """Step times of several arms, measured in turns on one machine; the first is the baseline."""

    format: int
    date: str
    """Day of the measurement, such as "2026-11-28"."""
    threads: int = field(metadata={"least": 1})
    """CPU threads per rank."""
    warmup_steps: int = field(metadata={"least": 1})
    """First steps of each turn, which are not timed."""
    timed_steps: int = field(metadata={"least": 1})
    """Steps of each turn that are timed."""
    arms: dict[str, ArmTiming]

    @property
    def baseline(self) -> str:
        return next(iter(self.arms))

    def machine(self, names: Iterable[str]) -> str:
        """Describe the device, the ranks and threads, the precisions of arms, and torch.

        Args:
            names: names of the arms.
        """
        facts = self.arms[self.baseline].facts
        ranks = plural(int(facts.ranks), "rank") if facts.ranks else "unknown world size"
        precisions = dict.fromkeys(self.arm(name).precision for name in names)
        return (
            f"{facts.device or 'unknown device'}, {ranks}, "
            f"{plural(self.threads, 'CPU thread')} per rank, {' or '.join(precisions)}, "
            f"torch {facts.torch or 'unknown'}"
        )

    def arm(self, name: str) -> ArmTiming:
        """Return the step times of an arm; raises ConfigError if the arm is unknown."""
        if name not in self.arms:
            choices = choose_from(name, list(self.arms))
            raise ConfigError(f"the timing profile has no arm {name!r}{choices}")
        return self.arms[name]

    def content(self) -> dict[str, Any]:
        """Return the content of the profile file.

        The file also has numbers that follow from the times of the blocks. `read_profile` ignores
        these numbers.
        """
        content = asdict(self)
        baseline = self.arms[self.baseline]
        for name, arm in self.arms.items():
            content["arms"][name] |= {
                "seconds_per_step": arm.seconds_per_step,
                "median_seconds": arm.median_seconds,
                "mean_seconds": arm.mean_seconds,
                "tokens_per_s": arm.tokens_per_s,
                "round_seconds": arm.round_seconds,
                "spread": arm.spread,
                "ratio": arm.ratio(baseline),
                "round_ratios": arm.round_ratios(baseline),
            }
        return content


def time_settings(cfg: TrainConfig) -> dict[str, str]:
    """Return the config keys that decide the time of a training step, with values as JSON text.

    Seeds, the number of steps and the settings of the optimizer do not change this time, and
    checkpoints do not count. With data.mask_documents, the time also depends on the data, which
    these keys do not describe.
    """
    declared = declarations(cfg)
    settings = {}
    for name, value in flatten(yaml_dict(cfg)).items():
        key = declaration_of(name, declared)
        is_ignored = name in LENGTHS or name.startswith(("optim.", "checkpoint."))
        if is_ignored or "seed" in key.kinds:
            continue
        if key.effect in ("numbers", "speed"):
            settings[name] = json.dumps(value, sort_keys=True)
    return settings


def read_profile(path: Path) -> TimingProfile:
    """Read a file of `diffllm timing`; raises CheckpointError if the content is invalid."""
    with readable(path):
        content = read_json(path, follow=True)
        try:
            if content.get("format") != PROFILE_FORMAT:
                raise ValueError(f"format={content.get('format')!r:.20} must be {PROFILE_FORMAT}")
            profile = made(TimingProfile, content)
            check_profile(profile)
        except (ValueError, ConfigError) as error:
            raise ValueError(f"is not a profile of diffllm timing: {error}") from None
        return profile


def check_profile(profile: TimingProfile) -> None:
    check_bounds("", profile)
    if not profile.arms:
        raise ValueError("arms is empty")
    arms = profile.arms.values()
    rounds = {len(arm.block_seconds) for arm in arms}
    if len(rounds) > 1 or 0 in rounds:
        raise ValueError(
            "block_seconds of all arms must have the same number of rounds, at least 1"
        )
    for name, arm in profile.arms.items():
        for blocks in arm.block_seconds:
            if not blocks or min(blocks) < LEAST_SECONDS:
                raise ValueError(
                    f"arms.{name}.block_seconds must be at least {LEAST_SECONDS:g} in each round"
                )
        if not arm.settings:
            raise ValueError(f"arms.{name}.settings is empty")
    for fact in MACHINE:
        # Arms may differ in a fact if they differ in the config key that decides it.
        key = KEY_BY_FACT.get(fact, "")
        settings = {arm.settings.get(key) for arm in arms}
        values = {str(getattr(arm.facts, fact)) for arm in arms}
        if len(values) > 1 and len(settings) == 1:
            raise ValueError(
                f"the arms differ in {fact} ({', '.join(sorted(values))}); measure all arms on one "
                "machine"
            )


@dataclass(frozen=True)
class SecondsBudget:
    """Seconds of the training steps of a run, by the step times of a profile.

    `profile` is a file of `diffllm timing`, relative to the study file.
    """

    seconds: float = field(metadata={"above": 0})
    profile: str

    def read(self, directory: Path, arms: Collection[str]) -> tuple[TimingProfile, bytes]:
        """Return the profile of this budget and the bytes of its file.

        Raises ConfigError if the file cannot be read or is invalid, if the profile lacks an arm, or
        if the budget is less than one training step of an arm or more than MOST_STEPS.

        Args:
            directory: directory of the study file.
            arms: names of the study's arms.
        """
        path = directory / user_path(self.profile, "budget.profile")
        try:
            profile = read_profile(path)
            # The bytes of the file are a part of the study's hash.
            with readable(path):
                content = read_bytes(path, follow=True)
        except CheckpointError as error:
            raise ConfigError(
                f"budget.profile: {error}; write a profile with diffllm timing STUDY.yaml "
                f"out={path}"
            ) from error
        for name in arms:
            try:
                step = profile.arm(name).seconds_per_step
            except ConfigError as error:
                raise ConfigError(f"budget.profile={self.profile}: {error}") from error
            if self.seconds < step:
                raise ConfigError(
                    f"budget.seconds={self.seconds:g} must be at least {step:.3g}, the seconds of "
                    f"one training step of arm {name}"
                )
            if self.seconds > step * MOST_STEPS:
                raise ConfigError(
                    f"budget.seconds={self.seconds:g} must be at most {step * MOST_STEPS:.3g}, "
                    f"the seconds of {MOST_STEPS:,} training steps of arm {name}"
                )
        return profile, content

    def check_settings(self, timing: TimingProfile, configs: Mapping[str, TrainConfig]) -> None:
        """Raise ConfigError if the profile was measured with other settings than those of an arm.

        Args:
            timing: content of the profile.
            configs: config of a run, by arm.
        """
        for arm, cfg in configs.items():
            settings = timing.arm(arm).settings
            for name, value in time_settings(cfg).items():
                # Older profiles do not have the keys of newer versions.
                if settings.get(name, value) != value:
                    raise ConfigError(
                        f"arm {arm}: {name} is {value}, but budget.profile={self.profile} was "
                        f"measured with {settings[name]}; measure the profile again with diffllm "
                        "timing"
                    )
