"""Runs on disk side by side: one self-contained page and a table."""

from pathlib import Path


def write_report(
    paths: list[Path], baseline: str | None = None, out: Path | None = None
) -> tuple[Path, Path]:
    """Write report.html and report.csv about the runs in `paths`, and return their paths.

    Raises ConfigError if no run can be read, no run has that variant, or `out` cannot be written.

    Args:
        paths: run directories, directories of runs, globs.
        baseline: the variant that gaps are measured from; None takes `standard` if it is there.
        out: directory of the two files; None is the one that holds all that `paths` name.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import write

    comparison, home = read(paths, baseline)
    return write(comparison, out or home)


def comparison_text(paths: list[Path], baseline: str | None = None) -> str:
    """Means, gaps and 95% intervals of the runs in `paths`, in at most 100 columns, and notes.

    Raises ConfigError as `write_report` does.

    Args:
        paths: run directories, directories of runs, globs.
        baseline: the variant that gaps are measured from; None takes `standard` if it is there.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import whole_text

    return whole_text(read(paths, baseline)[0])
