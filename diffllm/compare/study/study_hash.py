"""The hash of a study covers the study file and the configs of the runs that the rules compare.

Each run saves the hash before its first step. A verdict recomputes the hash from the configs that
the runs saved. A difference reveals mistakes, such as an edited study file, but not forgery.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import config_of_planned, planned_by_name
from diffllm.config import TrainConfig
from diffllm.config.changes import FREE, is_allowed
from diffllm.config.saved import defaults_of, flatten, yaml_dict

UNHASHED = (*(key for key in FREE if key != "eval"), "run.study")
"""Keys without effect on the computed and measured values of a run."""


def config_digest(cfg: TrainConfig, study: Study) -> str:
    """Return the SHA-256 of the settings that affect results and differ from their defaults.

    Defaults are ignored, so that new config keys do not change the hash. The key optim.lr is
    ignored if the study itself chooses the learning rate.
    """
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
    defaults = flatten(defaults_of(None, attention, data)[1])
    # The default of a study's runs.
    defaults["eval.tokens"] = None
    return defaults


def planned_digests(study: Study) -> dict[str, str]:
    """Return the config SHA-256 of each run that the study's rules compare, by run name."""
    return {
        name: config_digest(config_of_planned(run), study)
        for name, run in planned_by_name(study).items()
    }


def study_hash(study: Study, digests: Mapping[str, str]) -> str:
    """Return one hash of the study file and `digests` together.

    `digests` maps each run name to the SHA-256 of the run's config.
    """
    lines = [study.hash, *(f"{digest} {name}" for name, digest in digests.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
