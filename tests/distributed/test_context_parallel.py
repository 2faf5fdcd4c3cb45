"""Training with slices of sequences equals training with whole sequences in one process."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from runs.one_rank import unsharded
from runs.ranks import run_ranks, run_single
from test_training_ranks import BASE, END, global_batch

from diffllm.compare.sweep.runs import plan_sweep, split_overrides
from diffllm.config import load_config
from diffllm.core.errors import ConfigError
from diffllm.metrics.diagnostics import named_values
from diffllm.model.attention.slices import degrees
from diffllm.training.build import build
from diffllm.training.step import Due, train_step

SHAPE = ["model.dim=48", "model.n_heads=8", "model.n_kv_heads=4", "model.head_dim=12"]
MIXTURE = [
    *("model=moe_tiny", "model.moe.balance_loss=0.1", "model.moe.balance_over=sequence"),
    "model.moe.router_z_loss=0.01",
]
LOSSES = ("loss", "norm", "train/balance_loss", "train/z_loss", "train/router_z_loss")
ALL = Due(statistics=True, probes=True, update=True)


def group_micro_batches(cfg, step, group, groups, end, ignored):
    """Yield the micro-batches of a group of ranks that share sequences, in the loader's order."""
    micro, count = cfg.micro_batches(dist.get_world_size())
    tokens = global_batch(cfg, step)
    drawn = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(step))
    tokens = torch.where(drawn < 0.15, END, tokens) if end else tokens
    for k in range(count):
        first = (k * groups + group) * micro
        part = tokens[first : first + micro]
        targets = part[:, 1:].clone()
        if ignored:
            targets[drawn[first : first + micro, 1:] > 0.7] = -1
        yield part[:, :-1].contiguous(), targets


def two_step_results(overrides, end, ignored):
    """Return losses, statistics and gradients (from AdamW's first moments) of two steps."""
    # AdamW divides a gradient near 0 by its magnitude. With a small eps, the second step would
    # compare parameters that differ by rounding of such gradients.
    optimizer = ["optim.clip_norm=1e9", "optim.eps=1e-4"]
    cfg = load_config([*BASE, *SHAPE, "model.init_std=0.2", *optimizer, *overrides])
    t = build(cfg, torch.device("cpu"), END if end else None, ignores_targets=ignored)
    values, gradients = [], {}
    for step in range(2):
        out = train_step(t, group_micro_batches(cfg, step, *t.group, end, ignored), step, ALL)
        values.append({
            "loss": out.nll.item(), "norm": out.grad_norms.total.item(),
            **{name: value.item() for name, value in out.losses.items()},
            **named_values(out.stats),
        })  # fmt: skip
        gradients |= {
            (step, name): unsharded(x).numpy()
            for name, x in t.tensors().items()
            if name.endswith("exp_avg")
        }
        keys = out.visible_keys
    if keys is not None:
        dist.all_reduce(keys)
        values[-1]["visible keys"] = keys.item()
    return values, gradients


MAIN = [f"attention={name}" for name in ("standard", "gated", "diff_v1", "diff_v2")]
MORE = [
    "attention=standard_sink", "attention=standard_off_by_one", "attention=standard_1p5x_heads",
    "attention=gated_headwise", "attention=diff_v1 model.attention.values=split",
    "attention=diff_v1_no_head_norm", "attention=diff_v2_unshared_kv",
    "attention=diff_v2_head_norm", "attention=diff_v2_no_sigmoid",
]  # fmt: skip


def assert_ranks_equal_one_process(tmp_path, ranks, words, context=2, end=False, ignored=False):
    """Compare training on `ranks` ranks with training of the same config in one process."""
    of_one = tuple(word for word in words if not word.startswith("parallel."))
    one = run_single(two_step_results, of_one, end, ignored)
    words = [*words, f"parallel.context={context}"]
    assert_results_equal(one, run_ranks(two_step_results, ranks, tmp_path, words, end, ignored))


