"""Write docs/configuration.md, docs/metrics.md and the maps of docs/in_60_lines.md: `make docs`."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from diffllm.config.compose import compose_config, variants
from diffllm.config.help import Key, KeySection, choices, sections_of
from diffllm.metrics.metric import Metric
from diffllm.metrics.table import METRICS, SECTIONS

CONFIGURATION = """\
# Configuration

Made by `make docs` from the comments in `conf/` and the docstrings of the config's dataclasses.

A run is a choice in every group and values for keys: `python train.py model=small_125m
attention=diff_v2 optim.lr=6e-4`. `python train.py --help` prints the same for given
choices. Of defaults, the YAML of each choice, `experiment=` and the command line, what comes later
is stronger.
"""
SIZES = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")
MORE_SIZES = ("moe.n_experts", "moe.top_k", "moe.expert_dim")


def configuration() -> str:
    """Return docs/configuration.md: choices, shapes of the models, keys of each section."""
    parts = [CONFIGURATION, "## Choices\n"]
    for group, options in choices().items():
        rows = "\n".join(f"| `{group}={name}` | {cell(words)} |" for name, words in options.items())
        parts.append(f"| `{group}=` | |\n|---|---|\n{rows}\n")
    parts += ["## Shapes of the models\n", shapes(), "## Keys\n"]
    sections = list(sections_of(compose_config(["experiment=none"])))
    for section in sections:
        if section.name == "model.attention":
            parts += attention_sections()
        else:
            heading = f"### {section.name}\n\n{section.title}\n" if section.name else ""
            parts.append(heading + ("\n" if heading else "") + table(section.keys))
    return "\n".join(parts)


def shapes() -> str:
    """Return a table of the models' sizes."""
    head = ["`model=`", *SIZES, *MORE_SIZES, "optim.lr"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in choices()["model"]:
        cfg = compose_config([f"model={name}"])
        keys = (*SIZES, *MORE_SIZES) if cfg.model.moe.n_experts else SIZES
        shown = [f"{OmegaConf.select(cfg.model, key) or 0:,}" for key in keys]
        shown += [""] * (len(head) - 2 - len(shown)) + [f"{cfg.optim.lr:g}"]
        lines.append(f"| `{name}` | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def attention_sections() -> list[str]:
    """Return a table for each config class of attention, with the names that use the class."""
    names: dict[type, list[str]] = {}
    sections: dict[type, KeySection] = {}
    for name in variants():
        cfg = compose_config([f"attention={name}"])
        (section,) = (s for s in sections_of(cfg) if s.name == "model.attention")
        names.setdefault(section.config, []).append(name)
        sections.setdefault(section.config, section)  # the plainest name comes first
    return [
        f"### model.attention of {', '.join(names[config])}\n\n{section.title}\n\n"
        + table(section.keys)
        for config, section in sections.items()
    ]


def table(keys: list[Key]) -> str:
    head = "| Key | Default | Meaning |\n|---|---|---|\n"
    return head + "".join(
        f"| `{key.name}` | `{key.default}` | {cell(words_of(key))} |\n" for key in keys
    )


def words_of(key: Key) -> str:
    values = ", ".join(f"`{value}`" for value in key.allowed)
    return " ".join(filter(None, [key.meaning, f"Values: {values}." if values else ""]))


def cell(text: str) -> str:
    return re.sub(r"([|*])", r"\\\1", text)


METRICS_HEAD = """\
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


def metrics() -> str:
    """Return docs/metrics.md: one table for each title of a section."""
    parts = [METRICS_HEAD]
    for title in dict.fromkeys(section.title for section in SECTIONS):
        rows = [line_of(metric) for metric in METRICS if metric.section.title == title]
        head = "| Name | Meaning | Unit | Combined | Kept |\n|---|---|---|---|---|"
        parts.append(f"## {title}\n\n{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def line_of(metric: Metric) -> str:
    combined = ", ".join(filter(None, ("probe" if metric.probe else "", metric.combine)))
    cells = (f"`{metric.name}`", metric.meaning, metric.unit, combined, metric.summary)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def write_maps(page: Path, picture: Path) -> None:
    """Run the code of docs/in_60_lines.md and draw its maps."""
    from matplotlib.figure import Figure

    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for ax, title in zip(axes, ("map 1", "map 2", "difference"), strict=True):
        weights = names[title.replace(" ", "")]
        image = ax.imshow(weights, cmap="RdBu_r", vmin=-0.6, vmax=0.6)
        ax.set_title("map 1 - 0.8 map 2" if title == "difference" else title)
        ax.set_xticks(range(len(weights)), names["tokens"], rotation=45)
        ax.set_yticks(range(len(weights)), names["tokens"] if ax is axes[0] else [])
        for t, s in zip(*np.tril_indices(len(weights)), strict=True):
            ax.text(
                s,
                t,
                f"{weights[t, s]:.2f}",
                ha="center",
                va="center",
                fontsize=7,
                color="w" if weights[t, s] > 0.45 else "k",
            )
    axes[0].set_ylabel("query")
    figure.supxlabel("key")
    figure.colorbar(image, ax=axes, label="weight")
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    docs = Path(__file__).parent
    write_maps(docs / "in_60_lines.md", docs / "images" / "maps.png")
    (docs / "configuration.md").write_text(configuration())
    (docs / "metrics.md").write_text(metrics())
