"""Names of files in run and sweep directories are in one module, which also reads the files."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import diffllm
from diffllm.core import run_files
from diffllm.core.errors import CheckpointError
from diffllm.core.run_files import (
    CONSOLIDATED,
    RunFile,
    RunFolder,
    SweepFile,
    list_checkpoints,
    list_incomplete,
    logged_lines,
    metrics_lines,
    read_facts,
    read_metrics_line,
    read_record,
    step_of,
)

ROOT = Path(diffllm.__file__).parent
NAMES = {*RunFile, *RunFolder, *SweepFile, CONSOLIDATED}


def spelled_names(source: str) -> Iterator[str]:
    """Yield the literals in a source that name a file or folder of a run or sweep.

    These are all paths to a file with an extension, and all names that are joined to a path.
    Sentences may contain the names.
    """
    # Other names are words or suffixes, such as "profile" and ".lock".
    file_names = "|".join(re.escape(name) for name in NAMES if "." in name[1:])
    path = re.compile(rf"(\S*/)?({file_names})")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            right = node.right
            if isinstance(right, ast.Constant) and right.value in NAMES:
                yield str(right.value)
        elif isinstance(node, ast.Constant) and path.fullmatch(str(node.value)):
            yield str(node.value)


def test_scanner_finds_joined_folders_and_file_names_but_no_sentences():
    source = """
"config.yaml, run.json and metrics.jsonl"
run / "checkpoints"
kinds = ["checkpoints", "wandb"]
file = path.glob("*/run.json")
text = f"{run}/metrics.jsonl: skipped {lines} lines; {run}/sweep.json"
"""
    assert sorted(spelled_names(source)) == ["*/run.json", "/sweep.json", "checkpoints"]


def test_no_other_module_spells_name_of_file_in_run_or_sweep_directory():
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        if file == Path(run_files.__file__):
            continue
        names = list(spelled_names(file.read_text(encoding="utf-8")))
        assert not names, f"{file} spells {names}; use the enums of diffllm.core.run_files"


def test_lists_contain_only_names_of_checkpoints_in_step_order(tmp_path):
    directories = ("step-20", "step-00000003", "step-x", "damaged-step-4")
    for name in (*directories, ".step-00000005.incomplete"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000007").touch()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 20]
    assert [step_of(path) for path in list_incomplete(tmp_path)] == [5]
    assert list_checkpoints(tmp_path / "missing") == []


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e400", "NaN", "-Infinity", "null"])
def test_out_of_range_number_is_read_as_none(tmp_path, value):
    line = f'{{"step": 1, "tokens": 64, "train/loss": {value}, "eval/loss": 2}}'
    expected = {"step": 1, "tokens": 64, "train/loss": None, "eval/loss": 2.0}
    assert read_metrics_line(line) == expected
    file = tmp_path / "summary.json"
    file.write_text(f'{{"steps": 1, "heldout_loss": {value}}}', encoding="utf-8")
    assert read_record(file) == {"steps": 1, "heldout_loss": None}


def test_facts_of_run_without_run_json_are_empty(tmp_path):
    assert read_facts(tmp_path) == {}


def test_metrics_lines_show_damaged_line_but_not_incomplete_last_line(tmp_path):
    assert list(metrics_lines(tmp_path)) == []
    lines = [{"step": step, "tokens": 64 * step} for step in (1, 2, 3)]
    text = '{"step": 1, "tokens": 64}\n{"step":\n{"step": 2, "tokens": 128}\n'
    text += '{"step": 3, "tokens": 192}\n{"step": 4, "to'
    (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    assert list(metrics_lines(tmp_path)) == [lines[0], None, *lines[1:]]
    assert list(logged_lines(tmp_path)) == lines
    assert list(logged_lines(tmp_path, last_step=2)) == lines[:2]


def test_metrics_lines_raise_error_for_link(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is a link"):
        list(metrics_lines(tmp_path))
