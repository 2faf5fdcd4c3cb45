"""python -m diffllm.metrics.document: the table of metrics as docs/metrics.md."""

from diffllm.metrics.metric import Metric
from diffllm.metrics.table import METRICS, SECTIONS
from diffllm.printing import echo

HEAD = """\
# Metrics

Made by `make docs` from the rows of `diffllm/metrics/table.py`.

`metrics.jsonl` and wandb have the same names. `/*` stands for a layer, as in `/layer_03`, or a
group of parameters; `_*` for a head and a layer, as in `lambda_head_00/layer_03`. Statistics of
layers are taken every `diagnostics.interval` steps, those marked "probe" every
`diagnostics.probe_interval`, from explicit maps of `diagnostics.probe_queries` query positions; the
others are of logged steps.

"Combined" says how the values of a step's micro-batches and ranks become one: `rms` is the root of
the mean of their squares. Where nothing is said, the value is that of the whole global batch, or of
the run so far. "Kept" is the value of a run that wandb's table of runs shows.
"""


def document() -> str:
    """The page, one table a section of the dashboard."""
    parts = [HEAD]
    for title in dict.fromkeys(section.dashboard for section in SECTIONS):
        rows = [line_of(metric) for metric in METRICS if metric.section.dashboard == title]
        head = "| Name | Meaning | Unit | Combined | Kept |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def line_of(metric: Metric) -> str:
    """One line of a table."""
    combined = ", ".join(filter(None, ("probe" if metric.probe else "", metric.combine)))
    cells = (f"`{metric.name}`", metric.meaning, metric.unit, combined, metric.summary)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    echo(document(), end="")
