"""Failed exports and imports print one error line and leave no files."""

import pytest
from disks import small_disk

from diffllm.cli import main

pytest.importorskip("transformers", "5")


def test_export_and_import_leave_no_files_if_disk_is_full(make_run, tmp_path, error_of):
    run = make_run("run", "attention=diff_v2")
    assert main(["export", f"run={run}", f"out={tmp_path / 'hf'}"]) == 0
    needed = sum(file.stat().st_size for file in (tmp_path / "hf").iterdir()) // 1024
    for size in (4, 64, needed // 2, needed - 8):
        with small_disk(tmp_path / f"disk-{size}", f"{size}k") as disk:
            for command, source in (("export", f"run={run}"), ("import", f"hf={tmp_path / 'hf'}")):
                error = error_of(command, source, f"out={disk / 'out'}")
                assert f"out={disk / 'out'} cannot be written: " in error
                assert "No space left" in error or "os error 28" in error.lower(), error
                assert list(disk.iterdir()) == []


def test_export_command_prints_error_for_invalid_arguments(make_run, tmp_path, error_of):
    run, out = make_run("run", "attention=diff_v2"), f"out={tmp_path / 'hf'}"
    (tmp_path / "file").write_text("", encoding="utf-8")
    for words, said in (
        ([f"run={run}", f"out={run}"], "already exists"),
        ([f"run={run}", f"out={tmp_path / 'file' / 'hf'}"], "Not a directory"),
        ([f"run={run}", out, "step=7"], "has no checkpoint of step 7"),
        ([f"run={run}", out, "dtype=fp8"], "dtype=fp8 must be float32 or bf16"),
        ([f"run={run}", out, "format=gguf"], "format=gguf is unknown"),
        ([f"run={run}", out, "max_shard_size=0"], "must be a size above 0"),
    ):
        assert said in error_of("export", *words)
    (run / "tokenizer.model").write_bytes(b"no model")
    error = error_of("export", f"run={run}", out)
    assert "tokenizer.model: not a valid sentencepiece model" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_import_removes_leftover_files_of_earlier_killed_import(make_run, tmp_path):
    (tmp_path / "out" / ".i.partial" / "checkpoints").mkdir(parents=True)
    (tmp_path / "out" / ".i.lock").write_text("", encoding="utf-8")
    run = make_run("run", "attention=diff_v2")
    assert main(["import", f"hf={run}", f"out={tmp_path / 'out' / 'i'}"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["i"]
