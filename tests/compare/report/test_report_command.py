"""`diffllm report`: search for runs, location of files, output and errors."""

import csv
from pathlib import Path

import pytest
from report_pages import without_drawing
from runs.json_files import write_json
from runs.written import sweep, write_run

import diffllm.compare.report.report_page
from diffllm.compare.arms.run_search import find_runs
from diffllm.compare.report import write_report
from diffllm.compare.report.comparison import read

LOSSES = {"standard": [4.0, 4.2], "diff_v2": [3.9, 4.0]}


@pytest.fixture
def two_sweeps(workplace):
    """Create cmp1/ and cmp2/ with runs in the current directory; reports draw no figures."""
    sweep(Path("cmp1"), LOSSES)
    sweep(Path("cmp2"), {"gated": [4.0]})
    with without_drawing():
        yield workplace


def variants(table):
    with open(table, encoding="utf-8") as file:
        return [line["variant"] for line in csv.DictReader(file)]


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


# Search for runs, and location of the report


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("words", "home", "title", "found"),
    [
        (["cmp1/"], "cmp1", "cmp1", ["standard", "diff_v2"]),
        (["cmp1/diff_v2-seed1"], "cmp1/diff_v2-seed1", "diff_v2-seed1", ["diff_v2"]),
        (["cmp1", "cmp2"], ".", "cmp1, cmp2", ["standard", "gated", "diff_v2"]),
        (["cmp*"], ".", "cmp*", ["standard", "gated", "diff_v2"]),
        (["cmp1/*-seed0"], "cmp1", "cmp1/*-seed0", ["standard", "diff_v2"]),
        (["**/gated*"], "cmp2/gated-seed0", "**/gated*", ["gated"]),
        (
            ["cmp1/standard-seed0", "cmp1/diff_v2-seed0"],
            *("cmp1", "standard-seed0, diff_v2-seed0", ["standard", "diff_v2"]),
        ),
    ],
)
def test_report_directory_and_title_are_derived_from_run_paths(
    two_sweeps, output_of, words, home, title, found
):
    before = files(two_sweeps)
    out = output_of("report", *words, quiet=True)
    html, table = (str(Path(home, name)) for name in ("report.html", "report.csv"))
    assert files(two_sweeps) - before == {html, table}
    assert out.splitlines()[-2:] == [html, table]
    assert variants(table) == found
    assert read([Path(word) for word in words])[0].title == title


def test_find_runs_returns_each_run_only_once(two_sweeps):
    link = two_sweeps / "link"
    link.symlink_to(two_sweeps / "cmp1")
    paths = [Path("cmp1"), Path("cmp1/../cmp1"), two_sweeps / "cmp1", link, Path("cmp1/*")]
    assert len(find_runs(paths).runs) == 4
    assert read(paths)[0].notes == read([Path("cmp1")])[0].notes
    assert find_runs(paths).runs == find_runs(paths[::-1]).runs


def test_report_command_requires_out_if_default_directory_is_undefined(
    two_sweeps, tmp_path, monkeypatch, output_of, error_of
):
    for name in ("a/x", "b/y", "b/z"):
        sweep(tmp_path / name, {"standard": [4.0]})
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_runs([tmp_path / "b/y", tmp_path / "b/z"]).home == tmp_path / "b"
    assert find_runs([tmp_path / "a/x", tmp_path / "b/y"]).home is None
    before = files(tmp_path)
    words = ("report", tmp_path / "a/x", tmp_path / "b/y")
    assert "out=DIR" in error_of(*words)
    assert files(tmp_path) == before
    output_of(*words, "out=.")
    assert files(tmp_path) - before == {"elsewhere/report.html", "elsewhere/report.csv"}


def test_report_lists_sweep_runs_that_have_not_started(two_sweeps):
    names = [path.name for path in sorted(Path("cmp1").iterdir())]
    planned = [*names, *(f"gated-seed{seed}" for seed in range(10))]
    record = two_sweeps / "cmp1/sweep.json"

    def notes(*paths):
        return [n for n in read([Path(path) for path in paths])[0].notes if "not started" in n]

    write_json(record, {"runs": {key: [] for key in planned}})
    (two_sweeps / "cmp1/gated-seed0.log").write_text("it failed", encoding="utf-8")
    few = ", ".join(f"gated-seed{seed}" for seed in range(8))
    expected = [f"10 of 14 runs of cmp1 have not started: {few} and 2 more."]
    assert notes("cmp1") == notes(".", "cmp1") == expected
    assert notes("cmp1/*") == []
    write_json(record, {"runs": {key: [] for key in names}})
    assert notes("cmp1") == []
    record.write_text("[]", encoding="utf-8")
    assert any("sweep.json" in note for note in read([Path("cmp1")])[0].notes)


