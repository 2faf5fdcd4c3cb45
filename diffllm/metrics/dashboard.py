"""The layout of a comparison of attention variants in wandb: sections of line plots over tokens."""

from typing import Any

# Section by section, each panel the metrics it draws, as diffllm/metric_names.py writes them.
SECTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Loss": (("train/loss",), ("eval/loss",), ("train/z_loss",), ("train/lr",)),
    "Spikes": (
        ("spikes/loss_total", "spikes_olmo2/loss_total"),
        ("spikes/grad_total", "spikes_olmo2/grad_total"),
        ("spikes/loss_score", "spikes_olmo2/loss_score"),
        ("spikes/grad_score", "spikes_olmo2/grad_score"),
        ("spikes/loss_rolling_total", "spikes_olmo2/loss_rolling_total"),
        ("spikes/grad_rolling_total", "spikes_olmo2/grad_rolling_total"),
        ("spikes/loss_rolling_score", "spikes_olmo2/loss_rolling_score"),
        ("spikes/grad_rolling_score", "spikes_olmo2/grad_rolling_score"),
        ("spikes/skipped_total",),
    ),
    "Gradient norm": (
        ("train/grad_norm",),
        ("grad_norm/*",),
        ("train/update_norm",),
        ("train/param_norm",),
    ),
    "Context RMS": (("context_rms/*",), ("context_rms_min/*",), ("context_rms_max/*",)),
    "Outliers": (("hidden_top1/*",), ("hidden_kurtosis/*",), ("attn_logit_top1/*",)),
    "Attention": (("attn_entropy/*",), ("sink_mass/*",), ("attn_negative_share/*",)),
    "Lambda and gate": (
        ("lambda_mean/*",),
        ("lambda_min/*",),
        ("lambda_max/*",),
        ("lambda_head_*",),
        ("gate_mean/*",),
    ),
    "Performance": (
        ("perf/tokens_per_s",),
        ("perf/step_ms",),
        ("perf/data_ms",),
        ("perf/mfu",),
        ("perf/peak_memory_gib",),
    ),
    "Experts": (
        ("router_entropy/*",),
        ("expert_load_max/*",),
        ("expert_load_min/*",),
        ("router_bias_range/*",),
        ("train/balance_loss",),
        ("train/router_z_loss",),
    ),
}
OPEN = ("Loss", "Spikes", "Gradient norm")
"""Sections that are unfolded at first: wandb fetches what a panel draws when it is shown."""


def workspace(entity: str, project: str, name: str) -> Any:
    """The view as a wandb_workspaces Workspace, runs grouped by variant; nothing is sent.

    Raises:
        ImportError: wandb-workspaces is not installed.
    """
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
            panels=[plot(metrics) for metrics in panels],
            is_open=title in OPEN,
            panel_settings=ws.SectionPanelSettings(x_axis="tokens"),
        )
        for title, panels in SECTIONS.items()
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
    """What saving the workspace would send: the view, its spec under "spec"."""
    return view._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2)
