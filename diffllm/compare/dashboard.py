"""Content of a wandb dashboard of a sweep, a study or a project, with the sections of report.html.

`Dashboard` describes the panels and the selection of runs. `wandb_views.py` makes the workspace and
the report from this description.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.figures import MUTED, STYLED, row_styles, variant_style
from diffllm.compare.report.page import loss_table, stored_comparison_id
from diffllm.compare.report.rows import Row
from diffllm.compare.report.runs import Run
from diffllm.core.errors import ConfigError
from diffllm.metrics.panels import Panel, PanelSection, panels_of, sections_by_title
from diffllm.metrics.table import GAPS
from diffllm.metrics.wandb_run import (
    LONGEST_TAG,
    WandbConfig,
    WandbMode,
    resolve_mode,
    with_recorded,
)
from diffllm.metrics.wandb_uploads import uploaded_id

NOISE_FLOOR = "gap/noise_floor"
LEAST_RUNS, PROJECT_RUNS = 10, 100
"""Lower bound of runs per panel, and runs per panel in the dashboard of a project."""


@dataclass(frozen=True)
class Dashboard:
    """Content of a dashboard, independent of wandb."""

    title: str
    project: str
    entity: str
    """User or team that owns the project; empty if only the server knows the default."""
    sections: list[PanelSection]
    tags: list[str] = field(default_factory=list)
    """Runs with one of these tags are shown. Without tags and `run_colours`, all runs are shown."""
    run_colours: dict[str, str] = field(default_factory=dict)
    """Colour of each run, by wandb id."""
    group_colours: dict[str, str] = field(default_factory=dict)
    """Colour of each row, by wandb group."""
    baseline: list[str] = field(default_factory=list)
    """wandb ids of the runs of the baseline; these runs are pinned."""
    comparison: str | None = None
    """wandb id of the run with the gaps over tokens."""
    gap_colours: dict[str, str] = field(default_factory=dict)
    """Colour of each line with a gap, by metric."""

    @property
    def most_runs(self) -> int:
        """Number of runs that each panel shows: all runs of a sweep, and the comparison."""
        return max(LEAST_RUNS, len(self.run_colours) + 1) if self.run_colours else PROJECT_RUNS


def project_dashboard(project: str, entity: str) -> Dashboard:
    """Return the dashboard of all runs of a wandb project, with the panels of all metrics."""
    gaps = [Panel("Gaps to the baselines", (), pattern="^gap/")]
    sections = make_sections(None, gaps)
    colours = {variant: variant_style(variant)[0] for variant in STYLED}
    return Dashboard(f"diffllm {project}", project, entity, sections, group_colours=colours)


def comparison_dashboard(
    comparison: Comparison,
    directory: Path,
    title: str,
    entity: str = "",
    mode: WandbMode | None = None,
) -> Dashboard:
    """Return the dashboard of compared runs.

    Panels of metrics that no run logged are omitted. Raises ConfigError if no run was logged to
    wandb, or if the runs are in several projects.

    Args:
        directory: directory of the report, which can contain the id of the wandb run with the gaps.
        entity: user or team; empty: the entity of the runs.
        mode: replaces the mode of the runs, because `diffllm wandb` also writes disabled runs.
    """
    runs = [run for row in comparison.rows for run in row.runs]
    configs = {}
    for run in runs:
        cfg = with_recorded(run.cfg.wandb, run.variables, mode)
        if resolve_mode(cfg) != "disabled" and wandb_id(run, cfg):
            configs[run.path] = cfg
    if not configs:
        raise ConfigError(
            f"no run of {title} was logged to wandb (wandb.mode=disabled); write the runs with "
            "diffllm wandb sweep=DIR mode=online, then add mode=online"
        )
    projects = sorted({cfg.project or "" for cfg in configs.values()})
    if len(projects) > 1:
        raise ConfigError(
            f"the runs of {title} are in several wandb projects ({', '.join(projects)}); "
            "name runs of one project with sweep=DIR"
        )
    names = {name for run in runs for name in run.metrics.columns}
    styles = row_styles(comparison.rows)
    run_colours: dict[str, str] = {}
    group_colours: dict[str, str] = {}
    gap_colours = {NOISE_FLOOR: MUTED}
    for row, style in zip(comparison.rows, styles, strict=True):
        gap_colours |= dict.fromkeys(gap_metrics(row), style.colour)
        for run in row.runs:
            if recorded := configs.get(run.path):
                group = run.facts.get("wandb_group") or recorded.group or run.variant
                run_colours[wandb_id(run, recorded)] = style.colour
                group_colours.setdefault(group, style.colour)
    comparison_run = stored_comparison_id(directory)
    baseline_runs = [run for row in comparison.rows if row.is_baseline for run in row.runs]
    return Dashboard(
        f"diffllm {title}",
        projects[0],
        entity or next((cfg.entity for cfg in configs.values() if cfg.entity), ""),
        make_sections(names, gap_panels(comparison, comparison_run is not None)),
        sweep_tags(runs, directory),
        run_colours,
        group_colours,
        [wandb_id(run, configs[run.path]) for run in baseline_runs if run.path in configs],
        comparison_run,
        gap_colours,
    )


def make_sections(names: Collection[str] | None, gaps: list[Panel]) -> list[PanelSection]:
    """Return the sections that have panels; `names` is as in `panels_of`."""
    sections = []
    for title, of_title in sections_by_title().items():
        panels = panels_of(of_title, names)
        if title == GAPS.report:
            panels += gaps
        if panels:
            sections.append(PanelSection(title, tuple(panels)))
    return sections


def gap_panels(comparison: Comparison, over_tokens: bool) -> list[Panel]:
    """Return the table of the gaps at the end and, if `over_tokens`, one panel per row."""
    rows = [row for row in comparison.rows if row.gap]
    if not rows:
        return []
    panels = [Panel("Gaps at the end", (), axis="", text=loss_table(comparison).markdown())]
    if over_tokens:
        for row in rows:
            panels.append(Panel(f"Gap of {row.label}", (*gap_metrics(row), NOISE_FLOOR)))
    return panels


def gap_metrics(row: Row) -> list[str]:
    """Return the names of a row's gap and the ends of its interval, as `record_gaps` logs them."""
    return [f"gap/{row.label}{end}" for end in ("", "/low", "/high")]


def wandb_id(run: Run, cfg: WandbConfig) -> str:
    """Return the id of a run in wandb; empty if run.json is missing or damaged.

    `cfg` is the result of `with_recorded`.
    """
    recorded_id = run.facts.get("wandb_id") or ""
    return uploaded_id(run.path, recorded_id, cfg) or recorded_id


def sweep_tags(runs: list[Run], directory: Path) -> list[str]:
    """Return the tags of the sweeps of `runs` and of their comparison.

    If a run has no such tag, as in a study, return [].
    """
    sweeps = [run.cfg.run.sweep for run in runs]
    tags = [sweep[:LONGEST_TAG] for sweep in sweeps if sweep]
    if len(tags) < len(runs):
        return []
    tags.append(os.path.basename(os.path.abspath(directory))[:LONGEST_TAG])
    return list(dict.fromkeys(tags))
