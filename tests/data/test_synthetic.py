"""Generated examples as a corpus: what its documents are, and which settings it takes."""

import re
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from diffllm import load_config
from diffllm.config.saved import load_run_config
from diffllm.core.errors import ConfigError
from diffllm.data.preparation.prepare import prepare
from diffllm.data.tasks.task import TASKS
from diffllm.data.text.corpus import open_corpus
from diffllm.data.text.synthetic import words_of

WORDS = ["model=tiny", "model.vocab_size=420", "seq_len=32", "data=synthetic", "data.examples=300"]


def texts(cache: Path, *words: str) -> list[tuple[str, ...]]:
    """The pieces of each document, the last of them its text."""
    cfg = load_config([*WORDS, f"data.cache_dir={cache}", *words])
    found = []
    for part in open_corpus(cfg.data, cache).list_parts():
        for batch in part.read():
            documents = zip(batch.before, batch.texts, strict=True)
            found += [(*before, text or "") for before, text in documents]
    return found


@pytest.mark.parametrize("task", ["mqar", "icl", "needle"])
def test_documents_are_examples_with_their_answers(tmp_path: Path, task: str) -> None:
    found = texts(tmp_path, f"data.task={task}")
    whole = texts(tmp_path, f"data.task={task}", "data.answers_only=false")
    assert len(found) == 300
    assert ["".join(document) for document in found] == [text for (text,) in whole]
    asked = {e.prompt for e in TASKS[task].examples(TASKS[task].levels(256)[0], 300, 0, len)}
    assert not asked & {document[0] for document in found}


def test_a_document_of_pairs_asks_for_all_values_and_keys_are_given(tmp_path: Path) -> None:
    for document in texts(tmp_path, "data.level={pairs: 6}"):
        *told, _ = document[0].split(",")
        value_of = dict(pair.split() for pair in told)
        keys = [given.split(", ")[-1] for given in document[::2]]
        assert sorted(keys) == sorted(value_of)
        assert [value.strip() for value in document[1::2]] == [value_of[key] for key in keys]


def test_a_document_with_needles_asks_for_all_of_them(tmp_path: Path) -> None:
    for document in texts(tmp_path, "data.task=needle"):
        told = dict(re.findall(r"magic number of (\w+) is (\d+)\.", document[0]))
        asked = [re.findall(r"magic number of (\w+) is$", given)[0] for given in document[::2]]
        assert sorted(asked) == sorted(told)
        assert [number.strip() for number in document[1::2]] == [told[city] for city in asked]


@pytest.mark.parametrize("asked", [1, 6])
def test_a_document_with_needles_is_as_long_as_its_level_says(tmp_path: Path, asked: int) -> None:
    level = f"data.level={{length: 300, needles: 6, asked: {asked}}}"
    sizes = [words_of("".join(document)) for document in texts(tmp_path, "data.task=needle", level)]
    assert min(sizes) > 250
    assert max(sizes) <= 300


def test_only_values_are_to_be_predicted(tmp_path: Path) -> None:
    words = [*WORDS, f"data.cache_dir={tmp_path}", "data.level={pairs: 6}", "data.examples=3000"]
    data = prepare(load_config(words).data)
    tokenizer, stream = data.tokenizer(), data.split("train")
    predicted = stream.loss_mask(0, 3000)
    ids = np.asarray(stream.tokens(0, 3000))
    documents = np.split(np.arange(3000), np.flatnonzero(ids == tokenizer.eos_id) + 1)[:-1]
    assert len(documents) > 10
    for places in documents:
        text = tokenizer.decode(ids[places[:-1]].tolist())
        told, values = text.rstrip().split(",")[:6], text.rstrip().split(",")[6:12]
        shown = tokenizer.decode(ids[places[predicted[places]]].tolist())
        assert len(set(told) & set(values)) == 6
        assert shown.split() == [pair.split()[1] for pair in values]


def test_parts_and_settings_decide_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffllm.data.text.synthetic.A_PART", 100)
    level = "data.level={pairs: 8}"
    first = texts(tmp_path, level)
    assert len(set(first)) == 300
    assert texts(tmp_path, level) == first
    assert texts(tmp_path, level, "data.task_seed=1") != first
    assert all(len(document) == 16 and document[0].count(",") == 8 for document in first)
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
        ("data.level={pair: 4}", "data.level: pair=4 must be one of pairs, words"),
        ("data.level={pairs: x}", "pairs=x must be one of pairs, words with a whole number"),
        ("data.level={pairs: 1048577}", "pairs=1048577 must be one of pairs"),
        ("data.level={pairs: 9000}", "data.level={'pairs': 9000}: mqar has no examples"),
        ("data.level={pairs: 4, words: 7}", "no examples: 8 different words are wanted of 7"),
        (
            "data.level={pairs: 4, words: 8101}",
            "8 different words are wanted of 8,101",
        ),
        ("data.examples=0", "data.examples"),
    ],
)
def test_impossible_task_or_level_is_refused(tmp_path: Path, word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        texts(tmp_path, word)


def test_removed_task_cannot_be_prepared_but_its_config_is_read(tmp_path: Path) -> None:
    words = [*WORDS, f"data.cache_dir={tmp_path}", "data.task=phonebook", "data.level={entries: 6}"]
    cfg = load_config(words)
    said = "data.task=phonebook was removed; use needle, mqar, icl or a task of your own"
    with pytest.raises(ConfigError, match=said):
        prepare(cfg.data)
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    assert load_run_config(tmp_path).data == cfg.data
