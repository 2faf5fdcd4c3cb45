"""Activation checkpointing: equal gradients, attention kernels per step, and memory."""

from collections import Counter

import pytest
import torch
from runs.allocations import allocations, kept_bytes
from runs.one_rank import gloo_group
from tiers import slow_but
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from diffllm.config import load_config
from diffllm.core.errors import ConfigError
from diffllm.distributed.recompute import ActivationCheckpointing, checkpointed
from diffllm.model.attention.ops import attend
from diffllm.training.build import build
from diffllm.training.step import train_step

CPU = torch.device("cpu")
BASE = ["model=tiny", "seq_len=128", "global_batch_size=4", "precision=fp32", "compile=false"]
POLICIES = ("none", "selective", "full")
LAYERS = 4


def recomputed_training(*words):
    return build(load_config([*BASE, f"model.n_layers={LAYERS}", *words]), CPU)


def endless_batches(t):
    generator = torch.Generator().manual_seed(0)
    shape = (t.cfg.micro_batches(1)[0], t.cfg.seq_len + 1)
    while True:
        tokens = torch.randint(0, t.cfg.model.vocab_size, shape, generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


class Kernels(TorchDispatchMode):
    """Counts the calls of attention kernels in the forward and in the backward pass."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # A graph that runs a kernel twice calls it through an operator that keeps random states.
        kernel = next((arg for arg in args if isinstance(arg, OpOverload)), func)
        self.calls[kernel.name()] += "scaled_dot_product" in kernel.name()
        return func(*args, **(kwargs or {}))


def gradients_and_kernels(policy, *words):
    """Return the gradients of one step, its loss, and the numbers of kernel calls."""
    with gloo_group():
        t = recomputed_training(f"activation_checkpointing={policy}", *words)
        grads = {}

        def see(*_):
            grads.update({name: p.grad.clone() for name, p in t.params.items()})

        t.optimizer.register_step_pre_hook(see)
        with Kernels() as kernels:
            train_step(t, endless_batches(t), 0)
        forward = sum(n for name, n in kernels.calls.items() if "backward" not in name)
        backward = sum(n for name, n in kernels.calls.items() if "backward" in name)
        return grads, forward, backward


CASES = {
    "V1": ["attention=diff_v1"],
    "V2": ["attention=diff_v2"],
    "sink": ["attention=standard_sink"],
    "mixture": ["model=moe_tiny", f"model.n_layers={LAYERS}"],
    "compiled": ["attention=diff_v2", "compile=true"],
}


@pytest.mark.parametrize("case", slow_but(["V2"], CASES))
def test_policies_have_equal_gradients_and_only_full_repeats_attention_kernels(case):
    grads, forward, backward = {}, {}, {}
    for policy in POLICIES:
        results = gradients_and_kernels(policy, *CASES[case])
        grads[policy], forward[policy], backward[policy] = results
    assert set(backward.values()) == {backward["none"]}
    assert backward["none"] >= LAYERS
    assert forward["selective"] == forward["none"] == backward["none"]
    assert forward["full"] == 2 * forward["none"]
    tolerance = 1e-6 if case == "compiled" else 0
    for policy in ("selective", "full"):
        for name, grad in grads["none"].items():
            torch.testing.assert_close(grads[policy][name], grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["one graph", "eager", "several graphs"])
@pytest.mark.parametrize("policy", list(ActivationCheckpointing))
def test_each_kind_of_checkpoint_has_equal_gradients_and_expected_kernel_calls(policy, kind):
    def forward(x):
        return attend(x.sin(), x.exp(), attend(x, x, x))

    x = torch.randn(2, 8, 2, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    compiled = torch.compile(forward, backend="aot_eager") if kind == "several graphs" else forward
    attention = checkpointed(compiled, policy, kind == "one graph")
    with Kernels() as kernels:
        attention(x).square().sum().backward()
    calls = {name: n for name, n in kernels.calls.items() if n}
    forward_calls = [n for name, n in calls.items() if "backward" not in name]
    assert forward_calls == [4 if policy is ActivationCheckpointing.full else 2]
    found, x.grad = x.grad, None
    forward(x).square().sum().backward()
    assert torch.equal(x.grad, found)


def kept_with(policy):
    """Return the bytes that a forward pass keeps, from the events of torch's allocator."""
    with gloo_group():
        words = ("attention=diff_v2", "seq_len=512")
        t = recomputed_training(f"activation_checkpointing={policy}", *words)
        x, y = next(endless_batches(t))
        t.model.loss(x, y)  # allocates buffers that later passes reuse
        profiler, _ = allocations(lambda: t.model.loss(x, y))
        return kept_bytes(profiler)


def test_selective_checkpointing_keeps_less_than_none_and_attention_results_more_than_full():
    kept = {policy: kept_with(policy) for policy in POLICIES}
    cfg = load_config([*BASE, "attention=diff_v2", "seq_len=512"])
    # The context (B, T, 2H, d) in float32 and one float32 logarithm of a sum per query and head.
    heads = 2 * cfg.model.n_heads
    results = LAYERS * 4 * 512 * heads * (cfg.model.head_dim + 1) * 4
    assert kept["selective"] - kept["full"] == pytest.approx(results, rel=0.02)
    assert kept["none"] > 2 * kept["selective"]


def test_unknown_policy_is_refused():
    with pytest.raises(ConfigError, match=r"activation_checkpointing.*none.*selective.*full"):
        load_config([*BASE, "activation_checkpointing=true"])