def test_find_runs_prefers_existing_path_over_glob_pattern(tmp_path):
    run = write_run(tmp_path / "a[1]" / "run", "attention=standard")
    write_run(tmp_path / "a1" / "run", "attention=gated")
    assert find_runs([tmp_path / "a[1]"]).runs == [run]


def test_find_runs_does_not_search_inside_runs_or_hidden_directories(tmp_path):
    run = write_run(tmp_path / "run", "attention=standard")
    write_run(run / "checkpoints" / "inner", "attention=gated")
    write_run(tmp_path / ".trash" / "run", "attention=gated")
    (tmp_path / "wandb" / "files").mkdir(parents=True)
    (tmp_path / "wandb" / "files" / "config.yaml").write_text("a: 1", encoding="utf-8")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert find_runs([tmp_path]).runs == [run]


def test_report_command_accepts_output_directory_and_baseline(two_sweeps, output_of):
    out = output_of("report", "out=a/new/place", "cmp1", "baseline=diff_v2")
    assert "gap to diff_v2" in out
    assert variants(two_sweeps / "a/new/place/report.csv") == ["standard", "diff_v2"]
    assert write_report([Path("cmp1")], "diff_v2", Path("x")) == (
        *(Path("x/report.html"), Path("x/report.csv")),
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["cmp1", "baseline=gated"], ["baseline=gated", "standard, diff_v2"]),
        (["cmp1", "basline=gated"], ["basline=gated", "did you mean baseline=?"]),
        ([], ["no run directory is given"]),
        (["nowhere"], ["nowhere: no such directory"]),
        (["cmp1", "nowhere*"], ["nowhere*: no such directory"]),
        (["cmp1/standard-seed0/config.yaml"], ["config.yaml: no such directory"]),
        (["cmp1/standard-seed0/checkpoints"], ["checkpoints is not a run directory"]),
        (["cmp1", "cmp2/gated-seed0/check*"], ["check* is not a run directory"]),
        (["cmp1", "out=cmp1/standard-seed0/config.yaml"], ["config.yaml", "out=DIR"]),
        (["cmp1", "out=/proc/none"], ["/proc/none", "out=DIR"]),
    ],
)
def test_report_prints_one_error_line_for_invalid_argument(two_sweeps, error_of, words, parts):
    before = files(two_sweeps)
    error = error_of("report", *words)
    assert all(part in error for part in parts), error
    assert files(two_sweeps) == before


def test_failed_write_of_report_keeps_existing_report_files(two_sweeps, monkeypatch):
    write_report([Path("cmp1")])
    before = {name: (two_sweeps / name).read_bytes() for name in files(two_sweeps)}
    monkeypatch.setattr(diffllm.compare.report.report_page, "csv_text", lambda rows: "\ud800")
    with pytest.raises(UnicodeEncodeError):
        write_report([Path("cmp1")])
    assert {name: (two_sweeps / name).read_bytes() for name in files(two_sweeps)} == before


# Runs that cannot be read


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "[1]"),
        ("config.yaml", "run: {choices: {attention: no_such}}"),
        ("run.json", "{"),
        ("summary.json", ""),
    ],
)
def test_report_contains_note_about_each_damaged_run(two_sweeps, output_of, name, text):
    Path("cmp1/standard-seed1", name).write_text(text, encoding="utf-8")
    out = output_of("report", "cmp1", quiet=True)
    notes = [line for line in out.splitlines() if line.startswith("note: cmp1/standard-seed1 is")]
    assert len(notes) == 1
    assert name in notes[0]
    assert variants("cmp1/report.csv") == ["standard", "diff_v2"]


def test_report_command_fails_if_all_runs_are_damaged(two_sweeps, error_of):
    for run in Path("cmp1").iterdir():
        (run / "config.yaml").write_text("", encoding="utf-8")
    error = error_of("report", "cmp1")
    assert "none of the runs can be read" in error
    assert "; 3 more runs cannot be read" in error
    assert not Path("cmp1/report.html").exists()
