"""An export in transformers, without diffllm, computes the same as the model of the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exported_runs import CASES
from tiers import slow_but

import diffllm
from diffllm.cli import main
from diffllm.model.generate import generate

transformers = pytest.importorskip("transformers", "5.4")

PYTHON = os.environ.get("TRANSFORMERS_PYTHON", sys.executable)
"""Interpreter that reads exports; `make test-transformers` sets another interpreter."""
FOREIGN = [name for name, (architecture, _) in CASES.items() if "DiffLLM" not in architecture]
OTHER_VERSION = pytest.mark.skipif(
    sys.executable == PYTHON, reason="all cases contain these; run make test-transformers"
)
TEXT = "def f(x):\n    return  \u2581x </s> é\U0001f600\n"


@pytest.mark.parametrize(
    ("names", "new"),
    [
        pytest.param(["diff_v2"], 24, id="one"),
        pytest.param(FOREIGN, 24, id="foreign", marks=[pytest.mark.slow, OTHER_VERSION]),
        pytest.param(
            list(CASES), 80, id="all", marks=[pytest.mark.slow, pytest.mark.timeout(1200)]
        ),
    ],
)
@torch.no_grad()
def test_transformers_reproduces_logits_and_tokens_of_exported_run(make_run, tmp_path, names, new):
    requests, mine = [], []
    for name in names:
        run = make_run(name, *CASES[name][1])
        assert main(["export", f"run={run}", f"out={tmp_path / 'hf' / name}"]) == 0
        model, tokenizer = diffllm.load_model(run)
        ids = torch.randint(2, 400, (2, 48), generator=torch.Generator().manual_seed(0))
        prompts = [ids[0, :10].tolist(), ids[1, :6].tolist()]
        greedy = [
            generate(model, [prompt], max_new_tokens=new, temperature=0.0, vocab_size=416)[0]
            for prompt in prompts
        ]
        mine.append({"logits": model(ids), "greedy": greedy, "tokens": tokenizer.encode(TEXT)})
        directory = str(tmp_path / "hf" / name)
        requests.append({"directory": directory, "ids": ids.tolist(), "new": new, "text": TEXT})
    (tmp_path / "requests.json").write_text(json.dumps(requests), encoding="utf-8")
    script = str(Path(__file__).with_name("reading.py"))
    command = [PYTHON, script, str(tmp_path / "requests.json"), str(tmp_path / "out.pt")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    for name, own, theirs in zip(names, mine, torch.load(tmp_path / "out.pt"), strict=True):
        assert theirs["class"] == CASES[name][0], name
        assert own["logits"].std() > 0.3, name
        torch.testing.assert_close(own["logits"], theirs["logits"], rtol=0, atol=1e-5, msg=name)
        for kind, expected in (
            ("greedy", own["greedy"][0]), ("uncached", own["greedy"][0]),
            ("padded_first", own["greedy"][0]), ("padded_second", own["greedy"][1]),
            ("second", own["greedy"][1]),
        ):  # fmt: skip
            assert theirs[kind][0].tolist() == expected, (name, kind)
        assert theirs["tokens"] == own["tokens"], name
        assert theirs["decoded"] == TEXT, name


@pytest.mark.parametrize("name", slow_but(["linear"], ["llama3", "yarn_qwen", "linear"]))
@torch.no_grad()
def test_export_without_rope_parameters_key_reproduces_logits_of_run(make_run, tmp_path, name):
    run, out = make_run(name, *CASES[name][1]), tmp_path / "hf"
    assert main(["export", f"run={run}", f"out={out}"]) == 0
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    del config["rope_parameters"]  # transformers 4 ignores this key
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    ids = torch.randint(2, 400, (2, 48), generator=torch.Generator().manual_seed(0))
    ours = diffllm.load_model(run)[0](ids)
    torch.testing.assert_close(theirs(ids).logits, ours, rtol=0, atol=2e-5)
