"""Loss masks of shards, and the remaining targets."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs.json_files import read_json, write_json

from diffllm.core.errors import DataError
from diffllm.core.targets import CONTEXT_TARGET, PADDING_TARGET
from diffllm.data.config import DataConfig
from diffllm.data.heldout import heldout_documents, heldout_tokens
from diffllm.data.imported import FilesStream
from diffllm.data.packing import PackingPlan, write_plan
from diffllm.data.sequences import PackedSequences, StreamSequences, ignores_targets
from diffllm.data.shards import Manifest
from diffllm.data.streams import JoinedStream, TokenStream
from diffllm.training.checks import corpus_facts

EOS, TOKENS = 0, 400
FILES = Path(__file__).parent.parent / "data_files" / "imported"


def random_documents(seed: int = 0) -> tuple[list[int], np.ndarray]:
    """Return random documents as tokens, and a loss mask."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 1000, TOKENS)
    tokens[generator.random(TOKENS) < 0.1] = EOS
    tokens[-1] = EOS
    return tokens.tolist(), generator.random(TOKENS) < 0.6


def write_masks(directory: Path, mask: np.ndarray, but: tuple[int, ...] = ()) -> None:
    """Write masks next to the shards of a directory, except for the shard numbers in `but`."""
    manifest = read_json(directory / "manifest.json")
    start = 0
    for number, shard in enumerate(manifest["splits"]["train"]["shards"]):
        content = mask[start : start + shard["tokens"]].astype(np.uint8).tobytes()
        start += shard["tokens"]
        if number not in but:
            shard["mask"] = f"{Path(shard['file']).stem}.mask"
            shard["mask_sha256"] = hashlib.sha256(content).hexdigest()
            (directory / shard["mask"]).write_bytes(content)
    write_json(directory / "manifest.json", manifest)


def open_stream(directory: Path) -> TokenStream:
    return TokenStream(directory, Manifest.load(directory), "train")


@pytest.fixture
def masked(make_stream: Callable[..., TokenStream], tmp_path: Path) -> TokenStream:
    """A masked stream of several shards."""
    tokens, mask = random_documents()
    make_stream(tokens)
    write_masks(tmp_path / "stream", mask)
    return open_stream(tmp_path / "stream")


def test_loss_mask_range_may_span_several_shards(masked):
    _, mask = random_documents()
    assert masked.masked
    for start, stop in ((0, TOKENS), (0, 0), (90, 300), (97, 194), (399, 400)):
        found = masked.loss_mask(start, stop)
        assert found.dtype == np.bool_
        assert found.tolist() == mask[start:stop].tolist()
    with pytest.raises(IndexError):
        masked.loss_mask(0, TOKENS + 1)


def test_loss_mask_is_true_for_all_tokens_of_shard_without_mask_file(make_stream, tmp_path):
    tokens, mask = random_documents()
    stream = make_stream(tokens)
    assert not stream.masked
    assert stream.loss_mask(3, 200).all()
    write_masks(tmp_path / "stream", mask, but=(1,))
    found = open_stream(tmp_path / "stream")
    expected = mask.copy()
    expected[97:194] = True
    assert found.loss_mask(0, TOKENS).tolist() == expected.tolist()
    text = (tmp_path / "stream" / "manifest.json").read_text(encoding="utf-8")
    assert asdict(Manifest.load(tmp_path / "stream")) == json.loads(text)


def test_token_shards_have_no_loss_mask_if_manifest_has_no_mask_keys(make_stream, tmp_path):
    make_stream(random_documents()[0])
    file = tmp_path / "stream" / "manifest.json"
    manifest = read_json(file)
    for shard in manifest["splits"]["train"]["shards"]:
        del shard["mask"], shard["mask_sha256"]
    write_json(file, manifest)
    assert not open_stream(tmp_path / "stream").masked


def test_damaged_loss_mask_file_raises_error_with_path(masked, tmp_path):
    file = tmp_path / "stream" / "train-00001.mask"
    file.write_bytes(bytes(97))
    masked.loss_mask(0, 97)
    with pytest.raises(DataError, match=r"train-00001\.mask: damaged: its sha256 is not"):
        masked.loss_mask(0, 98)
    file.write_bytes(bytes(96))
    with pytest.raises(DataError, match=r"train-00001\.mask: 96 bytes, expected 97"):
        open_stream(tmp_path / "stream")
    file.unlink()
    with pytest.raises(DataError, match=r"train-00001\.mask: no file, expected"):
        open_stream(tmp_path / "stream")


