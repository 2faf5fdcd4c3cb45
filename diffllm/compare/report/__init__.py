"""Reports that compare runs on disk: a self-contained HTML page and a CSV table."""

from pathlib import Path


def write_report(
    paths: list[Path], baseline: str | None = None, out: Path | None = None
) -> tuple[Path, Path]:
    """Compare runs in report.html and report.csv; return the paths of both files in this order.

    Raises ConfigError if no run can be read, if no run has the attention variant `baseline`, or if
    `out` cannot be written.

    Args:
        paths: run directories, directories that contain runs, or globs.
        baseline: variant to compare others with; default: `standard` if present, else the first.
        out: directory for both files; default: the closest directory that contains all runs.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.report_page import write_page

    comparison, home = read(paths, baseline)
    return write_page(comparison, out or home)


def comparison_text(paths: list[Path], baseline: str | None = None) -> str:
    """Return a text table of held-out losses and their gaps to the baseline, followed by notes.

    The table contains means over seeds with 95% intervals, in lines of at most 100 characters.
    Raises ConfigError if no run can be read, or if no run has the attention variant `baseline`.

    Args:
        paths: run directories, directories that contain runs, or globs.
        baseline: variant to compare others with; default: `standard` if present, else the first.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.terminal import whole_text

    return whole_text(read(paths, baseline)[0])
