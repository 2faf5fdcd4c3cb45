"""Tasks of lm-evaluation-harness on a checkpoint, by lm-eval's own class for transformers' models.

The model is the one of our modelling file with the checkpoint's parameters, in memory. lm-eval and
transformers are extras, and slow to import: nothing here imports them before they are needed.
"""

import difflib
import hashlib
import inspect
import json
import logging
import math
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.metadata import version
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from diffllm.data.tokenizer_files import tokenizer_of
from diffllm.errors import ConfigError
from diffllm.evaluation.evaluation import Asked, Evaluation, Line, Score, Settings, Subject
from diffllm.evaluation.suite import HARNESS

ZERO_SHOT = ("arc_challenge", "arc_easy", "boolq", "hellaswag", "openbookqa", "piqa", "winogrande")
"""The tasks of table 1 of the Differential Transformer (arXiv 2410.05258), by lm-eval's names."""
Z = 1.96
"""Standard errors in half of a 95% interval."""
SCORES = 1
"""Changed whenever results change, so that older ones are made anew."""
ROWS = 64
"""Most texts of a batch."""
LOGITS = {"cpu": 2**28, "cuda": 2**30}
"""Most logits of a batch of texts that are as long as the model takes: lm-eval holds them twice, in
float32."""
RESAMPLES = 1000
"""Bootstrap samples behind the standard error of a metric that is no mean."""
SEED = 1234
"""The seed of lm-eval's own command, for the examples of a prompt and for sampling."""
LIBRARIES = ("lm_eval", "datasets", "huggingface_hub", "transformers", "fsspec")
FAULTS = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, TemplateError)
"""Errors of a task that is faulty, or that asks for more tokens than the model takes."""


class HarnessTask(Evaluation):
    """A task of lm-eval, or of YAML files in its format.

    Its scores are the metrics that are finite numbers, with 95% intervals where lm-eval has a
    standard error. Its first line has them, too, and how many requests were longer than the model
    takes and lost their beginnings ("shortened"); then come the samples, as lm-eval logs them.
    """

    unit = "metric of lm-eval"

    def __init__(self, name: str, task: Any, opened: "Opened"):
        self.name, self.task, self.opened = name, task, opened

    @property
    def file(self) -> str:
        return f"lm_eval-{re.sub(r'[^A-Za-z0-9_.-]', '_', self.name)[:200]}.jsonl"

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        """Return what a result depends on, the task's documents included."""
        documents, task = hashlib.sha256(), self.task
        with of_task(self.name, "loaded", (Exception,)):
            examples = task.fewshot_docs() if task.get_config("num_fewshot") else None
            for document in chain(islice(task.eval_docs, asked.limit), examples or ()):
                documents.update(json.dumps(plain(document), sort_keys=True).encode())
        return {
            "version": [version("lm_eval"), SCORES],
            "limit": asked.limit,
            "config": hash_of(plain(task.dump_config())),
            "documents": documents.hexdigest(),
        }

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        """Run the task; raises ConfigError where it cannot be run."""
        model, limit = self.opened.model_of(subject), settings["limit"]
        from lm_eval.evaluator import evaluate

        if self.task.get_config("num_fewshot") is None:
            self.task.set_config("num_fewshot", 0)
        self.task.set_fewshot_seed(SEED)
        random.seed(0)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        with of_task(self.name, "run", FAULTS):
            tasks = {"tasks": {self.name: self.task}}
            found = evaluate(lm=model, task_dict=tasks, limit=limit, bootstrap_iters=RESAMPLES)
        assert found is not None
        samples = found["samples"][self.name]
        metrics: Mapping[str, Any] = found["results"][self.name]
        result = {
            "values": numbers(metrics, stderr=False),
            "stderr": numbers(metrics, stderr=True),
            "samples": found["n-samples"][self.name]["effective"],
            "shortened": shortened(subject, samples),
            "shots": found["n-shot"][self.name],
            "version": found["versions"][self.name],
        }
        return [plain(result), *map(plain, samples)]

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[Score]:
        result = lines[0]
        more = {key: result[key] for key in ("shortened", "shots", "version")}
        found = []
        for metric, value in result["values"].items():
            error = result["stderr"].get(metric)
            interval = None if error is None else (value - Z * error, value + Z * error)
            found.append(Score(metric, value, interval, result["samples"], None, more))
        return found


class Opened:
    """The model of the checkpoint that was looked at last, as lm-eval takes it."""

    def __init__(self) -> None:
        self.subject: Subject | None = None
        self.model: Any = None

    def model_of(self, subject: Subject) -> Any:
        """Return a checkpoint as a model of lm-eval, made once."""
        if self.subject is not subject:
            self.subject, self.model = subject, language_model(subject)
        return self.model


def harness_tasks(names: Sequence[str], include: Path | None = None) -> list[HarnessTask]:
    """Load tasks by lm-eval's names, with their data; a group or a tag is its tasks.

    Raises ConfigError for unknown ones, without lm-eval, or where data cannot be reached.

    Args:
        names: without any, the seven zero-shot ones.
        include: directory of YAML tasks of one's own, which come before those of lm-eval.
    """
    names = list(dict.fromkeys(names)) or list(ZERO_SHOT)
    index, opened = index_of(names, include), Opened()
    return [
        HarnessTask(leaf, task, opened)
        for name in names
        for leaf, task in loaded(index, name).items()
    ]


