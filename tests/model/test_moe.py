"""The mixture of experts against a per-token reference: outputs, counts and every gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_reference import counts_of, global_balance, mixture, moved_bias, sequence_balance, z_loss
from tiers import pairs

from diffllm.model.ffn import experts
from diffllm.model.ffn.moe import MoE, MoEConfig
from diffllm.model.ffn.router import Balance, Router, Score
from diffllm.model.loss import Term

DIM, WIDTH, EXPERTS, TOP_K = 8, 12, 5, 2
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Errors relative to the largest entry."""


def layer(dtype=torch.float64, dim=DIM, biased=False, **fields):
    """Build an MoE with weights large enough that every option changes the output.

    With `biased`, the bias changes the choice of experts.
    """
    options = {"n_experts": EXPERTS, "top_k": TOP_K, "expert_dim": WIDTH, **fields}
    moe = MoE(dim, MoEConfig(**options))
    with torch.no_grad():
        for param in moe.parameters():
            param.normal_(0, 0.7)
        if biased:
            moe.router.bias.normal_()
        moe.router.load.uniform_(0.2, 2)
    moe = moe.to(dtype)
    if dtype == torch.bfloat16:
        moe.router.float()  # the dtype under FSDP2
    return moe


def reference_mixture(moe, x, chosen=None):
    """Return the output (N, D) and the routing of the reference."""
    cfg, w = moe.cfg, moe.experts
    shared = moe.shared and (moe.shared.w1.weight, moe.shared.w2.weight, moe.shared.w3.weight)
    return mixture(
        x.flatten(0, 1),
        moe.router.weight,
        moe.router.bias,
        w.w1,
        w.w2,
        w.w3,
        cfg.top_k,
        cfg.score.value,
        cfg.renormalise,
        cfg.routed_scaling,
        shared,
        chosen,
    )


