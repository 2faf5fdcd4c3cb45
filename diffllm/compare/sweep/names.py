"""Names of the runs of a sweep, composed of the values that differ."""

import hashlib
import json
import re
from collections import Counter
from enum import Enum
from typing import Any

from diffllm.config import TrainConfig
from diffllm.config.overrides import CONFIG_GROUPS
from diffllm.core.names import shortened
from diffllm.training.run_directory import LONGEST_NAME

LONGEST_VALUE = 40
"""Most characters of a value in a run name."""


def name_run(cfg: TrainConfig, keys: list[str]) -> str:
    """Return a run name composed of the values of `keys`, such as "diff_v1-lr0.001-seed0".

    Different values give different names. The values 0.1 and 1e-1 give the same name.
    """
    labels = short_labels(keys)
    parts = [label_value(labels[key], config_value(cfg, key)) for key in keys]
    return shortened("-".join(parts) or "run", LONGEST_NAME)


def config_value(cfg: TrainConfig, key: str) -> Any:
    """Return the value of a config key (enum members as names), or None if the key is missing."""
    path = key.lstrip("+").split(".")
    if key in CONFIG_GROUPS:
        path = ["resolved", "choices", key]
    value: Any = cfg
    for part in path:
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
    return value.name if isinstance(value, Enum) else value


def short_labels(keys: list[str]) -> dict[str, str]:
    """Return the shortest suffix of each key that is no suffix of another key.

    The label of a config group is "". A key without such a suffix is its own label. The keys
    data.seed, seed and optim.lr have the labels data.seed, seed and lr.
    """
    counts: Counter[str] = Counter()
    dotted_keys = []
    for key in dict.fromkeys(keys):
        if key not in CONFIG_GROUPS:
            dotted_keys.append(key)
            counts.update(suffixes(key))
    labels = dict.fromkeys(keys, "")
    for key in dotted_keys:
        candidates = suffixes(key)
        # The whole key is the last candidate, and the label if no suffix is unique.
        labels[key] = candidates[-1]
        for suffix in candidates:
            if counts[suffix] == 1:
                labels[key] = suffix
                break
    return labels


def suffixes(key: str) -> list[str]:
    """Return the parts of a dotted key that end at its end, shortest first."""
    parts = key.lstrip("+").split(".")
    starts = reversed(range(len(parts)))
    return [".".join(parts[start:]) for start in starts]


def label_value(label: str, value: Any) -> str:
    """Return a part of a run name, such as "lr0.001" or "compile_true".

    The value ends with a hash of its text if the part does not contain the whole text.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    text = value if isinstance(value, str) else json.dumps(value)
    # Characters that file names and shells accept without quotes.
    safe = re.sub(r"[^A-Za-z0-9_.+-]+", "_", text).strip("_")
    if safe != text or len(safe) > LONGEST_VALUE:
        # Different values must have different names.
        digest = hashlib.sha256(text.encode()).hexdigest()[:6]
        end = safe[-LONGEST_VALUE:].lstrip("_.-")
        safe = f"{end}-{digest}" if end else digest
    separator = "" if is_number or not label else "_"
    return f"{label}{separator}{safe}"
