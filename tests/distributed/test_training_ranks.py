"""World size, mesh and gradient accumulation do not change a training, except for rounding."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from runs.one_rank import unsharded
from runs.ranks import run_ranks, run_single
from tiers import slow_but

from diffllm import build_model
from diffllm.config import load_config
from diffllm.data.heldout import HeldoutSample
from diffllm.distributed.gradients import local
from diffllm.training.build import build
from diffllm.training.measure import sample_loss
from diffllm.training.step import Due, train_step

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
STEPS = 20
BASE = [
    "model=tiny",
    "model.dim=48",
    "model.ffn_dim=64",
    "model.head_dim=12",
    "model.vocab_size=97",
    "model.z_loss=1e-3",
    "seq_len=24",
    "global_batch_size=8",
    f"steps={STEPS}",
    "optim.warmup_steps=5",
    "precision=fp32",
]


def global_batch(cfg, step):
    """Return (global batch size, seq_len + 1) tokens; each row has a constant stride."""
    generator = torch.Generator().manual_seed(step)
    shape = (cfg.global_batch_size, 1)
    start = torch.randint(0, 97, shape, generator=generator)
    stride = torch.randint(1, 4, shape, generator=generator)
    return (start + stride * torch.arange(cfg.seq_len + 1)) % 97


def micro_batches(cfg, step, end=None):
    """Yield this rank's micro-batches, in the loader's order.

    end: replaces about every fifth token, as the end of a document; None replaces no token.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    micro, count = cfg.micro_batches(size)
    tokens = global_batch(cfg, step)
    if end is not None:
        generator = torch.Generator().manual_seed(step)
        tokens[torch.rand(tokens.shape, generator=generator) < 0.2] = end
    for k in range(count):
        first = k * size * micro + rank * micro
        part = tokens[first : first + micro]
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def train_losses(overrides, end=None, masked=False, counts=False):
    """Return (losses, gradient norms, final parameters, last statistics) of a short run.

    end: the token after each document; `masked` masks documents.
    counts: count the targets of every step.
    """
    cfg = load_config([*BASE, *overrides])
    t = build(cfg, torch.device("cpu"), end if masked else None, ignores_targets=counts)
    losses, norms, stats = [], [], {}
    for step in range(STEPS):
        last = step == STEPS - 1
        out = train_step(t, micro_batches(cfg, step, end), step, Due(last, last, last))
        losses.append(out.nll.item())
        norms.append(out.grad_norms.total.item())
        stats = {name: value.tolist() for name, value in out.stats.items()}
    parameters = {name: unsharded(p).numpy() for name, p in t.params.items()}
    return losses, norms, parameters, stats