def gradients(moe, x, out):
    """Return gradients of x and all parameters for a loss with different weights per output."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    names = dict(moe.named_parameters())
    return dict(
        zip(
            ["x", *names],
            torch.autograd.grad((out * weights).sum(), [x, *names.values()]),
            strict=True,
        )
    )


def assert_reference_moe(moe, x):
    x = x.requires_grad_()
    out, routed = moe(x)
    expected, taken, _, _ = reference_mixture(moe, x)
    torch.testing.assert_close(out, expected.view_as(x), rtol=1e-10, atol=1e-10)
    assert routed.counts.tolist() == counts_of(taken, moe.cfg.n_experts)
    found, wanted = gradients(moe, x, out), gradients(moe, x, expected.view_as(x))
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-9, msg=name)
    return routed.counts


@pytest.mark.parametrize(
    ("score", "renormalise", "scaling", "n_shared", "biased"),
    pairs(list(Score), [True, False], [1.0, 2.5], [0, 1, 2], [False, True]),
)
def test_moe_layer_equals_reference_for_all_options(score, renormalise, scaling, n_shared, biased):
    moe = layer(
        biased=biased,
        score=score,
        renormalise=renormalise,
        routed_scaling=scaling,
        n_shared=n_shared,
    )
    assert_reference_moe(moe, torch.randn(2, 7, DIM, dtype=torch.float64))


@pytest.mark.parametrize("score", Score)
def test_experts_without_tokens_get_zero_gradients(score):
    moe = layer(score=score, n_experts=9)
    moe.router.bias[[0, 4, 8]] = -100
    counts = assert_reference_moe(moe, torch.randn(2, 5, DIM, dtype=torch.float64))
    assert (counts == 0).nonzero().flatten().tolist() == [0, 4, 8]


@pytest.mark.parametrize("favourite", [0, 2, 4])
def test_moe_layer_equals_loop_reference_if_one_expert_gets_all_tokens(favourite):
    moe = layer(top_k=1, renormalise=False)
    moe.router.bias[favourite] = 100
    counts = assert_reference_moe(moe, torch.randn(2, 5, DIM, dtype=torch.float64))
    assert counts.tolist() == [10 * (e == favourite) for e in range(EXPERTS)]


def test_router_breaks_ties_between_experts_deterministically():
    """The choice among equal experts is free; the output must be that of the chosen experts."""
    moe = layer(n_experts=6, top_k=3)
    with torch.no_grad():
        moe.router.weight[1:] = moe.router.weight[0]
    x = torch.randn(2, 8, DIM, dtype=torch.float64, requires_grad=True)
    taken = moe.router(x.flatten(0, 1)).experts.tolist()
    assert all(len(set(row)) == 3 for row in taken)
    assert moe.router(x.flatten(0, 1)).experts.tolist() == taken
    out, routed = moe(x)
    expected = reference_mixture(moe, x, taken)[0].view_as(x)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert routed.counts.sum() == 2 * 8 * 3
    wanted = gradients(moe, x, expected)
    for name, grad in gradients(moe, x, out).items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-9, atol=1e-9, msg=name)


def both_ways(monkeypatch, moe, x):
    """Return output, counts and gradients, grouped and looped; check that both were used."""
    calls, real, results = [], torch.nn.functional.grouped_mm, []

    def counted(*args, **options):
        calls.append(args)
        return real(*args, **options)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    for products in (3, 0):
        if not products:
            monkeypatch.setattr(experts, "takes_groups", lambda *_: False)
        calls.clear()
        mine = x.clone().requires_grad_()
        out, routed = moe(mine)
        assert len(calls) == products
        results.append((out, routed.counts, gradients(moe, mine, out)))
    return results


def assert_close(found, wanted, tolerance, name="", floor=0.1):
    assert torch.isfinite(found).all(), name
    error = (found.double() - wanted.double()).abs().max()
    assert error <= tolerance * max(wanted.abs().max(), floor), name


@pytest.mark.parametrize("crowded", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_matmul_in_moe_layer_matches_loop_over_experts(monkeypatch, dtype, crowded):
    """Cases include experts without tokens, and an expert with the maximum number of tokens."""
    moe = layer(dtype, dim=16, expert_dim=24, n_experts=8, n_shared=1)
    if crowded:
        moe.router.bias[[1, 2, 7]] = -100
        moe.router.bias[3] = 100
    x = torch.randn(2, 33, 16).to(dtype)
    grouped, looped = both_ways(monkeypatch, moe, x)
    assert torch.equal(grouped[1], looped[1])
    if crowded:
        assert grouped[1][[1, 2, 3, 7]].tolist() == [0, 0, 66, 0]
    assert grouped[0].dtype == dtype
    assert_close(grouped[0], looped[0], DTYPES[dtype])
    for name, grad in looped[2].items():
        assert_close(grouped[2][name], grad, DTYPES[dtype], name)
        if crowded and name.startswith("experts"):
            assert not grouped[2][name][[1, 2, 7]].any(), name


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    dim=st.sampled_from([4, 6, 16]),
    width=st.sampled_from([4, 9, 32]),
    n_experts=st.integers(1, 12),
    data=st.data(),
)
def test_float32_moe_of_any_shape_equals_reference(batch, length, dim, width, n_experts, data):
    """Widths with and without support by grouped products."""
    top_k = data.draw(st.integers(1, n_experts))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    moe = layer(
        torch.float32, dim=dim, n_experts=n_experts, top_k=top_k, expert_dim=width, n_shared=1
    )
    x = torch.randn(batch, length, dim, requires_grad=True)
    out, routed = moe(x)
    found = gradients(moe, x, out)
    taken = moe.router(x.flatten(0, 1)).experts.tolist()
    exact, x64 = moe.double(), x.detach().double().requires_grad_()
    expected = reference_mixture(exact, x64, taken)[0].view_as(x64)
    assert routed.counts.tolist() == counts_of(taken, n_experts)
    assert_close(out, expected, 1e-5)
    wanted = gradients(exact, x64, expected)
    for name, grad in wanted.items():
        # A single renormalised weight is 1: the router's gradient is a difference of large terms.
        floor = wanted["experts.w2"].abs().max() if name == "router.weight" else 0.1
        assert_close(found[name], grad, 1e-4, name, floor)


PADDED = {
    "no padding": ("ttttttt", "ttttttt", "ttttttt"),
    "ends of sequences": ("ttttt--", "ttttttt", "t------"),
    "a whole sequence": ("tttt---", "-------", "tttttt-"),
    "between tokens": ("tt-ttt-", "-tttttt", "ttttttt"),
}
"""Rows of tokens (t) and padding (-)."""


@pytest.mark.parametrize(
    ("loss", "score", "biased", "padded"),
    pairs(["sequence", "global_batch", "z"], list(Score), [False, True], list(PADDED)),
)
def test_router_losses_and_gradients_equal_paper_formulas(loss, score, biased, padded):
    """Formulas cover tokens without padding; sequences count by their numbers of tokens."""
    weights = {"router_z_loss": 0.1} if loss == "z" else {"balance_loss": 0.1}
    over = Balance.global_batch if loss == "z" else Balance(loss)
    moe = layer(score=score, biased=biased, balance_over=over, **weights)
    shares_before = [3, 0, 7, 1, 9]
    moe.router.rebalance(torch.tensor(shares_before), torch.zeros(()))
    x = torch.randn(3, 7, DIM, dtype=torch.float64, requires_grad=True)
    rows = PADDED[padded]
    padding = torch.tensor([[position == "-" for position in row] for row in rows])
    out, routed = moe(x, padding=padding)
    assert torch.equal(out, moe(x)[0]), "padding must not change outputs"
    _, taken, shares, logits = reference_mixture(moe, x)
    places = torch.arange(21).view(3, 7)
    sequences = [place[~row].tolist() for place, row in zip(places, padding, strict=True)]
    tokens = places[~padding].tolist()

    def mean_of_sequences():
        total = 0
        for own in sequences:
            if own:
                chosen = [taken[i] for i in own]
                total += len(own) * sequence_balance(shares[own], chosen, len(own), TOP_K)
        return total / len(tokens)

    expected = {
        "sequence": mean_of_sequences,
        "global_batch": lambda: global_balance(shares[tokens], shares_before),
        "z": lambda: z_loss(logits[tokens]),
    }[loss]()
    assert routed.counts.tolist() == counts_of([taken[i] for i in tokens], EXPERTS)
    found, other = routed.losses[Term.balance_loss], routed.losses[Term.router_z_loss]
    if loss == "z":
        found, other = other, found
    assert not other.any(), "losses without weight must be 0"
    mean = found / len(tokens)
    torch.testing.assert_close(mean, expected, rtol=1e-6, atol=0)  # the load is in float32
    inputs = [x, moe.router.weight]
    grads = torch.autograd.grad(mean, inputs)
    for mine, grad in zip(grads, torch.autograd.grad(expected, inputs), strict=True):
        torch.testing.assert_close(mine, grad, rtol=1e-6, atol=1e-9)


def test_router_updates_bias_and_load_except_in_skipped_steps():
    router = Router(DIM, MoEConfig(n_experts=EXPERTS, top_k=TOP_K, bias_update_rate=0.25))
    router.bias.zero_()
    router.load.fill_(1)
    bias = [0.0] * EXPERTS
    steps = [[10, 0, 5, 5, 5], [1, 1, 1, 1, 1], [0, 0, 0, 0, 100], [7, 6, 5, 4, 3]]
    for counts, skipped in zip(steps, (0.0, 0.0, 1.0, 0.0), strict=True):
        before = router.bias.clone(), router.load.clone()
        router.rebalance(torch.tensor(counts), torch.tensor(skipped))
        if skipped:
            assert torch.equal(router.bias, before[0])
            assert torch.equal(router.load, before[1])
        else:
            bias = moved_bias(bias, counts, 0.25)
            assert router.bias.tolist() == bias
            load = [EXPERTS * count / sum(counts) for count in counts]
            torch.testing.assert_close(router.load, torch.tensor(load))
    assert router.bias.tolist() == [-0.5, 0.0, 0.0, 0.25, 0.25]
