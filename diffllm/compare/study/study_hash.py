"""The hash of a study: of its file and of the resolved configs of its deciding runs.

A run stores it before its first step, and a verdict computes it again from the configs that the
runs saved. It guards against mistakes, such as an edited file; it does not prove who wrote what.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import config_of_planned, deciding_runs
from diffllm.config import TrainConfig
from diffllm.config.saved import defaults_of, flatten, yaml_dict
from diffllm.config.schema import FREE, is_allowed

UNHASHED = (*(key for key in FREE if key != "eval"), "run.study")
"""Keys that change nothing of what a run computes and measures."""


def config_digest(cfg: TrainConfig, study: Study) -> str:
    """Return the SHA-256 of the settings that are not defaults, so that a later version with more
    keys gives the same; without the learning rate if the study chooses it."""
    usual = flat_defaults(*map(type, (cfg.model.attention, cfg.data)))
    found = {
        key: value
        for key, value in flatten(yaml_dict(cfg)).items()
        if not (key in usual and usual[key] == value) and is_hashed(key)
    }
    if study.lr:
        found.pop("optim.lr", None)
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


@cache
def is_hashed(key: str) -> bool:
    return not is_allowed(key, [*UNHASHED])


@cache
def flat_defaults(attention: type, data: type) -> dict[str, Any]:
    return flatten(defaults_of(None, attention, data)[1])


def planned_digests(study: Study) -> dict[str, str]:
    """Return the digests of the configs of all deciding runs, by name, in order."""
    return {
        run.name: config_digest(config_of_planned(run), study)
        for arm in study.arms
        for seed in study.seeds
        for run in deciding_runs(study, arm, seed, None)
    }


def study_hash(study: Study, digests: Mapping[str, str]) -> str:
    """Return the hash of the file and of the digests of its deciding runs, by name, in order."""
    lines = [study.hash, *(f"{digest} {name}" for name, digest in digests.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
