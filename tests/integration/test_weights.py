"""Initial parameters: weights of a run, checkpoint, export or import; or matched values."""

import contextlib
import io
import shlex
from pathlib import Path

import pytest
from runs.command import (
    assert_same_weights,
    finish,
    metric_lines,
    overrides_of,
    success_of,
    train,
    unfinish,
)
from runs.json_files import read_json
from tiers import slow_but

from diffllm.cli import main
from diffllm.config import load_config
from diffllm.config.saved import load_run_config
from diffllm.config.words import printed_override, unquoted

WORDS = (
    "steps=4", "optim.warmup_steps=1", "checkpoint.interval=2", "eval.interval=4",
    "log_interval=1", "precision=fp32", "diagnostics.interval=4", "data.num_workers=0",
)  # fmt: skip
STILL = ("optim.lr=1e-20", "optim.weight_decay=0", "steps=1")
"""Overrides of one step that does not change the weights."""


@pytest.fixture(scope="module")
def sources(corpus, tmp_path_factory):
    """Return a standard run, its checkpoint, exports and imports, and all printed text."""
    place = tmp_path_factory.mktemp("out puts")
    run, converted = place / "source", place / "it's (new)"
    said = finish(corpus, run, *WORDS, "attention=standard", "model.rope.theta=5000")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(["export", f"run={run}", f"out={place / 'hf'}"]) == 0
        assert main(["import", f"hf={place / 'hf'}", f"out={place / 'imported'}"]) == 0
        words = [f"out={converted}", "attention=diff_v2"]
        assert main(["import", f"hf={place / 'hf'}", *words]) == 0
    return {
        "printed": said + printed.getvalue(),
        "run": run,
        "checkpoint": run / "checkpoints" / "step-00000004",
        "export": place / "hf",
        "import": place / "imported",
        "converted": converted,
    }


def weights_of(path: Path) -> str:
    """Return the override that a shell passes for the printed override."""
    (word,) = shlex.split(printed_override("resume", f"weights:{path}"))
    return word


def heldout(run: Path) -> float:
    return read_json(run / "summary.json")["heldout_loss"]


SOURCES = [("run", 1), ("checkpoint", 2), ("export", 2), ("import", 1), ("converted", 1)]
"""Each source, and a world size: one rank and two ranks for checkpoints and for exports."""


@pytest.mark.parametrize(("name", "ranks"), slow_but([("converted", 1)], SOURCES))
def test_resume_from_weights_accepts_every_kind_of_source(corpus, sources, tmp_path, name, ranks):
    words = [*WORDS, *STILL, weights_of(sources[name]), "model.rope.theta=5000"]
    said = finish(corpus, tmp_path / "run", *words, ranks=ranks)
    assert heldout(tmp_path / "run") == pytest.approx(heldout(sources["run"]), abs=1e-5)
    variant = "diff_v2" if name == "converted" else "standard"
    assert f"{variant} / tiny" in said
    facts = read_json(tmp_path / "run" / "run.json")["weights"]
    steps = {"run": 4, "checkpoint": 4, "export": None, "import": 0, "converted": 0}
    assert facts["step"] == steps[name]
    assert "optimizer and data start from the beginning" in said
    assert ("trained on an unknown corpus" in said) == (name not in ("run", "checkpoint"))


@pytest.mark.parametrize(
    ("command", "key", "value"),
    [
        ("diffllm generate", "run", "{run}"),
        ("python train.py", "resume", "weights:{import}"),
        ("python train.py", "resume", "weights:{converted}"),
    ],
)
def test_paths_in_suggested_commands_are_quoted_for_shell(sources, command, key, value):
    lines = [line for line in sources["printed"].splitlines() if command in line]
    words = [word for line in lines for word in shlex.split(line) if word.startswith(f"{key}=")]
    assert value.format(**sources) in [unquoted(word.partition("=")[2]) for word in words]


@pytest.mark.slow
def test_training_from_weights_of_run_matches_training_from_export(corpus, sources, tmp_path):
    for name in ("run", "export"):
        words = [*WORDS, f"resume=weights:{sources[name]}", "model.rope.theta=5000"]
        finish(corpus, tmp_path / name, *words)
    assert metric_lines(tmp_path / "run") == metric_lines(tmp_path / "export")
    assert_same_weights(tmp_path / "run", tmp_path / "export", 4)
    assert metric_lines(tmp_path / "run") != metric_lines(sources["run"])
    before = metric_lines(tmp_path / "export")
    unfinish(tmp_path / "export", 4)
    assert "resumes from step 2" in finish(corpus, tmp_path / "export", *words)
    assert metric_lines(tmp_path / "export") == before
    assert "weights" in read_json(tmp_path / "export" / "run.json")


