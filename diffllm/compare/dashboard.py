"""Content of a wandb dashboard of a sweep, a study or a project, with the sections of report.html.

`Dashboard` describes the panels and the selection of runs. `wandb_views.py` makes the workspace and
the report from this description.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.figures import MUTED
from diffllm.compare.report.styles import STYLED, row_styles, variant_style
from diffllm.compare.report.terminal import loss_table
from diffllm.compare.wandb_runs import NOISE_FLOOR, gap_metrics, ids_of_run, stored_comparison_id
from diffllm.core.errors import ConfigError
from diffllm.metrics.panels import Panel, PanelSection, panels_of, sections_by_title
from diffllm.metrics.sections import GAPS
from diffllm.metrics.wandb_config import WandbConfig, WandbMode, resolve_mode, with_recorded

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
    run_colours: dict[str, str] = field(default_factory=dict)
    """Colour of each run, by wandb id. Only these runs are shown; if empty, all runs are shown."""
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
        if not self.run_colours:
            return PROJECT_RUNS
        return max(LEAST_RUNS, len(self.run_colours) + 1)


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
    wandb, or if the runs are in several projects or entities.

    Args:
        directory: directory of the report, which can contain the id of the wandb run with the gaps.
        entity: user or team; empty: the entity of the runs.
        mode: replaces the mode of the runs, because `diffllm wandb` also writes disabled runs.
    """
    logged_runs = find_logged_runs(comparison, entity, mode)
    project, entity = common_project([run.cfg for run in logged_runs], title)
    gap_colours = {NOISE_FLOOR: MUTED}
    for row, style in zip(comparison.rows, row_styles(comparison.rows), strict=True):
        for metric in gap_metrics(row.label):
            gap_colours[metric] = style.colour
    # Several rows can share a group in wandb; the first row decides its colour.
    group_colours: dict[str, str] = {}
    for run in logged_runs:
        group_colours.setdefault(run.group, run.colour)
    comparison_id = stored_comparison_id(directory)
    gaps = gap_panels(comparison, comparison_id is not None)
    return Dashboard(
        title=f"diffllm {title}",
        project=project,
        entity=entity,
        sections=make_sections(logged_metrics(comparison), gaps),
        run_colours={run.id: run.colour for run in logged_runs},
        group_colours=group_colours,
        baseline=[run.id for run in logged_runs if run.is_baseline],
        comparison=comparison_id,
        gap_colours=gap_colours,
    )


class LoggedRun(NamedTuple):
    """A run that was logged to wandb."""

    id: str
    group: str
    cfg: WandbConfig
    """Result of `with_recorded`."""
    colour: str
    is_baseline: bool


def find_logged_runs(
    comparison: Comparison, entity: str, mode: WandbMode | None
) -> list[LoggedRun]:
    """Return the runs that were logged to wandb, row by row.

    Arguments as in `comparison_dashboard`.
    """
    logged_runs = []
    for row, style in zip(comparison.rows, row_styles(comparison.rows), strict=True):
        for run in row.runs:
            cfg = with_recorded(run.cfg.wandb, run.variables, mode, entity=entity or None)
            if resolve_mode(cfg) == "disabled":
                continue
            # `diffllm wandb` gives a run a new id if the server already has the former one.
            run_id = ids_of_run(run.path, run.facts, cfg).newest
            group = run.facts.get("wandb_group") or cfg.group or run.variant
            logged_runs.append(LoggedRun(run_id, group, cfg, style.colour, row.is_baseline))
    return logged_runs


def logged_metrics(comparison: Comparison) -> set[str]:
    """Return the names of the metrics that at least one run has logged."""
    names: set[str] = set()
    for row in comparison.rows:
        for run in row.runs:
            names.update(run.metrics.columns)
    return names


def common_project(configs: list[WandbConfig], title: str) -> tuple[str, str]:
    """Return the project and the entity of runs; the entity is empty if only the server knows it.

    Raises ConfigError if there are no runs, or if they are in several projects or entities.
    """
    if not configs:
        raise ConfigError(
            f"no run of {title} was logged to wandb (wandb.mode=disabled); write the runs with "
            "diffllm wandb sweep=DIR mode=online, then add mode=online"
        )
    projects = sorted({(cfg.project or "", cfg.entity or "") for cfg in configs})
    if len(projects) == 1:
        return projects[0]
    paths = []
    for project, entity in projects:
        paths.append(f"{entity}/{project}" if entity else project)
    raise ConfigError(
        f"the runs of {title} are in several wandb projects ({', '.join(paths)}); "
        "name runs of one project with sweep=DIR, or set entity=NAME if only entities differ"
    )


def make_sections(names: Collection[str] | None, gaps: list[Panel]) -> list[PanelSection]:
    """Return the sections that have panels; `names` is as in `panels_of`."""
    sections = []
    for title, metrics in sections_by_title().items():
        panels = panels_of(metrics, names)
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
            panels.append(Panel(f"Gap of {row.label}", (*gap_metrics(row.label), NOISE_FLOOR)))
    return panels
