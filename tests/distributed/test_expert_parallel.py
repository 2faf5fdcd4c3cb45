"""Expert parallelism trains like a single process, with fewer experts in each rank's memory."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from runs.one_rank import resume, unsharded
from runs.ranks import run_ranks, run_single
from test_training_ranks import BASE, heldout_losses, micro_batches
from tiers import slow_but

from diffllm import build_model
from diffllm.checkpoint.writer import Checkpointer
from diffllm.config import load_config
from diffllm.core.errors import ConfigError
from diffllm.distributed.gradients import local
from diffllm.training.build import build
from diffllm.training.outputs import sample
from diffllm.training.state import LoopState, save
from diffllm.training.step import Due, train_step

STEPS = 4
CLIP = 0.2
MOE = [
    "model.moe.n_experts=4",
    "model.moe.expert_dim=32",
    "model.moe.n_shared=1",
    "model.moe.bias_update_rate=0.01",
    "model.moe.balance_loss=0.01",
    f"optim.clip_norm={CLIP}",
    "optim.warmup_steps=1",
    "compile=false",
]
LAYOUTS = {
    "expert2": (2, ["parallel.expert=2"]),
    "expert4": (4, ["parallel.expert=4"]),
    "shard2_expert2": (4, ["parallel.shard=2", "parallel.expert=2"]),
    "replicate2_expert2": (4, ["parallel.replicate=2", "parallel.expert=2"]),
    "shard2": (2, ["parallel.shard=2"]),
    "shard4": (4, ["parallel.shard=4"]),
}
OTHER_OPTIONS = (
    *("model.moe.score=softmax", "model.moe.renormalise=false", "model.moe.n_dense_layers=1"),
    *("model.moe.balance_over=sequence", "model.moe.router_z_loss=0.01", "model.moe.n_shared=0"),
)
SPARING = ["micro_batch_size=1", "activation_checkpointing=full"]
TWO_EXPERTS = ("model.moe.n_experts=2", "model.moe.top_k=1")  # Fewer experts than ranks.


def expert_config(overrides):
    return load_config([*BASE, *MOE, *overrides])


def short_run_results(overrides, bias=None):
    """Train a short run; return its results as numbers and arrays.

    bias: the initial router bias of every layer, which decides the selected experts.
    """
    cfg = expert_config(overrides)
    t = build(cfg, torch.device("cpu"))
    if bias:
        for layer in t.model.layers:
            layer.ffn.router.bias.copy_(torch.tensor(bias))
    values = {name: unsharded(p).numpy() for name, p in t.params.items()}
    result = {"initial": values, "losses": [], "norms": [], "squares": [], "loads": []}
    gradients = []
    t.optimizer.register_step_post_hook(  # AdamW clips gradients in place.
        lambda *_: gradients.append({n: unsharded(p.grad).numpy() for n, p in t.params.items()})
    )
    for step in range(STEPS):
        last = step == STEPS - 1
        out = train_step(t, micro_batches(cfg, step), step, Due(True, last, last))
        result["losses"].append(out.nll.item())
        result["norms"].append(out.grad_norms.total.item())
        result["squares"].append(dict(zip(*map(list, out.grad_norms[:2]), strict=True)))
        result["loads"].append(out.stats["expert_load_min"].tolist())
    result["squares"] = [{n: s.item() for n, s in step.items()} for step in result["squares"]]
    result["stats"] = {name: value.tolist() for name, value in out.stats.items()}
    result["update_norm"] = out.update_norm.item()
    result["final"] = {name: unsharded(p).numpy() for name, p in t.params.items()}
    result["gradients"] = gradients
    result["routers"] = {name: value.tolist() for name, value in t.model.router_state().items()}
    result["held"] = {n: (tuple(local(p).shape), storage(t, p)) for n, p in t.params.items()}
    return result


def storage(t, param):
    """Return the bytes of this rank's storage for a parameter and for its first moment."""
    moment = t.optimizer.state[param]["exp_avg"]
    return [local(x).detach().untyped_storage().nbytes() for x in (param, moment)]


def assert_alike(one, other, atol=1e-6):
    """Compare two results up to float32 rounding.

    Adam's first steps magnify rounding: almost zero gradients move weights as far as large
    gradients. `atol` of a gradient is relative to its largest value.
    """
    for key in ("losses", "norms", "update_norm"):
        torch.testing.assert_close(
            torch.tensor(other[key]), torch.tensor(one[key]), rtol=1e-5, atol=atol
        )
    for kind, rtol in (("stats", 1e-3), ("routers", 1e-5)):
        assert one[kind].keys() == other[kind].keys()
        for name, value in one[kind].items():
            torch.testing.assert_close(
                torch.tensor(other[kind][name]), torch.tensor(value), rtol=rtol, atol=1e-4
            )
    for step, gradients in enumerate(one["gradients"]):
        assert gradients.keys() == other["gradients"][step].keys()
        for name, value in gradients.items():
            error = abs(value - other["gradients"][step][name]).max()
            bound = atol * (100 if step else 10) * (1e-2 + abs(value).max())
            assert error <= bound, f"step {step}, {name}: {error}"
    for name, value in one["final"].items():
        error = abs(value - other["final"][name]).max()
        assert error < 100 * atol, f"{name} differs by {error}"


