"""Learning-rate schedules, and AdamW compared with the equations in float64."""

import math

import pytest
import torch

from diffllm.optim import (
    OptimConfig,
    Schedule,
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    update,
)

SCHEDULES = list(Schedule)


def rates(steps, **changes):
    cfg = OptimConfig(**{"lr": 0.5, "warmup_steps": 10, "min_lr_ratio": 0.1, **changes})
    cfg.validate(steps)
    return [learning_rate(cfg, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("steps", "warmup"), [(100, 10), (100, 0), (11, 10), (20, 20)])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1.0])
def test_learning_rate_rises_only_during_warmup(schedule, steps, warmup, ratio):
    lrs = rates(steps, schedule=schedule, warmup_steps=warmup, min_lr_ratio=ratio)
    assert all(0 <= lr <= 0.5 + 1e-12 for lr in lrs)
    for step in range(warmup):
        assert lrs[step] == pytest.approx(0.5 * (step + 1) / warmup)
    assert all(a >= b - 1e-15 for a, b in zip(lrs[warmup:], lrs[warmup + 1 :], strict=False))
    assert lrs[-1] == pytest.approx(0.5 if warmup == steps else ratio * 0.5, abs=1e-12)


def test_cosine_learning_rate_schedule_equals_formula():
    lrs = rates(110, warmup_steps=10, min_lr_ratio=0.2)
    for done in (1, 25, 50, 99, 100):  # of the 100 steps after warm-up
        half_wave = 0.5 * (1 + math.cos(math.pi * done / 100))
        assert lrs[9 + done] == pytest.approx(0.1 + 0.4 * half_wave)
    assert lrs[9 + 50] == pytest.approx(0.3)  # halfway between lr and the minimum


def test_wsd_learning_rate_is_constant_then_decays_linearly():
    lrs = rates(100, schedule=Schedule.wsd, decay_fraction=0.3, min_lr_ratio=0.0)
    assert lrs[9:70] == [0.5] * 61
    assert lrs[69:] == pytest.approx([0.5 * (1 - i / 30) for i in range(31)])


def test_wsd_learning_rate_decay_begins_after_warmup():
    lrs = rates(100, schedule=Schedule.wsd, decay_fraction=1.0, warmup_steps=60, min_lr_ratio=0.0)
    assert lrs[59] == 0.5
    assert lrs[59:] == pytest.approx([0.5 * (1 - i / 40) for i in range(41)])


def parameters_of_all_shapes(dtype):
    """Return parameters with 0 to 3 dimensions, like the parameters of models."""
    shapes = {"vector": (5,), "matrix": (4, 3), "experts": (2, 3, 4), "scalar": ()}
    return {
        name: torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()
    }


def test_weight_decay_applies_only_to_tensors_with_two_or_more_dimensions():
    params = parameters_of_all_shapes(torch.float32)
    before = {name: param.detach().clone() for name, param in params.items()}
    optimizer = build_optimizer(params, OptimConfig(lr=0.1, weight_decay=0.5))
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for name, param in params.items():
        factor = 1 - 0.1 * 0.5 if param.ndim >= 2 else 1.0
        torch.testing.assert_close(param.detach(), before[name] * factor)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-7), (torch.float32, 2e-5)])
@pytest.mark.parametrize("clip_norm", [0, 3.0])
def test_optimizer_steps_match_clipping_and_adamw_equations(dtype, tolerance, clip_norm):
    cfg = OptimConfig(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.3)
    params = parameters_of_all_shapes(dtype)
    theta = {name: param.detach().double() for name, param in params.items()}
    first = {name: torch.zeros_like(value) for name, value in theta.items()}
    second = {name: torch.zeros_like(value) for name, value in theta.items()}
    optimizer, clipped = build_optimizer(params, cfg), []
    for step in range(1, 8):
        lr = 0.01 * step
        for param in params.values():
            param.grad = torch.randn_like(param) * 10.0 ** (step % 3 - 1)
        norm = torch.cat([p.grad.double().flatten() for p in params.values()]).norm().item()
        clipped.append(bool(clip_norm) and norm > clip_norm)
        for name, param in params.items():
            g = param.grad.double() * (clip_norm / norm if clipped[-1] else 1)
            if param.ndim >= 2:
                theta[name] = theta[name] - lr * 0.3 * theta[name]
            first[name] = 0.8 * first[name] + 0.2 * g
            second[name] = 0.95 * second[name] + 0.05 * g**2
            mean, square = first[name] / (1 - 0.8**step), second[name] / (1 - 0.95**step)
            theta[name] = theta[name] - lr * mean / (square.sqrt() + 1e-6)
        update(optimizer, lr, clip_norm, torch.tensor(norm), torch.zeros(()))
        for name, param in params.items():
            torch.testing.assert_close(
                param.detach().double(), theta[name], rtol=tolerance, atol=tolerance, msg=name
            )
    assert len(set(clipped)) == (2 if clip_norm else 1)
    state = optimizer_tensors(optimizer, params)
    for name in params:
        assert state[f"{name}.step"].item() == 7
        torch.testing.assert_close(
            state[f"{name}.exp_avg"].double(), first[name], rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(
            state[f"{name}.exp_avg_sq"].double(), second[name], rtol=tolerance, atol=tolerance
        )


def test_optimizer_step_uses_moments_that_were_overwritten_in_place():
    params = parameters_of_all_shapes(torch.float32)
    optimizer = build_optimizer(params, OptimConfig(lr=0.1))
    state = optimizer_tensors(optimizer, params)
    expected = {f"{n}.{key}" for n in params for key in ("exp_avg", "exp_avg_sq", "step")}
    assert set(state) == expected
    assert all((value == 0).all() for value in state.values())
    # The next step must use a moment that is loaded in place.
    state["matrix.exp_avg"].fill_(1.0)
    state["matrix.step"].fill_(1000.0)
    before = params["matrix"].detach().clone()
    for param in params.values():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert (params["matrix"] < before * (1 - 0.1 * 0.1) - 0.1).all()
