"""Losses of training in bits a byte."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_texts import sample_documents

from diffllm.data import MixtureData, TokenData, prepare, training_samples
from diffllm.data.config import DataConfig, SampleBy, SourceConfig
from diffllm.data.samples import mean_bits_per_nat


def test_bits_per_nat_of_corpus_uses_mean_bytes_per_token(
    prepared: TokenData, make_config: Callable[..., DataConfig]
) -> None:
    stream, tokenizer = prepared.split("train"), prepared.tokenizer()
    text = tokenizer.decode(stream.tokens(0, len(stream)).tolist())
    expected = len(stream) / len(text.encode()) / math.log(2)
    assert training_samples(prepared, make_config(), 8, 0, 4).bits_per_nat(4) == pytest.approx(
        expected
    )


def test_mixture_bits_per_nat_weights_sources_by_tokens_read(
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
    splits = [data.sources[name].manifest.splits["train"] for name in sources]
    text = sum(n * s.bytes / s.tokens for n, s in zip((300, 100), splits, strict=True))
    assert mean_bits_per_nat(splits, [300, 100]) == pytest.approx(400 / text / math.log(2))
    assert mean_bits_per_nat(splits, [300, 0]) == pytest.approx(splits[0].bits_per_byte(1.0))
    assert mean_bits_per_nat(splits, [0, 0]) is None