def assert_own_experts_only(held, cfg, ranks):
    """Assert that this rank stores only its share of experts' parameters and moments."""
    _, shard, expert = cfg.parallel.sizes(ranks)
    with torch.device("meta"):
        plain = dict(build_model(cfg.model).named_parameters())
    names = [name for name in plain if ".experts." in name]
    assert len(names) == 3 * cfg.model.n_layers
    for name in names:
        shape, sizes = held[name]
        assert shape == (cfg.model.moe.n_experts // expert // shard, *plain[name].shape[1:])
        assert sizes == [plain[name].nbytes // expert // shard] * 2, name


@pytest.fixture(scope="module")
def one_process():
    result = run_single(short_run_results, ())
    assert min(result["norms"]) > 2 * CLIP, "nothing is clipped"
    assert abs(result["final"]["norm.weight"] - result["initial"]["norm.weight"]).max() > 1e-3
    return result


@pytest.mark.parametrize(
    ("layout", "sparing"),
    slow_but(
        [("expert4", False)],
        [
            ("expert2", True),
            ("expert4", False),
            ("shard2_expert2", True),
            ("shard2_expert2", False),
            ("replicate2_expert2", True),
            ("shard2", False),
            ("shard4", True),
        ],
    ),
)
def test_expert_parallel_training_matches_single_process(layout, sparing, one_process, tmp_path):
    ranks, overrides = LAYOUTS[layout]
    results = run_ranks(short_run_results, ranks, tmp_path, overrides + SPARING * sparing)
    for result in results:
        assert result["losses"] == results[0]["losses"], "the ranks disagree"
        assert result["norms"] == results[0]["norms"], "the ranks disagree"
        assert result["routers"] == results[0]["routers"], "the ranks disagree"
        assert_own_experts_only(result["held"], expert_config(overrides), ranks)
    assert_alike(one_process, results[0])
    for name, value in one_process["initial"].items():
        assert (results[0]["initial"][name] == value).all(), name
    for squares, gradients in zip(results[0]["squares"], results[0]["gradients"], strict=True):
        norm = math.sqrt(sum(squares.values()))
        for name, square in squares.items():  # Norms are from before clipping, gradients after.
            clipped = math.sqrt(square) * CLIP / norm
            whole = torch.tensor(gradients[name]).double().norm().item()
            assert clipped == pytest.approx(whole, rel=1e-4), name


@pytest.mark.slow
def test_moe_training_on_four_ranks_matches_training_on_single_rank(tmp_path):
    one = run_single(short_run_results, OTHER_OPTIONS)
    ranks, overrides = LAYOUTS["shard2_expert2"]
    more = [*OTHER_OPTIONS, *overrides, *SPARING, "parallel.reduce=last"]
    assert_alike(one, run_ranks(short_run_results, ranks, tmp_path, more)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [(4, ["parallel.expert=2"]), (4, ["parallel.expert=1"]), (2, ["parallel.expert=2"])],
)
def test_expert_parameters_are_distributed_evenly_over_all_ranks(ranks, overrides, tmp_path):
    one = run_single(short_run_results, TWO_EXPERTS)
    results = run_ranks(short_run_results, ranks, tmp_path, [*TWO_EXPERTS, *overrides, *SPARING])
    assert_alike(one, results[0])
    for name, value in one["initial"].items():
        assert (results[0]["initial"][name] == value).all(), name
    for result in results:
        for name, (shape, _) in result["held"].items():
            if ".experts." in name:
                assert math.prod(shape) * ranks == one["final"][name].size, name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert2", "expert4", "shard2_expert2"])
def test_expert_parallel_training_is_correct_if_one_rank_receives_no_tokens(layout, tmp_path):
    bias = (-9.0, -9.0, 9.0, 9.0)  # No token selects the first two experts, on the first rank.
    still = ("model.moe.bias_update_rate=0",)
    one = run_single(short_run_results, still, bias)
    assert one["loads"] == [[0.0, 0.0]] * STEPS
    ranks, overrides = LAYOUTS[layout]
    result = run_ranks(short_run_results, ranks, tmp_path, [*overrides, *still, *SPARING], bias)[0]
    assert_alike(one, result)
    for name, value in result["gradients"][0].items():
        if ".experts." in name:
            assert (value[:2] == 0).all()
            assert (value[2:] != 0).any()


@pytest.mark.slow
def test_compiled_expert_parallel_training_matches_single_process(one_process, tmp_path):
    for extra in (SPARING, ["activation_checkpointing=selective"]):
        overrides = ["parallel.expert=2", "compile=true", *extra]
        results = run_ranks(short_run_results, 2, tmp_path, overrides)
        assert_alike(one_process, results[0], atol=1e-5)


def moved(overrides, source, target):
    """Train three steps, or resume from `source`; save to `target`; return step and all tensors."""
    cfg = expert_config(overrides)
    t = build(cfg, torch.device("cpu"))
    if source:
        state = resume(t, source)
    else:
        state = LoopState()
        for step in range(3):
            train_step(t, micro_batches(cfg, step), step)
        state.step = 3
    checkpointer = Checkpointer(target, cfg.checkpoint)
    save(t, state, checkpointer)
    checkpointer.close()
    return state.step, {name: unsharded(value).numpy() for name, value in t.tensors().items()}


@pytest.mark.slow
@pytest.mark.parametrize("experts", [[], TWO_EXPERTS], ids=["four", "two"])
def test_moe_checkpoint_keeps_values_if_number_of_ranks_changes(experts, tmp_path):
    split = ["parallel.shard=2", "parallel.expert=2"]
    steps = [(1, []), (2, ["parallel.expert=2"]), (4, ["parallel.expert=4"]), (4, split), (1, [])]
    if experts:
        del steps[2]
    source, first = None, None
    for i, (ranks, overrides) in enumerate(steps):
        target = tmp_path / str(i)
        for step, tensors in run_ranks(
            moved, ranks, tmp_path, [*experts, *overrides], source, target
        ):
            first = first or tensors
            assert step == 3
            assert tensors.keys() == first.keys()
            for name, value in first.items():
                assert (tensors[name] == value).all(), f"{name} on {ranks} ranks"
        source = target / "step-00000003"
    kept = "optim.layers.0.ffn.experts.w2.exp_avg"
    assert abs(first[kept]).max() > 0
    assert "model.layers.0.ffn.router.bias" in first


def test_heldout_loss_is_correct_if_number_of_sequences_differs_between_ranks(tmp_path):
    overrides = [*MOE, "parallel.expert=2", "micro_batch_size=4"]
    for masked, free, one_by_one, whole in run_ranks(heldout_losses, 2, tmp_path, overrides):
        assert masked == pytest.approx(one_by_one, abs=1e-5)
        assert free == pytest.approx(whole, abs=1e-5)


PIECES = SimpleNamespace(eos_id=5, vocab_size=97, encode=lambda _: [1, 5, 2], decode=list)
"""A tokenizer that returns ids as text."""


def calls_of_sampling(overrides):
    """Return (tokens, number of model calls); the second rank draws the end of text immediately."""
    cfg = expert_config(["seq_len=60", "data.sample_prompt=words", *overrides])
    t = build(cfg, torch.device("cpu"))
    calls = []
    t.model.register_forward_pre_hook(lambda *_: calls.append(1))
    if dist.get_rank() == 1:
        end = torch.tensor([PIECES.eos_id])
        t.model.register_forward_hook(lambda m, a, logits: logits.index_fill(-1, end, 1e4))
    return sample(t, SimpleNamespace(tokenizer=lambda: PIECES)), len(calls)


def test_number_of_model_calls_in_text_generation_is_equal_on_all_ranks(tmp_path):
    """A rank that stopped early would block other ranks, which need its experts."""
    results = run_ranks(calls_of_sampling, 2, tmp_path, ["parallel.expert=2"])
    (tokens, calls), (ended, others) = results
    assert calls == others == 57
    assert ended == [1, 5, 2, 5]
    alone, _ = run_single(calls_of_sampling, ())
    assert alone == tokens
    assert tokens[:3] == [1, 5, 2]
    assert 5 not in tokens[3:-1]


@pytest.mark.parametrize("expert", [3, 16])
def test_expert_parallel_size_must_divide_number_of_experts(expert):
    with pytest.raises(ConfigError, match=rf"parallel.expert={expert} .* model.moe.n_experts=4"):
        expert_config([f"parallel.expert={expert}"])


def test_shard_count_must_divide_experts_per_rank_or_matrix_size():
    # Each rank has 2 experts of 48 x 32.
    cfg = expert_config(["parallel.expert=2", "global_batch_size=20"])
    cfg.check_world(4)
    message = r"shard=5 must divide .* experts per rank \(2\), .*=32, .*=48"
    with pytest.raises(ConfigError, match=message):
        cfg.check_world(10)
