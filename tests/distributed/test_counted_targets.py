"""The loss is the mean over targets that are not ignored, in all micro-batches on all ranks.

Losses and statistics of routers are means over tokens without padding.
"""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runs.ranks import run_ranks, run_single
from test_training_ranks import BASE, assert_same_training, global_batch, train_losses

from diffllm import build_model
from diffllm.config import load_config
from diffllm.core.targets import CONTEXT_TARGET, PADDING_TARGET
from diffllm.model.loss import Term
from diffllm.training.build import build
from diffllm.training.step import Due, train_step

MOE = (
    *("model=moe_tiny", "model.moe.expert_dim=32", "model.moe.balance_loss=0.02"),
    *("model.moe.router_z_loss=0.001", "model.moe.balance_over=sequence"),
)
ROUTER_STATS = ("router_entropy", "expert_load_max", "expert_load_min")
CPU = torch.device("cpu")


def masked_batch(cfg, step, share=None, padded=False):
    """Return inputs and targets with ignored targets.

    The ignored share is `share`, or falls from 1 in the first row to 0 in the last row. With
    `padded`, the first row is only padding; padding at the end gets shorter from row to row.
    """
    tokens = global_batch(cfg, step)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    drawn = torch.rand(targets.shape, generator=torch.Generator().manual_seed(step))
    shares = torch.linspace(1, 0, len(targets))[:, None] if share is None else share
    targets = torch.where(drawn < shares, CONTEXT_TARGET, targets)
    if padded:
        lengths = torch.linspace(0, cfg.seq_len, len(targets)).round()[:, None]
        padding = torch.arange(cfg.seq_len) >= lengths
        inputs = inputs.masked_fill(padding, 0)
        targets = targets.masked_fill(padding, PADDING_TARGET)
    return inputs, targets


def own_part(t, inputs, targets):
    """Yield this rank's micro-batches, in the loader's order."""
    (group, groups), micro = t.group, t.micro_batch_size
    for k in range(t.micro_batches):
        first = (k * groups + group) * micro
        yield inputs[first : first + micro], targets[first : first + micro]


def masked_config(overrides):
    return load_config([*BASE, "model.init_std=0.2", *overrides])


def first_step(overrides, padded):
    """Train one step; return losses and squared gradient norms by name, the target share, and
    statistics and biases of routers by name."""
    cfg = masked_config(overrides)
    t = build(cfg, CPU, ignores_targets=True)
    batch = masked_batch(cfg, 0, padded=padded)
    out = train_step(t, own_part(t, *batch), 0, Due(statistics=True))
    squares = dict(zip(out.grad_norms.names, out.grad_norms.squares.tolist(), strict=True))
    losses = {name: loss.item() for name, loss in out.losses.items()}
    routers = {name: out.stats[name].tolist() for name in ROUTER_STATS if name in out.stats}
    routers |= {name: value.tolist() for name, value in t.model.router_state().items()}
    return {"nll": out.nll.item(), **losses}, squares, out.target_share.item(), routers


