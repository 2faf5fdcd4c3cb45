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
from diffllm.config.saved import defaults_of, flatten, yaml_dict
from diffllm.core.keys import Declaration, declaration_of, declarations

FORMER_SECTION = {
    "resolved.schemas.attention": "run.schemas.attention",
    "resolved.schemas.data": "run.schemas.data",
    "resolved.choices.attention": "run.choices.attention",
}
"""Computed values that are hashed, with the names that hashes of older versions contain."""


def config_digest(cfg: TrainConfig, study: Study) -> str:
    """Return the SHA-256 of the settings that affect results and differ from their defaults.

    Defaults are ignored, so that new config keys do not change the hash. The key optim.lr is
    ignored if the study itself chooses the learning rate. The starting point of a run is not a part
    of this hash: the hash of the study file covers it, and a verdict compares it, see `strayed`.
    """
    defaults = flat_defaults(*map(type, (cfg.model.attention, cfg.data)))
    declared = declarations(cfg)
    hashed: dict[str, Any] = {}
    for key, value in flatten(yaml_dict(cfg)).items():
        is_default = key in defaults and defaults[key] == value
        if is_default:
            continue
        if key in FORMER_SECTION:
            hashed[FORMER_SECTION[key]] = value
        # Hashes of older versions contain the paths of a mixture's sources, and eval.interval.
        elif is_hashed(declaration_of(key, declared)) or key.startswith(("data.sources.", "eval.")):
            hashed[key] = value
    if study.lr:
        # The planned configs have no chosen rate yet, the saved configs have.
        hashed.pop("optim.lr", None)
    content = json.dumps(hashed, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def is_hashed(declared: Declaration) -> bool:
    """Return whether the hash of a run covers a key: whether the key decides or measures results.

    Keys that are compared by content at resume, such as data.paths, are not hashed. Neither is
    the interval of logging, which the hash of the study file covers.
    """
    if declared.computes:
        return not declared.resumable
    return declared.effect == "measurement"


@cache
def flat_defaults(attention: type, data: type) -> dict[str, Any]:
    defaults = flatten(defaults_of(None, attention, data)[1])
    # The default of a study's runs.
    defaults["eval.tokens"] = None
    return defaults


def planned_digests(study: Study) -> dict[str, str]:
    """Return the config SHA-256 of each run that the study's rules compare, by run name."""
    digests = {}
    for name, run in planned_by_name(study).items():
        digests[name] = config_digest(config_of_planned(run), study)
    return digests


def study_hash(study: Study, digests: Mapping[str, str]) -> str:
    """Return one hash of the study file and `digests` together.

    `digests` maps each run name to the SHA-256 of the run's config.
    """
    lines = [study.hash]
    for name, digest in digests.items():
        lines.append(f"{digest} {name}")
    content = "\n".join(lines)
    return hashlib.sha256(content.encode()).hexdigest()
