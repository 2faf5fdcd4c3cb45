"""Document masks: boundaries of documents, and no attention between documents."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import families, slow_but
from variants import MIXTURE, VARIANTS, small_model

from diffllm.model.attention.masks import Documents

END = 0
SPLIT = ("model.attention.values=split",)
REFERENCE = ("model.attention.backend=reference",)
EVERY = [(variant, extra) for variant in VARIANTS for extra in ((), MIXTURE)]
EVERY += [("diff_v1", SPLIT)]
FEW = [(variant, ()) for variant in families(VARIANTS)]
TOKENS = torch.tensor(
    [
        # Rows: documents of 4, 1, 1, 5 and 3 tokens; of 9 and 5; of 14; of 1, 11 and 2.
        [5, 9, 3, END, END, END, 7, 7, 2, 8, END, 3, 4, 6],
        [1, 2, 3, 4, 5, 6, 7, 8, END, 9, 9, 1, 2, END],
        [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7],
        [END, 2, 7, 1, 8, 2, 8, 1, 8, 2, 8, END, 4, 5],
    ]
)

shared_model = cache(small_model)


def documents_by_loop(tokens, end=END):
    """Return (row, start, end) of every document with a plain loop over tokens."""
    found = []
    for row, line in enumerate(tokens.tolist()):
        first = 0
        for i, token in enumerate(line):
            if token == end or i == len(line) - 1:
                found.append((row, first, i + 1))
                first = i + 1
    return found


@settings(max_examples=150)
@given(
    st.integers(1, 9).flatmap(
        lambda length: st.lists(
            st.lists(st.integers(0, 3), min_size=length, max_size=length), min_size=1, max_size=4
        )
    ),
    st.integers(0, 4),
)
def test_document_ids_positions_and_masks_match_reference_loop(rows, end):
    tokens = torch.tensor(rows)
    batch, length = tokens.shape
    documents = Documents.of(tokens, end)
    ids = torch.full_like(tokens, -1)
    positions = torch.full_like(tokens, -1)
    mask = torch.zeros(batch, 1, length, length, dtype=torch.bool)
    found = documents_by_loop(tokens, end)
    for row, first, last in found:
        ids[row, first:last] = int(ids[row].max()) + 1
        for i in range(first, last):
            positions[row, i] = i - first
            mask[row, 0, i, first : i + 1] = True
    assert torch.equal(documents.ids, ids)
    assert torch.equal(documents.positions, positions)
    assert torch.equal(documents.mask(), mask)
    assert documents.visible_keys() == documents.mask().tril().sum() == mask.sum()
    starts = [row * length + first for row, first, _ in found]
    assert documents.boundaries.tolist() == [*starts, batch * length]
    assert documents.boundaries.dtype == torch.int32
    assert documents.positions.dtype == torch.int64


def one_by_one(model, tokens, read=lambda logits: logits):
    """Concatenate outputs of separate forward passes, one pass per document."""
    rows = [[] for _ in tokens]
    for row, first, last in documents_by_loop(tokens):
        rows[row].append(read(model(tokens[row : row + 1, first:last])))
    return torch.cat([torch.cat(parts, dim=1) for parts in rows])


def grads_of(model, scalar):
    return torch.autograd.grad(scalar, list(model.parameters()))


@pytest.mark.fast_cases(15)
@pytest.mark.parametrize(("variant", "extra"), EVERY)
@pytest.mark.parametrize("shape", [pytest.param((8, 2, 8), marks=pytest.mark.slow), (8, 4, 8)])
def test_outputs_of_masked_documents_match_separate_forward_passes(variant, extra, shape):
    """Compares logits, loss and all gradients."""
    model = shared_model(variant, *shape, extra)
    targets = torch.randint(0, 64, TOKENS.shape)
    documents = Documents.of(TOKENS, END)
    masked = model(TOKENS, documents=documents)
    alone = one_by_one(model, TOKENS)
    torch.testing.assert_close(masked, alone, rtol=0, atol=1e-10)
    assert (model(TOKENS) - masked).abs().max() > 1e-6, "the masks must change the logits"
    objective = model(TOKENS, targets, documents=documents).objective
    losses = torch.nn.functional.cross_entropy(
        alone.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    torch.testing.assert_close(objective, losses, rtol=1e-10, atol=0)
    names = [name for name, _ in model.named_parameters()]
    for name, mine, other in zip(
        names, grads_of(model, objective), grads_of(model, losses), strict=True
    ):
        # float32, because the loss sums the gradient of the output in float32
        atol = 1e-4 if name == "output.weight" else 1e-10
        assert (mine - other).abs().max() < atol, name


def test_rope_positions_restart_at_0_in_every_document():
    """Check tables, because outputs depend only on differences of positions."""
    model = shared_model("diff_v2")
    documents = Documents.of(TOKENS, END)
    (cos, sin), _ = model.whole_sequences(TOKENS, documents, torch.float64)
    for row, first, last in documents_by_loop(TOKENS):
        for table, whole in ((cos, model.rope.cos), (sin, model.rope.sin)):
            assert torch.equal(table[row, first:last], whole[: last - first])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("variant", "extra"), slow_but(FEW, EVERY))
def test_reference_attention_backend_matches_sdpa(variant, extra, masked):
    """Compare forward and gradients of backend=reference with backend=sdpa."""
    documents = Documents.of(TOKENS, END) if masked else None
    weights = torch.randn(*TOKENS.shape, 64, dtype=torch.float64)
    results = []
    for backend in ((), REFERENCE):
        model = small_model(variant, 8, 4, 8, (*extra, *backend))
        logits = model(TOKENS, documents=documents)
        results.append((logits, *grads_of(model, (logits * weights).sum())))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
