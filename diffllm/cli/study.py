"""diffllm study run|verdict STUDY.yaml out=DIR: a claim, its runs and the rule that decides it."""

from pathlib import Path

from diffllm.cli.table import print_table, table
from diffllm.compare.report.numbers import MISSING, clock, compact
from diffllm.compare.study.cost import Cost, costs
from diffllm.compare.study.file import Study, load_study
from diffllm.config.plugins import directories, is_plugins, yamls
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.printing import echo, echo_json

WHAT = """\
diffllm study run STUDY.yaml out=DIR [--dry-run] [pilot=DIR] [hydra/launcher=...]
diffllm study verdict STUDY.yaml out=DIR [--json]

A study is a YAML file: a claim, the arms that are compared, their seeds, and the rule that decides.
docs/studies.md has its keys.

run       makes all runs that have not ended, in DIR, and goes on where it was stopped
verdict   shown, refuted, equivalent, underpowered, not comparable or exploratory, with numbers;
          writes DIR/verdict.html and DIR/verdict.md
--dry-run says what the runs cost, and checks all of them; hours follow from their FLOPs and the
          speed of the study's runs that have ended, or else of those in pilot=DIR
--json    the verdict as JSON alone"""


def main(argv: list[str]) -> int:
    """Run or judge a study; return the exit code."""
    if "-h" in argv or "--help" in argv:
        echo(WHAT)
        return 0
    if not argv or argv[0] not in ("run", "verdict"):
        raise ConfigError(f"study {' '.join(argv[:1])}: choose from run, verdict; --help says more")
    flag = "--dry-run" if argv[0] == "run" else "--json"
    study, out, words = arguments(argv[1:], flag)
    launcher = [w for w in words if w.startswith(("hydra/launcher=", "hydra.launcher."))]
    plugins = [word for word in words if is_plugins(word)]
    pilot = [word for word in words if word.startswith("pilot=")]
    known = {flag, *plugins, *([*launcher, *pilot, "probe=false"] if argv[0] == "run" else [])}
    if other := [word for word in words if word not in known]:
        if other[0] == "probe=true" and argv[0] == "run":
            raise ConfigError("probe=true: speed is no longer probed; name ended runs: pilot=DIR")
        raise ConfigError(f"unknown argument {other[0]!r}; --help has all")
    if argv[0] == "verdict":
        return verdict(study, out, flag in words)
    if flag in words:
        dry_run(study, out, [user_path(word.partition("=")[2], "pilot") for word in pilot])
        return 0
    from diffllm.compare.study.stages import run_study

    named = [directory for directory in directories() if yamls(directory)]
    flags = [word for directory in named for word in ("--config-dir", str(directory))]
    return run_study(study, out, launcher, [*flags, *plugins])


def arguments(words: list[str], flag: str) -> tuple[Study, Path, list[str]]:
    """The study, its directory, and the other words; raises ConfigError."""
    files = [word for word in words if "=" not in word and word != flag]
    if len(files) != 1 or files[0].startswith("-"):
        wrong = f"unknown argument {files[-1]!r}" if files else "no study file"
        raise ConfigError(f"{wrong}; give one, as in diffllm study run STUDY.yaml out=DIR")
    outs = [word.partition("=")[2] for word in words if word.startswith("out=")]
    if not outs or not outs[-1]:
        raise ConfigError("out=DIR is missing: the directory of the study's runs")
    study = load_study(user_path(files[0], "STUDY"))
    rest = [word for word in words if word != files[0] and not word.startswith("out=")]
    return study, user_path(outs[-1], "out"), rest


def dry_run(study: Study, out: Path, pilot: list[Path]) -> None:
    """Check every run, and print what they cost."""
    from diffllm.compare.study.stages import check_study_runs

    check_study_runs(study, out, 1)
    found = costs(study, out, pilot)
    echo(f"{study.path}: {study.claim}\n")
    made = table("stage", "arm", "runs", "ended", "tokens a run", "FLOPs a run", "hours to go")
    for cost in found:
        made.add_row(
            cost.stage, cost.arm, f"{cost.runs}", f"{cost.ended}", compact(cost.tokens),
            compact(cost.flops), hours(cost.hours),
        )  # fmt: skip
    print_table(made)
    echo(f"\n{total(found)}")


def hours(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2g}"


def total(found: list[Cost]) -> str:
    """The sum in a sentence."""
    runs, ended = sum(cost.runs for cost in found), sum(cost.ended for cost in found)
    left = [(cost.runs - cost.ended, cost) for cost in found]
    tokens, flops = (
        sum(n * getattr(cost, name) for n, cost in left) for name in ("tokens", "flops")
    )
    known = [cost.hours for cost in found if cost.hours is not None]
    time = f"about {clock(3600 * sum(known))} here, one run after another"
    if len(known) < len(found):
        time = "a time that is not known: no run has ended here, and no pilot=DIR is given"
    gone = f"; {ended} have ended" if ended else ""
    to_go = f"{compact(tokens)} tokens, {compact(flops)} training FLOPs, {time}"
    return f"{runs} runs{gone}. To go: {to_go}."


def verdict(study: Study, out: Path, as_json: bool) -> int:
    """Judge a study, write its page, and print the verdict."""
    from diffllm.compare.study.verdict import judge
    from diffllm.compare.study.verdict_page import verdict_text, write_verdict

    found = judge(study, out)
    files = write_verdict(found, out)
    if as_json:
        echo_json(found.numbers(), allow_nan=False)
        return 0
    echo(verdict_text(found))
    for file in files:
        echo(file)
    return 0
