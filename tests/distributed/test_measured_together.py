"""All metrics of a step equal a plain recomputation on the global batch in one process.

The step runs on 2 ranks with micro-batches and activation checkpointing, eager and compiled.

Shapes: B batch, T tokens, h heads.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from runs.ranks import run_ranks
from test_training_ranks import BASE, global_batch, micro_batches
from tiers import slow_but
from torch._dynamo.utils import counters

from diffllm import build_model
from diffllm.config import load_config
from diffllm.evaluation.maps import attention_maps
from diffllm.metrics.diagnostics import named_values, probe_positions
from diffllm.training.build import build
from diffllm.training.record import grad_norm_by_group
from diffllm.training.step import Due, train_step

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
LAYOUT = ["micro_batch_size=2", "activation_checkpointing=full"]
ALL = Due(statistics=True, probes=True, update=True)


def measured_config(variant, *extra):
    return load_config([*BASE, f"attention={variant}", "model.init_std=0.2", *extra])


def values_and_graphs(variant, extra):
    """Return {name: value} of the first step, and the number of compiled graphs after each step."""
    cfg = measured_config(variant, *LAYOUT, *extra)
    t = build(cfg, torch.device("cpu"))
    counters.clear()
    values, graphs = {}, []
    for step, due in enumerate((ALL, Due(), Due(True), Due(probes=True), Due(), ALL, Due())):
        out = train_step(t, micro_batches(cfg, step), step, due)
        if step == 0:
            values = {
                "train/loss": out.nll.item(),
                "train/grad_norm": out.grad_norms.total.item(),
                "train/update_norm": out.update_norm.item(),
                **grad_norm_by_group(out.grad_norms),
                **named_values(out.stats),
            }
        graphs.append(counters["stats"]["unique_graphs"])
    return values, graphs


def reference_values(variant):
    """Compute the same metrics with a plain model, without the tested code."""
    cfg = measured_config(variant)
    model = build_model(cfg.model)
    tokens = global_batch(cfg, 0)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    heard = listen(model)
    logits = model(inputs)
    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    z = torch.logsumexp(logits, -1).square().mean()
    (nll + cfg.model.z_loss * z).backward()
    values = {"train/loss": nll.item(), **gradient_norms(model)}
    positions = probe_positions(cfg.diagnostics, cfg.seq_len, cfg.seed, 0)
    for i, layer in enumerate(model.layers):
        own = {**block_values(layer, heard[i]), **map_values(model, layer, heard[i], positions)}
        values |= {f"{name}/layer_{i:02d}": value for name, value in own.items()}
    values["train/update_norm"] = update_norm(model, cfg)
    return values


def listen(model):
    """Record inputs and outputs of each layer's parts in the next forward pass."""
    heard = [{} for _ in model.layers]

    def keep(store, name, what):
        def hook(_, args, out):
            found = args[0] if what == "input" else out
            store[name] = (found[0] if isinstance(found, tuple) else found).detach()

        return hook

    for store, layer in zip(heard, model.layers, strict=True):
        attention = layer.attention
        layer.register_forward_hook(
            lambda _, args, out, s=store: s.update(out=out[0].detach(), residual=args[0].detach())
        )
        attention.register_forward_hook(keep(store, "attn_write", "output"))
        layer.ffn.register_forward_hook(keep(store, "ffn_write", "output"))
        layer.attention_norm.register_forward_hook(keep(store, "normed", "output"))
        last = getattr(attention, "head_norm", attention.wo)
        last.register_forward_hook(keep(store, "context", "input"))
        for name in ("wv", "w_lambda", "w_gate"):
            if hasattr(attention, name):
                getattr(attention, name).register_forward_hook(keep(store, name, "output"))
    return heard


