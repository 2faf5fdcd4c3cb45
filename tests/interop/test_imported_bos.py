"""An imported model keeps the BOS of its tokenizer in prompts; training data contains no BOS."""

from pathlib import Path

import pytest
import torch
from runs.json_files import read_json, write_json
from test_import import save_foreign_model
from tokenizer_kinds import BOS, EOS, KINDS, LINES, UNK, differing_texts

import diffllm
from diffllm import load_config, train
from diffllm.checkpoint.hf.tokenizer import imported_prefix
from diffllm.cli import main
from diffllm.core.errors import printable
from diffllm.core.printing import KEPT
from diffllm.data.tasks.task import TASKS
from diffllm.data.tokenizer import Tokenizer, tokenizer_of
from diffllm.evaluation.answers import questions

transformers = pytest.importorskip("transformers", "5.4")
PROMPT = "def größe(x):\n    return"


@pytest.fixture(params=["bos", "dummy_prefix"])
def model_directory(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Path) -> Path:
    """Write a Llama model whose tokenizer puts a BOS before each text."""
    place = tmp_path / "hf"
    save_foreign_model("llama", place, tokenizer)
    (place / "tokenizer.model").unlink()
    KINDS[request.param](place)
    if request.param == "dummy_prefix":
        config = {
            "tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "bos_token": "<s>",
            "eos_token": "</s>",
        }  # fmt: skip
        write_json(place / "tokenizer_config.json", config)
    return place


@pytest.mark.fast_cases(1)
@torch.no_grad()
def test_imported_model_continues_prompts_like_transformers(model_directory, tmp_path, output_of):
    run, again = tmp_path / "run", tmp_path / "again"
    theirs = transformers.AutoTokenizer.from_pretrained(model_directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory)
    inputs = theirs(PROMPT, return_tensors="pt", return_token_type_ids=False)
    bos_id, eos_id = theirs.bos_token_id, theirs.eos_token_id
    assert inputs["input_ids"][0, 0] == bos_id
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": eos_id}
    options["suppress_tokens"] = list(range(380, 416))  # ids without a token
    continued = model.generate(**inputs, **options)

    said = output_of("import", f"hf={model_directory}", f"out={run}")
    assert f"BOS: {theirs.bos_token}, before each text" in said
    assert f"EOS: {theirs.eos_token}, token {eos_id}\n" in said
    facts = read_json(run / "run.json")
    assert facts["imported"]["bos_token"] == theirs.bos_token
    assert facts["eos_token"] == theirs.eos_token
    words = [f"prompt={PROMPT}", "temperature=0", "max_new_tokens=20"]
    ours = diffllm.load_model(run)[1]
    # The library of transformers decodes incomplete characters to more U+FFFD.
    text = printable(ours.decode(continued[0].tolist()), KEPT)
    assert output_of("generate", f"run={run}", *words) == f"{text}\n"
    settings = {"seed": 0, "examples": [2], "levels": [TASKS["icl"].levels(64)[0]]}
    for _, _, question in questions(TASKS["icl"], settings, ours, 10_000):
        assert question.context[0] == ours.start_id == ours.bos_id == bos_id
    for source in (run, again):  # the second export is of an imported export
        out = tmp_path / f"exported-{source.name}"
        assert main(["export", f"run={source}", f"out={out}"]) == 0
        assert differing_texts(source, out) == []
        if source is run:
            assert main(["import", f"hf={out}", f"out={again}"]) == 0
    assert Tokenizer.from_file(tokenizer_of(again)).bos_id == bos_id


@pytest.mark.slow
@pytest.mark.parametrize("model_directory", ["bos"], indirect=True)
def test_run_from_imported_weights_notes_that_data_has_no_bos(model_directory, tmp_path, capfd):
    imported, corpus = tmp_path / "imported", tmp_path / "corpus.txt"
    assert main(["import", f"hf={model_directory}", f"out={imported}"]) == 0
    corpus.write_text("".join(f"{line}, {i}\n" for i in range(40) for line in LINES[:20]), "utf-8")
    small = ("seq_len=32", "steps=2", "global_batch_size=2", "optim.warmup_steps=1")
    data = ("data=files", f"data.paths=[{corpus}]", "data.sample_by=line", "data.num_workers=0")
    off = ("wandb.mode=disabled", "run.report=false", f"data.cache_dir={tmp_path / 'cache'}")
    start = (f"resume=weights:{imported}", f"run.dir={tmp_path / 'run'}")
    train(load_config([*start, *data, *small, *off]))
    assert (
        f"puts the BOS '{BOS}' before each text; the training data contains no BOS"
        in capfd.readouterr().out
    )
    facts = read_json(tmp_path / "run" / "run.json")
    assert (facts["weights"]["bos_token"], facts["eos_token"]) == (BOS, EOS)
    assert diffllm.load_model(imported)[1].bos_id == 0
    assert diffllm.load_model(tmp_path / "run")[1].bos_id is None


@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
@pytest.mark.parametrize(
    ("kind", "with_key_false", "with_key_true"),
    [
        ("bos", [BOS], [BOS]),
        ("bos_and_eos", [BOS], [BOS]),
        ("two_tokens", [BOS, UNK], [BOS, UNK]),
        ("eos", [], []),
        ("byte_level", [], []),
        ("dummy_prefix", [], ["<s>"]),
    ],
)
def test_imported_prefix_equals_tokens_that_transformers_puts_before_texts(
    tmp_path, class_name, kind, with_key_false, with_key_true
):
    KINDS[kind](tmp_path)
    (path,) = tmp_path.glob("tokenizer.[mj]*")
    bos, eos = ("<s>", "</s>") if kind == "dummy_prefix" else (BOS, EOS)
    added_token = {"__type": "AddedToken", "content": bos}
    for bos_config in ({}, {"bos_token": bos}, {"bos_token": added_token}):
        for added in ({}, {"add_bos_token": False}, {"add_bos_token": True}):
            config = {"tokenizer_class": class_name, "eos_token": eos, **bos_config, **added}
            write_json(tmp_path / "tokenizer_config.json", config)
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
            ids = theirs(PROMPT)["input_ids"]
            start = ids.index(theirs(PROMPT, add_special_tokens=False)["input_ids"][0])
            expected = with_key_true if added.get("add_bos_token") else with_key_false
            assert theirs.convert_ids_to_tokens(ids[:start]) == imported_prefix(path) == expected


@pytest.mark.parametrize("model_directory", ["bos"], indirect=True)
def test_import_refuses_tokenizer_with_two_tokens_before_texts(model_directory, tmp_path, error_of):
    KINDS["two_tokens"](model_directory)
    error = error_of("import", f"hf={model_directory}", f"out={tmp_path / 'run'}")
    assert f"the post-processor puts 2 tokens before each text ('{BOS}', '{UNK}')" in error
    assert not (tmp_path / "run").exists()
