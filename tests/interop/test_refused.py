"""Exports and imports that cannot be: one line, and nothing left behind."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import small_disk

from diffllm.cli import main

pytest.importorskip("transformers", "5")


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1, error
    return error


def test_a_full_disk(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("run", "attention=diff_v2")
    assert main(["export", f"run={run}", f"out={tmp_path / 'hf'}"]) == 0
    needed = sum(file.stat().st_size for file in (tmp_path / "hf").iterdir()) // 1024
    for size in (4, 64, needed // 2, needed - 8):
        with small_disk(tmp_path / f"disk-{size}", f"{size}k") as disk:
            for command, source in (("export", f"run={run}"), ("import", f"hf={tmp_path / 'hf'}")):
                error = refused([command, source, f"out={disk / 'out'}"], capsys)
                assert f"out={disk / 'out'} cannot be written: " in error
                assert "No space left" in error or "os error 28" in error.lower(), error
                assert list(disk.iterdir()) == []


def test_what_cannot_be_exported(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = make_run("run", "attention=diff_v2"), f"out={tmp_path / 'hf'}"
    (tmp_path / "file").write_text("")
    for words, said in (
        ([f"run={run}", f"out={run}"], "is there already"),
        ([f"run={run}", f"out={tmp_path / 'file' / 'hf'}"], "Not a directory"),
        ([f"run={tmp_path / 'none'}", out], "it does not exist"),
        ([f"run={run}", out, "step=7"], "has no checkpoint of step 7"),
        ([f"run={run}", out, "dtype=fp8"], "dtype=fp8 must be float32 or bf16"),
        ([f"run={run}", out, "dtyp=bf16"], "did you mean dtype=?"),
        ([f"run={run}", out, "format=gguf"], "format=gguf must be hf"),
        ([f"run={run}", out, "max_shard_size=0"], "must be a size above 0"),
        ([f"run={run}"], "missing out=..."),
    ):
        assert said in refused(["export", *words], capsys)
    (run / "tokenizer.model").write_bytes(b"no model")
    assert "tokenizer.model: not a sentencepiece model" in refused(
        ["export", f"run={run}", out], capsys
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_a_tokenizer_of_a_terabyte_is_not_read(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("run", "attention=diff_v2")
    assert main(["export", f"run={run}", f"out={tmp_path / 'hf'}"]) == 0
    for source in (run, tmp_path / "hf"):
        for name in ("tokenizer.model", "tokenizer.json"):
            if (source / name).exists():
                with open(source / name, "r+b") as file:
                    file.truncate(2**40)
        error = refused(["import", f"hf={source}", f"out={tmp_path / 'out'}"], capsys)
        assert "bytes, more than 1,073,741,824" in error


@pytest.mark.parametrize("facts", [{"diffllm": "x"}, {"imported": 7}])
def test_export_of_run_with_odd_facts_is_refused(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], facts: dict
) -> None:
    run = make_run("run", "attention=diff_v2")
    (run / "run.json").write_text(json.dumps(facts))
    error = refused(["export", f"run={run}", f"out={tmp_path / 'hf'}"], capsys)
    assert f"run.json has no usable {next(iter(facts))}" in error
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_import_after_killed_import_removes_what_it_left(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "out" / ".i.partial" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / ".i.lock").write_text("")
    run = make_run("run", "attention=diff_v2")
    assert main(["import", f"hf={run}", f"out={tmp_path / 'out' / 'i'}"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["i"]
