"""Read and write values.json: all measured values from which a study's verdict is computed.

A verdict computed from values.json equals the verdict computed from the run directories.
benchmarks/results/recompute.py also reads this file. The class `Values` describes the format.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from diffllm.compare.arms.run import Series
from diffllm.compare.study.arms import StudyRun
from diffllm.compare.study.evidence import Evidence
from diffllm.compare.study.file import Study
from diffllm.compare.study.planned_runs import planned_by_name
from diffllm.compare.study.study_hash import study_hash
from diffllm.compare.study.trend_data import PositionLosses
from diffllm.core.files import read_json, readable
from diffllm.core.typed import made
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.metrics.facts import RunFacts
from diffllm.metrics.records import LARGEST

FORMAT = 1
SHARED = (
    "name", "seed", "lr", "loss", "value", "planned_tokens", "vocab_size", "variant", "mark",
    "plugin_code", "strayed", "thin", "chance", "training_flops", "train_seconds",
)  # fmt: skip
"""Fields that `RunValues` and `StudyRun` have in common."""
T = TypeVar("T")


@dataclass(frozen=True)
class Texts:
    """Properties of the held-out documents that one or more runs were measured on.

    Each list has one entry per document. `tokens` and `bytes` contain the document's length in
    tokens and in bytes. `texts` contains the first 8 bytes of the text's SHA-256 as an integer.
    `sources` contains the index of the data source.
    """

    tokens: list[int]
    bytes: list[int]
    texts: list[int]
    sources: list[int]


@dataclass(frozen=True)
class RunValues:
    """A run in values.json that the rules of a study compare.

    Fields without an own docstring have the same meaning as in `StudyRun`. `facts`, `settings` and
    `texts` are indices into the lists with the same names in `Values`.
    """

    name: str
    arm: str
    seed: int
    lr: float
    loss: float | None
    value: float | None
    planned_tokens: int
    vocab_size: int
    variant: str
    mark: str
    facts: int
    settings: int
    tokens: list[int]
    values: list[float | None]
    """The metric after each number of training tokens in `tokens`."""
    texts: int | None = None
    nats: list[float | None] | None = None
    """Summed loss of each document."""
    reached: dict[str, list[float]] = field(default_factory=dict)
    """[tokens, 1] for each target value of a log-rank rule; [tokens, 0] if it was not reached."""
    plugin_code: dict[str, str] = field(default_factory=dict)
    strayed: str = ""
    thin: str = ""
    chance: float | None = None
    training_flops: float | None = None
    train_seconds: float | None = None
    positions: list[float] | None = None
    position_losses: list[float | None] = field(default_factory=list)
    position_settings: str = ""
    """`positions`, `position_losses` and `position_settings` are the fields of `PositionLosses`."""


@dataclass(frozen=True)
class RateValues:
    """A run in a grid of learning rates, with its final held-out loss (None if it diverged)."""

    name: str
    loss: float | None


@dataclass(frozen=True)
class Values:
    """Content of values.json: all measured values from which the verdict of a study is computed.

    `facts`, `settings` and `texts` contain each distinct value once. Each entry of `runs` contains
    indices into these lists.
    """

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
    runs: list[RunValues]
    rates: list[RateValues]
    marks: dict[str, str]
    """The field `rate_marks` of `Evidence`."""
    digests: dict[str, str]
    """The field `digests` of `Evidence`."""


def values_text(study: Study, evidence: Evidence) -> str:
    """Return the content of values.json as JSON, with one line per run."""
    facts: list[RunFacts] = []
    settings: list[dict[str, str]] = []
    texts: list[Texts] = []
    planned = planned_by_name(study)
    levels = [rule.reaches for rule in study.rules if rule.reaches is not None]
    runs = []
    for name, run in evidence.runs.items():
        documents = None
        if run.documents is not None:
            columns = (
                getattr(run.documents, key) for key in ("tokens", "bytes", "texts", "sources")
            )
            documents = Texts(*(column.tolist() for column in columns))
        runs.append(
            RunValues(
                **{key: getattr(run, key) for key in SHARED},
                arm=planned[name].arm,
                facts=place_of(run.facts, facts),
                settings=place_of(run.settings, settings),
                tokens=run.curve.tokens.tolist(),
                values=plain(run.curve.values),
                texts=None if documents is None else place_of(documents, texts),
                nats=None if run.documents is None else plain(run.documents.nats),
                reached={f"{level:g}": [*map(float, run.reached(level))] for level in levels},
                positions=run.positions and run.positions.positions.tolist(),
                position_losses=plain(run.positions.losses) if run.positions else [],
                position_settings=run.positions.settings if run.positions else "",
            )
        )
    rates = [
        RateValues(name, loss if math.isfinite(loss) else None)
        for name, loss in evidence.rates.items()
    ]
    found = Values(
        FORMAT, study.path.name, study.hash, evidence.hash_of(study), study.metric, facts, settings,
        texts, runs, rates, evidence.rate_marks, evidence.digests,
    )  # fmt: skip
    return as_lines(asdict(found))


def place_of(value: T, known: list[T]) -> int:
    """Return the index of `value` in `known`; first append `value` if it is missing."""
    if value not in known:
        known.append(value)
    return known.index(value)


def plain(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def as_lines(content: dict[str, Any]) -> str:
    """Return `content` as JSON with one line per key and, in lists, one line per item."""

    def compact(value: Any) -> str:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))

    def lines(value: Any) -> str:
        if not isinstance(value, list) or not value:
            return compact(value)
        return "[\n" + ",\n".join(map(compact, value)) + "\n]"

    return "{\n" + ",\n".join(f'"{key}":{lines(v)}' for key, v in content.items()) + "\n}\n"


def read_values(study: Study, file: Path) -> Evidence:
    """Read values.json of a study; raises CheckpointError if the content is invalid."""
    with readable(file):
        content = read_json(file)
        try:
            if content.get("format") != FORMAT:
                raise ValueError(f"format={content.get('format')!r:.20} must be {FORMAT}")
            found = made(Values, content, strict=True)
            check_values(study, found)
            return evidence_of(found)
        except ValueError as error:
            raise ValueError(f"does not have the values of this study: {error}") from None


def check_values(study: Study, found: Values) -> None:
    """Raise ValueError if values.json is inconsistent or belongs to another study."""
    if found.metric != study.metric:
        raise ValueError(f"metric={found.metric} is not the study's {study.metric}")
    if found.study_hash != study_hash(replace(study, hash=found.sha256), found.digests):
        raise ValueError("study_hash does not match sha256 and digests")
    for i, facts in enumerate(found.facts):
        for name in ("parameters", "flops_per_token"):
            check_number(f"facts[{i}].{name}", getattr(facts, name), above=0)
    for i, texts in enumerate(found.texts):
        columns = [getattr(texts, each.name) for each in fields(texts)]
        if len({*map(len, columns)}) != 1 or not texts.tokens:
            raise ValueError(f"texts[{i}] has columns of unequal or no length")
        if min(texts.tokens) < 1 or min(texts.bytes) < 0:
            raise ValueError(f"texts[{i}] has documents without tokens")
    planned, digests = planned_by_name(study), found.digests
    names = [run.name for run in found.runs]
    if len({*names}) < len(names) or not names:
        raise ValueError("runs contains a name twice" if names else "runs is empty")
    for rate in found.rates:
        check_number(f"{rate.name}.loss", rate.loss)
    for run in found.runs:
        own = planned.get(run.name)
        if own is None or (own.arm, own.seed) != (run.arm, run.seed) or run.name not in digests:
            raise ValueError(f"the study has no run {run.name} of arm {run.arm}, seed {run.seed}")
        check_run(study, found, run)


def check_run(study: Study, found: Values, run: RunValues) -> None:
    for key, place in (("facts", run.facts), ("settings", run.settings), ("texts", run.texts)):
        if place is not None and not 0 <= place < len(getattr(found, key)):
            raise ValueError(f"{run.name}.{key}={place} is out of range of {key}")
    check_number(f"{run.name}.lr", run.lr, above=0)
    check_number(f"{run.name}.vocab_size", run.vocab_size, above=0)
    for name in ("training_flops", "train_seconds"):
        check_number(f"{run.name}.{name}", getattr(run, name), above=0)
    numbers = [run.loss, run.value, run.chance, *run.values, *run.tokens, run.planned_tokens]
    for number in [*numbers, *(run.nats or [])]:
        check_number(run.name, number)
    if run.loss is None and run.value is not None:
        raise ValueError(f"{run.name}.value={run.value} of a diverged run must be null")
    if min([run.planned_tokens, *run.tokens]) < 0 or len(run.tokens) != len(run.values):
        raise ValueError(f"{run.name}: tokens and values do not form a curve")
    if not run.tokens and any(rule.needs_curve for rule in study.rules):
        raise ValueError(f"{run.name} has no curve")
    places = run.positions or []
    if len(places) != len(run.position_losses) or min(places, default=1) <= 0:
        raise ValueError(f"{run.name}: positions and position_losses do not fit")
    for number in [*places, *run.position_losses]:
        check_number(f"{run.name}.positions", number)
    expected = None if run.texts is None else len(found.texts[run.texts].tokens)
    if expected != (None if run.nats is None else len(run.nats)):
        raise ValueError(f"{run.name}: nats and texts are of unequal length")


def check_number(where: str, value: float | None, above: float = -math.inf) -> None:
    if value is not None and not (abs(value) <= LARGEST and value > above):
        raise ValueError(f"{where}={value} is out of range")


def evidence_of(found: Values) -> Evidence:
    runs = {run.name: run_of(found, run) for run in found.runs}
    rates = {rate.name: math.inf if rate.loss is None else rate.loss for rate in found.rates}
    return Evidence(runs, rates, found.marks, found.digests)


def run_of(found: Values, run: RunValues) -> StudyRun:
    documents = None
    if run.nats is not None and run.texts is not None:
        nats = np.array(run.nats, np.float64)
        columns = asdict(found.texts[run.texts])
        texts = {name: np.array(column, np.int64) for name, column in columns.items()}
        documents = DocumentLosses(nats=nats, **texts)
    positions = None
    if run.positions is not None:
        places, losses = (np.array(x, np.float64) for x in (run.positions, run.position_losses))
        positions = PositionLosses(places, losses, run.position_settings)
    facts = found.facts[run.facts]
    whole: dict[str, Any] = {
        name: int(value)
        for name, value in vars(facts).items()
        if isinstance(value, float) and value.is_integer()
    }
    return StudyRun(
        **{key: getattr(run, key) for key in SHARED},
        curve=Series(np.array(run.tokens, np.int64), np.array(run.values, np.float64)),
        documents=documents,
        facts=replace(facts, **whole),
        settings=found.settings[run.settings],
        positions=positions,
        digest=found.digests[run.name],
    )
