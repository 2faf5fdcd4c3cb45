"""Simulated steps against real steps: bytes of every rank, peak, and traffic."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from runs.ranks import run_ranks

from diffllm.config import load_config
from diffllm.distributed.experts import balanced_splits
from diffllm.distributed.gradients import local
from diffllm.model import without_storage
from diffllm.plan import simulate as simulation
from diffllm.plan.compiled import gpu_kernels
from diffllm.plan.memory import Observer
from diffllm.plan.simulate import CPU, MeasuredTraining, fake_world, simulate
from diffllm.plan.step import Collective
from diffllm.training.build import allocated, build, sharded_model
from diffllm.training.memory import training_state
from diffllm.training.step import train_step

SMALL = [
    "model=tiny",
    "model.dim=44",
    "model.ffn_dim=72",
    "model.vocab_size=97",
    "data.vocab_size=97",
    "seq_len=24",
    "global_batch_size=8",
    "micro_batch_size=1",
    "compile=false",
    "precision=bf16",
    "optim.warmup_steps=5",
]
REDUCE = ("every", "last")
MOE = [*SMALL[3:], "model=moe_tiny", "model.dim=64"]


def random_batches(cfg):
    shape = (cfg.micro_batches(dist.get_world_size())[0], cfg.seq_len)
    while True:
        yield torch.randint(0, 97, shape), torch.randint(0, 97, shape)


def real_bytes(overrides):
    """Return bytes of parameters, gradients and optimizer state of this rank, without observers."""
    cfg = load_config(overrides)
    t = build(cfg, CPU)
    grads = []

    def see(*_):
        grads.extend(local(p.grad).nbytes for p in t.params.values())

    t.optimizer.register_step_pre_hook(see)
    train_step(t, random_batches(cfg), 0)
    state = t.optimizer.state.values()
    return (
        sum(local(p).nbytes for p in t.params.values()),
        sum(grads),
        sum(local(value).nbytes for each in state for value in each.values()),
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, MOE),
        (2, [*SMALL, "attention=diff_v1"]),
        (4, [*SMALL, "attention=diff_v2", "model.tie_embeddings=true"]),
        (4, [*SMALL, "attention=gated", "parallel.replicate=2", "model.qk_norm=true"]),
        (2, MOE),
        (4, [*MOE, "parallel.replicate=2"]),
        (2, [*MOE, "parallel.expert=2"]),
        (4, [*MOE, "parallel.expert=2", "attention=diff_v1"]),
    ],
)
def test_planned_bytes_of_training_state_equal_real_bytes(ranks, overrides, tmp_path):
    real = run_ranks(real_bytes, ranks, tmp_path, overrides)
    cfg = load_config(overrides)
    sizes = cfg.parallel.sizes(ranks)
    states = [training_state(without_storage(cfg.model), sizes, rank) for rank in range(ranks)]
    assert states == real
    assert states[0].total < simulate(cfg, ranks).peak.total


def observed(cfg):
    """Observe a step of a rank with real data."""
    observer = Observer()
    sharded = sharded_model(cfg, CPU, balanced_splits)
    with gpu_kernels(), observer.memory.patched(), observer:
        t = allocated(cfg, CPU, sharded)
        for param in t.params.values():
            local(param).detach().zero_()
        watched = MeasuredTraining(t, observer)
        watched.batches = lambda: random_batches(cfg)
        return watched.step(cfg.micro_batches(dist.get_world_size())[1])


def counted_calls(calls):
    return Counter((call.kind.value, call.size, call.ranks) for call in calls)


def collectives_of(overrides):
    return counted_calls(observed(load_config(overrides)).calls)


WITHOUT_PROBES = "diagnostics.probe_interval=0"
REAL_STEPS = [  # one and two micro-batches
    [*SMALL, "attention=diff_v2", "global_batch_size=4"],
    [*SMALL, "activation_checkpointing=full", "global_batch_size=2"],
    [*SMALL, "activation_checkpointing=selective", "global_batch_size=2"],
    [*MOE, "parallel.replicate=2", "global_batch_size=4"],
    [*MOE, "parallel.expert=2", "global_batch_size=4"],
    [*SMALL, "attention=diff_v2", "parallel.context=2", "global_batch_size=2", WITHOUT_PROBES],
]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("overrides", REAL_STEPS)
def test_simulated_memory_equals_memory_of_real_step(overrides):
    cfg = load_config(overrides)
    step = simulate(cfg, 2)
    # Threads of gloo make copies, and keep a collective's tensors until some time after its end.
    with fake_world(0, 2):
        real = observed(cfg)
    assert step.activations == real.activations
    assert step.peak.total == real.peak.total
    assert (step.peak.by_kind, step.when) == (real.peak.by_kind, real.when)
    assert sum(step.peak.by_kind.values()) == step.peak.total


@pytest.mark.slow
@pytest.mark.parametrize("overrides", REAL_STEPS)
def test_simulated_collectives_match_real_step(overrides, tmp_path):
    step = simulate(load_config(overrides), 2)
    assert counted_calls(step.calls) == run_ranks(collectives_of, 2, tmp_path, overrides)[0]


@pytest.mark.slow
@pytest.mark.parametrize("expert", [1, 2])
def test_selective_checkpointing_keeps_attention_results_of_compiled_mixture(expert):
    words = ["model=moe_tiny", "attention=standard", "compile=true", "precision=bf16"]
    words += ["seq_len=64", "global_batch_size=2", "micro_batch_size=1"]
    words += [f"parallel.expert={expert}"]
    kept = {}
    for policy in ("selective", "full"):
        cfg = load_config([*words, f"activation_checkpointing={policy}"])
        kept[policy] = simulate(cfg, 2).activations
    # The context (1, T, H, d) in bfloat16 and one float32 logarithm of a sum per query and head.
    results = cfg.model.n_layers * 64 * cfg.model.n_heads * (cfg.model.head_dim * 2 + 4)
    assert kept["selective"] - kept["full"] == pytest.approx(results, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("reduce", REDUCE)
def test_extrapolated_simulation_equals_simulation_of_all_micro_batches(reduce, monkeypatch):
    reduce = f"parallel.reduce={reduce}"
    overrides = [*SMALL, "global_batch_size=20", "parallel.replicate=2", reduce]
    cfg = load_config(overrides)
    short = simulate(cfg, 4)
    monkeypatch.setattr(simulation, "SIMULATED", 5)
    full = simulate(cfg, 4)
    assert Counter(short.calls) == Counter(full.calls)
    assert (short.peak.total, short.activations) == (full.peak.total, full.activations)


def sent(step, kind):
    return sum(
        call.kind.on_the_wire(call.size, len(call.ranks))
        for call in step.calls
        if call.kind is kind and call.size > 500  # ignore scalars: losses and norms
    )


@pytest.mark.parametrize(("reduce", "times"), [("every", 3), ("last", 1)])
def test_simulated_traffic_of_sharded_model_equals_hand_computed_bytes(reduce, times):
    words = ["model.vocab_size=100", "global_batch_size=12", f"parallel.reduce={reduce}"]
    cfg = load_config([*SMALL, "attention=standard", *words])
    step = simulate(cfg, 4)  # three micro-batches
    layer = 2 * 44 * 128 + 2 * 44 * 64 + 3 * 44 * 72 + 2 * 44
    root = 2 * 100 * 44 + 44
    gathered = 2 * (2 * 2 * layer + root)  # bf16; layers are gathered in both passes, the rest once
    reduced = 4 * (2 * layer + root)  # float32; reduced once
    assert sent(step, Collective.all_gather) == 3 * gathered * 3 / 4
    assert sent(step, Collective.reduce_scatter) == times * reduced * 3 / 4
    assert sent(step, Collective.all_reduce) == 0
