"""Links in a copied run directory: their targets are never written, printed or copied."""

import os
import shutil

import pytest
from runs.command import refusal_of, tool, train
from runs.json_files import read_json
from tiers import slow_but

from diffllm.core.run_files import RunFile
from diffllm.data.tokenizer import TOKENIZER_FILES

WRITTEN = [
    *RunFile, *TOKENIZER_FILES, "checkpoints/.step-00000004.incomplete",
    "heldout/step-00000004.npz", "traces/rank-00000.txt", "metrics.partial", ".metrics.jsonl.{pid}",
]  # fmt: skip
FEW = ["config.yaml", "metrics.jsonl", "report.html", ".lock"]
CONTENT = "a file outside of the run, which must not change\n"


@pytest.mark.parametrize("name", slow_but(FEW, WRITTEN))
def test_training_never_writes_through_link_in_run(killed_run, tiny, tmp_path, environment, name):
    run = killed_run
    outside, file = tmp_path / "outside", run / name.format(pid=os.getpid())
    outside.write_text(CONTENT, encoding="utf-8")
    file.parent.mkdir(exist_ok=True)
    file.unlink(missing_ok=True)
    file.symlink_to(outside)
    before = (run / "metrics.jsonl").read_bytes()
    words = [*tiny, "attention=standard", f"run.dir={run}", "run.report=true"]
    result = train(words, tmp_path, environment)
    assert outside.read_text(encoding="utf-8") == CONTENT
    if result.code:
        line = refusal_of(result)
        assert str(file) in line or name == ".lock"
        if name != "metrics.jsonl":
            assert (run / "metrics.jsonl").read_bytes() == before
    else:
        assert read_json(run / "summary.json")["steps"] == 4


@pytest.mark.parametrize("name", slow_but(["config.yaml"], ["tokenizer.model", "config.yaml"]))
@pytest.mark.parametrize("command", ["consolidate", "generate", "attention-map", "report"])
def test_commands_read_no_link_in_run_directory(finished_run, tmp_path, environment, name, command):
    run, outside = shutil.copytree(finished_run, tmp_path / "run"), tmp_path / "outside"
    shutil.move(run / name, outside)
    (run / name).symlink_to(outside)
    words = {
        "consolidate": [f"run={run}", f"out={tmp_path / 'out'}"],
        "generate": [f"run={run}", "prompt=a"],
        "attention-map": [f"run={run}", "prompt=a"],
        "report": [str(run)],
    }
    result = tool([command, *words[command]], tmp_path, environment)
    if (command, name) != ("report", "tokenizer.model"):
        assert result.code == 2, result.out
        assert f"{run / name} is" in result.err
        assert "a link or not a regular file" in result.err
    assert not list(tmp_path.glob("out/*"))


def test_attention_map_command_never_writes_through_symlink(finished_run, tmp_path, environment):
    run, outside = shutil.copytree(finished_run, tmp_path / "run"), tmp_path / "outside"
    outside.write_text(CONTENT, encoding="utf-8")
    (run / "figure.png").symlink_to(outside)
    words = ["attention-map", f"run={run}", "prompt=a", f"out={run / 'figure.png'}"]
    assert tool(words, tmp_path, environment).code == 0
    assert outside.read_text(encoding="utf-8") == CONTENT
    assert (run / "figure.png").read_bytes().startswith(b"\x89PNG")
