"""Held-out documents of the final loss, and the sequences of these documents."""

import hashlib
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch

from diffllm.data.heldout import (
    HeldoutDocuments,
    HeldoutSample,
    heldout_documents,
    heldout_tokens,
    predicted_text,
)
from diffllm.data.prepared import TokenData
from diffllm.data.streams import TokenStream
from diffllm.data.tokenizer import Tokenizer

EOS = 0


def lengths_of(documents: int, seed: int = 0) -> list[int]:
    """Return random lengths, with a few long documents."""
    return (1 + np.random.default_rng(seed).pareto(1.2, documents) * 8).astype(int).tolist()


def distinct_tokens(lengths: list[int]) -> list[int]:
    """Return documents of these lengths; tokens are distinct, except EOS at the ends."""
    tokens = np.arange(1, sum(lengths) + 1)
    tokens[np.cumsum(lengths) - 1] = EOS
    return tokens.tolist()


@pytest.fixture
def stream(make_stream: Callable[..., TokenStream]) -> TokenStream:
    """300 documents, in shards of 97 tokens."""
    return make_stream(distinct_tokens(lengths_of(300)), vocab_size=2**20)


def test_heldout_documents_selects_all_documents_if_no_limit_is_set(stream):
    lengths = lengths_of(300)
    assert max(lengths) > 97 > 1 in lengths
    for tokens in (None, len(stream), 1e12):
        found = heldout_documents(stream, EOS, tokens)
        assert found.lengths.tolist() == lengths
        assert found.starts.tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
        assert heldout_tokens(stream, EOS, tokens) == len(stream)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("tokens", [None, 200])
