"""The loss is the mean over targets that are not ignored, in all micro-batches on all ranks."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runs.ranks import run_ranks
from test_training_ranks import BASE, assert_same_training, global_batch, train_losses
from tiers import slow_but

from diffllm import build_model
from diffllm.config import load_config
from diffllm.training.build import build
from diffllm.training.step import Due, train_step

MOE = (
    *("model=moe_tiny", "model.moe.expert_dim=32", "model.moe.balance_loss=0.02"),
    *("model.moe.router_z_loss=0.001", "model.moe.balance_over=sequence"),
)
CPU = torch.device("cpu")


def masked_batch(cfg, step, share=None):
    """Return inputs and targets with ignored targets.

    The ignored share is `share`, or falls from 1 in the first row to 0 in the last row.
    """
    tokens = global_batch(cfg, step)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    drawn = torch.rand(targets.shape, generator=torch.Generator().manual_seed(step))
    shares = torch.linspace(1, 0, len(targets))[:, None] if share is None else share
    return inputs, torch.where(drawn < shares, -1, targets)


def own_part(cfg, inputs, targets):
    """Yield this rank's micro-batches, in the loader's order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    micro, count = cfg.micro_batches(size)
    for k in range(count):
        rows = slice(k * size * micro + rank * micro, k * size * micro + (rank + 1) * micro)
        yield inputs[rows], targets[rows]


def config(overrides):
    return load_config([*BASE, "model.init_std=0.2", *overrides])


def first_step(overrides):
    """Train one step; return losses and squared gradient norms by name, and the target share."""
    cfg = config(overrides)
    t = build(cfg, CPU, ignores_targets=True)
    out = train_step(t, own_part(cfg, *masked_batch(cfg, 0)), 0)
    squares = dict(zip(out.grad_norms.names, out.grad_norms.squares.tolist(), strict=True))
    losses = {name: loss.item() for name, loss in out.losses.items()}
    return {"nll": out.nll.item(), **losses}, squares, out.target_share.item()


def reference(overrides):
    """Compute the result of `first_step` in float64, from the logits of all sequences at once."""
    cfg = config(overrides)
    model = build_model(cfg.model).double()
    inputs, targets = masked_batch(cfg, 0)
    logits = model(inputs)
    counted = targets >= 0
    log_probs = logits.log_softmax(-1).gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    nll = -log_probs[counted].mean()
    z = cfg.model.z_loss * logits.logsumexp(-1)[counted].square().mean()
    objective, losses = nll + z, {"nll": nll.item(), "train/z_loss": z.item()}
    if cfg.model.moe.n_experts:
        nothing = torch.full_like(targets, -1)
        routed = model(inputs, nothing).routed
        terms = (
            ("train/balance_loss", cfg.model.moe.balance_loss, routed.balance),
            ("train/router_z_loss", cfg.model.moe.router_z_loss, routed.z),
        )
        for name, weight, value in terms:
            term = weight * value / targets.numel()
            objective, losses[name] = objective + term, term.item()
    objective.backward()
    squares = {n: p.grad.square().sum().item() for n, p in model.named_parameters()}
    return losses, squares, counted.double().mean().item()


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    slow_but(
        [(1, ("micro_batch_size=2",)), (2, (*MOE, "micro_batch_size=1"))],
        [
            (1, ()),
            (1, ("micro_batch_size=2",)),
            (2, ("micro_batch_size=2",)),
            (2, ("parallel.replicate=2", "micro_batch_size=1")),
            (1, MOE),
            (2, (*MOE, "micro_batch_size=1")),
            (2, (*MOE, "parallel.expert=2")),
        ],
    ),
)
def test_loss_and_gradients_match_reference_if_some_targets_are_ignored(ranks, overrides, tmp_path):
    alone = [word for word in overrides if not word.startswith("parallel.")]
    losses, squares, share = reference(alone)
    for found, own_squares, own_share in run_ranks(first_step, ranks, tmp_path, overrides):
        assert found == pytest.approx(losses, rel=1e-4)
        assert own_share == pytest.approx(share)
        assert own_squares.keys() == squares.keys()
        for name, square in squares.items():
            expected = pytest.approx(math.sqrt(square), rel=1e-3, abs=1e-7)
            assert math.sqrt(own_squares[name]) == expected, name


def test_valid_target_count_does_not_change_training_if_all_targets_are_valid(tmp_path):
    (counted,) = run_ranks(train_losses, 1, tmp_path, [], None, False, True)
    (plain,) = run_ranks(train_losses, 1, tmp_path, [])
    assert_same_training(counted, plain, atol=1e-6)


def steps_without_targets():
    """Return (loss, gradient norm, norm of the parameter change) of a step without targets."""
    cfg = config(["optim.weight_decay=0"])
    t = build(cfg, CPU, ignores_targets=True)
    out = train_step(t, own_part(cfg, *masked_batch(cfg, 0, 1.0)), 0, Due(update=True))
    return out.nll.item(), out.grad_norms.total.item(), out.update_norm.item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradients_are_zero_if_all_targets_are_ignored(ranks, tmp_path):
    for found in run_ranks(steps_without_targets, ranks, tmp_path):
        assert found == (0, 0, 0)


def collectives(ignores):
    """Train one step; return dtype and size of all reduced tensors, and the number of batches read
    before the first forward pass."""
    cfg = config(["micro_batch_size=2"])
    t = build(cfg, CPU, ignores_targets=ignores)
    read, before, reduced = [], [], []
    real, forward = dist.all_reduce, t.model.forward

    def batches():
        for batch in own_part(cfg, *masked_batch(cfg, 0)):
            read.append(batch)
            yield batch

    def first(*args, **kwargs):
        before.append(len(read))
        return forward(*args, **kwargs)

    def noted(tensor, *args, **kwargs):
        reduced.append((str(tensor.dtype), tensor.numel()))
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", noted), mock.patch.object(t.model, "forward", first):
        train_step(t, batches(), 0)
    return reduced, before[0]


def test_valid_target_count_adds_one_all_reduce_per_training_step(tmp_path):
    for (counting, ahead), (plain, one) in zip(
        run_ranks(collectives, 2, tmp_path, True),
        run_ranks(collectives, 2, tmp_path, False),
        strict=True,
    ):
        assert counting == [("torch.int64", 1), *plain]
        assert (ahead, one) == (2, 1)
