"""Losses of training in bits a byte."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_texts import sample_documents

from diffllm.data import MixtureData, TokenData, prepare
from diffllm.data.config import DataConfig, SampleBy, SourceConfig


def test_a_corpus_has_the_mean_bytes_of_its_training_tokens(prepared: TokenData) -> None:
    stream, tokenizer = prepared.split("train"), prepared.tokenizer()
    text = tokenizer.decode(stream.tokens(0, len(stream)).tolist())
    expected = len(stream) / len(text.encode()) / math.log(2)
    assert prepared.bits_per_nat({}) == pytest.approx(expected)


def test_a_mixture_has_those_of_what_was_read(
    tmp_path: Path, make_config: Callable[..., DataConfig], prepared: TokenData
) -> None:
    words, digits = sample_documents(60), [f"{i * i} {i}" * 20 for i in range(60)]
    for name, texts in (("words", words), ("digits", digits)):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts))
    sources = {
        name: SourceConfig(
            source="files", paths=[str(tmp_path / f"{name}.txt")], sample_by=SampleBy.line
        )
        for name in ("words", "digits")
    }
    tokenizer = str(prepared.directory)
    data = prepare(make_config(source="mixture", sources=sources, tokenizer=tokenizer))
    assert isinstance(data, MixtureData)
    splits = {name: data.sources[name].manifest.splits["train"] for name in sources}
    read = {"data/tokens/words": 300.0, "data/tokens/digits": 100.0}
    text = sum(
        tokens * splits[name.split("/")[-1]].bytes / splits[name.split("/")[-1]].tokens
        for name, tokens in read.items()
    )
    assert data.bits_per_nat(read) == pytest.approx(400 / text / math.log(2))
    alone = {"data/tokens/words": 300.0, "data/tokens/digits": 0.0}
    assert data.bits_per_nat(alone) == pytest.approx(splits["words"].bits_per_byte(1.0))
