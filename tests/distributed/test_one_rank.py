"""On one rank, each parameter is copied at most once per step; gradient sums are float32."""

from collections import Counter

import pytest
import torch
from runs.one_rank import gloo_group
from tiers import pairs
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffllm.config import load_config
from diffllm.training.build import build
from diffllm.training.step import train_step

aten = torch.ops.aten
COPIES = (aten._to_copy, aten.copy_, aten.clone, aten._foreach_copy_, aten.cat, aten.add_)
BASE = [
    "model=tiny",
    "model.head_dim=64",
    "seq_len=32",
    "global_batch_size=8",
    "optim.warmup_steps=1",
]
CPU = torch.device("cpu")


def training_on_one_rank(*overrides):
    return build(load_config([*BASE, *overrides]), CPU)


def batches(t, seed=0):
    generator = torch.Generator().manual_seed(seed)
    micro, count = t.cfg.micro_batches(1)
    for _ in range(count):
        shape = (micro, t.cfg.seq_len + 1)
        tokens = torch.randint(0, t.cfg.model.vocab_size, shape, generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


class Watcher(TorchDispatchMode):
    """Count copies of known tensors, and casts of gradients from bf16 to float32."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage().data_ptr(): name for name, t in known.items()}
        self.shapes = {tuple(t.shape) for t in known.values() if t.ndim > 1}
        self.copied = Counter()
        self.widened = Counter()
        """Number of bf16 tensors with a parameter's shape cast to float32, by "copy" or "sum"."""
        self.narrow_sums = 0
        self.sharded = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if func.namespace == "fsdp":
            self.sharded.append(str(func))
        leaves = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        if packet in COPIES:
            sources = leaves[1:] if packet is aten.copy_ else leaves
            if packet is aten._foreach_copy_:
                sources = args[1]
            if packet is not aten.add_:
                for t in sources:
                    if name := self.known.get(t.untyped_storage().data_ptr()):
                        self.copied[name] += 1
            if tuple(leaves[-1].shape) in self.shapes and leaves[-1].dtype == torch.bfloat16:
                if packet is aten._to_copy and out.dtype == torch.float32:
                    self.widened["copy"] += 1
                if packet is aten.add_:
                    self.widened["sum"] += leaves[0].dtype == torch.float32
                    self.narrow_sums += leaves[0].dtype == torch.bfloat16
        return out


@pytest.mark.parametrize(
    ("micro", "checkpointing", "precision"),
    pairs([4, 8, 1], ["full", "selective", "none"], ["bf16", "fp32"]),
)
def test_step_on_one_rank_copies_each_parameter_at_most_once(micro, checkpointing, precision):
    words = [f"precision={precision}", f"micro_batch_size={micro}"]
    with gloo_group():
        t = training_on_one_rank(
            *words, f"activation_checkpointing={checkpointing}", "attention=diff_v1"
        )
        train_step(t, batches(t), 0)
        known = {**t.params, **{f"copy of {n}": p for n, p in t.model.named_parameters()}}
        with Watcher(known) as watcher:
            train_step(t, batches(t), 1)
    times = 1 if precision == "bf16" else 0
    # V1's lambda vectors stay in float32, without copies.
    expected = {name: times for name in t.params if "lambda_" not in name}
    for name in known:
        assert watcher.copied[name] == expected.get(name, 0), name
    assert not watcher.sharded


@pytest.mark.parametrize("micro", [8, 2, 1])
def test_single_rank_training_accumulates_bf16_gradients_in_float32(micro):
    with gloo_group():
        t = training_on_one_rank("precision=bf16", f"micro_batch_size={micro}")
        # The chunked loss accumulates the gradient of output.weight itself.
        vocabulary = ("output.weight", "tok_embeddings.weight")
        known = {n: p for n, p in t.params.items() if p.ndim > 1 and n not in vocabulary}
        with Watcher(known) as watcher:
            train_step(t, batches(t), 0)
    count = t.cfg.micro_batches(1)[1]
    assert watcher.widened["copy"] == len(known)
    assert watcher.widened["sum"] == (count - 1) * len(known)
    assert watcher.narrow_sums == 0


def test_accumulated_gradients_equal_float32_sum_of_micro_batch_gradients():
    with gloo_group():
        t = training_on_one_rank("precision=bf16", "micro_batch_size=2")
        pairs = list(batches(t))
        single = []
        for inputs, targets in pairs:
            (t.model.loss(inputs, targets).objective / 256).backward()
            single.append({name: p.grad for name, p in t.params.items()})
            t.optimizer.zero_grad(set_to_none=True)
        for inputs, targets in pairs:
            (t.model.loss(inputs, targets).objective / 256).backward()
    for name, param in t.params.items():
        first, *others = (grads[name] for grads in single)
        total = first.clone()
        for grad in others:
            total += grad
        assert param.grad.dtype == torch.float32
        assert torch.equal(param.grad, total), name
        assert not torch.equal(first, total), name


def test_training_step_updates_bf16_copies_of_parameters():
    with gloo_group():
        t = training_on_one_rank("precision=bf16", "optim.lr=1e-2")
        before = {name: p.clone() for name, p in t.model.named_parameters()}
        train_step(t, batches(t), 0)
    for name, copy in t.model.named_parameters():
        assert torch.equal(copy, t.params[name].bfloat16()), name
        assert not torch.equal(copy, before[name]), name


def test_gate_and_up_matrices_of_experts_are_updated_separately():
    with gloo_group():
        t = training_on_one_rank("precision=bf16", "model=moe_tiny", "model.dim=64")
        experts = t.model.layers[-1].ffn.experts
        both = experts.w1.untyped_storage()
        assert both.data_ptr() == experts.w3.untyped_storage().data_ptr()
        assert both.nbytes() == 2 * 2 * experts.w1.numel()
        train_step(t, batches(t), 0)
        name = f"layers.{len(t.model.layers) - 1}.ffn.experts"
        for part in ("w1", "w2", "w3"):
            param, copy = t.params[f"{name}.{part}"], getattr(experts, part)
            assert torch.equal(copy, param.bfloat16())
            assert param.is_contiguous()
            moment = t.optimizer.state[param]["exp_avg"]
            assert moment.abs().sum() > 0
        assert not torch.equal(t.params[f"{name}.w1"], t.params[f"{name}.w3"])
