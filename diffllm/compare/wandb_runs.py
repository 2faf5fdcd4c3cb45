"""Write runs and the loss gaps of sweeps to wandb, from their directories."""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.checkpoint.manifest import read_state
from diffllm.compare.report.comparison import Comparison, read
from diffllm.compare.report.curves import rows_of_gaps, sample_gaps, seed_noise
from diffllm.compare.report.rows import Row
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.core.errors import CheckpointError, ConfigError
from diffllm.core.files import read_bytes, readable, write_atomic
from diffllm.core.names import directory_name
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import (
    RunFile,
    RunFolder,
    SweepFile,
    list_checkpoints,
    read_ending,
    read_facts,
    recorded_variables,
)
from diffllm.metrics.history import history
from diffllm.metrics.wandb_config import (
    MODES,
    RUN_ID,
    WandbConfig,
    WandbMode,
    resolve_mode,
    with_defaults,
    with_recorded,
)
from diffllm.metrics.wandb_directories import has_online, is_synced, set_aside, wandb_parent
from diffllm.metrics.wandb_events import events_summary
from diffllm.metrics.wandb_run import WandbRun, init_options
from diffllm.metrics.wandb_start import Upload, new_id, upload
from diffllm.metrics.wandb_uploads import store_uploaded_id, uploaded_id
from diffllm.statistics.estimates import Estimate
from diffllm.training.run_directory import shared_lock
from diffllm.training.wandb_description import wandb_arguments, wandb_ending, with_labels

COMPARISON = "comparison"
"""Job type and default group of the wandb run of a comparison."""
NOISE_FLOOR = "gap/noise_floor"
"""Metric of half the width of the noise floor."""


class Destination(NamedTuple):
    """Values that replace those of the runs."""

    mode: WandbMode
    """online or offline."""
    project: str | None
    """None: the project of the run."""
    entity: str | None
    """None: the entity of the run."""


class WandbIds(NamedTuple):
    """Ids of a run in wandb."""

    recorded: str
    """Id of the wandb run that training writes, see `recorded_id`."""
    uploaded: str | None
    """Id under which `diffllm wandb` has last written the run online; None if it has not."""

    @property
    def newest(self) -> str:
        return self.uploaded or self.recorded


def choose_destination(mode: str, project: str, entity: str) -> Destination:
    """Return the destination for the arguments of the command; empty texts keep values of the runs.

    `mode` is auto, online or offline. Raises ConfigError if WANDB_MODE=disabled applies.
    """
    resolved = resolve_mode(WandbConfig(WandbMode[mode]))
    if resolved not in ("online", "offline"):
        raise ConfigError(f"WANDB_MODE={resolved} writes no run; set mode=online or mode=offline")
    return Destination(WandbMode[resolved], project or None, entity or None)


def write_run(path: Path, destination: Destination) -> dict[str, Any]:
    """Write the steps, config and summary of the run in `path` to wandb, see `upload`.

    If the run is in training, write the steps so far. The run directory changes only in wandb/.
    Raises CheckpointError if the run has no metrics, cannot be read, or is in training with wandb
    online; ConfigError if the server refuses the run.

    Returns:
        "run", "id", "replaces" (id of the run that the server already has, or None), "lines",
        "seconds", "url" (None offline), "directory" (of wandb's files).
    """
    with shared_lock(path) as has_ended:
        cfg = load_run_config(path)
        facts = read_facts(path)
        variables = recorded_variables(facts)
        recorded_config = with_recorded(cfg.wandb, variables, *destination)
        wandb_config = with_labels(recorded_config, cfg, facts, variables)
        ids = ids_of_run(path, facts, wandb_config)
        run_id = ids.newest
        parent = writable_parent(path)
        lines = nonempty_history(path)
        was_online = bool(facts.get("wandb_online")) or has_online(parent, run_id)
        training_mode = None if has_ended else mode_in_training(cfg, variables, was_online)
        if training_mode in ("online", "shared"):
            raise CheckpointError(f"{path} is in training and logs online; wait until it ends")
        options = init_options(
            wandb_config, **wandb_arguments(cfg, path, facts, variables),
            run_id=run_id, variables=variables,
        )  # fmt: skip
        if training_mode == "offline":
            # `wandb sync` will upload the run's own files, under the id of the run.
            options["id"] = new_id()
        elif destination.mode is WandbMode.offline:
            options["id"] = offline_id(parent, run_id, was_online or ids.uploaded is not None)
        summary, exit_code = wandb_ending(read_ending(path) or {})
        summary |= events_summary(path)
        uploaded = upload(destination.mode.value, options, lines, summary, exit_code)
        if destination.mode is WandbMode.online and training_mode != "offline":
            set_aside(parent, run_id)  # Not earlier: the server could have refused the run.
            store_newest_id(path, ids, wandb_config, uploaded.id)
    # A run that trains offline keeps its id, so no wandb run is replaced.
    return as_json(path, uploaded, None if training_mode == "offline" else run_id)