def assert_results_equal(one, several):
    values, gradients = one
    for found, own in several:
        for step, expected in enumerate(values):
            assert found[step].keys() == expected.keys()
            for name, value in expected.items():
                close = 1e-5 if name in LOSSES else 1e-4
                assert found[step][name] == pytest.approx(value, rel=close, abs=1e-6), name
        for name, value in gradients.items():
            near = 1e-5 * np.abs(value).max() + 1e-9
            np.testing.assert_allclose(own[name], value, atol=near, rtol=1e-5, err_msg=str(name))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("words", [*MAIN, *MORE])
def test_training_on_slices_matches_training_on_whole_sequences(words, tmp_path):
    assert_ranks_equal_one_process(tmp_path, 2, words.split())


CASES = {
    "documents and ignored targets": (2, ["attention=diff_v1"], {"end": True, "ignored": True}),
    "documents": (2, [], {"end": True}),
    "sink and documents": (2, ["attention=standard_sink"], {"end": True}),
    "accumulation": (2, ["micro_batch_size=2"], {}),
    "recomputation": (2, ["activation_checkpointing=full"], {}),
    "selective recomputation": (2, ["activation_checkpointing=selective"], {}),
    "four slices": (4, [], {"context": 4}),
    "fewer value heads than slices": (4, ["attention=diff_v1"], {"context": 4}),
    "two groups": (4, [], {"end": True, "ignored": True}),
    "replicas": (4, ["parallel.replicate=2", "parallel.shard=-1"], {}),
    "mixture": (2, MIXTURE, {}),
    "four slices, gated": (4, ["attention=gated"], {"context": 4}),
    "four slices, mixture": (4, [*MIXTURE, "parallel.expert=2"], {"context": 4}),
    "experts on the same ranks": (2, [*MIXTURE, "parallel.expert=2"], {}),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("case", CASES)
def test_training_on_slices_matches_whole_sequences_with_other_features(case, tmp_path):
    ranks, words, options = CASES[case]
    assert_ranks_equal_one_process(tmp_path, ranks, ["attention=diff_v2", *words], **options)


DEGREES = {  # heads of queries, keys and values of 1.3B models: standard, V1, V2, 1.5x heads
    (16, 8, 8): [1, 2, 4, 8, 16],
    (16, 8, 4): [1, 2, 4, 8],
    (32, 8, 8): [1, 2, 4, 8, 16, 32],
    (24, 8, 8): [1, 2, 4, 8, 24],
}


@pytest.mark.parametrize("heads", DEGREES)
def test_degrees_divide_value_heads_or_are_multiples_that_divide_query_groups(heads):
    assert degrees(*heads) == DEGREES[heads]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["parallel.context=3"],
            "fit the heads of attention=diff_v2; choose one of 1, 2, 4, 8, 16",
        ),
        (["parallel.context=2", "seq_len=25"], "parallel.context=2 must divide seq_len=25"),
        (
            ["parallel.context=2", "attention=diff_v1_clamped"],
            "is not supported with attention=diff_v1_clamped and model.attention.backend=sdpa",
        ),
        (["parallel.context=2", "model.attention.backend=reference"], "which need whole sequences"),
    ],
)
def test_impossible_number_of_slices_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        load_config([*BASE, *SHAPE, "attention=diff_v2", "seq_len=24", *words])


@pytest.mark.parametrize(
    ("words", "world", "said"),
    [
        (["parallel.replicate=2", "parallel.context=4"], 4, "must divide the ranks of one copy"),
        (["parallel.context=2", "global_batch_size=3"], 4, "groups of parallel.context=2 ranks"),
    ],
)
def test_slices_that_do_not_fit_the_ranks_are_refused(words, world, said):
    cfg = load_config([*BASE, *SHAPE, "attention=diff_v2", "seq_len=24", *words])
    with pytest.raises(ConfigError, match=said):
        cfg.check_world(world)


def test_comparison_names_the_numbers_of_slices_that_fit_every_arm(workplace):
    variants = "attention=standard,diff_v2,standard_1p5x_heads"
    words = [*BASE, *SHAPE, variants, "seq_len=48", "parallel.context=16", "run.sweep=own"]
    with pytest.raises(ConfigError, match=r"choose one of .*; all runs allow 1, 2, 4$"):
        plan_sweep(split_overrides(words)[0], 16)
