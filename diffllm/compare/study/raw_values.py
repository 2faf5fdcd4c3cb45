"""Read and write values.json: all measured values from which a study's verdict is computed.

A verdict computed from values.json equals the verdict computed from the run directories.
benchmarks/results/recompute.py also reads this file. The class `Values` describes the format.
"""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from diffllm.compare.study.arms import RateRun, StudyRun, Texts
from diffllm.compare.study.evidence import LOSS_METRICS, Evidence
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import planned_by_name
from diffllm.compare.study.study_hash import study_hash
from diffllm.core.bounds import check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.files import read_json, readable
from diffllm.core.run_facts import RunFacts
from diffllm.core.typed import made

VALUES_FORMAT = 1
SHARED = ("facts", "settings", "texts")
"""Values that many runs have in common."""
MEAN_TOLERANCE = 1e-4
"""Largest relative difference of a loss from the mean over its documents, which are rounded."""


@dataclass(frozen=True)
class Values:
    """Content of values.json: all measured values from which the verdict of a study is computed."""

    format: int
    study: str
    """Name of the study file."""
    sha256: str
    """The field `hash` of `Study`: SHA-256 of the study file and of its profile."""
    study_hash: str
    """Hash of `sha256` and `digests` together."""
    metric: str
    facts: list[RunFacts]
    settings: list[dict[str, str]]
    texts: list[Texts]
    runs: list[dict[str, Any]]
    """The fields of `StudyRun`. Those in SHARED are indices into the lists with these names."""
    rates: list[RateRun]
    marks: dict[str, str]
    """The field `rate_marks` of `Evidence`."""
    digests: dict[str, str]
    """The field `digests` of `Evidence`."""


def values_text(study: Study, evidence: Evidence) -> str:
    """Return the content of values.json as JSON, with one line per run."""
    shared: dict[str, list[Any]] = {name: [] for name in SHARED}
    entries = []
    for run in evidence.runs.values():
        # Not `asdict`, which would copy the shared values of every run.
        entry = {field.name: getattr(run, field.name) for field in fields(run)}
        for name, distinct in shared.items():
            value = entry[name]
            if value is None:
                continue
            if value not in distinct:
                distinct.append(value)
            entry[name] = distinct.index(value)
        entries.append(entry)
    values = Values(
        format=VALUES_FORMAT,
        study=study.path.name,
        sha256=study.hash,
        study_hash=evidence.hash_of(study),
        metric=study.metric,
        **shared,
        runs=entries,
        rates=[*evidence.rates.values()],
        marks=evidence.rate_marks,
        digests=evidence.digests,
    )
    content = asdict(values)
    for rate in content["rates"]:
        # Older versions refuse this key, and can read the file without it.
        if not rate["strayed"]:
            del rate["strayed"]
    return as_lines(content)


def as_lines(content: dict[str, Any]) -> str:
    """Return `content` as JSON with one line per key and, in lists, one line per item."""
    encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
    entries = []
    for key, value in content.items():
        text = encode(value)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(map(encode, value)) + "\n]"
        entries.append(f'"{key}":{text}')
    return "{\n" + ",\n".join(entries) + "\n}\n"


def read_values(study: Study, file: Path) -> Evidence:
    """Read values.json of a study; raises CheckpointError if the content is invalid."""
    with readable(file):
        content = read_json(file)
        try:
            if content.get("format") != VALUES_FORMAT:
                raise ValueError(f"format={content.get('format')!r:.20} must be {VALUES_FORMAT}")
            values = made(Values, content, strict=True)
            check_bounds("", values)
            facts = [whole_numbers(recorded) for recorded in values.facts]
            values = replace(values, facts=facts)
            runs = []
            for i, entry in enumerate(values.runs):
                runs.append(run_of(values, f"runs[{i}]", entry))
            check_values(study, values, runs)
        except (ConfigError, ValueError) as error:
            raise ValueError(f"does not have the values of this study: {error}") from None
    return Evidence(
        runs={run.name: run for run in runs},
        rates={rate.name: rate for rate in values.rates},
        rate_marks=values.marks,
        digests=values.digests,
    )


def whole_numbers(facts: RunFacts) -> RunFacts:
    """Return `facts` with the counts as integers, as JSON should print them."""
    numbers: dict[str, Any] = {}
    for name, value in vars(facts).items():
        if isinstance(value, float) and value.is_integer():
            numbers[name] = int(value)
    return replace(facts, **numbers)


