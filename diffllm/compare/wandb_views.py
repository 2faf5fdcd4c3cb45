"""The wandb workspace and the wandb report of a dashboard, made with the package wandb-workspaces.

The package is imported inside of functions, because it is optional and slow to import.
"""

import hashlib
import importlib.util
import json
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.compare.dashboard import Dashboard
from diffllm.core.errors import ConfigError
from diffllm.core.files import read_json, replace_file
from diffllm.metrics.panels import Panel, PanelSection
from diffllm.metrics.wandb_start import abandon_service, has_api_key

FILE = "dashboard.json"
GROUP = "Group"
"""Name of the wandb group in wandb-workspaces. The wandb group of a run is its row."""
PANEL_COLUMNS = 3
"""Panels per line."""
PANEL_WIDTH, PANEL_HEIGHT = 8, 6
"""Size of a panel of a report, which is 24 units wide."""
RETRIES = 3
"""Repetitions of a request to the server, within a few seconds."""
LONGEST_TITLE, MOST_PINNED = 128, 20
"""Limits of wandb: characters of a report's title, and pinned runs."""


def check_installed() -> None:
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError(
            "diffllm dashboard needs a package; run "
            "pip install -c constraints.txt -e '.[dashboard]'"
        )


class Views(NamedTuple):
    """A workspace and a report of the package wandb-workspaces."""

    workspace: Any
    report: Any

    def requests(self) -> dict[str, Any]:
        """Return the variables of both UpsertView requests; `spec` is sent as JSON text.

        wandb-workspaces adds a random name if an object has no id.
        """
        view = self.workspace._to_model()
        report = self.report._to_model()
        project = {"entityName": self.workspace.entity, "projectName": self.workspace.project}
        return {
            "workspace": {
                **project, "id": view.id, "name": view.name, "displayName": view.display_name,
                "type": "project-view", "spec": plain(view.spec),
            },
            "report": {
                **project, "id": report.id, "displayName": report.display_name, "type": "runs",
                "spec": plain(report.spec),
            },
        }  # fmt: skip


def plain(spec: Any) -> dict[str, Any]:
    text = spec.model_dump_json(by_alias=True, exclude_none=True)
    return dict(json.loads(text))


def make_views(dashboard: Dashboard, file: Path) -> Views:
    """Return the workspace and the report of `dashboard`.

    If `file` is from an earlier call for the same project, both have the ids in it. A save then
    replaces the earlier workspace and report.
    """
    views = Views(workspace_of(dashboard), report_of(dashboard))
    with suppress(OSError, ValueError, KeyError, TypeError):
        requests = read_json(file)
        workspace, report = requests["workspace"], requests["report"]
        same_entity = not dashboard.entity or workspace["entityName"] in ("", dashboard.entity)
        if same_entity and workspace["projectName"] == dashboard.project:
            views.workspace._internal_id = str(workspace["id"])
            views.workspace._internal_name = str(workspace["name"])
            views.report.id = str(report["id"])
    return views


