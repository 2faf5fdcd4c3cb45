"""The EOS and the export of runs with a foreign tokenizer, from the headline to a resumed run."""

import io
import json
from pathlib import Path

import pytest
import sentencepiece
from runs.command import documents, tool, train
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """Write a tokenizer.json with two special tokens that may be the EOS."""
    special = ["<|im_end|>", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *LETTERS])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(tmp_path / "letters.json"))
    return tmp_path / "letters.json"


def test_run_of_older_version_resumes_with_its_guessed_eos(letters, tmp_path, tiny, environment):
    words = [*tiny, f"data.tokenizer={letters}", "run.dir=run", "run.allow_changes=[steps]"]
    refused = train(words, tmp_path, environment)
    assert refused.code == 2
    assert "several special tokens may be the EOS: '<|endoftext|>'; '<|im_end|>'" in refused.err
    assert not (tmp_path / "run").exists()
    begun = train([*words, "data.eos_token='<|endoftext|>'"], tmp_path, environment)
    assert begun.code == 0, begun.err
    assert "\nEOS: <|endoftext|>, token 1\n" in begun.out
    facts = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert (facts["eos_token"], facts["eos_guessed"]) == ("<|endoftext|>", False)
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text(encoding="utf-8")
    assert "  eos_token: <|endoftext|>\n" in text
    config.write_text(text.replace("  eos_token: <|endoftext|>\n", ""), encoding="utf-8")
    evaluated = tool(["evaluate", "run=run", "tasks=[position]", "limit=2"], tmp_path, environment)
    assert evaluated.code == 0, evaluated.err
    resumed = train([*words, "steps=6"], tmp_path, environment)
    assert resumed.code == 0, resumed.err
    assert "run resumes from step 4" in resumed.out
    assert "\nEOS: <|endoftext|>, token 1\n" in resumed.out


def test_run_says_before_training_that_its_tokenizer_cannot_be_exported(
    tmp_path, tiny, environment
):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(50)), model_writer=model, minloglevel=2,
        vocab_size=100, model_type="unigram",
    )  # fmt: skip
    (tmp_path / "unigram.model").write_bytes(model.getvalue())
    words = [*tiny, f"data.tokenizer={tmp_path / 'unigram.model'}", "run.dir=run"]
    result = train(words, tmp_path, environment)
    assert result.code == 0, result.err
    note = "diffllm export will refuse the tokenizer of this run, because it is not a BPE model"
    before, _, after = result.out.partition(note)
    assert "chosen for this device" in after
    assert "step" not in before.splitlines()[-1]
