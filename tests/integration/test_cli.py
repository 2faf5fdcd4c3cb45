"""The commands as a user runs them, on a tiny corpus."""

import errno
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import PATIENCE_S
from runs.command import (
    ForkedRun,
    Result,
    call,
    changes,
    command,
    documents,
    metrics,
    snapshot,
    tool,
    train,
    train_command,
)

from diffllm import cli as tools
from diffllm.evaluation.load import load_model

VARIANTS = ["standard", "gated", "diff_v1", "diff_v2"]
SWEPT = ["diff_v1", "standard"]
TORCHRUN = [
    sys.executable,
    *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
]
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

LOGGED = {
    *("train/loss", "train/grad_norm", "train/param_norm", "train/lr"),
    *("perf/tokens_per_s", "perf/step_ms", "perf/data_ms", "perf/peak_memory_gib"),
    *(f"spikes/{name}" for name in ("loss_total", "grad_total", "loss_score", "grad_score")),
    *(f"spikes_olmo2/{name}" for name in ("loss_total", "grad_total", "loss_score", "grad_score")),
}
EVERY_LAYER = [
    *("context_rms", "context_rms_min", "context_rms_max", "hidden_top1", "hidden_kurtosis")
]
LAMBDA = ["lambda_mean", "lambda_min", "lambda_max"]
OWN = {"standard": [], "gated": ["gate_mean"], "diff_v1": LAMBDA, "diff_v2": LAMBDA}


def assert_complete(run: Path) -> None:
    """Assert that a run has all that a finished run of four steps has."""
    assert [line["step"] for line in metrics(run)][-1] == 4
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert (run / "config.yaml").is_file()
    assert (run / "tokenizer.model").is_file()
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000004"]
    assert all((run / "checkpoints" / name / "state.json").is_file() for name in saved)


# One run


def test_a_finished_run_says_so_and_is_left_alone(
    workplace: Path, finished_run: Path, tiny: list[str], environment: dict[str, str]
) -> None:
    assert_complete(finished_run)
    before = snapshot(workplace)
    words = [*tiny, "attention=standard", "run.name=finished"]
    again = train(words, workplace, environment)
    assert (again.code, again.err) == (0, "")
    assert re.fullmatch(
        r"outputs/finished is finished: 4 steps, held-out loss \d\.\d{3}; more steps= .*\n",
        again.out,
    )
    assert not changes(before, snapshot(workplace))


