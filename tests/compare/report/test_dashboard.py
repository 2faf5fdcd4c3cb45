"""wandb dashboards: panels, runs and colours in the JSON, requests to a server, and errors."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_comparison as sample
from runs.json_files import read_json
from runs.written import LOWER, edit_json, study_file, sweep, write_arms
from wandb_server import WandbServer

from diffllm.cli import main
from diffllm.compare import wandb_views
from diffllm.compare.dashboard import comparison_dashboard, project_dashboard
from diffllm.compare.report.comparison import Comparison
from diffllm.compare.report.styles import row_styles
from diffllm.core.run_files import SweepFile
from diffllm.metrics.panels import sections_by_title
from diffllm.metrics.table import COST_AXES, METRICS, metric_of
from diffllm.metrics.wandb_config import WandbConfig
from diffllm.metrics.wandb_start import abandon_service
from diffllm.metrics.wandb_uploads import store_uploaded_id

DIGEST = Path(__file__).parents[2] / "data_files" / "dashboard.txt"
LOSSES = {"standard": [4.0, 4.2, 4.1], "diff_v2": [3.8, 4.0, 3.7]}


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    """Return two variants with three seeds, logged to wandb as the sweep "first"."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    compared = sample.comparison_of(("standard", "diff_v2"), 3, 40, probes=True)
    for row in compared.rows:
        for run in row.runs:
            run.facts["wandb_id"] = run.path.name
            run.cfg.run.sweep = "first"
    return compared


@pytest.fixture
def logged_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a sweep of two variants and three seeds."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for run in sweep(tmp_path / "swept", LOSSES):
        edit_json(run / "run.json", wandb_id=run.name)
    return tmp_path / "swept"


@pytest.fixture
def dashboard_server(
    logged_sweep: Path, wandb_server: WandbServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WandbServer]:
    monkeypatch.setenv("WANDB_BASE_URL", wandb_server.address)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield wandb_server
    abandon_service()  # The next test has another server.


def dashboard_of(directory: Path) -> dict[str, Any]:
    """Return the content of dashboard.json."""
    return read_json(directory / "dashboard.json")


def shown_ids(content: dict[str, Any]) -> list[str]:
    """Return the ids of the runs in a dashboard's workspace."""
    (runs,) = content["workspace"]["spec"]["section"]["runSets"]
    (selection,) = runs["filters"]["filters"]
    assert selection["key"]["name"] == "name"
    return selection["value"]


def requests_of(comparison: Comparison, directory: Path) -> dict[str, Any]:
    (directory / SweepFile.COMPARISON_ID).write_text("0a0b0c0d\n", encoding="utf-8")
    content = comparison_dashboard(comparison, directory, "first", "team")
    return wandb_views.make_views(content, directory / "none.json").requests()


def project_requests() -> dict[str, Any]:
    content = project_dashboard("diffllm", "team")
    return wandb_views.make_views(content, Path("none.json")).requests()


