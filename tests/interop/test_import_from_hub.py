"""Import from a hub downloads files of one commit, without code and pickle files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from runs.json_files import read_json

import diffllm
from diffllm.cli import main

HUB = Path(__file__).parents[1] / "data" / "fake_hub.py"
NAME, SHA = "someone/corpus", "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.slow
@pytest.mark.parametrize("revision", ["", "@main"])
def test_import_from_hub_downloads_no_code_or_pickle_file(make_run, tmp_path, revision):
    run, repository = make_run("two", "attention=diff_v2"), tmp_path / "repository"
    assert main(["export", f"run={run}", f"out={repository}", "max_shard_size=100KB"]) == 0
    (repository / "pytorch_model.bin").write_bytes(b"not to be fetched")
    words = [sys.executable, str(HUB), str(repository), "no file", str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, encoding="utf-8") as server:
        try:
            assert server.stdout is not None
            address = f"http://127.0.0.1:{int(server.stdout.readline())}"
            environment = {
                **os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": address,
                "HF_HOME": str(tmp_path / "home"),
            }  # fmt: skip
            command = [sys.executable, "-m", "diffllm", "import"]
            asked_for = {NAME + revision: 0, "nobody/nothing": 2}
            for i, (name, code) in enumerate(asked_for.items()):
                ended = subprocess.run(
                    [*command, f"hf={name}", f"out=back-{i}"],
                    env=environment, cwd=tmp_path, capture_output=True, encoding="utf-8",
                )  # fmt: skip
                assert ended.returncode == code, ended.stderr
            assert ended.stderr.startswith("error: hf=nobody/nothing is not a directory, and")
            assert ended.stderr.count("\n") == 1
        finally:
            server.kill()
    facts = read_json(tmp_path / "back-0" / "run.json")["imported"]
    assert (facts["from"], facts["revision"]) == (NAME, SHA)
    asked = (tmp_path / "log").read_text(encoding="utf-8")
    assert "modeling_diffllm.py" not in asked
    assert "pytorch_model.bin" not in asked
    mine, theirs = (diffllm.load_model(path)[0] for path in (run, tmp_path / "back-0"))
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