def offline_id(parent: Path, run_id: str, on_server: bool) -> str:
    """Set aside the offline runs `run_id`, and return the id of the next one.

    The id is new if the server has the run: `wandb sync` would append to it.

    Args:
        parent: parent of wandb's directory.
        on_server: whether the run was online.
    """
    on_server = on_server or is_synced(parent, run_id)
    set_aside(parent, run_id)
    return new_id() if on_server else run_id


def store_newest_id(path: Path, ids: WandbIds, cfg: WandbConfig, newest_id: str) -> None:
    """Store the id of a new wandb run of the run in `path`; print a warning if this fails."""
    try:
        store_uploaded_id(path, ids.recorded, cfg, newest_id)
    except CheckpointError as error:
        to_stderr(f"warning: a resume of {path} will not continue {newest_id}: {error}")


def nonempty_history(path: Path) -> Iterator[dict[str, Any]]:
    """Return the result of `history`; raises CheckpointError if the run has no steps."""
    lines = history(path)
    # `history` yields lines: only its first line shows whether there are any.
    first_line = next(lines, None)
    if first_line is None:
        raise CheckpointError(
            f"{path} has no metrics: steps.npy and metrics.jsonl are missing or empty; "
            "train the run first"
        )
    return chain([first_line], lines)


def write_gaps(sweep: Path, destination: Destination) -> dict[str, Any] | None:
    """Write the loss gaps of a sweep or study to wandb; return None if there are no gaps.

    Raises ConfigError if no run can be read, or if the server refuses the run. The result has the
    same keys as that of `write_run`.
    """
    comparison, _ = read([sweep])
    gaps = gap_run(comparison, sweep)
    if gaps is None:
        return None
    parent = writable_parent(sweep)
    run_id = comparison_id(sweep)
    cfg = comparison_config(comparison, sweep, destination)
    options = init_options(cfg, **gaps.arguments, run_id=run_id, variables={})
    if destination.mode is WandbMode.offline:
        options["id"] = offline_id(parent, run_id, has_online(parent, run_id))
    uploaded = upload(destination.mode.value, options, gaps.lines, gaps.summary)
    if destination.mode is WandbMode.online:
        set_aside(parent, run_id)  # Not earlier: the server could have refused the run.
    if uploaded.id != run_id:
        store_comparison_id(sweep, uploaded.id)
    return as_json(sweep, uploaded, run_id)


def comparison_config(
    comparison: Comparison, directory: Path, destination: Destination | tuple[()] = ()
) -> WandbConfig:
    """Return the wandb config of the gaps: that of the first run, with the given destination."""
    first = comparison.rows[0].runs[0]
    cfg = with_recorded(first.cfg.wandb, first.variables, *destination)
    return with_defaults(cfg, COMPARISON, [directory_name(directory)])


def as_json(path: Path, uploaded: Upload, former_id: str | None) -> dict[str, Any]:
    values = {"run": str(path), "replaces": None, **uploaded._asdict()}
    if uploaded.id != former_id:
        values["replaces"] = former_id
    return values


def ids_of_run(path: Path, facts: dict[str, Any], cfg: WandbConfig) -> WandbIds:
    """Return the ids of the run in `path`; raises CheckpointError as `recorded_id`.

    Args:
        facts: content of run.json.
        cfg: result of `with_recorded`.
    """
    run_id = recorded_id(path, facts)
    return WandbIds(run_id, uploaded_id(path, run_id, cfg))


def recorded_id(path: Path, facts: dict[str, Any]) -> str:
    """Return the id of a run in wandb from run.json or the newest checkpoint.

    The id of a run of an older version without both depends on its config and first metrics. Raises
    CheckpointError if config.yaml is then unreadable.
    """
    run_id = facts.get("wandb_id")
    if run_id is None:
        for checkpoint in list_checkpoints(path / RunFolder.CHECKPOINTS)[-1:]:
            run_id = (read_state(checkpoint)["loop"] or {}).get("wandb_id")
    if isinstance(run_id, str) and RUN_ID.fullmatch(run_id):
        return run_id
    with readable(path / RunFile.CONFIG):
        content = read_bytes(path / RunFile.CONFIG)
    first_line = next(history(path), {})
    return hashlib.sha256(content + repr(first_line).encode()).hexdigest()[:8]


def mode_in_training(cfg: TrainConfig, variables: dict[str, str], was_online: bool) -> str:
    """Return the wandb mode of a run that is in training, as its directory shows it.

    Args:
        variables: environment variables that run.json records.
        was_online: whether the wandb run with the id of the run is online.
    """
    if cfg.wandb.mode is not WandbMode.auto:
        return cfg.wandb.mode.value
    default = "online" if was_online else "offline"
    return MODES.get(variables.get("WANDB_MODE", "")) or default


