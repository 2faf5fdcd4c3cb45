"""The order of samples, and the conversion of losses to bits per byte."""

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sample_texts import sample_documents

from diffllm.data.config import SampleBy, SourceConfig
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import MixtureData
from diffllm.data.samples import mean_bits_per_nat, permute, training_samples

SEEDS = st.integers(min_value=0, max_value=2**63)
EPOCHS = st.integers(min_value=0, max_value=2**31)


@given(n=st.integers(min_value=1, max_value=5000), seed=SEEDS, epoch=EPOCHS)
@example(n=65_536, seed=7, epoch=1)
@example(n=65_537, seed=7, epoch=1)
def test_permute_is_a_bijection(n, seed, epoch):
    assert sorted(permute(np.arange(n), n, seed, epoch).tolist()) == list(range(n))


@given(n=st.integers(min_value=1, max_value=2**40), seed=SEEDS, data=st.data())
def test_permute_result_for_an_index_does_not_depend_on_other_indices(n, seed, data):
    indices = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    together = permute(np.array(indices), n, seed, 0)
    alone = [permute(np.array([index]), n, seed, 0)[0] for index in indices]
    assert together.tolist() == alone
    assert ((together >= 0) & (together < n)).all()


@given(n=st.integers(min_value=200, max_value=5000), seed=SEEDS, epoch=EPOCHS)
def test_permutation_differs_between_epochs_and_seeds(n, seed, epoch):
    order = permute(np.arange(n), n, seed, epoch)
    for other_seed, other_epoch in ((seed, epoch + 1), (seed + 1, epoch)):
        other = permute(np.arange(n), n, other_seed, other_epoch)
        # Two random permutations agree at one place on average.
        assert (order == other).sum() < 20


@pytest.mark.parametrize("n", [1000, 4096, 10_007])
def test_permuted_positions_do_not_correlate_with_indices(n):
    order = permute(np.arange(n), n, 3, 2)
    bound = 5 / np.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), order)[0, 1]) < bound
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < bound
    assert (order == np.arange(n)).sum() < 10


def test_permute_produces_all_24_orders_of_four_items():
    orders = {tuple(permute(np.arange(4), 4, seed, 0).tolist()) for seed in range(500)}
    assert len(orders) == 24


def test_permute_matches_stored_results():
    """Another order would silently change the samples of resumed runs."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [8, 1, 5, 2, 6, 7, 4, 3, 9, 0]
    large = permute(np.arange(3), 10**12, 1234, 5)
    assert large.tolist() == [767138975145, 822644210034, 182445646350]


def test_corpus_bits_per_nat_matches_reference_value(prepared, make_config):
    stream, tokenizer = prepared.split("train"), prepared.tokenizer()
    text = tokenizer.decode(stream.tokens(0, len(stream)).tolist())
    expected = len(stream) / len(text.encode()) / math.log(2)
    samples = training_samples(prepared, make_config(), 8, 0, 4)
    assert samples.bits_per_nat(4) == pytest.approx(expected)


def test_mixture_bits_per_nat_depends_on_token_count_per_source(tmp_path, make_config, prepared):
    words, digits = sample_documents(60), [f"{i * i} {i}" * 20 for i in range(60)]
    for name, texts in (("words", words), ("digits", digits)):
        (tmp_path / f"{name}.txt").write_text("\n".join(texts), encoding="utf-8")
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
