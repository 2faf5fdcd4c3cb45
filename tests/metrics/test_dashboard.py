"""diffllm dashboard: the view that is written offline is the one that would be sent."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb
import wandb_workspaces.workspaces.interface as interface
import wandb_workspaces.workspaces.internal as internal
from wandb_file import covers, examples

from diffllm.cli import main
from diffllm.metrics.table import METRICS
from diffllm.metrics.wandb_run import panels as panels_of_the_table

NAMES = [metric.name for metric in METRICS]
WHERE = ["entity=a-team", "project=a-project"]
ORDER = [
    "Loss", "Tasks", "Spikes", "Gradient norm", "Context RMS", "Outliers", "Residual stream",
    "Attention", "Lambda and gate", "Performance", "Data", "Experts",
]  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An empty directory, as home too, and no wandb variable in the environment."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(words: list[str], out: str = "dashboard.json") -> dict[str, Any]:
    assert main(["dashboard", *WHERE, *words]) == 0
    return json.loads(Path(out).read_text())


def panels(view: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The panels' configs by section."""
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    return {s["name"]: [panel["config"] for panel in s["panels"]] for s in sections}


def draws(panel: dict[str, Any], name: str) -> bool:
    pattern = panel.get("metricRegex")
    return name in panel["metrics"] or bool(pattern and re.search(pattern, name))


def test_every_section_has_panels_over_tokens_and_runs_are_grouped(capsys):
    view = written([])
    assert capsys.readouterr().out == "offline; the view is in dashboard.json\n"
    assert view["entity"] == "a-team"
    assert view["project"] == "a-project"
    assert view["displayName"] == "Attention variants"
    found = panels(view)
    assert list(found) == ORDER
    for configs in found.values():
        assert len(configs) >= 2
        assert {config["xAxis"] for config in configs} == {"tokens"}
    section = view["spec"]["section"]
    assert section["settings"]["xAxis"] == "tokens"
    locals_ = [s["localPanelSettings"]["xAxis"] for s in section["panelBankConfig"]["sections"]]
    assert set(locals_) == {"tokens"}
    grouping = section["runSets"][0]["grouping"]
    assert grouping == [{"section": "config", "name": "run.value.choices.attention"}]


def test_every_metric_is_drawn_by_one_panel():
    found = panels(written([]))
    for pattern in NAMES:
        for name in examples(pattern):
            assert covers(pattern, name)
            drawn = [p for configs in found.values() for p in configs if draws(p, name)]
            assert len(drawn) == 1, name


def test_nothing_is_drawn_that_is_not_a_metric():
    drawn = [name for s in panels_of_the_table().values() for panel in s for name in panel]
    assert sorted(drawn) == sorted(NAMES)


def test_name_and_file_can_be_chosen_and_a_key_alone_does_not_go_online(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "Api", lambda *_: pytest.fail("wandb was called"))
    view = written(["name=Of mine", "out=x.json", "--offline"], "x.json")
    assert view["displayName"] == "Of mine"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert panels(written(["out=y.json"], "y.json")).keys() == panels(view).keys()


@pytest.fixture
def sent(monkeypatch):
    """The views that would have gone to wandb's server."""
    views: list[Any] = []

    def upsert(view: Any) -> dict[str, Any]:
        views.append(view)
        return {"upsertView": {"view": {"name": "nw-abc-v", "id": "an-id"}}}

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(internal, "upsert_view2", upsert)
    monkeypatch.setattr(interface, "get_app_url", lambda _: "https://wandb.example.org")
    monkeypatch.setattr(wandb, "Api", lambda *_: SimpleNamespace())
    return views


def without_ids(view: dict[str, Any]) -> Any:
    """A view without what is drawn anew for each."""
    return json.loads(re.sub(r'"__id__": "\w+"', '"__id__": ""', json.dumps(view)))


def test_online_saves_the_same_view_and_prints_its_address(sent, capsys, place):
    assert main(["dashboard", *WHERE]) == 0
    assert capsys.readouterr().out == "https://wandb.example.org/a-team/a-project?nw=abc\n"
    (view,) = sent
    assert not (place / "dashboard.json").exists()
    online = json.loads(view.model_dump_json(by_alias=True, exclude_none=True))
    offline = written(["--offline"])
    assert online.pop("name")
    offline.pop("name")
    assert without_ids(online) == without_ids(offline)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a command that ends in exit code 2."""
    assert main(["dashboard", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


def test_a_server_that_refuses_is_one_line(sent, monkeypatch, capsys):
    def fail(view: Any) -> None:
        raise ValueError("permission\ndenied")

    monkeypatch.setattr(internal, "upsert_view2", fail)
    line = refused(WHERE, capsys)
    assert line == "error: wandb did not save the view to a-team/a-project: permission denied"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([], ["missing", "entity=...", "project=..."]),
        (["entity=x"], ["missing", "project=..."]),
        ([*WHERE, "projct=x"], ["projct=x", "project="]),
        (["entity=", "project=x"], ["entity=", "empty"]),
        ([*WHERE, "name=😀"], ["name=😀", "emoji"]),
        ([*WHERE, "out=nowhere/x.json"], ["out=nowhere/x.json", "No such file"]),
        ([*WHERE, "--ofline"], ["--ofline"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, parts, capsys, place):
    line = refused(words, capsys)
    assert line.startswith("error: ")
    assert all(part in line for part in parts)
    assert list(place.iterdir()) == []


def test_without_the_extra_the_line_says_what_to_install(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "wandb_workspaces"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    assert 'pip install "diffllm[dashboard]"' in refused(WHERE, capsys)


def test_help_needs_neither_the_extra_nor_torch():
    code = """
import sys
from diffllm.cli import main
try:
    main(["dashboard", "--help"])
except SystemExit as stop:
    assert stop.code == 0
assert not {"torch", "wandb", "wandb_workspaces"} & set(sys.modules)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert all(f"{key}=" in done.stdout for key in ("entity", "project", "name", "out"))