def run_of(values: Values, key: str, entry: dict[str, Any]) -> StudyRun:
    """Return a run of values.json; raises ConfigError or ValueError if a value is invalid."""
    shared: dict[str, Any] = {}
    for name in SHARED:
        place = entry.get(name)
        distinct = getattr(values, name)
        # bool is a subclass of int, but no index.
        if place is None and name == "texts":
            shared[name] = None
        elif type(place) is int and 0 <= place < len(distinct):
            shared[name] = distinct[place]
        else:
            raise ValueError(f"{key}.{name}={place} is out of range of {name}")
    unshared = {name: value for name, value in entry.items() if name not in SHARED}
    run = made(StudyRun, unshared, key, strict=True)
    check_bounds(f"{key}.", run)
    return replace(run, **shared)


def check_values(study: Study, values: Values, runs: list[StudyRun]) -> None:
    """Raise ValueError if values.json is inconsistent or belongs to another study."""
    if values.metric != study.metric:
        raise ValueError(f"metric={values.metric} is not the study's {study.metric}")
    # The hashes of values.json itself: the study file may have changed since.
    expected_hash = study_hash(replace(study, hash=values.sha256), values.digests)
    if values.study_hash != expected_hash:
        raise ValueError("study_hash does not match sha256 and digests")
    for i, texts in enumerate(values.texts):
        lengths = {len(column) for column in vars(texts).values()}
        if len(lengths) != 1 or not texts.tokens:
            raise ValueError(f"texts[{i}] has columns of unequal or no length")
    names = {run.name for run in runs}
    if len(names) < len(runs) or not runs:
        raise ValueError("runs contains a name twice" if runs else "runs is empty")
    check_rates(values)
    planned_runs = planned_by_name(study)
    for run in runs:
        planned = planned_runs.get(run.name)
        is_planned = False
        if planned is not None:
            is_planned = planned.arm == run.arm and planned.seed == run.seed
        if not is_planned or run.name not in values.digests:
            raise ValueError(f"the study has no run {run.name} of arm {run.arm}, seed {run.seed}")
        if run.texts is not None and study.metric not in LOSS_METRICS:
            raise ValueError(f"{run.name}.texts must be null with metric={study.metric}")
        if run.loss is None and run.value is not None:
            raise ValueError(f"{run.name}.value={run.value} of a diverged run must be null")
        if study.metric in LOSS_METRICS and run.value != run.loss:
            raise ValueError(f"{run.name}.value={run.value} must be its loss={run.loss}")
        if len(run.tokens) != len(run.values):
            raise ValueError(f"{run.name}: tokens and values do not form a curve")
        # A run of an older version whose batch changed has tokens that do not increase.
        if not run.strayed and sorted({*run.tokens}) != run.tokens:
            raise ValueError(f"{run.name}.tokens must increase")
        if not run.tokens and any(rule.needs_curve for rule in study.rules):
            raise ValueError(f"{run.name} has no curve")
        if len(run.positions or []) != len(run.position_losses):
            raise ValueError(f"{run.name}: positions and position_losses do not fit")
        check_nats(run)


def check_rates(values: Values) -> None:
    """Raise ValueError if a run of the learning rate grid appears twice or has no mark."""
    names = set()
    for rate in values.rates:
        if rate.name in names:
            raise ValueError(f"rates contains {rate.name} twice")
        if rate.name not in values.marks:
            raise ValueError(f"rates contains {rate.name}, which is not in marks")
        names.add(rate.name)


def check_nats(run: StudyRun) -> None:
    """Raise ValueError if the losses of documents do not have the mean loss of the run.

    The mean loss of a run is not checked if the run measured it on another number of tokens.
    """
    if run.texts is None and run.nats is None:
        return
    if run.texts is None or run.nats is None or len(run.nats) != len(run.texts.tokens):
        raise ValueError(f"{run.name}: nats and texts are of unequal length")
    tokens = sum(run.texts.tokens)
    if run.loss is None or run.facts.heldout_tokens != tokens:
        return
    if None in run.nats:
        raise ValueError(f"{run.name}.nats of a run with a loss must not contain null")
    mean = math.fsum(nats for nats in run.nats if nats is not None) / tokens
    if not math.isclose(mean, run.loss, rel_tol=MEAN_TOLERANCE):
        raise ValueError(
            f"{run.name}.loss={run.loss:g} must be {mean:g}, the sum of its nats over {tokens:,} "
            "tokens"
        )
