"""Packing: places of documents, targets, and independence of block size and layout."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs.json_files import read_json, write_json

from diffllm.config.compose import steps_to_train
from diffllm.core.errors import DataError
from diffllm.core.targets import PADDING_TARGET
from diffllm.data import packing, streams
from diffllm.data.config import DataConfig, Packing, SampleBy, SourceConfig
from diffllm.data.imported import FilesStream
from diffllm.data.loader import TrainLoader
from diffllm.data.packing import PackingPlan, best_fit_decreasing, write_plan
from diffllm.data.prepared import MixtureData
from diffllm.data.samples import ShuffledSequences, permute, training_samples
from diffllm.data.sequences import (
    PackedSequences,
    packing_counts,
    plan_key,
    sequences_of_epoch,
    training_sequences,
)
from diffllm.data.shards import Manifest
from diffllm.data.streams import TokenStream
from diffllm.model.attention.masks import Documents

EOS = 0

# The algorithm


def plainly_packed(sizes: list[int], capacity: int) -> list[list[int]]:
    """Pack item by item, as in the paper, with a search over all bins; return the items of bins."""
    bins: list[list[int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        full = [sum(sizes[i] for i in own) for own in bins]
        fitting = [b for b in range(len(bins)) if full[b] + sizes[item] <= capacity]
        if not fitting:
            bins.append([item])
        else:
            bins[max(fitting, key=lambda b: full[b])].append(item)
    return bins


@st.composite
def drawn_items(draw: st.DrawFn) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 40))
    largest = draw(st.integers(1, capacity))
    return draw(st.lists(st.integers(1, largest), max_size=60)), capacity


@settings(max_examples=100)
@given(drawn_items())
def test_best_fit_decreasing_matches_reference_implementation(drawn):
    sizes, capacity = drawn
    bins, count = best_fit_decreasing(np.array(sizes, np.int64), capacity)
    expected = plainly_packed(sizes, capacity)
    assert count == len(expected)
    for number, own in enumerate(expected):
        assert np.flatnonzero(bins == number).tolist() == sorted(own)


def test_best_fit_decreasing_supports_capacities_above_16_bits():
    sizes = [70_000, 1, 50_000, 20_000, 30_000, 70_001]
    bins, count = best_fit_decreasing(np.array(sizes), 100_000)
    assert plainly_packed(sizes, 100_000) == [[5, 3, 1], [0, 4], [2]]
    assert (bins.tolist(), count) == ([1, 0, 2, 0, 1, 0], 3)


# Documents in sequences


class Tokens:
    """A stream in memory: documents of the given lengths, with distinct tokens."""

    split, masked = "train", False

    def __init__(self, lengths: list[int], ended: bool = True) -> None:
        ends = np.cumsum(lengths)
        self.all = 1 + np.arange(ends[-1])
        self.all[ends[: None if ended else -1] - 1] = EOS
        self.documents = [
            slice(int(end - n), int(end)) for n, end in zip(lengths, ends, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.all)

    def tokens(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        return self.all[start:stop].copy()


def packed(stream: Any, seq_len: int, directory: str | Path, eos_id: int = EOS) -> PackedSequences:
    write_plan(stream, eos_id, seq_len, Path(directory))
    return PackedSequences(stream, eos_id, seq_len, PackingPlan(Path(directory)))


@st.composite
def corpora(draw: st.DrawFn) -> tuple[Tokens, int]:
    seq_len = draw(st.integers(1, 20))
    longest = draw(st.sampled_from([1, 2, seq_len, 5 * seq_len]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=40))
    return Tokens(lengths, ended=draw(st.booleans())), seq_len


@settings(max_examples=100)
@given(corpora(), st.integers(1, 50), st.integers(1, 50))
def test_packing_cuts_only_documents_longer_than_a_sequence(drawn, block, window):
    stream, seq_len = drawn
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "PACKING_WINDOW", window)
        other = packed(stream, seq_len, directory)
        whole = [other.plan[i] for i in range(len(other))]
        patch.setattr(streams, "BLOCK", block)
        sequences = packed(stream, seq_len, directory)
        rows = [sequences.plan[i] for i in range(len(sequences))]
    assert rows == whole, "the block size must not change the plan"
    found = sorted((start, start + length) for row in rows for start, length in row)
    expected = [
        (start, min(start + seq_len, document.stop))
        for document in stream.documents
        for start in range(document.start, document.stop, seq_len)
    ]
    assert found == expected
    assert all(row == sorted(row) for row in rows), "pieces must be in corpus order"
    counts = sequences.plan.counts
    assert counts.documents == len(stream.documents)
    assert counts.documents_cut == sum(d.stop - d.start > seq_len for d in stream.documents)
    assert (counts.sequences, counts.tokens) == (len(rows), len(stream))
    assert counts.padding == len(rows) * seq_len - len(stream)


@settings(max_examples=100)
@given(corpora())
def test_packed_sequence_contains_only_document_tokens_and_padding(drawn):
    """The input of a target is the previous token, or an EOS for the first target of a document."""
    stream, seq_len = drawn
    with TemporaryDirectory() as directory:
        sequences = packed(stream, seq_len, directory)
        inputs, targets = sequences.read(np.arange(len(sequences)))
        rows = [sequences.plan[i] for i in range(len(sequences))]
    tokens, starts = stream.all.tolist(), {document.start for document in stream.documents}
    assert inputs.dtype == targets.dtype == torch.int64
    assert int((targets >= 0).sum()) == len(stream)
    for row, one, other in zip(rows, inputs.tolist(), targets.tolist(), strict=True):
        expected: list[tuple[int, int]] = []
        for start, length in row:
            if start not in starts and length < seq_len:
                expected.append((EOS, PADDING_TARGET))
            for i in range(start, start + length):
                expected.append((EOS if i in starts else tokens[i - 1], tokens[i]))
        assert len(expected) <= seq_len
        expected += [(EOS, PADDING_TARGET)] * (seq_len - len(expected))
        assert list(zip(one, other, strict=True)) == expected


@settings(max_examples=100)
@given(corpora())
def test_document_masks_separate_all_documents_packed_into_a_sequence(drawn):
    """Only the EOS before a document may belong to the previous document."""
    stream, seq_len = drawn
    with TemporaryDirectory() as directory:
        sequences = packed(stream, seq_len, directory)
        inputs, _ = sequences.read(np.arange(len(sequences)))
        rows = [sequences.plan[i] for i in range(len(sequences))]
    starts = {document.start for document in stream.documents}
    for row, ids in zip(rows, Documents.of(inputs, EOS).ids.tolist(), strict=True):
        at, own = 0, []
        for start, length in row:
            at += start not in starts and length < seq_len
            own.append(set(ids[at + (start in starts) : at + length]))
            at += length
        assert all(len(each) <= 1 for each in own)
        assert len(set.union(*own)) == sum(map(len, own)), "two pieces share a document id"


@pytest.mark.parametrize("window", [1, 7, 10_000])
def test_packed_sequence_count_matches_reference_implementation(window, tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "PACKING_WINDOW", window)
    lengths = np.random.default_rng(0).integers(1, 60, 300).tolist()
    sequences = packed(Tokens(lengths), 32, tmp_path)
    slots = [m for n in lengths for m in ([n] if n <= 32 else [32, n - 32 + (n - 32 < 32)])]
    expected = [
        len(plainly_packed(slots[i : i + window], 32)) for i in range(0, len(slots), window)
    ]
    assert len(sequences) == sum(expected)


@pytest.mark.parametrize("eos_id", [1, 399])
def test_packing_accepts_token_files_of_other_libraries(tmp_path, eos_id):
    """Documents without an EOS are read with an added EOS."""
    files = Path(__file__).parent.parent / "data_files" / "imported"
    stream = FilesStream("train", [str(files / "megatron_uint16.bin")], (400, eos_id), 0, 2**62)
    stream.stop = len(stream.joined)
    sequences = packed(stream, 16, tmp_path, eos_id)
    documents = read_json(files / "documents.json")
    assert sequences.plan.counts.documents == len(documents)
    _, targets = sequences.read(np.arange(len(sequences)))
    assert int((targets >= 0).sum()) == len(stream)
    assert int((targets == eos_id).sum()) == len(documents)


# Training

SEQ_LEN, SEED, BATCH = 8, 5, 12


@pytest.fixture
def packing_stream(make_stream: Callable[..., TokenStream]) -> TokenStream:
    """A stream of documents of 1 to 19 distinct tokens with EOS, in several shards."""
    lengths = np.random.default_rng(1).integers(1, 20, 60).tolist()
    return make_stream(Tokens(lengths).all.tolist())


@pytest.fixture
def sequences(packing_stream: TokenStream, tmp_path: Path) -> PackedSequences:
    (tmp_path / "plan").mkdir()
    return packed(packing_stream, SEQ_LEN, tmp_path / "plan")


@pytest.fixture
def make_packed_loader(sequences: PackedSequences, open_loader: Any) -> Callable[..., TrainLoader]:
    return lambda **options: open_loader(ShuffledSequences(sequences, SEED), **options)


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "num_workers"), [(1, 12, 0), (1, 3, 2), (2, 2, 1), (3, 4, 0)]
)
def test_packed_step_reads_same_samples_for_any_world_size_and_micro_batch(
    make_packed_loader, sequences, world_size, micro_batch_size, num_workers
):
    """The steps cross two borders of epochs."""
    n = len(sequences)
    samples = range(2 * n // BATCH * BATCH + BATCH)
    places = [int(permute(np.array([g % n]), n, SEED, g // n)[0]) for g in samples]
    expected = torch.stack(sequences.read(np.array(places)), dim=1)
    layout = {"micro_batch_size": micro_batch_size, "num_workers": num_workers}
    layout |= {"world_size": world_size}
    loaders = [make_packed_loader(rank=rank, **layout) for rank in range(world_size)]
    steps = len(samples) // (world_size * micro_batch_size)
    read = [torch.stack(next(each), dim=1) for _ in range(steps) for each in loaders]
    assert torch.equal(torch.cat(read), expected)


@pytest.mark.parametrize(
    ("name", "value"), [("starts.bin", -1), ("starts.bin", 10**9), ("lengths.bin", 10**6)]
)
def test_packing_plan_with_out_of_range_values_raises_error(sequences, tmp_path, name, value):
    file, record = tmp_path / "plan" / name, tmp_path / "plan" / "plan.json"
    content = np.fromfile(file, packing.ARRAYS[name])
    content[:] = value
    content.tofile(file)
    said = read_json(record)
    said["files"][name]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    write_json(record, said)
    sequences.plan = PackingPlan(tmp_path / "plan")
    with pytest.raises(DataError, match=r"plan.json: unusable \(a piece .*; delete"):
        sequences.read(np.arange(2))


# From the config


def packing_config(cache: Path, **changes: Any) -> DataConfig:
    return DataConfig(packing=Packing.best_fit, cache_dir=str(cache), **changes)


def test_packing_plan_is_computed_once_per_corpus_and_seq_len(prepared, tmp_path):
    cfg = packing_config(tmp_path)
    first = training_sequences(prepared, cfg, 32)
    (plan,) = [path for path in (tmp_path / "packing").iterdir() if path.is_dir()]
    made = (plan / "plan.json").stat().st_mtime_ns
    assert len(training_sequences(prepared, cfg, 32)) == len(first)
    assert (plan / "plan.json").stat().st_mtime_ns == made
    training_sequences(prepared, cfg, 33)
    assert len([path for path in (tmp_path / "packing").iterdir() if path.is_dir()]) == 2
    other = replace(prepared.manifest, corpus="another")
    keys = {plan_key(manifest, 32) for manifest in (prepared.manifest, other)}
    assert len(keys) == 2
    train = prepared.manifest.splits["train"]
    assert first.plan.counts.documents == train.documents
    assert first.plan.counts.tokens == train.tokens


def mixture_of(
    make_stream: Callable[..., TokenStream], cache: Path, **limits: float
) -> tuple[MixtureData, DataConfig]:
    parts: dict[str, Any] = {}
    for k, name in enumerate(("code", "web")):
        lengths = np.random.default_rng(k).integers(1, 20, 40 * (k + 1)).tolist()
        stream = make_stream(Tokens(lengths).all.tolist(), directory=name)
        manifest = Manifest.load(stream._directory)
        parts[name] = SimpleNamespace(split=lambda _, stream=stream: stream, manifest=manifest)
    sources = {name: SourceConfig(epochs_at_most=limits.get(name)) for name in parts}
    return MixtureData(parts), packing_config(cache, source="mixture", sources=sources)


def test_mixture_sources_are_packed_separately(make_stream, tmp_path):
    data, cfg = mixture_of(make_stream, tmp_path, code=1)
    own = {name: training_sequences(each, cfg, SEQ_LEN) for name, each in data.sources.items()}
    total = len(own["code"]) * 3
    samples = training_samples(data, cfg, SEQ_LEN, SEED, total)
    inputs, _ = samples[range(total)]  # type: ignore[misc]
    for name, count in (("code", len(own["code"])), ("web", 2 * len(own["code"]))):
        consumed = samples.consumed(total)
        assert consumed[f"data/epochs/{name}"] == count / len(own[name])
        assert consumed[f"data/tokens/{name}"] == count * SEQ_LEN
    rows = {tuple(row) for row in inputs.tolist()}
    code, _ = own["code"].read(np.arange(len(own["code"])))
    assert {tuple(row) for row in code.tolist()} <= rows, "all code sequences must be read"
    counts = packing_counts(data, cfg, SEQ_LEN)
    assert counts is not None
    assert counts.sequences == sum(map(len, own.values()))
    assert counts.tokens == sum(len(each.split("train")) for each in data.sources.values())
    assert sequences_of_epoch(data, cfg, SEQ_LEN) == counts.sequences


def test_number_of_steps_per_epoch_depends_on_packed_sequence_count(corpus_file, tmp_path):
    data = packing_config(
        tmp_path / "cache",
        source="files",
        paths=[str(corpus_file)],
        vocab_size=400,
        sample_by=SampleBy.line,
    )
    batches = {"seq_len": 16, "global_batch_size": 4}
    cfg: Any = SimpleNamespace(data=data, prepare=None, epochs=3, max_tokens=None, **batches)
    steps = steps_to_train(cfg)
    (plan,) = (path for path in (tmp_path / "cache" / "packing").iterdir() if path.is_dir())
    assert steps == 3 * PackingPlan(plan).counts.sequences // 4
