"""An imported model keeps the BOS of its tokenizer in prompts; training data contains no BOS."""

import json
from pathlib import Path

import pytest
import torch
from test_import import saved
from tokenizer_kinds import BOS, EOS, KINDS, differing_texts

import diffllm
from diffllm.checkpoint.hf.tokenizer import imported_bos
from diffllm.cli import main
from diffllm.data.tasks.task import TASKS
from diffllm.data.tokenizer import Tokenizer, tokenizer_of
from diffllm.evaluation.answers import questions

transformers = pytest.importorskip("transformers", "5.4")
PROMPT = "def größe(x):\n    return"


@pytest.fixture
def model_directory(tmp_path: Path, tokenizer: Path) -> Path:
    """Write a Llama model whose tokenizer puts a BOS before each text."""
    place = tmp_path / "hf"
    KINDS["bos"](place)
    saved("llama", place, tokenizer)
    (place / "tokenizer.model").unlink()
    return place


@torch.no_grad()
def test_imported_model_continues_prompts_like_transformers(model_directory, tmp_path, capsys):
    run, again = tmp_path / "run", tmp_path / "again"
    assert main(["import", f"hf={model_directory}", f"out={run}"]) == 0
    assert f"BOS: {BOS}, before each text" in capsys.readouterr().out
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert facts["imported"]["bos_token"] == BOS

    theirs = transformers.AutoTokenizer.from_pretrained(model_directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory)
    inputs = theirs(PROMPT, return_tensors="pt", return_token_type_ids=False)
    assert inputs["input_ids"][0, 0] == 0
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 1}
    options["suppress_tokens"] = list(range(380, 416))  # ids without a token
    continued = model.generate(**inputs, **options)
    words = [f"prompt={PROMPT}", "temperature=0", "max_new_tokens=20"]
    assert main(["generate", f"run={run}", *words]) == 0
    expected = theirs.decode(continued[0], skip_special_tokens=True)
    assert capsys.readouterr().out == f"{expected}\n"

    ours = diffllm.load_model(run)[1]
    settings = {"seed": 0, "examples": [2], "levels": [TASKS["icl"].levels(64)[0]]}
    for _, _, question in questions(TASKS["icl"], settings, ours, 10_000):
        assert question.context[0] == ours.start_id == ours.bos_id == 0
    for source in (run, again):  # the second export is of an imported export
        out = tmp_path / f"exported-{source.name}"
        assert main(["export", f"run={source}", f"out={out}"]) == 0
        assert differing_texts(source, out) == []
        if source is run:
            assert main(["import", f"hf={out}", f"out={again}"]) == 0
    assert Tokenizer.from_file(tokenizer_of(again)).bos_id == 0


@pytest.mark.parametrize(
    ("kind", "config", "expected"),
    [
        ("bos", {}, BOS),
        ("bos_and_eos", {}, BOS),
        ("eos", {}, None),
        ("byte_level", {}, None),
        ("bos", {"add_bos_token": False, "bos_token": BOS}, None),
        ("byte_level", {"add_bos_token": True, "bos_token": {"content": BOS}}, BOS),
        ("dummy_prefix", {"add_bos_token": True, "bos_token": "<s>"}, "<s>"),
        ("dummy_prefix", {}, None),
    ],
)
def test_bos_of_imported_tokenizer_follows_its_config_or_post_processor(
    tmp_path, kind, config, expected
):
    KINDS[kind](tmp_path / "hf")
    content = json.dumps({"eos_token": EOS, **config})
    (tmp_path / "hf" / "tokenizer_config.json").write_text(content, encoding="utf-8")
    (path,) = (tmp_path / "hf").glob("tokenizer.[mj]*")
    assert imported_bos(path) == expected