def write_views(views: Views, file: Path) -> None:
    """Write the requests of `views` as JSON. Raises ConfigError if `file` cannot be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(views.requests(), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}; choose another directory with out=DIR"
        ) from error


def send(views: Views, file: Path) -> tuple[str, str]:
    """Save the workspace and the report on wandb's server, and their ids in `file`.

    Return both addresses. Raises ConfigError if there is no API key, or if the server cannot be
    reached or refuses a request.
    """
    if not has_api_key():
        raise ConfigError(
            "mode=online needs an API key; set WANDB_API_KEY or run wandb login, or write "
            f"{FILE} with mode=offline"
        )
    import wandb

    # By default, wandb retries for minutes and prints additional lines.
    settings = wandb.Settings(
        silent=True, x_graphql_retry_max=RETRIES, x_graphql_retry_wait_max_seconds=2
    )
    wandb.setup(settings)
    try:
        if not views.workspace.entity:
            views.workspace.entity = views.report.entity = wandb.Api().default_entity or ""
        # Both saves set an id. The file is written after each, so that a repetition after a failure
        # replaces the saved workspace instead of adding another.
        views.workspace.save()
        write_views(views, file)
        views.report.save()
        write_views(views, file)
        return views.workspace.url, views.report.url
    except ConfigError:
        raise
    except Exception as error:
        # wandb waits at exit for a service that cannot reach the server.
        abandon_service()
        raise ConfigError(
            f"wandb did not save the dashboard: {error!r}; {file} contains it. Repeat the command; "
            f"if the workspace or the report was deleted, remove {FILE} first"
        ) from error


def workspace_of(dashboard: Dashboard) -> Any:
    import wandb_workspaces.workspaces as ws

    sections = []
    for section in dashboard.sections:
        panels = [panel_of(dashboard, section, panel) for panel in section.panels]
        rows = math.ceil(len(panels) / PANEL_COLUMNS)
        layout = ws.SectionLayoutSettings(columns=PANEL_COLUMNS, rows=rows)
        sections.append(
            ws.Section(name=section.title, panels=panels, is_open=True, layout_settings=layout)
        )
    run_settings = {}
    for run_id, colour in dashboard.run_colours.items():
        run_settings[run_id] = ws.RunSettings(color=colour)
    group_colours: dict[Any, Any] = dict(dashboard.group_colours)
    runs = ws.RunsetSettings(
        groupby=[ws.Metric(GROUP)],
        filters=run_filter(dashboard),
        run_settings=run_settings,
        group_colors=group_colours,
        baseline_run=dashboard.baseline[0] if dashboard.baseline else None,
        pinned_runs=[*dashboard.baseline[:MOST_PINNED]],
    )
    workspace = ws.Workspace(
        entity=dashboard.entity,
        project=dashboard.project,
        name=without_symbols(dashboard.title),
        sections=sections,
        settings=ws.WorkspaceSettings(
            x_axis="tokens", smoothing_type="none", max_runs=dashboard.most_runs
        ),
        runset_settings=runs,
    )
    # Random ids would change the file at each call.
    workspace._internal_runset_id = stable_id(dashboard.title)
    return workspace


def report_of(dashboard: Dashboard) -> Any:
    import wandb_workspaces.reports.v2 as wr

    blocks: list[Any] = [wr.TableOfContents()]
    for section in dashboard.sections:
        panels = [panel_of(dashboard, section, panel) for panel in section.panels]
        for number, panel in enumerate(panels):
            row, column = divmod(number, PANEL_COLUMNS)
            panel.layout = wr.Layout(
                x=PANEL_WIDTH * column, y=PANEL_HEIGHT * row, w=PANEL_WIDTH, h=PANEL_HEIGHT
            )
        # The grid has the project of the report.
        runs = wr.Runset(name="Runs", groupby=["run.group"], filters=run_filter(dashboard))
        runs._id = stable_id(section.title)
        colours: dict[Any, Any] = dict(dashboard.run_colours)
        for group, colour in dashboard.group_colours.items():
            key = wr.RunsetGroupKey(wr.Metric("run:group"), group)
            colours[wr.RunsetGroup(runs.name, (key,))] = colour
        grid = wr.PanelGrid(runsets=[runs], panels=panels, custom_run_colors=colours)
        blocks += [wr.H2(section.title), grid]
    return wr.Report(
        entity=dashboard.entity,
        project=dashboard.project,
        title=dashboard.title[:LONGEST_TITLE],
        blocks=blocks,
        width="fluid",
    )


def run_filter(dashboard: Dashboard) -> Any:
    """Return the filter that selects the runs of the dashboard; "" selects all runs."""
    import wandb_workspaces.workspaces as ws

    if not dashboard.run_colours:
        return ""
    ids = [*dashboard.run_colours]
    if dashboard.comparison:
        ids.append(dashboard.comparison)
    # Runs of other sweeps, and replaced runs, can have equal tags and groups.
    return ws.And(ws.Metric("ID").isin(ids))


def panel_of(dashboard: Dashboard, section: PanelSection, panel: Panel) -> Any:
    """Return a panel as an object of wandb-workspaces."""
    import wandb_workspaces.reports.v2 as wr

    # A line or bar is the mean over the runs of a group, and its band is their range.
    common: dict[str, Any] = {
        "title": panel.title, "max_runs_to_show": dashboard.most_runs,
        "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax",
    }  # fmt: skip
    if panel.text:
        plot: Any = wr.MarkdownPanel(markdown=f"{panel.title}\n\n{panel.text}")
    elif not panel.axis:
        plot = wr.BarPlot(metrics=[*panel.metrics], max_bars_to_show=dashboard.most_runs, **common)
    else:
        colours = {}
        for name in panel.metrics:
            if name in dashboard.gap_colours:
                colours[f"{dashboard.comparison}:{name}"] = dashboard.gap_colours[name]
        if colours:
            # wandb has colours of single metrics only for runs outside of groups.
            common["groupby"] = "None"
        plot = wr.LinePlot(
            x=panel.axis, y=[*panel.metrics], metric_regex=panel.pattern or None,
            log_y=panel.log, smoothing_type="none", line_colors=colours or None, **common,
        )  # fmt: skip
    plot._id = stable_id(f"{section.title}/{panel.title}")
    return plot


def stable_id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def without_symbols(name: str) -> str:
    """Replace the characters that wandb-workspaces refuses in the name of a workspace.

    These are symbols, such as "=", "+" and emojis.
    """
    return re.sub(r"[^\w .,:;()/-]", "-", name)
