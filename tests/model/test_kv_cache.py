"""The KV cache: contents, truncation, and decoding steps that read the cache once, in place."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import pairs, variant_cases
from variants import MIXTURE, SHAPES, VARIANTS, is_refused, small_config, small_model

from diffllm import build_model
from diffllm.model.attention.base import KVCache

ONE_READ = ["standard", "standard_1p5x_heads", "gated", "gated_headwise"] + [
    name for name in VARIANTS if name.startswith("diff_v2")
]

shared_model = cache(small_model)


def filled(lengths=(4, 4), room=6):
    """Return a cache (3 key heads of width 2, 1 value head of width 5) and the appended tensors."""
    batch, length = len(lengths), max(lengths)
    held = KVCache((batch, 3, room, 2), (batch, 1, room, 5), torch.float64)
    k, v = new(batch, length)
    held.append(k, v)
    held.truncate(list(lengths))
    return held, k, v


def new(batch, tokens):
    return (
        torch.randn(batch, tokens, 3, 2, dtype=torch.float64),
        torch.randn(batch, tokens, 1, 5, dtype=torch.float64),
    )


def test_kv_cache_append_returns_views_of_stored_keys_and_values():
    held, k, v = filled()
    assert held.k.shape == (2, 3, 6, 2)
    assert held.v.shape == (2, 1, 6, 5)
    assert held.k.is_contiguous()
    assert held.v.is_contiguous()
    assert torch.equal(held.k[:, :, :4], k.transpose(1, 2))
    assert torch.equal(held.v[:, :, :4], v.transpose(1, 2))
    all_k, all_v = held.append(*new(2, 1))
    assert all_k.data_ptr() == held.k.data_ptr()
    assert all_v.data_ptr() == held.v.data_ptr()


def test_kv_cache_converts_appended_tensors_to_cache_dtype():
    held = KVCache((2, 3, 6, 2), (2, 1, 6, 5), torch.bfloat16)
    k, v = new(2, 2)
    all_k, _ = held.append(k.float(), v.float())
    assert all_k.dtype == torch.bfloat16
    held.truncate([2, 1])
    k, v = new(2, 1)
    all_k, _ = held.append(k.float(), v.float())
    assert torch.equal(all_k[0, 2], k[0, 0].bfloat16())
    assert torch.equal(all_k[1, 1], k[1, 0].bfloat16())


def test_refused_append_leaves_kv_cache_unchanged():
    held, k, _ = filled((4, 4))
    with pytest.raises(ValueError, match="is full"):
        held.append(*new(2, 3))
    assert held.length == 4
    k2, v2 = new(2, 2)
    assert torch.equal(held.append(k2, v2)[0], torch.cat((k, k2), 1))


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "shape", "extra"), variant_cases(VARIANTS, [(8, 2, 8), (4, 4, 8)], [(), MIXTURE])
)
def test_decoding_with_kv_cache_equals_full_forward_pass(variant, shape, extra):
    model = shared_model(variant, *shape, extra)
    tokens = torch.randint(0, 64, (3, 16))
    whole = model(tokens)
    caches = model.new_caches(3, 16)
    out = [model(part, caches=caches) for part in tokens.split([1, 4, 1, 6, 4], 1)]
    torch.testing.assert_close(torch.cat(out, 1), whole, rtol=0, atol=1e-10)
    lengths = torch.tensor([9, 2, 12])
    for held in caches:
        held.truncate(lengths.tolist())
    others = torch.randint(0, 64, (3, 16))  # positions after the cut must not matter
    tokens = torch.where(torch.arange(16) < lengths[:, None], tokens, others)
    whole = model(tokens)
    for _ in range(3):
        logits = model(tokens.gather(1, lengths[:, None]), caches=caches)
        expected = whole[torch.arange(3), lengths].unsqueeze(1)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
        lengths += 1


@settings(max_examples=25)
@given(
    variant=st.sampled_from(VARIANTS),
    lengths=st.lists(st.integers(1, 10), min_size=1, max_size=4),
    cuts=st.data(),
)
@torch.no_grad()
def test_decoding_after_kv_cache_truncation_equals_full_forward_pass(variant, lengths, cuts):
    """Truncate rows at any position, drop some rows, and continue with other tokens."""
    model, batch = shared_model(variant), len(lengths)
    read = torch.randint(0, 64, (batch, max(lengths)))
    caches = model.new_caches(batch, 16)
    model(read, caches=caches)
    texts = [read[row, :length].tolist() for row, length in enumerate(lengths)]
    for held in caches:
        held.truncate(lengths)
    for _ in range(3):
        if len(texts) > 1 and cuts.draw(st.booleans()):
            rows = cuts.draw(st.sets(st.integers(0, len(texts) - 1), min_size=1))
            texts = [texts[row] for row in sorted(rows)]
            for held in caches:
                held.keep(sorted(rows))
        step = torch.randint(0, 64, (len(texts), 1))
        logits = model(step, caches=caches)
        for row, token in enumerate(step[:, 0].tolist()):
            texts[row].append(token)
            alone = model(torch.tensor([texts[row]]))[0, -1]
            torch.testing.assert_close(logits[row, 0], alone, rtol=0, atol=1e-10)


def test_decoding_beyond_seq_len_raises_value_error():
    model = shared_model("diff_v2")
    caches = model.new_caches(2, 40)
    model(torch.zeros(2, 31, dtype=torch.int64), caches=caches)
    for held in caches:
        held.truncate([31, 5])
    step = torch.zeros(2, 1, dtype=torch.int64)
    model(step, caches=caches)
    with pytest.raises(ValueError, match=r"33 positions exceed model\.seq_len=32"):
        model(step, caches=caches)


def held_bytes(variant, shape):
    with torch.device("meta"):
        model = build_model(small_config(variant, *shape).model)
    return sum(t.nbytes for held in model.new_caches(2, 9) for t in (held.k, held.v))


@pytest.mark.parametrize("shape", SHAPES)
def test_no_attention_variant_has_larger_kv_cache_than_standard_attention(shape):
    baseline = held_bytes("standard", shape)
    assert baseline == 2 * 2 * 2 * 9 * shape[1] * shape[2] * 4  # layers, k and v, rows, float32
    measured = {v: held_bytes(v, shape) for v in VARIANTS if not is_refused(v, *shape[:2])}
    assert {"diff_v2", "gated", "standard"} <= measured.keys()
    assert ("diff_v1" in measured) == (shape[1] > 1)
    assert {name: held for name, held in measured.items() if held > baseline} == {}


@pytest.fixture
def kernel_calls(monkeypatch):
    """Record (q, k, v, other arguments) of all kernel calls."""
    calls = []
    kernel = F.scaled_dot_product_attention

    def recording(q, k, v, **options):
        calls.append((q, k, v, options))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording)
    return calls


def decoding(model, ragged, batch=3):
    """Return caches after seven tokens; with `ragged`, rows have different lengths."""
    caches = model.new_caches(batch, 12)
    model(torch.randint(0, 64, (batch, 7)), caches=caches)
    for held in caches:
        held.truncate([5, 7, 2] if ragged else [7, 7, 7])
    return caches


def assert_read_in_place(part, cached, heads, width, positions):
    """Check that a tensor is a view of the cache without repeated heads or positions."""
    assert part.shape == (3, heads, positions, width)
    assert part.untyped_storage().data_ptr() == cached.untyped_storage().data_ptr()
    assert part.stride() == cached.stride()


@torch.no_grad()
@pytest.mark.parametrize(
    ("variant", "shape", "ragged"),
    variant_cases(ONE_READ, [(8, 2, 8), (4, 4, 8), (4, 1, 8)], [False, True]),
)
def test_decoding_step_reads_each_kv_cache_in_one_kernel_call(kernel_calls, variant, shape, ragged):
    heads, kv_heads, d = shape
    model = shared_model(variant, *shape)
    caches = decoding(model, ragged)
    kernel_calls.clear()
    model(torch.randint(0, 64, (3, 1)), caches=caches)
    queries = model.layers[0].attention.n_query_heads
    assert queries == {"diff_v2": 2 * heads, "standard_1p5x_heads": 1.5 * heads}.get(
        "diff_v2" if variant.startswith("diff_v2") else variant, heads
    )
    assert len(kernel_calls) == len(caches), "more than one kernel call per layer"
    for held, (q, k, v, options) in zip(caches, kernel_calls, strict=True):
        assert q.shape == (3, kv_heads, queries // kv_heads, d)
        assert_read_in_place(k, held.k, kv_heads, d, 8)
        assert_read_in_place(v, held.v, kv_heads, d, 8)
        assert k.data_ptr() == held.k.data_ptr()
        assert v.data_ptr() == held.v.data_ptr()
        assert not options.get("enable_gqa")


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "values", "ragged"),
    pairs([(4, 4, 8), (4, 2, 8), (8, 2, 8)], ["wide", "split"], [False, True]),
)
def test_diff_v1_decoding_step_calls_one_kernel_per_map(kernel_calls, shape, values, ragged):
    heads, kv_heads, d = shape
    model = shared_model("diff_v1", *shape, (f"model.attention.values={values}",))
    caches = decoding(model, ragged)
    kernel_calls.clear()
    model(torch.randint(0, 64, (3, 1)), caches=caches)
    assert len(kernel_calls) == 2 * len(caches)
    pairs = kv_heads // 2
    for i, (q, k, v, options) in enumerate(kernel_calls):
        held, second = caches[i // 2], i % 2
        assert q.shape == (3, pairs, heads // kv_heads, d)
        assert_read_in_place(k, held.k, pairs, d, 8)
        assert_read_in_place(v, held.v, pairs, 2 * d, 8)
        assert k.data_ptr() == held.k[:, second * pairs :].data_ptr()
        assert v.data_ptr() == held.v.data_ptr()
        assert not options.get("enable_gqa")
