"""Stages: runs that continue training of another run with other settings."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from runs.command import (
    Gate,
    assert_same_weights,
    checkpoint_tensors,
    finish,
    metric_lines,
    overrides_of,
    start,
    train,
    trained_on,
)
from runs.json_files import read_json
from tiers import slow_but

from diffllm.checkpoint.manifest import read_state
from diffllm.checkpoint.reader import load_tensors
from diffllm.cli import main
from diffllm.compare.arms.run import load_run
from diffllm.compare.report.step_curves import over_stages, run_curves, stages_of
from diffllm.config import load_config
from diffllm.config.saved import load_run_config
from diffllm.model import without_storage

WORDS = (
    "steps=4", "optim.warmup_steps=1", "checkpoint.interval=2", "eval.interval=4",
    "log_interval=1", "precision=fp32", "diagnostics.interval=4", "attention=diff_v2",
)  # fmt: skip
STILL = (
    *("optim.lr=1e-20", "optim.weight_decay=0", "steps=1"),
    *("optim.beta1=0.9999999", "optim.beta2=0.9999999"),
)
"""Overrides of one step that changes neither parameters nor moments of AdamW."""
LONGER = ("seq_len=128", "global_batch_size=4", "model.rope.theta=40000")


@pytest.fixture(scope="module")
def first(corpus, tmp_path_factory):
    run = tmp_path_factory.mktemp("stages") / "first"
    finish(corpus, run, *WORDS)
    return run


def moments(run: Path, step: int, name: str = "layers.0.attention.wq.weight"):
    """Return AdamW's two moments and its step for one parameter."""
    path = run / "checkpoints" / f"step-{step:08d}"
    shape = read_state(path)["parameters"][name]
    tensors = {f"optim.{name}.{key}": torch.zeros(shape) for key in ("exp_avg", "exp_avg_sq")}
    tensors[f"optim.{name}.step"] = torch.zeros(())
    load_tensors(path, tensors, no_dist=True)
    return tensors.values()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("ranks", slow_but([1], [1, 2]))
def test_stage_carries_parameters_and_optimizer_state_and_weights_only_parameters(
    corpus, first, tmp_path, ranks
):
    for kind in ("stage", "weights"):
        words = [*WORDS, *STILL, *LONGER, f"resume={kind}:{first}"]
        finish(corpus, tmp_path / kind, *words, ranks=ranks)
        assert checkpoint_tensors(first, 4).keys() == checkpoint_tensors(tmp_path / kind, 1).keys()
        assert_same_values(first, 4, tmp_path / kind, 1)
    *before, steps = moments(first, 4)
    *carried, carried_steps = moments(tmp_path / "stage", 1)
    *new, new_steps = moments(tmp_path / "weights", 1)
    assert (steps, carried_steps, new_steps) == (4, 5, 1)
    for was, now, fresh in zip(before, carried, new, strict=True):
        torch.testing.assert_close(now, was, rtol=1e-3, atol=1e-3 * was.abs().max().item())
        assert fresh.abs().max() < 1e-3 * was.abs().max()


def assert_same_values(one: Path, step: int, other: Path, other_step: int) -> None:
    mine, theirs = checkpoint_tensors(one, step), checkpoint_tensors(other, other_step)
    assert all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.slow
def test_killed_stage_on_two_ranks_resumes_bit_identically(corpus, first, tmp_path):
    words = [*WORDS, *LONGER, f"resume=stage:{first}"]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    finish(corpus, straight, *words, ranks=2)
    gate = Gate(broken, 4)
    killed = start(corpus, broken, *words, ranks=2)
    killed.kill_at(gate, broken / "checkpoints" / "step-00000002")
    assert "resumes from step 2" in finish(corpus, broken, *words, ranks=2)
    assert metric_lines(broken) == metric_lines(straight)
    assert_same_weights(straight, broken, 4)
    assert "previous" in read_json(broken / "run.json")


@pytest.fixture(scope="module")
def stages(corpus, first, tmp_path_factory):
    """Return a run of 2 of 4 steps and two longer stages after it, and the output of the last."""
    place = tmp_path_factory.mktemp("later")
    finish(corpus, place / "second", *WORDS, *LONGER, f"resume=stage:{first}@2")
    said = finish(corpus, place / "third", *WORDS, *LONGER, f"resume=stage:{place}/second@4")
    return [first, place / "second", place / "third"], said


def test_each_stage_reads_samples_in_another_order(stages):
    orders = [
        [samples[:-1] for _, found in sorted(trained_on(run).items()) for samples in found]
        for run in stages[0][1:]
    ]
    assert all(len(order) == 4 for order in orders)
    assert orders[0] != orders[1]