def block_values(layer, heard):
    attention, x = layer.attention, heard["out"].double()
    width = attention.head_dim * (2 if hasattr(attention, "lambda_q1") else 1)
    rms = heard["context"].double().flatten(2).unflatten(-1, (-1, width)).square().mean(-1).sqrt()
    centred = x - x.mean(-1, keepdim=True)
    kurtosis = (centred**4).mean(-1) / (centred**2).mean(-1) ** 2
    own_values = heard["wv"].double().square().mean((1, 2)).sqrt()
    ratio = rms / own_values[:, None, None]
    values = {
        "context_over_value_rms": ratio.mean(),
        "context_over_value_rms_min": ratio.min(),
        "context_over_value_rms_max": ratio.max(),
        "context_rms": rms.mean(),
        "context_rms_min": rms.min(),
        "context_rms_max": rms.max(),
        "hidden_top1": x.abs().max(),
        "hidden_kurtosis": kurtosis.mean(),
        **{
            f"{name}_rms": heard[name].double().square().mean().sqrt()
            for name in ("residual", "attn_write", "ffn_write")
        },
    }
    if "w_gate" in heard:
        values["gate_mean"] = torch.sigmoid(heard["w_gate"]).mean()
    if "w_lambda" in heard:
        lam = torch.sigmoid(heard["w_lambda"].double())
        values |= {f"lambda_head_{h:02d}": lam[..., h].mean() for h in range(lam.shape[-1])}
    elif hasattr(attention, "lambda_q1"):
        names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
        q1, k1, q2, k2 = (getattr(attention, name).detach().double() for name in names)
        start = 0.8 - 0.6 * math.exp(-0.3 * attention.layer_idx)
        lam = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + start
    else:
        return {name: value.item() for name, value in values.items()}
    values |= {"lambda_mean": lam.mean(), "lambda_min": lam.min(), "lambda_max": lam.max()}
    return {name: value.item() for name, value in values.items()}


@torch.no_grad()
def map_values(model, layer, heard, positions):
    """Compute statistics of attention maps at the probed query positions."""
    attention, x = layer.attention, heard["normed"]
    rope = model.rope(0, x.shape[1])
    maps = [m.double()[:, :, positions] for m in attention_maps(attention, x, rope).maps.values()]
    effective, parts = maps[-1], maps[:-1] or maps
    entropies = [torch.where(p > 0, -p * p.log(), 0).sum(-1).mean() for p in parts]
    q, k, _ = attention.project(x, rope)
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    logits = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(attention.head_dim)
    seen = torch.ones(logits.shape[-2:]).tril().bool()
    logits = logits.masked_fill(~seen, -math.inf)[:, :, positions]
    negative = effective.clamp(max=0).abs().sum(-1) / effective.abs().sum(-1)
    return {
        "attn_logit_top1": logits.max().item(),
        "attn_entropy": (sum(entropies) / len(parts)).item(),
        "attn_negative_share": negative.mean().item(),
        "sink_mass": effective[..., 0].mean().item(),
    }


def gradient_norms(model):
    """Return train/grad_norm and grad_norm/<group>, grouped by parameter name."""
    squares = {}
    for name, param in model.named_parameters():
        group = (
            "embedding" if name.startswith("tok_embeddings")
            else "output" if name.startswith("output")
            else "norm" if "norm" in name
            else "lambda" if "lambda" in name
            else "attention" if ".attention." in name
            else "ffn"
        )  # fmt: skip
        squares[group] = squares.get(group, 0) + param.grad.double().square().sum().item()
    groups = {f"grad_norm/{group}": math.sqrt(square) for group, square in squares.items()}
    return {"train/grad_norm": math.sqrt(sum(squares.values())), **groups}


def update_norm(model, cfg):
    """Return the norm of one AdamW step after clipping, at the first learning rate of warm-up."""
    before = [p.detach().clone() for p in model.parameters()]
    torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip_norm)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": cfg.optim.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=cfg.optim.lr / cfg.optim.warmup_steps,
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        eps=cfg.optim.eps,
    ).step()
    pairs = zip(model.parameters(), before, strict=True)
    return math.sqrt(sum((p - old).double().square().sum().item() for p, old in pairs))


def assert_reference_values(variant, ranks):
    expected = reference_values(variant)
    for values, _ in ranks:
        assert values.keys() == expected.keys()
        for name, value in expected.items():
            assert values[name] == pytest.approx(value, rel=2e-4, abs=2e-5), name
    assert ranks[0][0] == ranks[1][0], "the ranks disagree"


@pytest.mark.parametrize("variant", slow_but(["diff_v2"], VARIANTS))
def test_training_metrics_on_two_ranks_match_single_process_reference(variant, tmp_path):
    ranks = run_ranks(values_and_graphs, 2, tmp_path, variant, ["compile=false"])
    assert_reference_values(variant, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["gated", "diff_v1", "diff_v2"])
def test_compiled_training_metrics_match_single_process_reference(variant, tmp_path):
    """`fullgraph=True` raises at a graph break."""
    ranks = run_ranks(values_and_graphs, 2, tmp_path, variant, ["compile=true"])
    assert_reference_values(variant, ranks)
    for _, graphs in ranks:
        assert graphs[1] > graphs[0] > 0
        assert graphs[2:] == graphs[1:2] * 5, "compiled again"
