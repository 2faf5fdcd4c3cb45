"""Probes of explicit maps compared with plain loops, and the probed positions.

Shapes: B batch, T tokens, N probed positions, h heads.
"""

import math

import pytest
import torch
from runs.models import tiny_model
from tiers import variant_cases

from diffllm import load_config
from diffllm.config.compose import variants
from diffllm.metrics.diagnostics import DiagnosticsConfig, probe_positions
from diffllm.metrics.table import METRICS
from diffllm.model.attention.masks import Documents
from diffllm.model.rope import apply_rope
from diffllm.model.stats import probe_at, probe_stats
from diffllm.training.step import Due, due

pytestmark = pytest.mark.usefixtures("gloo")

LENGTH, END = 12, 7
POSITIONS = torch.tensor([1, 4, 10])
PROBED = {metric.quantity for metric in METRICS if metric.probe}
COMMON = PROBED - {"lambda_head"}


def token_rows(size=2):
    tokens = torch.randint(10, 64, (size, LENGTH))
    tokens[0, [2, 7]] = END
    return tokens


def key_heads(attention, query_heads):
    """Return the key head of each query head, by the definition of the variant."""
    H, K = attention.n_heads, attention.n_kv_heads
    if hasattr(attention, "lambda_q1"):  # pair i, member m: kv pair i // (H / K), member m
        return [2 * (head // 2 // (H // K)) + head % 2 for head in range(H)]
    return [head // (query_heads // K) for head in range(query_heads)]


def largest_logit(attention, x, rope, allowed):
    """Return the largest logit over all query heads, probed positions and visible keys."""
    q = apply_rope(attention.wq(x).unflatten(-1, (-1, attention.head_dim)), rope)
    k = apply_rope(attention.wk(x).unflatten(-1, (-1, attention.head_dim)), rope)
    reads = key_heads(attention, q.shape[2])
    return max(
        (q[b, at, head] @ k[b, key, reads[head]]).item() / math.sqrt(attention.head_dim)
        for b in range(len(x))
        for head in range(q.shape[2])
        for at in POSITIONS.tolist()
        for key in range(at + 1)
        if allowed(b, at, key)
    )


def reference_probes(attention, x, rope, mask, allowed):
    """Return the expected statistics, computed per query from the maps of the whole sequence."""
    q, k, _ = attention.project(x, rope)
    maps = {n: m.double() for n, m in attention.maps(x, q, k, mask).items()}
    *parts, effective = maps.values()
    entropies, sinks, negatives = [], [], []
    for b in range(len(x)):
        for at in POSITIONS.tolist():
            keys = [key for key in range(at + 1) if allowed(b, at, key)]
            for head in range(effective.shape[1]):
                row = [effective[b, head, at, key].item() for key in keys]
                sinks.append(row[0])
                total = sum(abs(w) for w in row)
                negatives.append(-sum(w for w in row if w < 0) / total if total else 0.0)
            for part in parts or [effective]:
                for head in range(part.shape[1]):
                    row = [part[b, head, at, key].item() for key in keys]
                    shares = [w / sum(row) for w in row]
                    entropies.append(-sum(p * math.log(p) for p in shares if p))
    mean = {"attn_entropy": entropies, "sink_mass": sinks, "attn_negative_share": negatives}
    return {
        "attn_logit_top1": largest_logit(attention, x, rope, allowed),
        **{name: sum(values) / len(values) for name, values in mean.items()},
    }


@torch.no_grad()
@pytest.mark.parametrize(("variant", "masked"), variant_cases(variants(), [False, True]))
def test_attention_statistics_match_plain_loop_reference(variant, masked):
    model = tiny_model(f"attention={variant}", f"seq_len={LENGTH}", "model.init_std=0.3")
    tokens = token_rows()
    documents = Documents.of(tokens, END) if masked else None
    attention = model.layers[1].attention
    x = torch.randn(2, LENGTH, model.cfg.dim)
    rope, _ = model.whole_sequences(tokens, documents, x.dtype)
    mask = documents.mask() if masked else None
    aux = {}
    attention(x, rope, mask, aux=aux)
    found = probe_stats(attention, x, aux, probe_at(POSITIONS, LENGTH, documents))

    def allowed(b, at, key):
        return not masked or END not in tokens[b, key:at]

    by_head = found.pop("lambda_head", None)
    values = {name: value.item() for name, value in found.items()}
    assert values == pytest.approx(reference_probes(attention, x, rope, mask, allowed), abs=2e-5)
    assert (by_head is not None) == (
        variant in ("diff_v2_lambda_scalar", "diff_v2_no_sigmoid", "diff_v2_unshared_kv")
        or variant in ("diff_v2", "diff_v2_head_norm", "diff_v2_2x_context")
    )
    if by_head is not None:
        lam = attention.lambda_values(x).expand(2, LENGTH, attention.n_heads)
        assert by_head.tolist() == pytest.approx(lam.mean((0, 1)).tolist(), abs=1e-6)


@pytest.mark.parametrize("variant", ["standard", "diff_v1", "diff_v2"])
def test_loss_is_unchanged_if_attention_statistics_are_collected(variant):
    model = tiny_model(f"attention={variant}", f"seq_len={LENGTH}", "model.init_std=0.3")
    tokens = token_rows()
    plain = model.loss(tokens, tokens, diagnose=True)
    probed = model.loss(tokens, tokens, diagnose=True, probe=POSITIONS)
    heads = {"lambda_head"} if variant == "diff_v2" else set()
    assert set(probed.stats) == set(plain.stats) | COMMON | heads
    assert torch.equal(plain.objective, probed.objective)
    for name, value in plain.stats.items():
        assert torch.equal(value, probed.stats[name])
    assert not any(value.requires_grad for value in probed.stats.values())
    assert model.loss(tokens, tokens, probe=POSITIONS).stats == {}


def test_due_function_returns_actions_configured_for_each_step():
    words = ["log_interval=4", "diagnostics.interval=3", "diagnostics.probe_interval=6", "steps=14"]
    words += ["eval.interval=7", "eval.suites_interval=10", "checkpoint.interval=9"]
    words += ["distributed.check_interval=5", "profile.steps=[12,13]"]
    cfg = load_config(["model=tiny", "optim.warmup_steps=1", "eval.suites=[mqar]", *words])
    steps = {step: due(cfg, step) for step in range(1, 15)}
    assert {
        name: [step for step, now in steps.items() if getattr(now, name)] for name in Due._fields
    } == {
        "statistics": [3, 6, 9, 12],
        "probes": [6, 12],
        "update": [1, 4, 8, 12, 14],
        "log": [1, 4, 8, 12, 14],
        "check": [5, 10],
        "sample": [7, 14],
        "tasks": [10, 14],
        "save": [9, 14],
        "profile": [11, 12, 13],
        "last": [14],
    }
    cfg.diagnostics.interval = cfg.diagnostics.probe_interval = 0
    cfg.eval.suites, cfg.checkpoint.interval = [], "30min"
    steps = {step: due(cfg, step) for step in range(1, 15)}
    assert not any(now.diagnose or now.tasks for now in steps.values())
    assert [step for step, now in steps.items() if now.save] == [14]


def test_probe_positions_contain_one_random_position_per_segment():
    cfg = DiagnosticsConfig()
    drawn = [probe_positions(cfg, 257, seed=0, step=step) for step in range(50)]
    for positions in drawn:
        parts = ((positions - 1) // 32).tolist()
        assert parts == list(range(8)), "one position per part, without the first token"
    assert len({tuple(p.tolist()) for p in drawn}) == 50
    again = probe_positions(cfg, 257, seed=0, step=7)
    assert torch.equal(again, drawn[7])
    assert not torch.equal(probe_positions(cfg, 257, seed=1, step=7), again)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 8, 9])
@pytest.mark.parametrize("seed", [-5, 0, 2**63 - 1])
def test_probe_positions_of_short_sequence_are_valid_indices(seq_len, seed):
    positions = probe_positions(DiagnosticsConfig(), seq_len, seed, 3)
    assert positions.min() >= 0
    assert positions.max() < seq_len
    assert seq_len == 1 or positions.min() >= 1