def sections_of(spec: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the panels in the spec of a workspace or report, by title of their section."""
    if "section" in spec:
        sections = spec["section"]["panelBankConfig"]["sections"]
        return {section["name"]: section["panels"] for section in sections}
    panels, title = {}, ""
    for block in spec["blocks"]:
        if block["type"] == "heading":
            title = block["children"][0]["text"]
        if block["type"] == "panel-grid":
            panels[title] = block["metadata"]["panelBankSectionConfig"]["panels"]
    return panels


def digest(spec: dict[str, Any]) -> str:
    """Return one line per section and panel: kind and title, x-axis, and metrics."""
    lines = []
    for title, panels in sections_of(spec).items():
        lines.append(title)
        for panel in panels:
            config = panel["config"]
            name = config.get("chartTitle") or config["value"].splitlines()[0]
            metrics = config.get("metrics") or [config.get("metricRegex", "")]
            axis = config.get("xAxis", "")
            lines.append(f"  {panel['viewType']} | {name} | {axis} | {', '.join(metrics)}".rstrip())
    return "\n".join(lines) + "\n"


def test_workspace_and_report_have_committed_sections_panels_axes_and_metrics(comparison, tmp_path):
    requests = requests_of(comparison, tmp_path)
    expected = DIGEST.read_text(encoding="utf-8")
    assert digest(requests["workspace"]["spec"]) == expected
    assert digest(requests["report"]["spec"]) == expected
    assert json.dumps(requests) == json.dumps(requests_of(comparison, tmp_path)), "reproducible"


def test_each_panel_names_metrics_of_table_and_logged_axis():
    sections = sections_of(project_requests()["workspace"]["spec"])
    assert [*sections] == [*sections_by_title()]
    for panels in sections.values():
        for config in (panel["config"] for panel in panels):
            assert config.get("xAxis", "tokens") in COST_AXES
            for name in config.get("metrics", []):
                assert metric_of(name).name == name
            if pattern := config.get("metricRegex"):
                assert config["useMetricRegex"]
                assert f"{pattern[1:]}*" in [metric.name for metric in METRICS]


def test_exactly_panels_without_logged_metric_are_omitted(comparison, tmp_path):
    names = {name for row in comparison.rows for run in row.runs for name in run.metrics.columns}
    shown = comparison_dashboard(comparison, tmp_path, "first").sections
    panels = {panel for section in shown for panel in section.panels}
    outcomes = set()
    for section in project_dashboard("diffllm", "").sections:
        for panel in section.panels:
            pattern = panel.pattern or f"{re.escape(panel.metrics[0])}$"
            logged = any(re.match(pattern, name) for name in names)
            assert (panel in panels) == logged, panel
            outcomes.add(logged)
    assert outcomes == {True, False}


def test_runs_are_grouped_by_row_with_colours_of_figures_and_pinned_baseline(comparison, tmp_path):
    requests = requests_of(comparison, tmp_path)
    section = requests["workspace"]["spec"]["section"]
    (runs,) = section["runSets"]
    assert runs["grouping"] == [{"section": "run", "name": "group"}]
    ids = [run.path.name for row in comparison.rows for run in row.runs]
    assert shown_ids(requests) == [*ids, "0a0b0c0d"]
    baseline = [base64.b64decode(run_id).decode() for run_id in runs["pinnedRunIds"]]
    assert baseline == [f"Run:v1:standard-{seed}:diffllm:team" for seed in range(3)]
    assert runs["baselineRunId"] == runs["pinnedRunIds"][0]
    settings = section["settings"]
    assert (settings["smoothingActive"], settings["maxRuns"]) == (False, 10)
    for row, style in zip(comparison.rows, row_styles(comparison.rows), strict=True):
        variant = style.variant
        for run in row.runs:
            assert section["customRunColors"][run.path.name] == style.colour
        (group,) = [key for key in section["customRunColors"] if f"%22{variant}%22" in key]
        assert section["customRunColors"][group] == style.colour
        for block in requests["report"]["spec"]["blocks"]:
            if block["type"] == "panel-grid":
                (grid,) = block["metadata"]["runSets"]
                colours = block["metadata"]["customRunColors"]
                assert colours[f"{grid['id']}-run:group:{variant}"] == style.colour
                assert grid["filters"] == runs["filters"]
    line_plots = [
        panel["config"]
        for panels in sections_of(requests["report"]["spec"]).values()
        for panel in panels
        if panel["viewType"] == "Run History Line Plot"
    ]
    for config in line_plots:
        assert (config["groupAgg"], config["groupArea"]) == ("mean", "minmax")
        assert (config["smoothingType"], config["limit"]) == ("none", 10)


def test_wandb_groups_have_colours_of_their_rows(comparison, tmp_path):
    for row in comparison.rows:
        for run in row.runs:
            run.facts["wandb_group"] = f"{row.label} lr=0.1"
    content = comparison_dashboard(comparison, tmp_path, "first")
    styles = row_styles(comparison.rows)
    assert content.group_colours == {f"{style.label} lr=0.1": style.colour for style in styles}


def test_dashboard_shows_all_runs_of_large_sweep(comparison, tmp_path):
    many = sample.comparison_of(("standard", "diff_v2"), 8, 20)
    for run in [run for row in many.rows for run in row.runs]:
        run.facts["wandb_id"] = run.path.name
    requests = requests_of(many, tmp_path)
    settings = requests["workspace"]["spec"]["section"]["settings"]
    assert settings["maxRuns"] == 17, "16 runs and the comparison"
    assert len(shown_ids(requests)) == 17


def test_offline_command_writes_file_and_prints_panels_and_command(logged_sweep, output_of):
    lines = output_of("dashboard", logged_sweep).splitlines()
    titles = [line.partition(":")[0] for line in lines if line][:-1]
    assert titles == ["Loss", "Stability", "Outliers", "Attention", "Gaps", "Speed"]
    file = logged_sweep / "dashboard.json"
    assert lines[-1] == f"{file}; send it with: diffllm dashboard {logged_sweep} mode=online"
    written = dashboard_of(logged_sweep)
    assert written["report"]["type"] == "runs"
    (table,) = sections_of(written["workspace"]["spec"])["Gaps"]
    assert "| diff_v2 |" in table["config"]["value"]
    content = json.loads(output_of("dashboard", logged_sweep, "--json"))
    assert (content["workspace"], content["file"]) == (None, str(file))
    assert [section["title"] for section in content["sections"]] == titles


def test_dashboard_of_study_shows_its_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    study = study_file(tmp_path / "claim.yaml", LOWER)
    write_arms(study, tmp_path / "out", {"half": [4.40, 4.41, 4.39], "v2": [4.30, 4.312, 4.289]})
    runs = sorted(path.parent for path in (tmp_path / "out").glob("*/run.json"))
    for run in runs:
        edit_json(run / "run.json", wandb_id=run.name[-20:], wandb_group="arm")
    first_id = runs[0].name[-20:]
    store_uploaded_id(runs[0], first_id, WandbConfig(project="diffllm"), "newest")
    words = [f"study={study.path}", f"out={tmp_path / 'out'}"]
    assert main(["dashboard", *words]) == 0
    written = dashboard_of(tmp_path / "out")
    assert written["workspace"]["displayName"] == "diffllm claim"
    assert sorted(shown_ids(written)) == sorted(["newest", *(run.name[-20:] for run in runs[1:])])


def test_real_client_saves_file_and_repeated_command_replaces_both_views(
    dashboard_server, logged_sweep, output_of
):
    addresses = []
    for _ in range(2):
        output = output_of("dashboard", f"sweep={logged_sweep}", "mode=online")
        addresses.append(output.splitlines()[-2:])
        written = dashboard_of(logged_sweep)
        assert len(dashboard_server.views) == 2
        for content in written.values():
            sent = dashboard_server.views[content["id"]]
            assert json.loads(sent["spec"]) == content["spec"]
            for name in ("entityName", "projectName", "displayName", "type"):
                assert sent[name] == content[name]
            assert sent["entityName"] == "team", "the default entity of the API key"
    assert addresses[0] == addresses[1]
    workspace, report = addresses[0]
    assert workspace.startswith(f"workspace: {dashboard_server.address}/team/diffllm?nw=")
    reports = f"{dashboard_server.address}/team/diffllm/reports"
    assert report.startswith(f"report: {reports}/diffllm-swept--")


@pytest.mark.slow
def test_unavailable_server_causes_one_line_and_keeps_file(
    dashboard_server, logged_sweep, monkeypatch, error_of
):
    monkeypatch.setattr(wandb_views, "RETRIES", 1)
    dashboard_server.close()
    line = error_of("dashboard", f"sweep={logged_sweep}", "mode=online")
    assert line.startswith("error: wandb did not save the dashboard: ")
    assert f"{logged_sweep / 'dashboard.json'} contains it. Repeat the command" in line
    assert (logged_sweep / "dashboard.json").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name exactly one of sweep=DIR, study=STUDY.yaml or project=NAME"),
        (["sweep={0}", "project=a"], "name exactly one of "),
        (["project=a/b"], "project=a/b must have 1 to 128 characters "),
        (["{0}", "mode=shared"], "mode=shared must be auto, online or offline"),
        (["{0}", "mode=online"], "mode=online needs an API key; set WANDB_API_KEY or run wandb "),
        (["{0}", "baseline=gated"], "baseline=gated is not the attention variant of any run; "),
        (["{0}/empty"], "{0}/empty is not a run directory and contains none; "),
        (["study=claim.yaml"], "missing out=DIR, the directory of the study's runs"),
        (["{0}", "out={0}/standard-seed0/run.json"], "{0}/standard-seed0/run.json/dashboard.json "),
    ],
)
def test_wrong_argument_causes_one_line_with_fix(logged_sweep, words, message, error_of):
    (logged_sweep / "empty").mkdir()
    line = error_of("dashboard", *(word.format(logged_sweep) for word in words))
    assert line.startswith(f"error: {message.format(logged_sweep)}")


def test_runs_without_wandb_or_in_several_projects_are_refused(logged_sweep, monkeypatch, error_of):
    facts = logged_sweep / "standard-seed0" / "run.json"
    for name, value, projects in (
        ("WANDB_PROJECT", "other", "diffllm, other"),
        ("WANDB_ENTITY", "team", "diffllm, team/diffllm"),
    ):
        edit_json(facts, environment={"variables": {name: value}})
        error = error_of("dashboard", logged_sweep)
        assert f"in several wandb projects ({projects}); name runs" in error
    assert main(["dashboard", str(logged_sweep), "entity=team"]) == 0
    edit_json(facts, environment={})
    monkeypatch.setenv("WANDB_MODE", "disabled")
    message = "no run of swept was logged to wandb (wandb.mode=disabled)"
    assert message in error_of("dashboard", logged_sweep)
    assert main(["dashboard", str(logged_sweep), "mode=offline"]) == 0


def test_dashboard_and_wandb_command_use_same_ids_of_runs_without_run_json(logged_sweep, output_of):
    run = logged_sweep / "standard-seed0"
    (run / "run.json").unlink()
    (written,) = json.loads(output_of("wandb", f"run={run}", "mode=offline", "--json"))["runs"]
    assert main(["dashboard", str(logged_sweep), "mode=offline"]) == 0
    assert written["id"] in shown_ids(dashboard_of(logged_sweep))


def test_missing_package_causes_one_line_with_command(logged_sweep, monkeypatch, error_of):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    command = "pip install -c constraints.txt -e '.[dashboard]'"
    assert command in error_of("dashboard", logged_sweep)
