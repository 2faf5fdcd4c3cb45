"""`train.py -m`: every combination of the swept values is a run of its own, in its own process.

All configs are validated before the first starts. A run that fails does not stop the others. With
run.sweep=<name> an earlier sweep goes on: finished runs say so at once, others resume.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from diffllm.config import TrainConfig, explain, load_config, one_line
from diffllm.distributed.world import environment
from diffllm.errors import ConfigError
from diffllm.run_directory import choose_path


def sweep(words: list[str], launch: Callable[[], None]) -> int:
    """Validate every job of a sweep, launch them through Hydra, report.

    Args:
        words: the overrides of the command line.
        launch: Hydra's entry point; it reads sys.argv.

    Returns:
        0 if every run finished, else 1.

    Raises:
        ConfigError: a job that could not run; nothing has been started.
    """
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException as error:
        raise ConfigError(explain(error, words)) from error
    swept = [o.get_key_element() for o in overrides if o.is_sweep_override()]
    given = {o.get_key_element() for o in overrides}
    if "run.name" in given or "run.dir" in given:
        raise ConfigError("a sweep names its runs: use run.sweep=<name>, not run.name or run.dir")
    added = [f"run.swept=[{','.join(swept)}]"]
    if "run.sweep" not in given:
        added.append(f"run.sweep=sweep-{time.strftime('%Y%m%d-%H%M%S')}")
    sys.argv += added
    jobs = [[*job, *added] for job in combinations(overrides)]
    configs = [load_config(with_name(job)) for job in jobs]
    paths: set[Path] = set()
    for cfg in configs:
        cfg.check_world(environment()[1])
        path = choose_path(cfg)
        if path in paths:
            raise ConfigError(f"two jobs of the sweep would both be the run {path}")
        paths.add(path)
    launch()
    return report(configs)


def combinations(overrides: list[Override]) -> list[list[str]]:
    """The overrides of every job, in Hydra's order."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    own = [o for o in overrides if not o.get_key_element().startswith("hydra")]
    try:
        return BasicSweeper.split_arguments(own, None)[0]
    except HydraException as error:
        raise ConfigError(one_line(error)) from error


def with_name(job: list[str]) -> list[str]:
    """A job's overrides with the run name that its swept values make: diff_v1-lr0.001-seed0."""
    values = dict(word.split("=", 1) for word in job)
    swept = [key for key in values["run.swept"].strip("[]").split(",") if key]
    parts = []
    for key in swept:
        group = "." not in key and key in ("model", "attention", "data", "optim", "experiment")
        label = "" if group else key.rpartition(".")[2]
        parts.append(label + re.sub(r"[^\w.+-]+", "_", values[key]))
    return [*job, f"run.name={'-'.join(parts) or 'run'}"]


def run_job(script: str, hydra: Any) -> None:
    """One job of a sweep, as a child process; signals stop it cleanly and end the sweep."""
    words = with_name(list(hydra.overrides.task))
    environment = {**os.environ, "DIFFLLM_SWEEP_JOB": str(hydra.job.num)}
    print(f"\n{words[-1].partition('=')[2]} ({hydra.job.num + 1})", flush=True)
    child = subprocess.Popen([sys.executable, script, *words], env=environment)
    stopped = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if number == signal.SIGTERM:  # a terminal sends SIGINT to the child itself
            child.send_signal(number)

    previous = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        child.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped:
        sys.exit(130)


def report(configs: list[TrainConfig]) -> int:
    """A line a run: finished with what loss, or not finished."""
    if os.environ.get("RANK", "0") != "0":
        return 0
    unfinished = 0
    print()
    for cfg in configs:
        path = choose_path(cfg)
        file = path / "summary.json"
        if file.is_file():
            summary = json.loads(file.read_text())
            print(f"{path}  held-out loss {summary['heldout_loss']:.4f}")
        else:
            unfinished += 1
            print(f"{path}  FAILED")
    if unfinished:
        again = f"run.sweep={configs[0].run.sweep}"
        print(f"{unfinished} of {len(configs)} runs did not finish; add {again} to go on with them")
    return 1 if unfinished else 0
