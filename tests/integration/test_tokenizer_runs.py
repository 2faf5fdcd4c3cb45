"""The EOS and the export of runs with a foreign tokenizer, from the headline to a resumed run."""

import io
import shutil
from pathlib import Path

import pytest
import sentencepiece
from runs.command import documents, success_of, tool, train
from runs.json_files import read_json
from runs.written import edit_text
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from diffllm import load_config
from diffllm.data.preparation.prepare import RunHashes, prepare
from diffllm.data.tokenizer import FastTokenizer

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """Write a tokenizer.json whose `</s>` is an ordinary token; older versions guessed this EOS."""
    tokens = ["<pad>", "</s>", *LETTERS]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.add_tokens([AddedToken("</s>", normalized=False)])
    tokenizer.save(str(tmp_path / "letters.json"))
    return tmp_path / "letters.json"


@pytest.mark.slow
def test_run_of_older_version_continues_with_its_guessed_eos_without_cache(
    letters, tmp_path, tiny, environment
):
    cache = tmp_path / "cache"
    words = [*tiny, f"data.tokenizer={letters}", f"data.cache_dir={cache}"]
    begin = [*words, "data.eos_token='</s>'", "run.dir=run"]
    refused = train([*words, "run.dir=run"], tmp_path, environment)
    assert (refused.code, (tmp_path / "run").exists()) == (2, False)
    assert "that is special; special tokens: '<pad>'; set" in refused.err

    # Older versions prepared the tokens, so the run starts.
    data = load_config(begin).data
    tokenizer_hash = FastTokenizer(letters, "</s>").pieces_hash
    prepare(data, run_hashes=RunHashes(tokenizer=tokenizer_hash))
    begun = success_of(train(begin, tmp_path, environment))
    assert "\nEOS: </s>, token 1\n" in begun.out
    config = tmp_path / "run" / "config.yaml"
    edit_text(config, "  eos_token: </s>\n", "")

    shutil.rmtree(cache)
    success_of(tool(["evaluate", "run=run", "tasks=[position]", "limit=2"], tmp_path, environment))
    more = [*words, "steps=6", "run.allow_changes=[steps]"]
    for directory, start in (("fork", ["resume=run"]), ("run", [])):
        shutil.rmtree(cache)
        resumed = success_of(train([*more, *start, f"run.dir={directory}"], tmp_path, environment))
        assert f"{directory} resumes from step 4" in resumed.out
        assert "\nEOS: </s>, token 1, guessed from its name; data.eos_token sets" in resumed.out
        facts = read_json(tmp_path / directory / "run.json")
        assert (facts["eos_token"], facts["eos_guessed"]) == ("</s>", True)
        saved = (tmp_path / directory / "config.yaml").read_text(encoding="utf-8")
        assert "  eos_token: null\n" in saved

    shutil.rmtree(cache)
    stage = success_of(train([*words, "resume=stage:run", "run.dir=stage"], tmp_path, environment))
    assert "\nEOS: </s>, token 1, guessed" in stage.out
    shutil.rmtree(cache)
    new = train([*begin, "run.dir=new"], tmp_path, environment)
    assert new.code == 2
    assert "the text '</s>' encodes to the EOS" in new.err


def test_run_says_before_training_that_tokenizer_cannot_be_exported(tmp_path, tiny, environment):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(documents(50)), model_writer=model, minloglevel=2,
        vocab_size=100, model_type="unigram",
    )  # fmt: skip
    (tmp_path / "unigram.model").write_bytes(model.getvalue())
    words = [*tiny, f"data.tokenizer={tmp_path / 'unigram.model'}", "run.dir=run"]
    result = success_of(train(words, tmp_path, environment))
    note = "diffllm export will refuse the tokenizer of this run, because it is not a BPE model"
    before, _, after = result.out.partition(note)
    assert "chosen for this device" in after
    assert "\ndefaults: conf/train.yaml, because the override of model" in before
    assert "step" not in before.splitlines()[-1]