def assert_same_training(one, other, atol=1e-5):
    for mine, theirs in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-5, atol=atol)
    for name, value in one[2].items():
        difference = abs(value - other[2][name]).max()
        assert difference < 2e-4, f"{name} differs by {difference}"
    assert one[3].keys() == other[3].keys()
    for name, values in one[3].items():
        torch.testing.assert_close(
            torch.tensor(values), torch.tensor(other[3][name]), rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("variant", slow_but(["diff_v2"], VARIANTS))
def test_training_on_two_ranks_equals_training_on_single_rank(variant, tmp_path):
    one = run_single(train_losses, (f"attention={variant}",))
    overrides = [f"attention={variant}", "micro_batch_size=2"]
    two = run_ranks(train_losses, 2, tmp_path, overrides)
    assert one[0][-1] < one[0][0] - 0.3, "nothing was learnt"
    assert two[0][0] == two[1][0]
    assert_same_training(one, two[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.replicate=2", "micro_batch_size=1", "parallel.reduce=every"],
        ["parallel.replicate=2", "micro_batch_size=1", "parallel.reduce=last"],
        ["parallel.replicate=4"],
        ["activation_checkpointing=full", "model.tie_embeddings=true", "model.qk_norm=true"],
    ],
)
def test_training_on_four_ranks_matches_training_on_single_rank(layout, tmp_path):
    model = [word for word in layout if word.startswith("model.")]
    one = run_single(train_losses, ("attention=diff_v1", *model))
    four = run_ranks(train_losses, 4, tmp_path, ["attention=diff_v1", *layout])
    assert_same_training(one, four[0])


END = 96


@pytest.mark.parametrize("variant", slow_but(["diff_v2"], ["diff_v2", "standard_sink"]))
def test_masked_training_on_two_ranks_equals_training_on_single_rank(variant, tmp_path):
    """Micro-batches and activation checkpointing use the mask more than once per step."""
    overrides = (f"attention={variant}", "compile=false")
    one = run_single(train_losses, overrides, END, True)
    more = ["micro_batch_size=2", "activation_checkpointing=full"]
    two = run_ranks(train_losses, 2, tmp_path, [*overrides, *more], END, True)
    free = run_single(train_losses, overrides, END, False)
    assert_same_training(one, two[0])
    differences = [abs(mine - other) for mine, other in zip(one[0], two[0][0], strict=True)]
    assert max(differences) < 1e-5
    assert abs(one[0][-1] - free[0][-1]) > 1e-3, "nothing was masked"


class Stream:
    """Tokens with the interface of a prepared split."""

    masked = False

    def __init__(self, tokens):
        self.all = tokens

    def loss_mask(self, start, stop):
        return np.ones(stop - start, bool)

    def __len__(self):
        return len(self.all)

    def tokens(self, start, stop):
        return self.all[start:stop].numpy()


def heldout_losses(overrides):
    """Return losses with and without masked documents, then both from separate forward passes."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 90, (7 * 24 + 5,), generator=generator)
    tokens[torch.rand(tokens.shape, generator=generator) < 0.15] = END
    cfg = load_config([*BASE, "model.init_std=0.3", "eval.sequences=5", *overrides])
    losses = []
    for end in (END, None):
        t = build(cfg, torch.device("cpu"), end)
        sample = HeldoutSample(Stream(tokens), cfg.seq_len, cfg.eval.sequences, END)
        losses.append(sample_loss(t, sample))
    model = build_model(cfg.model)
    for end in (END, None):
        parts = []
        for i in (0, 1, 2, 4, 5):  # Five of seven sequences, spread evenly.
            inputs, targets = tokens[i * 24 : i * 24 + 24], tokens[i * 24 + 1 : i * 24 + 25]
            cuts = [0, *((inputs[:-1] == end).nonzero().squeeze(1) + 1).tolist()] if end else [0]
            for first, last in zip(cuts, [*cuts[1:], 24], strict=True):
                logits = model(inputs[None, first:last])[0]
                parts.append(F.cross_entropy(logits, targets[first:last], reduction="sum").item())
        losses.append(sum(parts) / (5 * 24))
    return losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_masked_heldout_loss_equals_loss_of_separate_documents(ranks, tmp_path):
    """Batches of four sequences are padded, because there are five sequences."""
    overrides = ["attention=diff_v2", "micro_batch_size=4"]
    for masked, free, one_by_one, whole in run_ranks(heldout_losses, ranks, tmp_path, overrides):
        assert masked == pytest.approx(one_by_one, abs=1e-5)
        assert free == pytest.approx(whole, abs=1e-5)
        assert abs(masked - free) > 1e-2


MIXTURE = ["model.moe.n_experts=6", "model.moe.expert_dim=32", "model.moe.n_shared=1"]


def float32_values_under_bf16():
    """Return lambdas and router logits of a bf16 forward pass, and the same by float32 formulas."""
    words = ["attention=diff_v1", "precision=bf16", "optim.lr=1e-2", *MIXTURE]
    cfg = load_config([*BASE, *words])
    t = build(cfg, torch.device("cpu"))
    for step in range(3):
        train_step(t, micro_batches(cfg, step), step)
    params = {name: local(p).detach() for name, p in t.params.items()}
    assert {p.dtype for p in params.values()} == {torch.float32}
    routed = []
    for layer in t.model.layers:
        layer.ffn.router.register_forward_hook(lambda _, args, out: routed.append((*args, out)))
    out = t.model.loss(*next(iter(micro_batches(cfg, 0))), diagnose=True)
    found, expected = [out.stats["lambda_mean"].tolist()], [[]]
    for i, (x, routing) in enumerate(routed):
        q1, k1, q2, k2 = (
            params[f"layers.{i}.attention.lambda_{n}"] for n in ("q1", "k1", "q2", "k2")
        )
        start = torch.tensor(0.8 - 0.6 * math.exp(-0.3 * i))
        lam = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + start
        expected[0].append(lam.item())
        assert x.dtype == torch.bfloat16
        found.append(routing.logits.tolist())
        expected.append(F.linear(x.float(), params[f"layers.{i}.ffn.router.weight"]).tolist())
    return found, expected


def test_bf16_training_computes_lambda_and_router_in_float32(tmp_path):
    for found, expected in run_ranks(float32_values_under_bf16, 2, tmp_path):
        assert len(found) == 3
        assert found == expected


def graph_breaks(overrides):
    """Train with compilation; `fullgraph=True` raises at a graph break."""
    return train_losses([*overrides, "compile=true", "activation_checkpointing=full"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["standard", "diff_v2"])
def test_compiled_training_on_two_ranks_matches_eager_training(variant, tmp_path):
    eager = run_single(train_losses, (f"attention={variant}",))
    compiled = run_ranks(graph_breaks, 2, tmp_path, [f"attention={variant}"])
    assert_same_training(eager, compiled[0], atol=1e-4)