def index_of(names: Sequence[str], include: Path | None) -> Any:
    """Return a `TaskManager` of lm-eval that knows these names; raises ConfigError for others."""
    if include is not None and not include.is_dir():
        raise ConfigError(f"include={include} is not a directory")
    with extras(), quiet():
        from lm_eval.tasks import TaskManager
    with quiet():
        if include is not None:  # lm-eval's own are thousands of files
            own = TaskManager(include_path=str(include), include_defaults=False)
            if set(names) <= set(own.all_subtasks):
                return own
        index = TaskManager(include_path=str(include) if include is not None else None)
    for name in names:
        if name not in index.task_index:
            close = difflib.get_close_matches(name, index.all_tasks, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            where = f" or of include={include}" if include is not None else ""
            raise ConfigError(
                f"tasks: {name} is no task of lm-eval{where}; `lm-eval ls tasks` lists them{hint}"
            )
    return index


@contextmanager
def extras() -> Iterator[None]:
    """A context for imports of extras; raises ConfigError where one is missing."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"suite={HARNESS} needs lm-eval: pip install 'diffllm[lm-eval]' ({error})"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which standard output stays free for results: libraries print to standard error,
    and of what they log and warn only errors are said."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    levels = [logger.level for logger in loggers]
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


@contextmanager
def of_task(name: str, asked: str, faults: tuple[type[Exception], ...]) -> Iterator[None]:
    """A quiet context that runs code of a task; raises ConfigError, one line, for its faults."""
    try:
        with quiet():
            yield
    except faults as error:
        from tqdm import tqdm

        for bar in list(getattr(tqdm, "_instances", ())):
            bar.close()  # or the message would stand behind it
        raise ConfigError(f"tasks: {name} cannot be {asked}: {described(error)}") from error


def loaded(index: Any, name: str) -> dict[str, Any]:
    """Load a task, or those of a group or a tag, with their data; raises ConfigError."""
    import datasets

    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        with of_task(name, "loaded", (Exception,)):  # of the hub, files, YAML, or its own code
            return dict(index.load([name])["tasks"])
    finally:
        if shown:
            datasets.utils.enable_progress_bars()


def described(error: Exception) -> str:
    """Return an error's kind, and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def hash_of(value: Any) -> str:
    """Return the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def language_model(subject: Subject) -> Any:
    """Return a checkpoint as a model of lm-eval."""
    with extras(), quiet():
        from lm_eval.models.huggingface import HFLM

        from diffllm.interop.in_memory import as_fast, as_transformers
    cfg = subject.model.cfg
    path = tokenizer_of(subject.run)
    device = subject.model.tok_embeddings.weight.device
    most = LOGITS["cuda" if device.type == "cuda" else "cpu"] // (cfg.seq_len * cfg.vocab_size)
    with quiet():
        return HFLM(
            pretrained=as_transformers(subject.model, subject.tokenizer),
            tokenizer=as_fast(path, subject.tokenizer, cfg.seq_len),
            max_length=cfg.seq_len,
            batch_size=max(1, min(ROWS, most)),
            add_bos_token=False,
        )


def numbers(metrics: Mapping[str, Any], stderr: bool) -> dict[str, float]:
    """Return those of lm-eval's metrics that are finite numbers, or their standard errors.

    lm-eval calls them "acc,none" and "acc_stderr,none", where "none" is a filter of the answers;
    the name of another one is kept, in brackets.
    """
    found = {}
    for key, value in metrics.items():
        metric, comma, of = key.partition(",")
        if not comma or metric.endswith("_stderr") != stderr:
            continue
        if isinstance(value, int | float | np.number) and math.isfinite(value):
            metric = metric.removesuffix("_stderr")
            found[metric if of == "none" else f"{metric} ({of})"] = float(value)
    return found


def shortened(subject: Subject, samples: Sequence[Mapping[str, Any]]) -> int:
    """Count the requests that are longer than the model takes; lm-eval drops their first tokens."""
    from lm_eval.models.utils import normalize_gen_kwargs

    length = subject.model.cfg.seq_len
    texts, rooms = [], []
    for sample in samples:
        if sample["filter"] != samples[0]["filter"]:
            continue  # the same requests once more
        for request in sample["arguments"]:
            if len(request) < 2:
                continue  # of a whole text, which lm-eval reads in windows
            context, other = request[:2]
            if isinstance(other, str):
                texts.append(context + other)
                rooms.append(length + 1)  # the last token is no input
            else:
                texts.append(context)
                with quiet():
                    rooms.append(length - normalize_gen_kwargs(other, 256)["max_gen_toks"])
    spelt = subject.tokenizer.encode_batch(texts, threads=1)
    return sum(len(ids) > room for ids, room in zip(spelt, rooms, strict=True))


def plain(value: Any) -> Any:
    """Return a value as JSON has it: functions as their source, what is no finite number as null,
    all else that JSON does not know as text."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if callable(value):
        try:
            return inspect.getsource(value)
        except (TypeError, OSError):
            return getattr(value, "__qualname__", type(value).__name__)
    return str(value)
