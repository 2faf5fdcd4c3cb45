"""Skipped updates: the guard on the device agrees with the spike monitor; skips change nothing."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from runs.one_rank import unsharded
from runs.ranks import run_ranks
from tiers import slow_but

from diffllm.config import load_config
from diffllm.metrics.spikes import SpikeMonitor
from diffllm.model.loss import Term
from diffllm.optim import Guard, SkipStep
from diffllm.training.build import build
from diffllm.training.step import Due, train_step

NAN, INF = math.nan, math.inf
CPU = torch.device("cpu")
STEPS, BAD = 6, 3


def recorded_series(seed=0, steps=600):
    """Return a series of losses and gradient norms, both with spikes, NaN and infinities."""
    rng = np.random.default_rng(seed)
    loss = 2.5 + 6 * np.exp(-np.arange(steps) / 60) + rng.normal(0, 0.05, steps)
    norm = 1 + rng.normal(0, 0.1, steps) ** 2
    loss[[400, 401, 500]] += (1.5, 1.5, 9.0)
    norm[[300, 450]] *= 40
    loss[[5, 350]], norm[[127, 351]] = (NAN, INF), (NAN, -INF)
    series = zip(loss.astype(np.float32), norm.astype(np.float32), strict=True)
    return [(float(a), float(b)) for a, b in series]


def guard(mode):
    return Guard(mode, 128, 6.0, CPU)


def judged_steps(guard, series):
    values = [torch.tensor(pair, dtype=torch.float32).unbind() for pair in series]
    return [guard.judge(*pair).item() for pair in values]


def spiked(monitor, series):
    """Return per step 1.0 if the monitor counts a spike in the loss or gradient norm, else 0.0."""
    names, flags = ("spikes/loss", "spikes/grad"), []
    for pair in series:
        before = sum(monitor.counters[name].total for name in names)
        monitor.update(*pair)
        flags.append(float(sum(monitor.counters[name].total for name in names) > before))
    return flags


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_spike_guard_on_device_matches_spike_monitor_on_host(seed):
    series = recorded_series(seed)
    flags = judged_steps(guard(SkipStep.spike), series)
    assert flags == spiked(SpikeMonitor(), series)
    bad = {i for i, flag in enumerate(flags) if flag}
    assert {5, 127, 300, 350, 351, 400, 401, 450, 500} <= bad


def test_spike_guard_skips_only_nonfinite_steps_if_skip_step_is_nonfinite():
    flags = judged_steps(guard(SkipStep.nonfinite), recorded_series())
    assert [i for i, flag in enumerate(flags) if flag] == [5, 127, 350, 351]
    assert set(judged_steps(guard(SkipStep.off), recorded_series())) == {0.0}


@pytest.mark.parametrize("cut", [0, 60, 128, 130, 400, 401])
def test_resumed_spike_guard_skips_same_steps_as_uninterrupted_guard(cut):
    series, monitor = recorded_series(), SpikeMonitor()
    whole = judged_steps(guard(SkipStep.spike), series)
    spiked(monitor, series[:cut])
    resumed = guard(SkipStep.spike)
    # `load` must replace the earlier content of the windows.
    judged_steps(resumed, recorded_series(9))
    resumed.load(*monitor.windows())
    assert judged_steps(resumed, series[cut:]) == whole[cut:]


# The update itself


class Injected:
    """A model whose loss or gradient can be multiplied by a factor, on one rank."""

    def __init__(self, model, rank):
        self.model, self.mine = model, torch.distributed.get_rank() == rank
        self.objective, self.nll = 1.0, 1.0

    def __getattr__(self, name):
        return getattr(self.model, name)

    def loss(self, *args, **kwargs):
        out = self.model.loss(*args, **kwargs)
        if not self.mine:
            return out
        nll = out.losses[Term.cross_entropy] * self.nll
        losses = {**out.losses, Term.cross_entropy: nll}
        return out._replace(objective=out.objective * self.objective, losses=losses)


def rank_batch(step, cfg):
    generator = torch.Generator().manual_seed(step)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shape = (cfg.global_batch_size, cfg.seq_len + 1)
    tokens = torch.randint(0, 64, shape, generator=generator).chunk(size)[rank]
    return tokens[:, :-1], tokens[:, 1:]


@cache
def protection_config(variant, *extra):
    return load_config(
        [
            *("model=tiny", f"attention={variant}", "model.vocab_size=64", "data.vocab_size=64"),
            *("seq_len=8", "global_batch_size=4", "optim.warmup_steps=2", f"steps={STEPS}"),
            *("precision=fp32", *extra),
        ]
    )


def train_with(fault, mode, variant, *extra, left_out=None):
    """Train with a fault in step BAD; return the skip flags and all tensors after each step.

    Do not train step `left_out` at all.
    """
    cfg = protection_config(variant, *extra)
    cfg = replace(cfg, train=replace(cfg.train, skip_step=SkipStep[mode]))
    t = build(cfg, CPU)
    injected = Injected(t.model, rank=torch.distributed.get_world_size() - 1)
    t = replace(t, model=injected)
    quiet = SpikeMonitor()
    for i in range(128):
        quiet.update(4 + i % 2, 0.5 + 4 * (i % 2))
    t.guard.load(*quiet.windows())
    flags, states = [], []
    for step in range(STEPS):
        if step == left_out:
            flags.append(None)
            states.append(states[-1])
            continue
        injected.objective, injected.nll = fault if step == BAD else (1.0, 1.0)
        out = train_step(t, iter([rank_batch(step, cfg)]), step)
        flags.append(out.skipped.item())
        states.append({name: unsharded(value).numpy() for name, value in t.tensors().items()})
    return flags, states


def same(one, other):
    return one.keys() == other.keys() and all(
        np.array_equal(value, other[name], equal_nan=True) for name, value in one.items()
    )


FAULTS = {
    "a NaN gradient": (NAN, 1.0),
    "an infinite gradient": (INF, 1.0),
    "a NaN loss": (1.0, NAN),
    "a gradient spike": (1e4, 1.0),
    "a loss spike": (1.0, 5.0),
}


def train_with_every_fault(variant, *extra):
    """Return {fault: (flags, states)}; key None is the run without step BAD."""
    runs = {None: train_with((1.0, 1.0), "off", variant, *extra, left_out=BAD)}
    for fault, factors in FAULTS.items():
        mode = "spike" if fault.endswith("spike") else "nonfinite"
        runs[fault] = train_with(factors, mode, variant, *extra)
    return runs


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ["diff_v2"]),
        pytest.param(2, ["diff_v1"], marks=pytest.mark.slow),
        pytest.param(2, ["diff_v1", "parallel.replicate=2"], marks=pytest.mark.slow),
        pytest.param(2, ["diff_v2", "model=moe_tiny"], marks=pytest.mark.slow),
    ],
)
def test_skipped_step_does_not_change_parameters_or_optimizer_state(ranks, words, tmp_path):
    """Parameters, moments and step counts equal a run without the step, bit for bit.

    V1 has replicated parameters; routers learn without a gradient.
    """
    for runs in run_ranks(train_with_every_fault, ranks, tmp_path, *words):
        expected = runs[None][1]
        for fault in FAULTS:
            flags, states = runs[fault]
            assert flags == [float(step == BAD) for step in range(STEPS)], fault
            assert same(states[BAD], states[BAD - 1]), fault
            assert not same(states[BAD + 1], states[BAD]), fault
            assert same(states[-1], expected[-1]), fault


def train_with_less_protection():
    return (
        train_with(FAULTS["a gradient spike"], "nonfinite", "standard"),
        train_with(FAULTS["a NaN gradient"], "off", "standard"),
    )


def test_bad_gradients_are_applied_if_skip_step_setting_is_too_weak(tmp_path):
    (((flags, spiked), (_, broken)),) = run_ranks(train_with_less_protection, 1, tmp_path)
    assert set(flags) == {0.0}
    assert not same(spiked[BAD], spiked[BAD - 1])
    assert np.isnan(broken[BAD]["model.norm.weight"]).all()


def steps_without_the_host(ignores_targets, *overrides):
    """Train while all methods that read a tensor on the host raise an error."""
    cfg = load_config(
        [
            *("model=tiny", "attention=diff_v1", "model.vocab_size=64", "data.vocab_size=64"),
            *("seq_len=8", "global_batch_size=4", "optim.warmup_steps=2", "train.skip_step=spike"),
            *overrides,
        ]
    )
    t = build(cfg, CPU, ignores_targets=ignores_targets)
    train_step(t, iter([rank_batch(0, cfg)]), 0)  # FSDP initialises itself in the first step.
    data = [iter([rank_batch(step, cfg)]) for step in (1, 2)]

    def refuse(*_):
        raise AssertionError("a tensor was read on the host")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        setattr(torch.Tensor, name, refuse)
    for step, batches in enumerate(data, 1):
        train_step(t, batches, step, Due(True, True, True))
    return True


@pytest.mark.parametrize(
    ("ignores_targets", "words"),
    slow_but(
        [(False, ()), (True, ("model=moe_tiny", "precision=bf16"))],
        [
            (False, ()),
            (True, ()),
            (False, ("model=moe_tiny", "precision=fp32")),
            (True, ("model=moe_tiny", "precision=bf16")),
        ],
    ),
)
def test_training_step_does_not_synchronize_device_with_host(tmp_path, ignores_targets, words):
    assert all(run_ranks(steps_without_the_host, 2, tmp_path, ignores_targets, *words))