def reference_step(overrides, padded):
    """Compute the result of `first_step` in float64, from each sequence without its padding."""
    cfg = masked_config(overrides)
    moe = cfg.model.moe
    model = build_model(cfg.model).double()
    inputs, targets = masked_batch(cfg, 0, padded=padded)
    tokens, counted = int((targets != PADDING_TARGET).sum()), int((targets >= 0).sum())
    losses, routers = {}, {}
    objective = counts = entropy = 0

    def add(name, value):
        losses[name] = losses.get(name, 0) + value.item()
        return value

    for row_inputs, row_targets in zip(inputs, targets, strict=True):
        length = int((row_targets != PADDING_TARGET).sum())
        if not length:
            continue
        x, y = row_inputs[None, :length], row_targets[None, :length]
        logits, valid = model(x), y >= 0
        log_probs = logits.log_softmax(-1).gather(-1, y.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        z = cfg.model.z_loss * logits.logsumexp(-1)[valid].square().sum()
        objective += add("nll", -log_probs[valid].sum() / counted)
        objective += add("train/z_loss", z / counted)
        if moe.n_experts:
            out = model.loss(x, torch.full_like(y, CONTEXT_TARGET), diagnose=True)
            balance = moe.balance_loss * out.losses[Term.balance_loss]
            z = moe.router_z_loss * out.losses[Term.router_z_loss]
            objective += add("train/balance_loss", balance / tokens)
            objective += add("train/router_z_loss", z / tokens)
            counts += out.expert_counts
            entropy += out.stats["router_entropy"] * length / tokens
    objective.backward()
    if moe.n_experts:
        loads = counts / (tokens * moe.top_k / moe.n_experts)
        stats = entropy, loads.amax(1), loads.amin(1)
        routers = dict(zip(ROUTER_STATS, (value.tolist() for value in stats), strict=True))
        for i, load in enumerate(loads):
            bias = moe.bias_update_rate * torch.sign(1 - load)
            routers |= {f"layers.{i}.ffn.router.bias": bias.tolist()}
            routers |= {f"layers.{i}.ffn.router.load": load.tolist()}
    squares = {n: p.grad.square().sum().item() for n, p in model.named_parameters()}
    return losses, squares, counted / targets.numel(), routers


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("ranks", "overrides", "padded"),
    [
        (1, ("micro_batch_size=2",), False),
        (1, (), True),
        (2, ("micro_batch_size=2",), False),
        (2, ("parallel.replicate=2", "micro_batch_size=1"), False),
        (1, MOE, False),
        (1, (*MOE, "model.moe.balance_over=global_batch"), True),
        (2, (*MOE, "micro_batch_size=1"), True),
        (2, (*MOE, "parallel.expert=2"), False),
        (2, (*MOE, "parallel.expert=2", "activation_checkpointing=full"), True),
        (2, (*MOE, "parallel.context=2", "activation_checkpointing=selective"), True),
    ],
)
def test_first_step_matches_reference_without_ignored_targets(ranks, overrides, padded, tmp_path):
    own = ("parallel.", "activation_checkpointing")
    alone = [word for word in overrides if not word.startswith(own)]
    losses, squares, share, routers = reference_step(alone, padded)
    results = run_ranks(first_step, ranks, tmp_path, overrides, padded)
    for found, own_squares, own_share, own_routers in results:
        assert found == pytest.approx(losses, rel=1e-4)
        assert own_share == pytest.approx(share)
        assert own_routers.keys() == routers.keys()
        for name, values in routers.items():
            assert own_routers[name] == pytest.approx(values, rel=1e-4), name
        assert own_squares.keys() == squares.keys()
        for name, square in squares.items():
            expected = pytest.approx(math.sqrt(square), rel=1e-3, abs=1e-7)
            assert math.sqrt(own_squares[name]) == expected, name


def test_valid_target_count_does_not_change_training_if_all_targets_are_valid():
    counted = run_single(train_losses, (), None, False, True)
    plain = run_single(train_losses, ())
    assert_same_training(counted, plain, atol=1e-6)


def steps_without_targets():
    """Return (loss, gradient norm, norm of the parameter change) of a step without targets."""
    cfg = masked_config(["optim.weight_decay=0"])
    t = build(cfg, CPU, ignores_targets=True)
    out = train_step(t, own_part(t, *masked_batch(cfg, 0, 1.0)), 0, Due(update=True))
    return out.nll.item(), out.grad_norms.total.item(), out.update_norm.item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_are_zero_if_all_targets_are_ignored(ranks, tmp_path):
    for found in run_ranks(steps_without_targets, ranks, tmp_path):
        assert found == (0, 0, 0)


def reduced_tensors(ignores):
    """Train one step; return dtype and size of all reduced tensors, and the number of batches read
    before the first forward pass."""
    cfg = masked_config(["micro_batch_size=2"])
    t = build(cfg, CPU, ignores_targets=ignores)
    read, before, reduced = [], [], []
    real, loss = dist.all_reduce, t.model.loss

    def batches():
        for batch in own_part(t, *masked_batch(cfg, 0)):
            read.append(batch)
            yield batch

    def first(*args, **kwargs):
        before.append(len(read))
        return loss(*args, **kwargs)

    def noted(tensor, *args, **kwargs):
        reduced.append((str(tensor.dtype), tensor.numel()))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted), mock.patch.object(t.model, "loss", first):
        train_step(t, batches(), 0)
    return reduced, before[0]


def test_valid_target_count_adds_one_all_reduce_per_training_step(tmp_path):
    for (counting, ahead), (plain, one) in zip(
        run_ranks(reduced_tensors, 2, tmp_path, True),
        run_ranks(reduced_tensors, 2, tmp_path, False),
        strict=True,
    ):
        assert counting == [("torch.int64", 2), *plain]
        assert (ahead, one) == (2, 1)