def writable_parent(path: Path) -> Path:
    """Return the result of `wandb_parent`; raises ConfigError if wandb cannot write there."""
    parent = wandb_parent(path)
    directory = parent / RunFolder.WANDB if (parent / RunFolder.WANDB).exists() else parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{directory} cannot be written; set WANDB_DIR to a directory for the files of wandb"
        )
    return parent


class GapRun(NamedTuple):
    """Content of the wandb run of a comparison."""

    arguments: dict[str, Any]
    """Arguments of `init_options`."""
    lines: list[dict[str, Any]]
    """Loss gaps by training tokens; the key "step" counts the lines."""
    summary: dict[str, float]


def gap_run(comparison: Comparison, directory: Path) -> GapRun | None:
    """Return the loss gap of each row to its baseline, over training tokens, as a wandb run.

    `gap/<row>` is the gap in held-out sample loss, and `gap/<row>/low` and `gap/<row>/high` are the
    ends of its 95% interval, which a single seed does not have. The summary contains the gaps of
    the report. `gap/noise_floor` is half the width of the noise floor. Rows that train on different
    numbers of tokens have gaps only in the summary. Return None if no row has a gap.
    """
    rows = [row for row in comparison.rows if row.gap]
    if not rows:
        return None
    values_by_tokens = gaps_by_tokens(comparison, rows)
    lines = []
    for step, tokens in enumerate(sorted(values_by_tokens)):
        lines.append({"step": step, "tokens": tokens, **values_by_tokens[tokens]})
    summary = {}
    for row in rows:
        assert row.gap
        summary.update(gap_values(row.label, row.gap))
    arguments = {
        "directory": directory,
        "job_type": COMPARISON,
        "config": {"baseline": comparison.baseline, "rows": [row.label for row in comparison.rows]},
    }
    return GapRun(arguments, lines, summary)


def gaps_by_tokens(comparison: Comparison, rows: list[Row]) -> dict[int, dict[str, float]]:
    """Return the gaps of `rows` and the noise floor as {training tokens: {metric: nats}}."""
    values: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        assert row.baseline
        for tokens, gap in sample_gaps(row, row.baseline).items():
            values[tokens] |= gap_values(row.label, gap)
    floor = seed_noise(rows_of_gaps(comparison.rows)) if values else None
    if floor:
        points = zip(floor.tokens.tolist(), floor.values.tolist(), strict=True)
        for tokens, half_width in points:
            values[int(tokens)][NOISE_FLOOR] = half_width
    return values


def record_gaps(comparison: Comparison, directory: Path) -> bool:
    """Log the result of `gap_run` to wandb.

    Another call makes a new run if the server has the former run, because wandb cannot replace
    lines, and prints the id of the former run. Otherwise, it replaces the offline run.

    The wandb mode and project come from the config of the first run and from the variables in its
    run.json. If no row has a gap, or if wandb is disabled, log nothing and return False; otherwise
    return True.
    """
    cfg = comparison_config(comparison, directory)
    gaps = gap_run(comparison, directory)
    if gaps is None or resolve_mode(cfg) == "disabled":
        return False
    run_id = comparison_id(directory)
    # `wandb sync` appends to a synced run, so an offline run then has a new id.
    was_online = is_synced(wandb_parent(directory), run_id)
    run = WandbRun(cfg, **gaps.arguments, run_id=run_id, resume=False, was_online=was_online)
    for line in gaps.lines:
        run.log(line)
    run.finish(gaps.summary)
    if run.id != run_id:
        to_stderr(f"wandb: run {run.id} has the gaps; delete the former run {run_id}")
        store_comparison_id(directory, run.id)
    return True


def gap_metrics(label: str) -> list[str]:
    """Return the names of a row's gap and of both ends of its interval."""
    return [f"gap/{label}", f"gap/{label}/low", f"gap/{label}/high"]


def gap_values(label: str, gap: Estimate) -> dict[str, float]:
    numbers = [gap.mean, *(gap.interval or ())]
    # Not strict: a single seed has no interval.
    return dict(zip(gap_metrics(label), numbers, strict=False))


def comparison_id(directory: Path) -> str:
    """Return the id of the wandb run of the comparison in `directory`; choose and store a new id.

    An id derived from the path would not be unique: many sweeps have the same path.
    """
    run_id = stored_comparison_id(directory)
    if run_id is None:
        run_id = new_id()
        store_comparison_id(directory, run_id)
    return run_id


def store_comparison_id(directory: Path, run_id: str) -> None:
    """Store the result of later calls of `stored_comparison_id`; print a warning if this fails."""
    try:
        write_atomic(directory / SweepFile.COMPARISON_ID, f"{run_id}\n")
    except CheckpointError as error:
        to_stderr(f"warning: later calls will write another wandb run with the gaps: {error}")


def stored_comparison_id(directory: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        run_id = (directory / SweepFile.COMPARISON_ID).read_text(encoding="utf-8").strip()
        if re.fullmatch(r"[0-9a-f]{8}", run_id):
            return run_id
    return None
