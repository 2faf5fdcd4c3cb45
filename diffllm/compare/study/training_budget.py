"""The key `budget` of a study file: the cost of training that is equal in all arms."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from diffllm.compare.timing_profile import TimingProfile, read_profile
from diffllm.config.schema import MOST_STEPS
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import read_bytes, readable, user_path

FLOPS = "flops"


@dataclass(frozen=True)
class SecondsBudget:
    """Seconds of the training steps of a run, by the step times of a profile.

    `profile` is a file of `diffllm timing`, relative to the study file.
    """

    seconds: float = field(metadata={"above": 0})
    profile: str


def budget_profile(
    budget: SecondsBudget, directory: Path, arms: Collection[str]
) -> tuple[TimingProfile, bytes]:
    """Return the profile of a budget and the bytes of its file.

    Raises ConfigError if the file cannot be read or is invalid, if the profile lacks an arm, or if
    the budget is less than one training step of an arm or more than MOST_STEPS.

    Args:
        directory: directory of the study file.
        arms: names of the study's arms.
    """
    path = directory / user_path(budget.profile, "budget.profile")
    try:
        profile = read_profile(path)
        with readable(path):
            content = read_bytes(path, follow=True)
    except CheckpointError as error:
        raise ConfigError(
            f"budget.profile: {error}; write a profile with diffllm timing STUDY.yaml out={path}"
        ) from error
    for name in arms:
        try:
            seconds = profile.seconds_per_step(name)
        except ConfigError as error:
            raise ConfigError(f"budget.profile={budget.profile}: {error}") from error
        if budget.seconds < seconds:
            raise ConfigError(
                f"budget.seconds={budget.seconds:g} must be at least {seconds:.3g}, the seconds of "
                f"one training step of arm {name}"
            )
        if budget.seconds > seconds * MOST_STEPS:
            raise ConfigError(
                f"budget.seconds={budget.seconds:g} must be at most {seconds * MOST_STEPS:.3g}, "
                f"the seconds of {MOST_STEPS:,} training steps of arm {name}"
            )
    return profile, content
