"""Reports that compare runs on disk: one self-contained HTML page and one CSV table."""

from pathlib import Path


def write_report(
    paths: list[Path], baseline: str | None = None, out: Path | None = None
) -> tuple[Path, Path]:
    """Write report.html and report.csv about the runs in `paths`, and return both paths.

    Raises ConfigError if no run can be read, if no run has the attention variant `baseline`, or if
    `out` cannot be written.

    Args:
        paths: run directories, directories that contain runs, or globs.
        baseline: attention variant that other variants are compared with; None selects `standard`
            if a run has this variant.
        out: directory of both files; None selects the closest directory that contains all `paths`.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import write

    comparison, home = read(paths, baseline)
    return write(comparison, out or home)


def comparison_text(paths: list[Path], baseline: str | None = None) -> str:
    """Return a text table of the runs' mean losses, gaps and 95% intervals, followed by notes.

    The table is at most 100 columns wide. Raises ConfigError if no run can be read, or if no run
    has the attention variant `baseline`.

    Args:
        paths: run directories, directories that contain runs, or globs.
        baseline: attention variant that other variants are compared with; None selects `standard`
            if a run has this variant.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import whole_text

    return whole_text(read(paths, baseline)[0])
