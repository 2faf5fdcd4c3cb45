"""Variants, data, models and experiments from a directory outside the repository."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from outside import write_package, write_plugin
from runs.command import (
    ForkedRun,
    Gate,
    Result,
    assert_same_weights,
    command,
    metric_lines,
    metrics,
    refusal_of,
    success_of,
    tool,
    train,
    train_command,
    unfinish,
)
from runs.json_files import read_json
from tiers import slow_but

MODULE = "scaled_attention"
PLUGIN = f"plugins=[{MODULE}]"
QUIET = ["wandb.mode=disabled", "run.report=false", "data.num_workers=0"]


@pytest.fixture(scope="module")
def plugin_files(tmp_path_factory) -> Path:
    return write_plugin(tmp_path_factory.mktemp("mine"))


@pytest.fixture(scope="module")
def cwd(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def env(plugin_files, environment) -> dict[str, str]:
    """Return the environment of commands, with the plugin on PYTHONPATH."""
    path = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(plugin_files)])
    return {**environment, "PYTHONPATH": path}


@pytest.fixture(scope="module")
def plugin_words(plugin_files) -> list[str]:
    return ["--config-dir", str(plugin_files), PLUGIN, "experiment=count_up", *QUIET]


@pytest.fixture(scope="module")
def plugin_run(cwd, env, plugin_words) -> Path:
    done = success_of(train([*plugin_words, "run.dir=straight"], cwd, env))
    assert f'run=straight prompt="..." {PLUGIN}' in done.out
    return cwd / "straight"


def assert_ends(done: Result, *parts: str) -> None:
    """Assert that a command printed one error line with these parts and exited with code 2."""
    assert not [part for part in parts if part not in refusal_of(done)], done.err


def test_training_uses_variant_and_data_source_and_metric_of_plugin(plugin_run):
    config = (plugin_run / "config.yaml").read_text(encoding="utf-8")
    for line in ("- scaled_attention", "attention: scaled", "source: counting", "documents: 400"):
        assert line in config
    assert read_json(plugin_run / "summary.json")["variant"] == "scaled"
    assert list(read_json(plugin_run / "run.json")["plugin_code"]) == [MODULE]
    measured = [line for line in metrics(plugin_run) if "scale_mean/layer_01" in line]
    assert [line["step"] for line in measured] == [2, 4, 6]


@pytest.mark.slow
def test_killed_plugin_run_resumes_bit_identically(plugin_run, cwd, env, plugin_words, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    monkeypatch.setenv("DIFFLLM_CACHE", env["DIFFLLM_CACHE"])
    run = cwd / "broken"
    gate = Gate(run, 4)
    first = ForkedRun([*plugin_words, f"run.dir={run}"])
    first.kill_at(gate, run / "checkpoints" / "step-00000002")
    assert "resumes from step 2" in ForkedRun([*plugin_words, f"run.dir={run}"]).finish()
    assert metric_lines(run) == metric_lines(plugin_run)
    assert_same_weights(run, plugin_run, 6)


@pytest.mark.slow
def test_plugin_run_on_slices_logs_metrics_of_run_in_one_process(
    cwd, env, plugin_words, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", env["PYTHONPATH"])
    monkeypatch.setenv("DIFFLLM_CACHE", env["DIFFLLM_CACHE"])
    for ranks in (1, 2):
        more = ["precision=fp32", f"parallel.context={ranks}", f"run.dir={cwd / str(ranks)}"]
        ForkedRun([*plugin_words, *more], ranks=ranks).finish()
    whole, sliced = metric_lines(cwd / "1"), metric_lines(cwd / "2")
    assert len(sliced) == len(whole)
    for line, expected in zip(sliced, whole, strict=True):
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_commands_succeed_for_run_that_uses_plugin(plugin_run, cwd, env, plugin_files):
    outputs = {}
    for command_words in (
        ["generate", "run=straight", "prompt=Document", "max_new_tokens=4"],
        ["attention-map", "run=straight", "prompt=Document 1", "out=map.png"],
        ["consolidate", "run=straight", "out=whole"],
        ["checkpoints", "run=straight"],
        ["report", "straight", "out=page"],
        ["plan", "attention=scaled", "--config-dir", str(plugin_files), "model=nano", "gpus=1"],
    ):
        done = tool([*command_words, PLUGIN], cwd, env)
        progress = [line for line in done.err.splitlines() if line.startswith("simulating a step")]
        assert (done.code, done.err.splitlines()) == (0, progress), command_words
        outputs[command_words[0]] = done.out
    assert outputs["generate"].startswith("Document")
    assert "scaled" in outputs["report"]
    assert "\nscaled / nano: " in outputs["plan"]
    page = (cwd / "page" / "report.html").read_text(encoding="utf-8")
    assert "Mean scale, by layer" in page
    header, row = (cwd / "page" / "report.csv").read_text(encoding="utf-8").splitlines()
    assert float(dict(zip(header.split(","), row.split(","), strict=False))["scale_mean"])


def test_commands_print_error_if_plugin_is_missing(plugin_run, env, tmp_path):
    for words in (
        ["generate", f"run={plugin_run}", "prompt=a"],
        ["attention-map", f"run={plugin_run}", "prompt=a"],
        ["consolidate", f"run={plugin_run}", "out=nowhere"],
        ["report", str(plugin_run), "out=nowhere"],
    ):
        done = tool(words, tmp_path, env)
        assert_ends(done, str(plugin_run), "attention=scaled", "data.source=counting", PLUGIN)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_run_of_custom_variant_is_readable_without_config_dir(tmp_path, tiny, environment):
    """The run's config names the built-in variant of which the YAML is an ablation."""
    file = tmp_path / "mine" / "attention" / "normed.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package model.attention\ndefaults: [diff_v2, _self_]\nhead_norm: true\n",
        encoding="utf-8",
    )
    words = [*tiny, "attention=normed", "steps=2", "run.dir=run"]
    success_of(train([f"--config-dir={file.parents[1]}", *words], tmp_path, environment))
    assert "attention: normed" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    for words in (["generate", "run=run", "prompt=a", "max_new_tokens=1"], ["report", "run"]):
        done = tool(words, tmp_path, environment)
        assert (done.code, done.err) == (0, ""), words


