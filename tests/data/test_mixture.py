"""Mixtures: samples, independence of the layout, and resuming."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from diffllm.core.errors import CheckpointError, ConfigError, DataError
from diffllm.data.config import DataConfig, SampleBy, SourceConfig
from diffllm.data.curriculum import Between, Point
from diffllm.data.mixture_order import check_place
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import MixtureData
from diffllm.data.samples import MixedSequences, Place
from diffllm.data.streams import JoinedStream, TokenStream

SEQ_LEN, SEED, BATCH, STEPS = 8, 5, 12, 40
SIZES = {"code": 50, "web": 700, "books": 90}
RAMP = [Point(0.3, {"code": 5, "web": 3, "books": 2}), Point(0.9, {"web": 1})]

Make = Callable[..., MixedSequences]


class Part(NamedTuple):
    """Replacement for a prepared source."""

    stream: TokenStream

    def split(self, name: str) -> TokenStream:
        return self.stream


@pytest.fixture
def make_mixture(make_stream: Callable[..., TokenStream]) -> Make:
    """Make mixtures in which token i of source k is 1,000 k + i, to recognise places in batches."""
    parts = {}
    for k, (name, sequences) in enumerate(SIZES.items()):
        tokens = [1000 * k + i % 1000 for i in range(sequences * SEQ_LEN + 1)]
        stream = make_stream(tokens, directory=name)
        parts[name] = Part(stream)

    def samples(total: int = BATCH * STEPS, seed: int = SEED, **changes: Any) -> MixedSequences:
        sources = {name: SourceConfig(weight=w) for name, w in zip(SIZES, (5, 3, 2), strict=True)}
        options: dict[str, Any] = {"curriculum": RAMP, "between": Between.linear, **changes}
        for name, limit in options.pop("limits", {}).items():
            sources[name].epochs_at_most = limit
        cfg = DataConfig(source="mixture", sources=sources, **options)
        return MixedSequences(MixtureData(parts), cfg, SEQ_LEN, seed, total)  # type: ignore[arg-type]

    return samples


def first_tokens(samples: MixedSequences, numbers: range) -> list[int]:
    inputs, targets = samples[numbers]
    assert inputs.shape == targets.shape == (len(numbers), SEQ_LEN)
    assert inputs[:, 1:].equal(targets[:, :-1])
    return inputs[:, 0].tolist()


def test_mixture_sources_are_shuffled_independently(make_mixture):
    read = first_tokens(make_mixture(curriculum=[]), range(200))
    code = [token for token in read if token < 1000]
    assert len(code) == 100
    assert sorted(code[:50]) == sorted(code[50:]) == [8 * i for i in range(50)], "two epochs"
    assert code[:50] != code[50:]
    other = first_tokens(make_mixture(curriculum=[], seed=6), range(200))
    assert read != other
    sources = [token // 1000 for token in read]
    assert sources == [token // 1000 for token in other], "the seed shuffles only within sources"


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "num_workers"),
    [(1, 12, 0), (1, 3, 2), (2, 2, 1), (3, 4, 0), (4, 3, 0)],
)
def test_mixture_step_reads_same_samples_for_any_world_size_and_micro_batch(
    make_mixture, open_loader, world_size, micro_batch_size, num_workers
):
    expected = first_tokens(make_mixture(), range(BATCH * STEPS))
    layout = {"micro_batch_size": micro_batch_size, "num_workers": num_workers}
    loaders = [
        open_loader(make_mixture(), rank=r, world_size=world_size, **layout)
        for r in range(world_size)
    ]
    read: list[int] = []
    for _ in range(BATCH * STEPS // (world_size * micro_batch_size)):
        read += [token for each in loaders for token in next(each)[0][:, 0].tolist()]
    assert read == expected


@pytest.mark.parametrize("step", [1, 13, 20, 39])
def test_mixture_reads_same_samples_after_resume_on_three_ranks(make_mixture, open_loader, step):
    whole = first_tokens(make_mixture(limits={"code": 2}), range(BATCH * STEPS))
    one = open_loader(make_mixture(limits={"code": 2}), micro_batch_size=2)
    for _ in range(step * BATCH // 2 + 1):  # and a part of the next step
        next(one)
    state = one.state_dict()
    assert state["sample"] == step * BATCH
    options = {"micro_batch_size": 2, "world_size": 3}
    others = [open_loader(make_mixture(limits={"code": 2}), rank=r, **options) for r in range(3)]
    for other in others:
        other.load_state_dict(state)
    assert others[0].state_dict() == state
    read = [
        token
        for _ in range((STEPS - step) * BATCH // 6)
        for other in others
        for token in next(other)[0][:, 0].tolist()
    ]
    assert read == whole[step * BATCH :]


def test_resumed_mixture_uses_new_weights_for_remaining_samples(make_mixture):
    """Each source resumes with its next sequence; a second resume reads the same samples."""
    former = make_mixture(curriculum=[])
    state = former.state(101)
    weights = {"curriculum": [Point(0.1, {"web": 1, "books": 1})], "between": Between.constant}
    changed = make_mixture(**weights)
    assert changed.sample_of(state) == 101
    read = first_tokens(changed, range(101, 301))
    assert {token // 1000 for token in read} == {1, 2}
    before = former.order.counts(101)
    every_book = [t for t in first_tokens(former, range(400)) if t // 1000 == 2]
    books = [t for t in read if t // 1000 == 2]
    common = min(len(books), len(every_book) - before[2])
    assert books[:common] == every_book[before[2] : before[2] + common]

    again = make_mixture(**weights)
    later = changed.state(150)
    assert again.sample_of(later) == 150
    assert first_tokens(again, range(150, 301)) == read[49:]
    assert again.consumed(301) == changed.consumed(301)


@pytest.mark.parametrize("first", [0, 37, 190])
def test_places_of_samples_do_not_depend_on_mixture_weights(make_mixture, first):
    samples = make_mixture()
    places = samples.places(range(first, first + 24))
    assert len(places) > 1
    other = make_mixture(total=1, curriculum=[Point(0, {"code": 1})], between=Between.constant)
    parts = [other.read(place).batch for place in places]
    inputs, targets = (torch.cat(part) for part in zip(*parts, strict=True))
    expected, expected_targets = samples[range(first, first + 24)]  # type: ignore[misc]
    order, expected_order = inputs[:, 0].argsort(), expected[:, 0].argsort()
    assert inputs[order].equal(expected[expected_order])
    assert targets[order].equal(expected_targets[expected_order])


def test_place_in_unknown_source_is_refused(make_mixture):
    with pytest.raises(DataError, match="no source 'corpus', only code, web, books"):
        make_mixture().read(Place("corpus", 0, 8))


def test_mixture_refuses_state_with_other_seed_or_sources(make_mixture):
    state = make_mixture().state(24)
    with pytest.raises(CheckpointError, match="seed=5, but this run has seed=6"):
        make_mixture(seed=6).sample_of(state)
    with pytest.raises(CheckpointError, match=r"has data\.sources code, web, but this run"):
        make_mixture().sample_of({**state, "consumed": {"code": 10, "web": 14}})
    with pytest.raises(CheckpointError, match=r"has data\.sources .no mixture."):
        make_mixture().sample_of({"seed": SEED, "epoch": 0, "sample": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("weights", value) for value in ("x", [[]], [[0, 1.0]], [["x", 0.5, 0.3, 0.2]])),
        *(("weights", [[0, *w]]) for w in ([-1, 1, 1], [1e308, 0, 0], [0, 0, 0], [1, 1e-9, 0])),
        *(("weights", [[start, 0.5, 0.3, 0.2]]) for start in (-1, 30, 10**18)),
        ("weights", [[0, 0.5, 0.3, 0.2], [20, 1, 0, 0], [10, 0, 0, 1]]),
        *((key, {"code": n}) for key in ("before", "consumed") for n in (-1, 24, 2**62, "x")),
        *((key, value) for key in ("sample", "since") for value in (25, -1, 2**62, [], None)),
    ],
)
def test_mixture_refuses_state_with_invalid_values(make_mixture, key, value):
    state = make_mixture().state(24)
    forged = {**state, key: {**state[key], **value} if isinstance(value, dict) else value}
    with pytest.raises(CheckpointError, match=r"invalid data position, the entry loop\.data"):
        make_mixture().sample_of(forged)
    check_place(state)
    with pytest.raises(ValueError):  # noqa: PT011
        check_place(forged)


def test_mixture_metrics_contain_token_and_epoch_counts_per_source(make_mixture):
    samples = make_mixture(limits={"code": 1})
    read = first_tokens(samples, range(BATCH * STEPS))
    consumed = samples.consumed(BATCH * STEPS)
    for k, name in enumerate(SIZES):
        count = sum(token // 1000 == k for token in read)
        assert consumed[f"data/tokens/{name}"] == count * SEQ_LEN
        assert consumed[f"data/epochs/{name}"] == count / SIZES[name]
    assert consumed["data/epochs/code"] == 1


def test_token_range_of_joined_stream_may_span_several_streams(make_stream):
    parts = [[1, 2, 3], [4], [5, 6, 7, 8]]
    joined = JoinedStream("train", [make_stream(p, directory=f"p{i}") for i, p in enumerate(parts)])
    whole = np.concatenate(parts)
    assert len(joined) == 8
    for start in range(9):
        for stop in range(start, 9):
            assert joined.tokens(start, stop).tolist() == whole[start:stop].tolist()
    with pytest.raises(IndexError):
        joined.tokens(3, 9)


# Prepared sources


def test_all_mixture_sources_use_one_common_tokenizer(tmp_path):
    for name, text in (("a", "def f{0}(x): return x + {0}"), ("b", "The {}th day was mild.")):
        paragraphs = "\n\n".join(text.format(i) for i in range(200))
        (tmp_path / f"{name}.txt").write_text(paragraphs, encoding="utf-8")
    texts: dict[str, Any] = {"source": "files", "sample_by": SampleBy.paragraph}
    sources = {
        "code": SourceConfig(**texts, paths=[str(tmp_path / "a.txt")], weight=3),
        "prose": SourceConfig(**texts, paths=[str(tmp_path / "b.txt")]),
    }
    cfg = DataConfig(
        source="mixture", sources=sources, vocab_size=300, cache_dir=str(tmp_path / "cache"),
        heldout_fraction=0.1,
    )  # fmt: skip
    data = prepare(cfg)
    assert isinstance(data, MixtureData)
    code, prose = data.sources.values()
    assert code.manifest.pieces_hash == prose.manifest.pieces_hash == data.manifest.pieces_hash
    for split in ("train", "heldout"):
        joined = data.split(split)
        assert len(joined) == data.manifest.splits[split].tokens
        assert len(joined) == len(code.split(split)) + len(prose.split(split))
    text = data.tokenizer().decode(prose.split("train").tokens(0, 60).tolist())
    assert "day was mild." in text
    again = prepare(cfg)
    assert again.manifest.corpus == data.manifest.corpus
    weights = {name: SourceConfig(**{**vars(s), "weight": 1.0}) for name, s in sources.items()}
    other = prepare(DataConfig(**{**vars(cfg), "sources": weights}))
    assert other.manifest.corpus == data.manifest.corpus, "weights must not change the corpus"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no.jsonl", "data.sources.web: data.paths: "),
        ("a.jsonl", "has no column 'text' that contains text (columns: content); use"),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_mixture_error_message_contains_key_of_faulty_source(
    tmp_path, corpus_file, prepared, given, name, said
):
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n', encoding="utf-8")
    paths = {"code": corpus_file, "web": tmp_path / name}
    by_line = {"source": "files", "sample_by": SampleBy.line}
    cfg = DataConfig(
        source="mixture",
        sources={key: SourceConfig(**by_line, paths=[str(p)]) for key, p in paths.items()},
        tokenizer=str(prepared.directory / "tokenizer.model") if given else None,
        vocab_size=400,
        cache_dir=str(tmp_path / "cache"),
    )
    with pytest.raises(DataError, match=r"data\.sources\.web") as raised:
        prepare(cfg)
    assert said in str(raised.value)


def test_damaged_or_short_mixture_source_raises_error_with_source_key(make_mixture, make_stream):
    samples = make_mixture()
    for shard in samples.sources[1].stream._directory.glob("*.bin"):
        shard.write_bytes(bytes(len(shard.read_bytes())))
    error = samples[range(40)]
    assert isinstance(error, DataError)
    assert str(error).startswith("data.sources.web: ")
    short = SimpleNamespace(split=lambda _: make_stream([1, 2], directory="short"))
    cfg = DataConfig(source="mixture", sources={"books": SourceConfig()})
    with pytest.raises(DataError, match=r"^data\.sources\.books: the corpus is shorter than one"):
        MixedSequences(MixtureData({"books": short}), cfg, SEQ_LEN, SEED, 9)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sources": {}}, "data.source=mixture needs data.sources="),
        ({"sources": {"a b": SourceConfig()}}, "'a b' may contain only letters"),
        ({"sources": {"a": SourceConfig(weight=-1)}}, "data.sources.a.weight=-1 must not be neg"),
        ({"sources": {"a": SourceConfig(weight=0)}}, "all weights are 0"),
        ({"sources": {"a": SourceConfig(source="mixture")}}, "a mixture cannot contain a mixture"),
        ({"sources": {"a": SourceConfig(source="files")}}, "data.sources.a.paths=[file, "),
        (
            {"curriculum": [Point(0.5, {"b": 1})]},
            "weights: the source 'b' must be one of data.sources: a",
        ),
        ({"curriculum": [Point(0.5, {"a": 1}), Point(0.4, {"a": 1})]}, "data.curriculum[1].at=0.4"),
        ({"curriculum": [Point(0.5, {"a": 1e308})]}, "weights.a=1e+308 must be from 0 to 1e+18"),
        (
            {"sources": {f"s{i}": SourceConfig() for i in range(501)}},
            "entries in data.sources is 501; the maximum is 500",
        ),
        ({"curriculum": [Point()] * 501}, "entries in data.curriculum is 501; the maximum"),
        (
            {
                "sources": {f"s{i}": SourceConfig() for i in range(101)},
                "curriculum": [Point()] * 100,
            },
            "weights in data.curriculum (points x sources) is 10,100; the maximum is 10,000",
        ),
    ],
)
def test_invalid_mixture_config_is_refused(changes, said):
    good = {"source": "mixture", "sources": {"a": SourceConfig()}}
    with pytest.raises(ConfigError) as raised:
        DataConfig(**{**good, "vocab_size": 300, **changes}).validate()
    assert said in str(raised.value)


def test_curriculum_points_are_fractions_of_the_run_or_token_counts():
    curriculum = [Point(at, {"a": 1}) for at in (0.1, 1, 2, 1e9, 0.5)]
    sources = {"a": SourceConfig()}
    DataConfig("mixture", sources=sources, curriculum=curriculum, vocab_size=300).validate()
