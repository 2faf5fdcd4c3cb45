"""The same training whatever the number of ranks, the mesh and the accumulation."""

import math

import pytest
import torch
import torch.distributed as dist
from gloo import run_ranks

from diffllm.config import load_config
from diffllm.distributed.fsdp import local
from diffllm.trainer import build, train_step

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
    """Sequences with something to learn: each token follows from the one before."""
    generator = torch.Generator().manual_seed(step)
    shape = (cfg.global_batch_size, 1)
    start = torch.randint(0, 97, shape, generator=generator)
    stride = torch.randint(1, 4, shape, generator=generator)
    return (start + stride * torch.arange(cfg.seq_len + 1)) % 97


def micro_batches(cfg, step):
    """This rank's share, in the loader's order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    micro, count = cfg.micro_batches(size)
    tokens = global_batch(cfg, step)
    for k in range(count):
        first = k * size * micro + rank * micro
        part = tokens[first : first + micro]
        yield part[:, :-1].contiguous(), part[:, 1:].contiguous()


def train_losses(overrides):
    """(losses, gradient norms, final parameters, last statistics) of a short run."""
    cfg = load_config([*BASE, *overrides])
    t = build(cfg, torch.device("cpu"))
    losses, norms, stats = [], [], {}
    for step in range(STEPS):
        out = train_step(t, micro_batches(cfg, step), step, diagnose=step == STEPS - 1)
        loss = out.nll.clone()
        dist.all_reduce(loss)
        losses.append(loss.item())
        norms.append(out.grad_norm.item())
        stats = {name: value.tolist() for name, value in out.stats.items()}
    full = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy()
        for name, p in t.params.items()
    }
    return losses, norms, full, stats


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_and_two_ranks_train_alike(variant, tmp_path):
    overrides = [f"attention={variant}"]
    (one,) = run_ranks(train_losses, 1, tmp_path, overrides)
    two = run_ranks(train_losses, 2, tmp_path, [*overrides, "micro_batch_size=2"])
    assert one[0][-1] < one[0][0] - 0.3, "nothing was learnt"
    assert two[0][0] == two[1][0]
    assert_same_training(one, two[0])


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.replicate=2", "micro_batch_size=1"],
        ["parallel.replicate=4"],
        ["activation_checkpointing=true", "model.tie_embeddings=true", "model.qk_norm=true"],
    ],
)
def test_meshes_of_four_ranks_train_alike(layout, tmp_path):
    model = [word for word in layout if word.startswith("model.")]
    (one,) = run_ranks(train_losses, 1, tmp_path, ["attention=diff_v1", *model])
    four = run_ranks(train_losses, 4, tmp_path, ["attention=diff_v1", *layout])
    assert_same_training(one, four[0])


def lambda_under_bf16():
    """(lambda of the module in a bf16 forward pass, the float32 formula, parameter dtypes)."""
    cfg = load_config([*BASE, "attention=diff_v1", "precision=bf16", "optim.lr=1e-2"])
    t = build(cfg, torch.device("cpu"))
    for step in range(3):
        train_step(t, micro_batches(cfg, step), step, diagnose=False)
    tokens = next(iter(micro_batches(cfg, 0)))
    out = t.model(*tokens, diagnose=True)
    values = []
    for i in range(cfg.model.n_layers):
        names = [f"layers.{i}.attention.lambda_{n}" for n in ("q1", "k1", "q2", "k2")]
        q1, k1, q2, k2 = (local(t.params[name]).detach() for name in names)
        lambda_init = 0.8 - 0.6 * math.exp(-0.3 * i)
        first, second = torch.exp((q1 * k1).sum()), torch.exp((q2 * k2).sum())
        values.append(first - second + torch.tensor(lambda_init))
    dtypes = {str(t.params[f"layers.0.attention.{n}"].dtype) for n in ("lambda_q1", "wq.weight")}
    return out.stats["lambda_mean"].tolist(), torch.stack(values).tolist(), dtypes


def test_lambda_is_float32_to_the_bit_under_bf16(tmp_path):
    for shown, expected, dtypes in run_ranks(lambda_under_bf16, 2, tmp_path):
        assert dtypes == {"torch.float32"}
        assert shown == expected


def initial_values(overrides):
    t = build(load_config([*BASE, *overrides]), torch.device("cpu"))
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy()
        for name, p in t.params.items()
    }


def test_initial_values_do_not_depend_on_ranks(tmp_path):
    (one,) = run_ranks(initial_values, 1, tmp_path, [])
    for other in run_ranks(initial_values, 3, tmp_path, ["global_batch_size=9"]):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert (value == other[name]).all(), name


def graph_breaks(overrides):
    """Losses of compiled training; `fullgraph=True` raises at a break."""
    return train_losses([*overrides, "compile=true", "activation_checkpointing=true"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_compiled_with_checkpointing_trains_alike(variant, tmp_path):
    (eager,) = run_ranks(train_losses, 1, tmp_path, [f"attention={variant}"])
    compiled = run_ranks(graph_breaks, 2, tmp_path, [f"attention={variant}"])
    assert_same_training(eager, compiled[0], atol=1e-4)