def test_commands_accept_plugin_and_config_dir_on_command_line(cwd, env, plugin_files):
    known = ["--config-dir", str(plugin_files), PLUGIN, "model=nano"]
    counted = tool(["count", "--json", "attention=scaled", *known], cwd, env)
    assert json.loads(counted.out)["by_component"]["head_scale"] == 8
    compared = tool(["count", "--compare", "standard,scaled,scaled_twice", *known], cwd, env)
    assert compared.code == 0, compared.err
    assert "scaled_twice" in compared.out
    matched = ["attention=standard", "model.match_params_to=scaled", "model.vocab_size=4096"]
    matched = tool(["count", "--json", *known, *matched], cwd, env)
    assert json.loads(matched.out)["matched"]["target"] == "scaled"
    prepared = tool(["prepare", "data=counting", *known], cwd, env)
    assert "counting" in prepared.out, prepared
    shown = train(["--cfg", "job", "attention=scaled", *known], cwd, env)
    assert "initial: 1.0" in shown.out, shown


def test_command_finds_installed_plugin_by_entry_point_name(tmp_path, environment):
    site = write_package(tmp_path / "site")
    env = {**environment, "PYTHONPATH": str(site)}
    done = tool(["count", "--json", "plugins=[counted]", "experiment=count_up"], tmp_path, env)
    assert done.code == 0, done.err
    assert json.loads(done.out)["by_component"]["head_scale"] == 8
    unnamed = tool(["count", "experiment=count_up"], tmp_path, env)
    assert_ends(unnamed, "experiment=count_up does not exist")