def test_heldout_document_batches_contain_each_token_once_as_target(stream, world_size, tokens):
    chosen = heldout_documents(stream, EOS, tokens)
    pairs = [
        (i, token)
        for i, (start, length) in enumerate(zip(chosen.starts, chosen.lengths, strict=True))
        for token in stream.tokens(start, start + length).tolist()
    ]
    before = dict(zip(range(len(pairs)), [EOS, *(token for _, token in pairs)], strict=False))
    shape = (2, 32)
    ranks = [list(chosen.batches(32, 2, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {chosen.rounds(32, 2, world_size)}
    seen = []
    for batch in [batch for together in zip(*ranks, strict=True) for batch in together]:
        assert [part.shape for part in batch] == [shape] * 3
        inputs, targets, owners = (part.flatten().tolist() for part in batch)
        for previous, target, owner in zip(inputs, targets, owners, strict=True):
            if target >= 0:
                assert previous == before[len(seen)]
                seen.append((owner, target))
    assert seen == pairs


def test_short_heldout_documents_are_never_cut_if_whole_is_true(stream):
    chosen = heldout_documents(stream, EOS, whole=True)
    cut = heldout_documents(stream, EOS)
    rows = [torch.cat(parts) for parts in zip(*chosen.batches(32, 2), strict=True)]
    inputs, targets, owners = rows
    held = targets >= 0
    of_all = [torch.cat(parts) for parts in zip(*cut.batches(32, 2), strict=True)]
    for mine, every in zip(rows, of_all, strict=True):
        assert mine[held].tolist() == every[of_all[1] >= 0].tolist()
    in_rows = [set(owners[row, held[row]].tolist()) for row in range(len(owners))]
    for document, length in enumerate(chosen.lengths.tolist()):
        rows_of = sum(document in found for found in in_rows)
        assert rows_of == 1 if length <= 32 else rows_of <= -(-length // 32) + 1
    # The first document of the next row does not fit into the rest of a row.
    used = held.sum(1).tolist()
    for row in range(len(used) - 1):
        following = chosen.lengths[owners[row + 1, 0]]
        assert used[row] + following > 32 or used[row + 1] == 0 or inputs[row + 1, 0] != EOS
    assert 32 in used
    assert min(used[:-1]) < 32


def test_heldout_sample_with_whole_documents_cuts_no_short_document(make_stream):
    stream = make_stream(distinct_tokens([9] * 100), vocab_size=2**20)
    sample = HeldoutSample(stream, 10, 40, EOS, whole=True)
    for rank in range(2):
        for inputs, targets in sample.batches(3, rank, 2):
            assert (inputs[:, 0] == EOS).all()
            assert (targets[:, 8] == EOS).all()
            assert (targets[:, 9] == -1).all()
    sizes = [len(inputs) for inputs, _ in sample.batches(3, 0, 2)]
    assert sum(sizes) == 20


@pytest.mark.parametrize("numbers", ["documents", "tokens"])
def test_larger_heldout_selection_contains_every_smaller_selection(stream, numbers):
    every = heldout_documents(stream, EOS)
    whole = dict(zip(every.starts.tolist(), every.lengths.tolist(), strict=True))
    smaller: dict[int, int] = {}
    for n in (1, 7, 50, 150, len(every), len(stream) - 1):
        if numbers == "documents":
            chosen = heldout_documents(stream, EOS, most=n)
            tokens = int(chosen.lengths.sum())
            assert len(chosen) == min(n, len(every))
            assert len(heldout_documents(stream, EOS, 50, most=n)) <= n
        else:
            chosen, tokens = heldout_documents(stream, EOS, n), n
            assert n <= sum(chosen.lengths) == heldout_tokens(stream, EOS, n)
            assert sum(chosen.lengths) < n + max(chosen.lengths)
        again = heldout_documents(stream, EOS, tokens)
        assert again.starts.tolist() == chosen.starts.tolist()
        found = dict(zip(chosen.starts.tolist(), chosen.lengths.tolist(), strict=True))
        assert len(found) == len(chosen)
        assert smaller.items() <= found.items() <= whole.items()
        smaller = found


def test_heldout_selection_does_not_depend_on_document_position_or_length(make_stream):
    lengths = lengths_of(4000, seed=1)
    stream = make_stream(distinct_tokens(lengths), vocab_size=2**20, shard_tokens=2**20)
    chosen = heldout_documents(stream, EOS, len(stream) / 10)
    parts = np.histogram(chosen.starts, bins=8, range=(0, len(stream)))[0]
    assert parts.min() > 0.5 * len(chosen) / 8
    assert parts.max() < 1.5 * len(chosen) / 8
    assert np.median(chosen.lengths) == pytest.approx(np.median(lengths), abs=1)
    assert max(chosen.lengths) > 40 * np.median(lengths)


def test_heldout_text_sizes_and_hashes_match_corpus_documents(prepared):
    split = prepared.manifest.splits["heldout"]
    chosen = heldout_documents(prepared.split("heldout"), prepared.manifest.eos_id)
    assert (len(chosen), int(chosen.ends[-1])) == (split.documents, split.tokens)
    sizes, hashes = (sum(parts) for parts in zip(*texts_of_ranks(chosen, prepared), strict=True))
    assert sizes.sum() == split.bytes
    (corpus,) = prepared.directory.parents[2].glob("corpus.txt")
    texts = [line.encode() for line in corpus.read_text(encoding="utf-8").splitlines()]
    of_text = {text: hashlib.sha256(text).digest()[:8] for text in texts}
    known = {int.from_bytes(digest, signed=True): len(text) for text, digest in of_text.items()}
    assert [known[value] for value in hashes.tolist()] == sizes.tolist()


def texts_of_ranks(chosen: HeldoutDocuments, data: TokenData) -> list:
    """Return sizes and hashes of three ranks, with zeros for documents of other ranks."""
    found = [chosen.texts(data.tokenizer(), rank, 3) for rank in range(3)]
    assert all((sizes > 0).sum() <= -(-len(chosen) // 3) for sizes, _ in found)
    return found


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level"])
@pytest.mark.parametrize("whole", [False, True])
def test_predicted_text_of_sequences_adds_up_to_text_of_documents(
    prepared, byte_level, make_stream, rng, kind, whole
):
    """Cuts fall into characters of several bytes, which are several tokens."""
    tokenizer = Tokenizer.from_file(byte_level) if kind == "byte_level" else prepared.tokenizer()
    texts = ["".join(rng.choices("ab \u00e9\u6f22\U0001f600\ufffd", k=40)) for _ in range(30)]
    tokens = [id for text in texts for id in (*tokenizer.encode(text), tokenizer.eos_id)]
    stream = make_stream(tokens)
    sample = HeldoutSample(stream, 7, len(tokens), tokenizer.eos_id, whole)
    ranges = [target for place in range(len(sample.cut)) for target in sample.targets(place)]
    if whole:
        every = heldout_documents(stream, tokenizer.eos_id, whole=True)
        borders = every.borders(7).tolist()
        ranges = [span for pair in pairwise(borders) for span in every.places(*pair)]
    else:
        ranges = [(0, 1), *ranges, (ranges[-1][1], len(tokens))]
    counts = [predicted_text(stream, tokenizer, tokenizer.eos_id, *span) for span in ranges]
    documents = heldout_documents(stream, tokenizer.eos_id)
    sizes, _ = documents.texts(tokenizer)
    assert sizes.tolist() == [len(text.encode()) for text in texts]
    assert sum(size for _, size in counts) == sizes.sum()
    assert sum(predicted for predicted, _ in counts) == len(tokens)


def test_predicted_text_of_sample_matches_its_targets(prepared):
    """The corpus is ASCII, so the bytes of cut sequences can be counted separately."""
    tokenizer, eos_id = prepared.tokenizer(), prepared.manifest.eos_id
    for whole in (False, True):
        sample = HeldoutSample(prepared.split("heldout"), 24, 9, eos_id, whole)
        targets = torch.cat([targets for _, targets in sample.batches(4)])
        text = "".join(tokenizer.decode(row[row >= 0].tolist()) for row in targets)
        counts = [sample.predicted_text(tokenizer, rank, 2) for rank in range(2)]
        expected = [int((targets >= 0).sum()), len(text)]
        assert [sum(pair) for pair in zip(*counts, strict=True)] == expected
