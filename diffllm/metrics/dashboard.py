"""The layout of a comparison of attention variants in wandb: sections of line plots over tokens."""

from typing import Any

from diffllm.metrics.table import METRICS, SECTIONS

OPEN = ("Loss", "Spikes", "Gradient norm")
"""Sections that are unfolded at first: wandb fetches what a panel draws when it is shown."""


def panels() -> dict[str, list[tuple[str, ...]]]:
    """By title of a section, the metrics that each of its plots draws."""
    drawn: dict[str, dict[str, tuple[str, ...]]] = {each.dashboard: {} for each in SECTIONS}
    for metric in METRICS:
        plots = drawn[metric.section.dashboard]
        key = metric.panel or metric.name
        plots[key] = (*plots.get(key, ()), metric.name)
    return {title: list(plots.values()) for title, plots in drawn.items()}


def workspace(entity: str, project: str, name: str) -> Any:
    """The view as a wandb_workspaces Workspace, runs grouped by variant; nothing is sent. Raises
    ImportError where wandb-workspaces is not installed."""
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    def plot(metrics: tuple[str, ...]) -> Any:
        title = ", ".join(metrics)
        if title.endswith("*"):
            return wr.LinePlot(title=title, x="tokens", metric_regex=f"^{title[:-1]}.*")
        return wr.LinePlot(title=title, x="tokens", y=list(metrics))

    sections = [
        ws.Section(
            name=title,
            panels=[plot(metrics) for metrics in drawn],
            is_open=title in OPEN,
            panel_settings=ws.SectionPanelSettings(x_axis="tokens"),
        )
        for title, drawn in panels().items()
    ]
    variant = ws.Config("run.choices.attention")
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        settings=ws.WorkspaceSettings(x_axis="tokens", max_runs=100),
        runset_settings=ws.RunsetSettings(groupby=[variant]),
    )


def as_json(view: Any) -> str:
    """The JSON that saving the workspace would send: the view, its spec under "spec"."""
    return view._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2)