ERRORS = {
    "a syntax error": ("def", "SyntaxError", 'bad.py", line 1'),
    "an error": ("x = 1\nx / 0", "ZeroDivisionError: division by zero", "bad.py, line 2"),
    "an existing variant": (
        "from diffllm.core.registry import schema\n@schema('attention', 'gated')\nclass A: ...",
        "the attention gated is registered twice, by diffllm.model.attention.gated.GatedConfig and "
        "bad.A",
    ),
    "an existing metric": (
        "from diffllm.metrics.metric import Metric\n"
        "from diffllm.metrics.sections import LOSS\n"
        "from diffllm.metrics.table import add_metric\n"
        "add_metric(Metric('train/loss', LOSS, 'another'))",
        "metric train/loss conflicts with the existing metric train/loss",
    ),
    "an unknown effect": (
        "from diffllm.core.keys import key\ntile = key(64, effect='fast', help='Keys per tile.')",
        "TypeError: effect='fast' is not one of numbers, order, measurement, logging, speed, none",
        "bad.py, line 2",
    ),
    "a key without effect": (
        "from diffllm.core.keys import key\ntile = key(64, help='Keys per tile.')",
        "TypeError: key() missing 1 required keyword-only argument: 'effect'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_command_prints_one_error_line_if_plugin_import_fails(env, tmp_path, name):
    source, *parts = ERRORS[name]
    (tmp_path / "bad.py").write_text(source, encoding="utf-8")
    env = {**env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{env['PYTHONPATH']}"}
    assert_ends(tool(["count", "plugins=[bad]"], tmp_path, env), "plugins=[bad]", *parts)


# Config keys of plugins: `tile` and `readers` decide speed, `temperature` decides numbers,
# `documents` decides the order, and `initial` has no declared effect.


@pytest.mark.slow
def test_resume_accepts_changes_only_of_plugin_keys_of_speed(plugin_run, cwd, env, plugin_words):
    again = [*plugin_words, f"run.dir={shutil.copytree(plugin_run, cwd / 'again')}"]
    unfinish(cwd / "again", 6)
    for key in ("model.attention.temperature", "model.attention.initial", "data.documents"):
        assert_ends(train([*again, f"{key}=300"], cwd, env), f"({key}: ", ", 300", "this command)")
    done = success_of(train([*again, "model.attention.tile=128", "data.readers=2"], cwd, env))
    assert "resumes from step 4" in done.out + done.err
    config = (cwd / "again" / "config.yaml").read_text(encoding="utf-8")
    assert "tile: 128" in config
    assert "readers: 2" in config
    assert_same_weights(cwd / "again", plugin_run, 6)


def edited_copy(run: Path, name: str, **values: int) -> None:
    """Copy a run directory to a sibling, and replace values of keys in its config.yaml."""
    path = run.with_name(name)
    shutil.copytree(run, path)
    text = (path / "config.yaml").read_text(encoding="utf-8")
    for key, value in values.items():
        text, count = re.subn(rf"\b{key}: \d+(\.0)?$", f"{key}: {value}", text, flags=re.M)
        assert count, key
    (path / "config.yaml").write_text(text, encoding="utf-8")


@pytest.mark.slow
def test_report_splits_runs_by_plugin_keys_only_of_numbers_and_order(plugin_run, env, tmp_path):
    shutil.copytree(plugin_run, tmp_path / "first")
    edited_copy(tmp_path / "first", "faster", seed=1, tile=128, readers=2)
    edited_copy(tmp_path / "first", "hotter", seed=2, temperature=2)
    edited_copy(tmp_path / "first", "fewer", seed=3, documents=300)
    done = success_of(tool(["report", str(tmp_path), "out=page", "--json", PLUGIN], tmp_path, env))
    rows = {
        (row["model.attention.temperature"], row["data.documents"]): row
        for row in json.loads(done.out)["rows"]
    }
    assert {values: row["seeds"] for values, row in rows.items()} == {
        (1.0, 400): 2,
        (2.0, 400): 1,
        (1.0, 300): 1,
    }
    assert not any("model.attention.tile" in row or "data.readers" in row for row in rows.values())
    assert rows[1.0, 300]["incomparable"] == ["data.documents"]
    # Rows that differ only in settings of the attention variant are in one group.
    assert rows[1.0, 400]["group"] == rows[2.0, 400]["group"] != rows[1.0, 300]["group"]


STUDY = """\
claim: the arms have equal losses
base: [experiment=count_up, wandb.mode=disabled, data.num_workers=0]
arms: {{first: [attention=scaled], second: [attention=scaled, {override}]}}
baseline: first
seeds: [0, 1, 2]
rule: {{kind: equivalence, arm: second, against: first, margin: 0.1}}
"""


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        ("data.documents=300", True),
        ("data.readers=2, model.attention.tile=128, model.attention.temperature=2", False),
    ],
)
def test_study_refuses_arms_with_unequal_plugin_key_of_order(
    env, plugin_files, tmp_path, override, refused
):
    (tmp_path / "study.yaml").write_text(STUDY.format(override=override), encoding="utf-8")
    words = ["study", "run", "study.yaml", "out=runs", "--dry-run", PLUGIN]
    done = tool([*words, "--config-dir", str(plugin_files)], tmp_path, env)
    if refused:
        assert_ends(done, "arms differ in data.documents: 400 in first; 300 in second")
    else:
        assert done.code == 0, done.err


def test_invalid_plugin_key_gives_one_error_line(cwd, env, plugin_files, plugin_words, tmp_path):
    file = tmp_path / "attention" / "misspelt.yaml"
    file.parent.mkdir()
    file.write_text(
        "# @package model.attention\ndefaults: [scaled, _self_]\ntiles: 32\n", encoding="utf-8"
    )
    misspelt = [*plugin_words, "--config-dir", str(tmp_path), "attention=misspelt"]
    assert_ends(train(misspelt, cwd, env), "attention=misspelt: unknown key model.attention.tiles")
    refused = train([*plugin_words, "model.attention.tile=0"], cwd, env)
    assert_ends(refused, "tile=0 must be at least 1")
    # The plugin changes the default of this key of the base class; the bound remains.
    scaled = train([*plugin_words, "model.attention.context_scale=0"], cwd, env)
    assert_ends(scaled, "model.attention.context_scale=0.0 must be positive")


def test_help_contains_descriptions_of_plugin_keys(cwd, env, plugin_words):
    lines = train([*plugin_words, "--help"], cwd, env).out.splitlines()
    for name, description in (
        ("model.attention.tile=64", "Keys per tile."),
        ("data.documents=400", "Number of texts."),
        ("data.source=counting", "Kind of the corpus; set by data=."),  # of the base class
    ):
        (line,) = (line for line in lines if line.split()[:1] == [name])
        assert line.endswith(description)


PLANTED = "raise ValueError('planted')"
FAILING = {
    "forward": ("if aux is not None:", f"{PLANTED}\n        if aux is not None:"),
    "statistics": ('return {"scale_mean"', f'{PLANTED}\n        return {{"scale_mean"'),
    "source": (
        '    return Corpus("counting", identity, lambda: [TextsPart("counting", texts)])',
        "    def read():\n        yield TextBatch(texts)\n        " + PLANTED + "\n"
        '    return Corpus("counting", identity, lambda: [Part("counting", 9, read)])',
    ),
}
"""Code of the plugin and its failing replacement. The source fails in another process."""


@pytest.mark.parametrize("name", slow_but(["source"], FAILING))
def test_train_prints_one_traceback_if_plugin_code_fails(env, tmp_path, name):
    file = write_plugin(tmp_path / "mine") / f"{MODULE}.py"
    source = file.read_text(encoding="utf-8").replace(*FAILING[name])
    source = source.replace("import Corpus,", "import Corpus, Part, TextBatch,")
    file.write_text(source, encoding="utf-8")
    env = {**env, "PYTHONPATH": f"{file.parent}{os.pathsep}{env['PYTHONPATH']}"}
    words = ["--config-dir", str(file.parent), PLUGIN, "experiment=count_up", *QUIET]
    done = train([*words, f"data.documents={300 + len(name)}"], tmp_path, env)
    assert done.code == 1, done
    assert done.err.count("Traceback") == 1, done.err
    assert done.err.count("ValueError: planted") <= 2
    assert f'{file}", line' in done.err


def test_train_prints_one_error_line_for_wrong_plugin_or_config_dir(
    cwd, env, plugin_files, tmp_path
):
    ours = tmp_path / "again" / "attention" / "gated.yaml"
    ours.parent.mkdir(parents=True)
    ours.write_text("", encoding="utf-8")
    (tmp_path / "global" / "experiment").mkdir(parents=True)
    (tmp_path / "global" / "experiment" / "all.yaml").write_text(
        "# @package _global_\nplugins: [scaled_attention]\n", encoding="utf-8"
    )
    known = ["--config-dir", str(plugin_files)]
    for words, *parts in (
        (["plugins=[not_there]"], "cannot find module not_there", "PYTHONPATH"),
        (["--config-dir=nowhere"], "nowhere has no YAML file in model/, attention/"),
        (["--config-dir", str(plugin_files / "attention")], "has no YAML file in model/, "),
        (["--config-dir", str(ours.parents[1])], "has the same name as", "conf/attention/gated"),
        (
            [*known, "attention=scaled"],
            "attention=scaled: attention=scaled is not registered; import it with",
            "plugins=[",
        ),
        (
            ["--config-dir", str(tmp_path / "global"), "experiment=all"],
            "plugins=[scaled_attention] is set in a YAML file",
        ),
    ):
        assert_ends(train(words, cwd, env), *parts)


@pytest.mark.slow
def test_every_run_of_sweep_imports_plugin_from_sys_path_of_parent_process(
    cwd, env, plugin_words, plugin_files
):
    """Only sys.path of the sweep contains the plugin's directory, as with `python -m`."""
    env = {key: value for key, value in env.items() if key != "PYTHONPATH"}
    sweep = [*plugin_words, "-m", "attention=scaled,scaled_twice,standard", "steps=2"]
    more = ["run.sweep=mine", "model.match_params_to=scaled", "model.vocab_size=4096"]
    python, script = train_command([])
    code = f"import runpy, sys; sys.path.insert(0, {str(plugin_files)!r}); sys.argv[0] = 'x'; "
    code += f"runpy.run_path({script!r}, run_name='__main__')"
    env["PYTHONPATH"] = str(Path(script).parent)
    words = [python, "-c", code, *sweep, *more]
    done = success_of(command(words, cwd, env))
    table = done.out[done.out.rindex("outputs/mine/scaled ") :]
    assert len(re.findall(r"held-out loss \d", table)) == 3, table
    again = command(words, cwd, env)
    assert "3 runs, 3 already finished" in again.out, again
