"""From paths to a comparison, and from a comparison to files."""

import os
from pathlib import Path

from diffllm.errors import CheckpointError, ConfigError
from diffllm.report.columns import csv_text
from diffllm.report.compare import compare
from diffllm.report.comparison import Comparison
from diffllm.report.find import find_runs
from diffllm.report.runs import Run, load_run
from diffllm.report.sweeps import sweep_notes


def read(paths: list[Path], baseline: str | None = None) -> tuple[Comparison, Path | None]:
    """The comparison of all runs in `paths`, and the directory that its report belongs in, if any.

    A run that cannot be read is a note, and so are a sweep's runs that have not started.

    Raises:
        ConfigError: no run can be read, or none has the baseline's variant.
    """
    found = find_runs(paths)
    runs: list[Run] = []
    unreadable: list[str] = []
    for path in found.runs:
        try:
            runs.append(load_run(path))
        except CheckpointError as error:
            unreadable.append(f"{path} is left out: {error}.")
    if not runs:
        more = f" (and {len(unreadable) - 1} more)" if len(unreadable) > 1 else ""
        raise ConfigError(f"no run can be read: {unreadable[0]}{more}")
    comparison = compare(runs, baseline, found.title)
    waiting = [note for sweep in found.sweeps for note in sweep_notes(sweep)]
    comparison.notes = unreadable + waiting + comparison.notes
    return comparison, found.home


def write(comparison: Comparison, directory: Path | None) -> tuple[Path, Path]:
    """Write report.html and report.csv, each in one step.

    Raises:
        ConfigError: `directory` is None, or cannot be written.

    Returns:
        The page and the table.
    """
    from diffllm.report.page import page

    if directory is None:
        raise ConfigError("the runs share no directory of theirs; choose one with out=DIR")
    texts = {
        directory / "report.html": page(comparison),
        directory / "report.csv": csv_text(comparison),
    }
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for path, text in texts.items():
                partial[path].write_text(text, encoding="utf-8")
            for path in texts:
                partial[path].replace(path)
        finally:
            for path in partial.values():
                path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory} cannot be written ({error.strerror}); choose another with out=DIR"
        ) from error
    html, table = texts
    return html, table