def test_report_of_third_stage_draws_loss_over_tokens_of_all_stages(stages):
    (first, second, third), said = stages
    assert f"next stage of {second}/checkpoints/step-00000004, step 4;" in said
    tokens = [read_json(run / "run.json")["previous"] for run in (second, third)]
    before = [2 * 8 * 64, 2 * 8 * 64 + 4 * 4 * 128]
    assert [each["tokens"] for each in tokens] == before
    runs, starts = zip(*stages_of(load_run(third)), strict=True)
    curve = over_stages([run_curves(run).curves["train/loss"] for run in runs], [*starts])
    steps = [64 * 8 * step for step in (1, 2)]
    steps += [start + 128 * 4 * step for start in before for step in (1, 2, 3, 4)]
    assert curve.tokens.tolist() == steps
    losses = [
        [line["train/loss"] for line in metric_lines(run) if "train/loss" in line][:kept]
        for run, kept in ((first, 2), (second, 4), (third, 4))
    ]
    assert curve.mean.tolist() == pytest.approx([*chain(*losses)])
    assert [*starts] == [0, *before]
    assert main(["report", str(third)]) == 0
    assert "Loss over all stages" in (third / "report.html").read_text(encoding="utf-8")


def router_biases(run: Path, step: int) -> dict[str, torch.Tensor]:
    state = without_storage(load_run_config(run).model).router_state()
    biases = {f"model.{name}": torch.empty(t.shape) for name, t in state.items() if "bias" in name}
    load_tensors(run / "checkpoints" / f"step-{step:08d}", biases, no_dist=True)
    return biases


@pytest.mark.slow
def test_stage_of_mixture_carries_router_state_and_begins_schedule_anew(corpus, tmp_path):
    words = [*WORDS, "model=moe_tiny", "model.moe.bias_update_rate=0.1"]
    finish(corpus, tmp_path / "first", *words)
    for kind in ("stage", "weights"):
        finish(corpus, tmp_path / kind, *words, f"resume={kind}:{tmp_path}/first")
    one, (stage, weights) = tmp_path / "first", (tmp_path / "stage", tmp_path / "weights")
    rates = [[line["train/lr"] for line in metric_lines(run)] for run in (one, stage, weights)]
    assert rates[0] == rates[1] == rates[2]
    finish(corpus, tmp_path / "still", *words, *STILL, "model.moe.bias_update_rate=0",
           f"resume=stage:{one}")  # fmt: skip
    assert_same_values(one, 4, tmp_path / "still", 1)
    before, carried = router_biases(one, 4), router_biases(tmp_path / "still", 1)
    assert before
    for name, bias in before.items():
        assert bias.abs().max() > 0
        assert torch.equal(carried[name], bias)


def test_experiment_of_next_stage_sets_rope_and_keeps_model_of_previous_stage(corpus, first):
    words = ["experiment=long_context_4k", f"resume=stage:{first}"]
    cfg, before = load_config(words), load_run_config(first)
    assert cfg.model.rope == replace(before.model.rope, theta=160_000.0)
    assert (cfg.model.dim, cfg.model.n_layers) == (before.model.dim, before.model.n_layers)
    assert load_config([*words, "model.rope.theta=5"]).model.rope.theta == 5


REFUSED = {
    "variant": (["attention=standard"], "has attention=diff_v2, but the run has"),
    "setting": (["attention=diff_v2_no_lambda"], "model.attention.lambda_form: sigmoid in the"),
    "shape": (["model.ffn_dim=256"], "a stage can change only seq_len, model.rope and"),
    "tokenizer": (["data.vocab_size=310", "data.tokenizer=null"], "has a different tokenizer than"),
    "step": (["resume=stage:{run}@3"], "has no checkpoint of step 3; available steps: [2, 4]"),
    "path": (["resume=stage:"], "resume=stage: needs a path, such as resume=stage:outputs/mine"),
    "export": (["resume=stage:{run}-hf"], "has no optimizer state, which a stage needs; to start"),
}


@pytest.mark.parametrize("what", slow_but(["setting", "export"], REFUSED))
def test_stage_of_other_model_is_refused_in_one_line(corpus, environment, first, tmp_path, what):
    words, said = REFUSED[what]
    if what == "export":
        assert main(["export", f"run={first}", f"out={first}-hf"]) == 0
    words = [f"resume=stage:{first}", *(word.format(run=first) for word in words)]
    ended = train(overrides_of(corpus, tmp_path / "run", *WORDS, *words), tmp_path, environment)
    assert ended.code == 2, ended
    assert said in ended.err.splitlines()[-1]
    assert ended.err.count("error: ") == 1, ended
    assert not (tmp_path / "run").exists()
