"""Generated examples as a corpus: its documents and settings."""

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from diffllm import load_config
from diffllm.config.saved import load_run_config
from diffllm.core.errors import ConfigError
from diffllm.data.preparation.prepare import prepare
from diffllm.data.streams import TokenStream
from diffllm.data.tasks.generators import FILLER, KEY_WORDS, VALUES
from diffllm.data.tasks.task import TASKS
from diffllm.data.text.corpus import open_corpus
from diffllm.data.text.synthetic import words_of
from diffllm.data.tokenizer import Tokenizer

WORDS = ["model=tiny", "model.vocab_size=640", "seq_len=32", "data=synthetic", "data.examples=300"]


def document_pieces(cache: Path, *words: str) -> list[tuple[str, ...]]:
    """The pieces of each document, the last of them its text."""
    cfg = load_config([*WORDS, f"data.cache_dir={cache}", *words])
    found = []
    for part in open_corpus(cfg.data, cache).list_parts():
        for batch in part.read():
            documents = zip(batch.before, batch.texts, strict=True)
            found += [(*before, text or "") for before, text in documents]
    return found


@pytest.mark.parametrize("task", ["mqar", "icl", "needle"])
def test_synthetic_training_documents_do_not_contain_evaluation_prompts(tmp_path, task):
    found = document_pieces(tmp_path, f"data.task={task}")
    whole = document_pieces(tmp_path, f"data.task={task}", "data.answers_only=false")
    assert len(found) == 300
    assert ["".join(document) for document in found] == [text for (text,) in whole]
    asked = {e.prompt for e in TASKS[task].examples(TASKS[task].levels(256)[0], 300, 0, words_of)}
    assert not asked & {document[0] for document in found}


def test_mqar_document_asks_for_at_most_half_of_the_keys(tmp_path):
    sizes: Counter[int] = Counter()
    for document in document_pieces(tmp_path, "data.level={filler: 5}"):
        *words, first = document[0].split()
        pairs = dict(zip(words[:-5:2], words[1:-5:2], strict=True))
        keys = [first, *(given.strip() for given in document[2::2])]
        assert len(keys) == len({*keys}) == min(4, len(pairs) // 2)
        assert [value.strip() for value in document[1::2]] == [pairs[key] for key in keys]
        sizes[len(pairs)] += 1
    assert sizes.keys() == {2, 4, 8, 16}
    assert sizes[2] == max(sizes.values()) > 0.65 * sizes.total()


def test_synthetic_needle_document_contains_correct_answer_to_each_query(tmp_path):
    for document in document_pieces(tmp_path, "data.task=needle"):
        told = dict(re.findall(r"magic number of (\w+) is (\d+)\.", document[0]))
        asked = [re.findall(r"magic number of (\w+) is$", given)[0] for given in document[::2]]
        assert len(told) == 6
        assert len(asked) == len({*asked}) == 2
        assert [number.strip() for number in document[1::2]] == [told[city] for city in asked]


def synthetic_data(tmp_path: Path, *words: str) -> tuple[Tokenizer, TokenStream]:
    words = (f"data.cache_dir={tmp_path}", "data.examples=1500", "data.vocab_size=640", *words)
    data = prepare(load_config([*WORDS, *words]).data)
    return data.tokenizer(), data.split("train")


def document_places(stream: TokenStream, eos_id: int) -> list[np.ndarray]:
    """Places of the tokens of each document, the last one its EOS."""
    ids = np.asarray(stream.tokens(0, len(stream)))
    return np.split(np.arange(len(stream)), np.flatnonzero(ids == eos_id) + 1)[:-1]


def test_loss_mask_of_mqar_document_selects_only_the_answers(tmp_path):
    tokenizer, stream = synthetic_data(tmp_path, "data.level={filler: 8}")
    predicted = stream.loss_mask(0, len(stream))
    ids = np.asarray(stream.tokens(0, len(stream)))
    found = document_places(stream, tokenizer.eos_id)
    assert len(found) > 1000
    for places in found:
        words = [tokenizer.decode([token]).strip() for token in ids[places[:-1]].tolist()]
        shown = [word for word, own in zip(words, predicted[places], strict=False) if own]
        asked = words[-2 * len(shown) :]
        assert {*words} <= {*KEY_WORDS, *VALUES, *FILLER}
        assert shown == asked[1::2]
        pairs = dict(zip(words[: -len(asked) - 8 : 2], words[1 : -len(asked) - 8 : 2], strict=True))
        assert shown == [pairs[key] for key in asked[::2]]


def test_needle_documents_contain_481_to_512_tokens(tmp_path):
    tokenizer, stream = synthetic_data(tmp_path, "data.task=needle")
    sizes = [len(places) for places in document_places(stream, tokenizer.eos_id)]
    assert min(sizes) > 480
    assert max(sizes) <= 512


def test_synthetic_documents_are_determined_by_settings_and_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("diffllm.data.text.synthetic.PART_EXAMPLES", 100)
    level = "data.level={filler: 9}"
    first = document_pieces(tmp_path, level)
    assert len(set(first)) == 300
    assert document_pieces(tmp_path, level) == first
    assert document_pieces(tmp_path, level, "data.task_seed=1") != first
    identities = {
        open_corpus(
            load_config([*WORDS, f"data.cache_dir={tmp_path}", *words]).data, tmp_path
        ).identity
        for words in ([], [level], ["data.task_seed=1"], ["data.task=icl"], ["data.examples=301"])
    }
    assert len(identities) == 5


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("data.task=mqr", "data.task=mqr is not one of icl, mqar, needle"),
        ("data.level={fill: 4}", "fill=4 is not a setting of the task mqar; its settings are"),
        ("data.level={filler: x}", "filler=x must be a whole number"),
        (
            "data.level={filler: 1048577}",
            "filler=1048577 must be a whole number from 0 to 1,048,576",
        ),
        ("data.examples=0", "data.examples"),
    ],
)
def test_synthetic_corpus_refuses_invalid_settings(tmp_path, word, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        document_pieces(tmp_path, word)


def test_needle_level_is_refused_if_length_is_too_small(tmp_path):
    said = r"data.level=.* is not possible for data.task=needle: \d+ sentences of hay fit; at least"
    with pytest.raises(ConfigError, match=said):
        document_pieces(tmp_path, "data.task=needle", "data.level={length: 150}")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "data.task=phonebook data.level={entries: 6}",
            "data.task=phonebook was removed; use needle, mqar, icl or a task of your own",
        ),
        (
            "data.task=mqar data.level={pairs: 8, words: 64}",
            "data.level: pairs=8 is not a setting of the task mqar; its settings are filler",
        ),
        (
            "data.task=needle data.level={length: 150, needles: 6, asked: 2}",
            "asked=2 is not a setting of the task needle; its settings are length, needles, ",
        ),
    ],
)
def test_prepare_refuses_config_with_removed_task_setting(tmp_path, word, said):
    cfg = load_config([*WORDS, f"data.cache_dir={tmp_path}", *word.split(" ", 1)])
    with pytest.raises(ConfigError, match=said):
        prepare(cfg.data)
    with pytest.raises(ConfigError, match=said):
        cfg.check_world(1)
    text = OmegaConf.to_yaml(OmegaConf.structured(cfg))
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    assert load_run_config(tmp_path).data == cfg.data