def test_run_from_weights_has_saved_model_config_by_default(environment, corpus, sources, tmp_path):
    words = [
        f"resume=weights:{sources['export']}", f"data.paths=[{corpus}]", *WORDS, *STILL,
        f"data.cache_dir={corpus.parent / 'cache'}", "seq_len=64", "global_batch_size=8",
        "eval.sequences=4", "eval.tokens=200", "wandb.mode=disabled", "run.report=false",
        f"run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    ended = success_of(train(words, tmp_path, environment))
    assert heldout(tmp_path / "run") == pytest.approx(heldout(sources["run"]), abs=1e-5)
    assert "differs:" not in ended.out
    assert "standard / hf: " in ended.out
    assert f"weights of {sources['export']}, trained on an unknown corpus;" in ended.out
    of_run = load_run_config(tmp_path / "run")
    for cfg in (of_run, load_config([f"resume=weights:{tmp_path / 'run'}", "seq_len=64"])):
        assert cfg.resolved.choices["model"] == "hf"
        assert cfg.model == of_run.model


def test_train_prints_model_setting_that_differs_from_weights_source(corpus, sources, tmp_path):
    words = [*WORDS, *STILL, f"resume=weights:{sources['run']}", "model.rope.theta=1000"]
    said = finish(corpus, tmp_path / "run", *words)
    assert "differs: model.rope.theta: 5000.0 in the weights, 1000.0 in this command;" in said


NO_FITS = {
    "a variant": (
        "weights:{run}",
        ["attention=diff_v2"],
        "diffllm import 'hf={run}' attention=diff_v2",
    ),
    "layers": ("weights:{export}", ["model.n_layers=1"], "of a different model: layers.1"),
    "scaled": ("weights:{run}", ["model.init_match=write"], "set model.init_match=none"),
    "tokens": (
        "weights:{run}",
        ["data.tokenizer=null", "data.vocab_size=310"],
        "has a different tokenizer than",
    ),
    "nothing": ("weights:{run}/none", [], "neither a run, a checkpoint of a run nor"),
    "parameters": (
        "{import}",
        [],
        "only parameters; to start from these parameters, set 'resume=weights:{import}/checkpoints",
    ),
}


@pytest.mark.parametrize("what", slow_but(["a variant", "tokens", "nothing"], NO_FITS))
def test_train_refuses_missing_or_unsuitable_weights(environment, corpus, sources, tmp_path, what):
    resume, words, said = NO_FITS[what]
    words = [*WORDS, f"resume={resume.format(**sources)}", *words]
    ended = train(overrides_of(corpus, tmp_path / "run", *words), tmp_path, environment)
    assert ended.code == 2, ended
    assert said.format(**sources) in ended.err.splitlines()[-1]
    assert ended.err.count("error: ") == 1, ended
    assert not (tmp_path / "run").exists()


EVERY_STEP = ("diagnostics.interval=1",)
MATCHED = (*EVERY_STEP, "attention=diff_v2", "model.init_match=write")


def factors(run: Path) -> list[float]:
    return read_json(run / "run.json")["init_match"]


@pytest.mark.slow
def test_init_match_factors_do_not_depend_on_rank_count_or_resume(corpus, tmp_path):
    one, two, standard = (tmp_path / name for name in ("one", "two", "standard"))
    finish(corpus, standard, *WORDS, *EVERY_STEP, "attention=standard")
    finish(corpus, one, *WORDS, *MATCHED)
    finish(corpus, two, *WORDS, *MATCHED, ranks=2)
    first, line = metric_lines(standard)[0], metric_lines(one)[0]
    for layer in ("layer_00", "layer_01"):  # 8 sequences are the whole first batch
        name = f"attn_write_rms/{layer}"
        assert line[name] == pytest.approx(first[name], rel=1e-5)
        assert line[f"ffn_write_rms/{layer}"] != first[f"ffn_write_rms/{layer}"]
    assert factors(one) == factors(two)
    assert [line["train/loss"] for line in metric_lines(two)] == pytest.approx(
        [line["train/loss"] for line in metric_lines(one)], abs=2e-4
    )
    before, uninterrupted = factors(one), metric_lines(one)
    unfinish(one, 4)
    assert "resumes from step 2" in finish(corpus, one, *WORDS, *MATCHED)
    assert factors(one) == before
    assert metric_lines(one) == uninterrupted
