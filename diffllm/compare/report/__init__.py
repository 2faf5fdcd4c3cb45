"""Reports that compare runs on disk: one self-contained HTML page and one CSV table."""

from pathlib import Path


def write_report(
    paths: list[Path], baseline: str | None = None, out: Path | None = None
) -> tuple[Path, Path]:
    """Write report.html and report.csv about the runs in `paths`, and return their paths.

    Raises ConfigError if no run can be read, if no run has the variant `baseline`, or if `out`
    cannot be written.

    Args:
        paths: run directories, directories that contain runs, or globs.
        baseline: variant that gaps are measured from; None selects `standard` if a run has it.
        out: directory of both files; None selects the closest directory that contains all `paths`.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import write

    comparison, home = read(paths, baseline)
    return write(comparison, out or home)


def comparison_text(paths: list[Path], baseline: str | None = None) -> str:
    """Return means, gaps and 95% intervals of runs in at most 100 columns, followed by notes.

    Raises ConfigError as `write_report` does.

    Args:
        paths: run directories, directories that contain runs, or globs.
        baseline: variant that gaps are measured from; None selects `standard` if a run has it.
    """
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.page import whole_text

    return whole_text(read(paths, baseline)[0])