def test_stream_sequences_ignore_targets_outside_the_loss_mask(make_stream, masked):
    tokens, mask = random_documents()
    plain = StreamSequences(make_stream(tokens, directory="plain"), 16)
    everything = np.arange(len(plain))
    inputs, targets = StreamSequences(masked, 16).read(everything)
    for place in everything:
        one = StreamSequences(masked, 16).read(everything[place : place + 1])
        assert torch.equal(one[0], inputs[place : place + 1])
        assert torch.equal(one[1], targets[place : place + 1])
    same, whole = plain.read(everything)
    assert torch.equal(inputs, same)
    wanted = torch.from_numpy(mask[1 : 1 + whole.numel()]).view_as(whole)
    assert torch.equal(targets, torch.where(wanted, whole, -1))


def test_packed_sequences_ignore_targets_outside_the_loss_mask(make_stream, masked, tmp_path):
    tokens, mask = random_documents()
    plain = make_stream(tokens, directory="plain")
    (tmp_path / "plan").mkdir()
    write_plan(plain, EOS, 16, tmp_path / "plan")
    plan = PackingPlan(tmp_path / "plan")
    everything = np.arange(plan.counts.sequences)
    inputs, targets = PackedSequences(masked, EOS, 16, plan).read(everything)
    same, whole = PackedSequences(plain, EOS, 16, plan).read(everything)
    assert torch.equal(inputs, same)
    assert torch.equal(targets[targets >= 0], whole[targets >= 0])
    assert torch.equal(targets == PADDING_TARGET, whole == PADDING_TARGET), "context is not padding"
    assert (targets == CONTEXT_TARGET).any()
    assert (targets == PADDING_TARGET).any()
    left = [sum(int(mask[i : i + n].sum()) for i, n in plan[row]) for row in everything.tolist()]
    assert (targets >= 0).sum(1).tolist() == left
    assert sum(left) == mask.sum()


def test_loss_mask_of_joined_stream_is_true_for_unmasked_streams(make_stream, masked):
    plain = make_stream(random_documents(1)[0], directory="plain")
    joined = JoinedStream("train", [plain, masked, plain])
    assert joined.masked
    assert not JoinedStream("train", [plain]).masked
    whole = np.concatenate([np.ones(TOKENS, bool), random_documents()[1], np.ones(TOKENS, bool)])
    for start, stop in ((0, 1200), (399, 401), (100, 100), (500, 900), (800, 1200)):
        assert joined.loss_mask(start, stop).tolist() == whole[start:stop].tolist()
    imported = FilesStream("train", [str(next(FILES.glob("*.bin")))], (250, EOS), 0, 9)
    assert not imported.masked
    assert imported.loss_mask(2, 9).tolist() == [True] * 7


# Held-out documents


@pytest.mark.parametrize("tokens", [None, 100])
def test_token_count_of_held_out_documents_excludes_tokens_without_loss(masked, tokens):
    chosen = heldout_documents(masked, EOS, tokens)
    _, mask = random_documents()
    spans = list(zip(chosen.starts.tolist(), chosen.lengths.tolist(), strict=True))
    assert chosen.predicted.tolist() == [int(mask[i : i + n].sum()) for i, n in spans]
    found = np.zeros(len(chosen), np.int64)
    for rank in range(2):
        for _, targets, owners in chosen.batches(16, 3, rank, 2):
            found += np.bincount(owners[targets >= 0].numpy(), minlength=len(chosen))
    assert found.tolist() == chosen.predicted.tolist()
    assert heldout_tokens(masked, EOS, tokens) == chosen.predicted.sum()


def test_byte_count_of_held_out_documents_excludes_tokens_without_loss(masked):
    chosen = heldout_documents(masked, EOS)
    decoder: Any = SimpleNamespace(decode=lambda tokens: "".join(map(chr, tokens)))
    sizes, _ = chosen.texts(decoder)
    tokens, mask = np.array(random_documents()[0]), random_documents()[1]
    for size, start, length in zip(sizes, chosen.starts, chosen.lengths, strict=True):
        here = slice(start, start + length)
        assert size == len("".join(map(chr, tokens[here][mask[here]])).encode())


def test_heldout_split_is_refused_if_loss_mask_excludes_all_tokens(masked, tmp_path):
    write_masks(tmp_path / "stream", np.zeros(TOKENS, bool))
    with pytest.raises(DataError, match="no token to predict"):
        heldout_tokens(open_stream(tmp_path / "stream"), EOS)


def test_corpus_token_hash_depends_on_loss_masks(masked, tmp_path):
    facts = []
    for mask in (random_documents()[1], random_documents(1)[1]):
        write_masks(tmp_path / "stream", mask)
        data: Any = SimpleNamespace(manifest=Manifest.load(tmp_path / "stream"))
        assert ignores_targets(data, DataConfig())
        facts.append(corpus_facts(data)["tokens"])
    assert facts[0] != facts[1]