def test_a_run_keeps_its_screen_in_a_log_start_by_start(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    words = [*tiny, "run.name=logged", "run.report=false"]
    first = train(words, tmp_path, environment)
    log = tmp_path / "outputs" / "logged" / "run.log"
    header, _, shown = log.read_text().partition("\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d on \S+: \S", header)
    assert shown == first.out + first.err
    refused = train([*words, "steps=5"], tmp_path, environment)
    assert refused.code == 2
    assert log.read_text() == f"{header}\n{shown}"
    again = train([*words, "steps=5", "run.allow_changes=[steps]"], tmp_path, environment)
    assert again.code == 0, again.err
    text = log.read_text()
    assert text.startswith(f"{header}\n{shown}2")
    assert text.endswith(again.out)
    assert "continues after step 4" in text


def test_one_text_file_is_a_corpus(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    (tmp_path / "book.txt").write_text("\n".join(documents(60)))
    words = [word for word in tiny if not word.startswith(("data.paths", "data=", "data.cache"))]
    more = ["data.paths=book.txt", "data.heldout_fraction=0.1", "data.cache_dir=cache"]
    result = train([*words, *more, "run.name=book", "run.report=false"], tmp_path, environment)
    assert result.code == 0, result.err
    assert re.search(r"held-out tokens, the end of the one document, in \d+ s", result.err)
    assert re.search(r"^files: .* held out, the end of the text; 4 steps", result.out, re.M)


def test_a_run_without_a_name_gets_a_fresh_one(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    """Piped output is plain lines; whatever is said of the run is true; in a new interpreter."""
    result = command(train_command([*tiny, "attention=gated"]), tmp_path, environment)
    assert result.code == 0, result.err
    assert not CONTROL.search(result.out + result.err)
    assert result.err == "", "the corpus was prepared before, and nothing else belongs here"
    (run,) = (tmp_path / "outputs").iterdir()
    assert re.fullmatch(r"tiny-gated-\d{8}-\d{6}", run.name)
    assert_complete(run)
    assert f"outputs/{run.name}" in result.out.splitlines()[0]
    for name, choice in json.loads((run / "run.json").read_text())["choices"].items():
        line = rf"^  {name.replace('_', ' ')} +{re.escape(str(choice['value']))} \("
        assert re.search(line, result.out, re.M), result.out
        assert f"({choice['reason']})" in result.out
    for step in (2, 4):
        line = rf"^step {step}/4  loss \d+\.\d+ \(\d\.\d\d b/B\)  grad"
        assert re.search(line, result.out, re.M), result.out
    summary = json.loads((run / "summary.json").read_text())
    assert re.search(rf"^held-out loss +{summary['heldout_loss']:.3f},", result.out, re.M)
    assert list(tmp_path.iterdir()) == [tmp_path / "outputs"], "something lies beside outputs/"


@pytest.mark.slow
def test_a_terminal_shows_live_progress(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    main, terminal = pty.openpty()
    process = subprocess.Popen(
        train_command([*tiny, "run.name=live"]),
        cwd=tmp_path,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "160", "LINES": "40"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    output = b""
    try:
        while True:
            try:
                block = os.read(main, 65536)
            except OSError as error:
                assert error.errno == errno.EIO  # noqa: PT017  the other end is closed
                break
            if not block:
                break
            output += block
        code = process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
        os.close(main)
    text = output.decode()
    assert code == 0, text
    assert "\x1b[" in text, "nothing was drawn"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"step +4/4", plain), plain
    assert re.search(
        r"loss \d+\.\d+ \(\d\.\d\d b/B\) +grad \d+\.\d+ +lr \S+ +[\d,]+ tok/s", plain
    ), plain
    assert "ETA" in plain
    assert "held-out loss" in plain


def test_help_and_cfg(tmp_path: Path, tiny: list[str], environment: dict[str, str]) -> None:
    helped = train(["--help"], tmp_path, environment)
    assert helped.code == 0, helped.err
    for word in ("attention:", *VARIANTS, "global_batch_size", "steps"):
        assert word in helped.out, word
    shown = train(["--cfg", "job", *tiny, "seed=7"], tmp_path, environment)
    assert shown.code == 0, shown.err
    assert re.search(r"^seed: 7$", shown.out, re.M)
    assert re.search(r"^ +vocab_size: 512$", shown.out, re.M)
    assert not list(tmp_path.iterdir())


# Tools


def continued(run: Path, capfd: pytest.CaptureFixture[str], prompt: str, *more: str) -> str:
    """Return the output of `diffllm generate`, run in this process."""
    words = ["generate", f"run={run}", f"prompt={prompt}", "max_new_tokens=6", *more]
    result = call(lambda: tools.main(words), capfd)
    assert (result.code, result.err) == (0, "")
    return result.out


PROMPTS = ["a=b, {c}", "x[1]", "${seed} 'a\"=", "  def f(\n\t", "null", "1e3"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_generate_continues_the_prompt_as_it_stands(
    finished_run: Path, capfd: pytest.CaptureFixture[str], prompt: str
) -> None:
    """Verbatim: no prompt is read as Hydra grammar, none loses a character."""
    before = snapshot(finished_run)
    out = continued(finished_run, capfd, prompt)
    assert out.startswith(prompt), out
    assert len(out.rstrip("\n")) > len(prompt.rstrip("\n")), out
    assert not changes(before, snapshot(finished_run))


def test_generate_is_a_function_of_its_seed(
    tmp_path: Path,
    finished_run: Path,
    capfd: pytest.CaptureFixture[str],
    environment: dict[str, str],
) -> None:
    first, again, other = (
        continued(finished_run, capfd, "def ", f"seed={seed}") for seed in (3, 3, 4)
    )
    assert first == again
    assert first != other
    words = ["generate", f"run={finished_run}", "prompt=def ", "max_new_tokens=6", "seed=3"]
    assert tool(words, tmp_path, environment) == Result(0, first, "")
    assert not list(tmp_path.iterdir())


def test_generate_prints_of_several_prompts_what_it_prints_of_each(
    finished_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same prompt a second time is continued with the next seed."""
    prompts = ["def ", "x", "return a[3] + b\ndef f(", "def "]
    singles = [
        continued(finished_run, capfd, prompt, f"seed={seed}")
        for prompt, seed in zip(prompts, (3, 3, 3, 4), strict=True)
    ]
    assert singles[0] != singles[3]
    more = [f"prompt={prompt}" for prompt in prompts[1:]]
    together = continued(finished_run, capfd, prompts[0], *more, "seed=3")
    assert together == ("-" * 79 + "\n").join(singles)


def test_generate_reads_the_checkpoint_it_is_told_to(finished_run: Path) -> None:
    newest, last, earlier = (load_model(finished_run, step)[0].norm.weight for step in (None, 4, 2))
    assert torch.equal(newest, last)
    assert not torch.equal(newest, earlier)


def test_prepare_makes_what_a_run_finds(
    tmp_path: Path, tiny: list[str], environment: dict[str, str]
) -> None:
    words = [*tiny, f"data.cache_dir={tmp_path / 'own cache'}"]
    first = tool(["prepare", *words], tmp_path, environment)
    assert first.code == 0, first.err
    directory = Path(first.out.splitlines()[0])
    assert directory.parent == tmp_path / "own cache" / "tokens"
    assert re.search(r"^train +[\d,]+ documents, [\d,]+ tokens", first.out, re.M), first.out
    assert re.search(r"^heldout +[\d,]+ documents, [\d,]+ tokens", first.out, re.M), first.out
    assert not CONTROL.search(first.out + first.err)
    before = snapshot(tmp_path)
    again = tool(["prepare", *words], tmp_path, environment)
    assert again == Result(0, first.out, "")
    assert not changes(before, snapshot(tmp_path))


def test_train_is_a_command_too(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ["--cfg", "job", "model=tiny", "--resolve", "seed=7"]
    as_command, as_script = (
        tool(["train", *words], tmp_path, environment),
        train(words, tmp_path, environment),
    )
    assert as_command.code == 0, as_command.err
    assert re.search(r"^seed: 7$", as_command.out, re.M)
    assert as_command == as_script


# Sweeps


@pytest.fixture(scope="module")
def swept(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: list[str],
    environment: dict[str, str],
    finished_run: Path,
) -> tuple[Path, Result]:
    """One sweep over two variants, without a name."""
    cwd = tmp_path_factory.mktemp("sweep")
    words = ["-m", f"attention={','.join(SWEPT)}", *tiny]
    return cwd, train(words, cwd, environment)


def test_a_sweep_gives_every_variant_its_directory(swept: tuple[Path, Result]) -> None:
    cwd, result = swept
    assert result.code == 0, result.err
    assert list(cwd.iterdir()) == [cwd / "outputs"]
    (directory,) = (cwd / "outputs").iterdir()
    assert re.fullmatch(r"sweep-\d{8}-\d{6}", directory.name)
    runs = [path for path in directory.iterdir() if path.is_dir()]
    assert sorted(run.name for run in runs) == sorted(SWEPT)
    for run in runs:
        assert_complete(run)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["variant"] == run.name
        loss = rf"held-out loss {summary['heldout_loss']:.4f}, \d\.\d{{3}} bits a byte"
        last = rf"^{run.relative_to(cwd)} +{loss}$"
        assert re.search(last, result.out, re.M), result.out
    assert not CONTROL.search(result.out + result.err)
    assert result.err == ""


def test_a_sweep_ends_with_means_and_gaps_by_variant(swept: tuple[Path, Result]) -> None:
    _, result = swept
    end = result.out[result.out.index("gap to standard") - 80 :]
    assert re.search(r"^ +held-out loss +gap to standard +seeds +parameters$", end, re.M), end
    assert re.search(r"^standard +\d\.\d{3} +1 +", end, re.M), end
    assert re.search(r"^diff_v1 +\d\.\d{3} +[+-]\d\.\d{3} +1 +", end, re.M), end
    assert re.search(r"^comparison outputs/\S+/report.html", end, re.M), end


def test_the_log_of_a_swept_run_lies_beside_it_and_has_its_screen(
    swept: tuple[Path, Result],
) -> None:
    cwd, _ = swept
    (directory,) = (cwd / "outputs").iterdir()
    text = (directory / "standard.log").read_text()
    assert re.match(r"\d{4}-\d\d-\d\d .*run.name=standard\n", text)
    assert re.search(r"^step 4/4  loss ", text, re.M)
    assert text.count("held-out loss") == 1
    assert not (directory / "standard" / "run.log").exists()


@pytest.fixture(scope="module")
def of_variants(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: list[str],
    environment: dict[str, str],
    finished_run: Path,
) -> dict[str, list[dict[str, float]]]:
    """The metrics of a run of each variant."""
    cwd = tmp_path_factory.mktemp("variants")
    for variant in VARIANTS:
        result = train([*tiny, f"attention={variant}", f"run.name={variant}"], cwd, environment)
        assert result.code == 0, result.err
    return {variant: metrics(cwd / "outputs" / variant) for variant in VARIANTS}


@pytest.mark.parametrize("variant", VARIANTS)
def test_metrics_have_their_names(
    of_variants: dict[str, list[dict[str, float]]], variant: str
) -> None:
    lines = of_variants[variant]
    for line in lines:
        assert line["tokens"] == line["step"] * 4 * 32
    per_layer = {
        f"{name}/layer_{layer:02d}" for name in EVERY_LAYER + OWN[variant] for layer in range(2)
    }
    by_step = {line["step"]: line for line in lines}
    assert len(by_step) == len(lines), "a step has two lines"
    for step in (2, 4):
        missing = (LOGGED | per_layer | {"eval/loss"}) - by_step[step].keys()
        assert not missing
        assert all(isinstance(value, (int, float)) for value in by_step[step].values())
    foreign = {name for names in OWN.values() for name in names} - set(OWN[variant])
    present = {name.partition("/")[0] for line in lines for name in line}
    assert not foreign & present


@pytest.mark.slow
def test_a_sweep_goes_on_past_a_failed_run_and_later_makes_up_for_it(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    directory = tmp_path / "outputs" / "mine"
    directory.mkdir(parents=True)
    obstacle = directory / "gated"
    obstacle.write_text("in the way")
    words = ["-m", "attention=gated,diff_v2", *tiny, "run.sweep=mine"]
    first = train(words, tmp_path, environment)
    assert first.code == 1, first
    assert "Traceback" not in first.out + first.err
    assert re.search(r"^error: run directory outputs/mine/gated cannot be written", first.err)
    assert_complete(directory / "diff_v2")
    last = first.out[first.out.rindex("\noutputs/mine/gated ") :]
    reason = "exit status 2: run directory outputs/mine/gated cannot be written"
    assert re.search(rf"^outputs/mine/gated +FAILED, {reason}", last, re.M), last
    assert re.search(r"^ +log outputs/mine/gated.log$", last, re.M), last
    assert re.search(r"^outputs/mine/diff_v2 +held-out loss \d", last, re.M), last
    assert "1 of 2" in last
    assert "run.sweep=mine" in last
    assert obstacle.read_text() == "in the way"

    obstacle.unlink()
    before = snapshot(directory / "diff_v2")
    second = train(words, tmp_path, environment)
    assert second.code == 0, second
    assert not changes(before, snapshot(directory / "diff_v2"))
    assert_complete(directory / "gated")
    assert "outputs/mine/diff_v2 is finished: 4 steps" in second.out
    assert "outputs/mine/gated is finished" not in second.out
    assert "FAILED" not in second.out


@pytest.mark.slow
def test_swept_numbers_name_their_runs(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    words = ["-m", *tiny, "optim.lr=1e-3,2e-3", "seed=5", "run.sweep=rates"]
    result = train(words, tmp_path, environment)
    assert result.code == 0, result.err
    runs = sorted(path for path in (tmp_path / "outputs" / "rates").iterdir() if path.is_dir())
    assert [run.name for run in runs] == ["lr0.001", "lr0.002"]
    assert [metrics(run)[-1]["train/lr"] for run in runs] == pytest.approx([1e-4, 2e-4])


# Two ranks


@pytest.mark.slow
def test_two_ranks(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    """The same run as on one rank, written once; under a real torchrun."""
    script = train_command([])[1:]
    words = [*TORCHRUN, *script, *tiny, "attention=standard", "run.name=two"]
    result = command(words, tmp_path, environment)
    assert result.code == 0, result.err
    run = tmp_path / "outputs" / "two"
    assert_complete(run)
    assert result.out.count("step 4/4") == 1, result.out
    assert "2 x CPU" in result.out
    assert not CONTROL.search(result.out)
    alone, together = metrics(finished_run), metrics(run)
    assert [line["step"] for line in alone] == [line["step"] for line in together]
    for name in ("train/loss", "eval/loss"):
        assert together[-1][name] == pytest.approx(alone[-1][name], abs=2e-3)
    said = ForkedRun([*words[len(TORCHRUN) + 1 :], f"run.dir={run}"], 2).finish()
    assert said.count(f"{run} is finished: 4 steps") == 1


@pytest.mark.slow
def test_two_ranks_sweep(
    tmp_path: Path, tiny: list[str], environment: dict[str, str], finished_run: Path
) -> None:
    script = train_command([])[1:]
    words = [*TORCHRUN, *script, "-m", "attention=standard,diff_v2", *tiny, "run.sweep=pair"]
    result = command(words, tmp_path, environment)
    assert result.code == 0, result.err
    runs = [path for path in (tmp_path / "outputs" / "pair").iterdir() if path.is_dir()]
    assert sorted(run.name for run in runs) == ["diff_v2", "standard"]
    for run in runs:
        assert_complete(run)
        said = re.findall(rf"^outputs/pair/{run.name} +held-out loss", result.out, re.M)
        assert len(said) == 1, result.out
    assert (tmp_path / "outputs").is_dir()
    assert list((tmp_path / "outputs").iterdir()) == [tmp_path / "outputs" / "pair"]


@pytest.mark.slow
def test_two_ranks_report_an_error_once(
    tmp_path: Path, tiny: list[str], environment: dict[str, str]
) -> None:
    words = [*TORCHRUN, *train_command([])[1:], *tiny, "global_batch_size=5"]
    result = command(words, tmp_path, environment)
    assert result.code != 0
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    assert "global_batch_size=5 cannot be shared by 2 ranks" in errors[0]
    assert not list(tmp_path.iterdir())
