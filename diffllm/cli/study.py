"""Commands `diffllm study` (run or judge a study) and `diffllm power` (estimate needed seeds)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.cli.arguments import CommandArguments, argument, flag, parse, plugins_argument
from diffllm.compare.arms.sentences import (
    MISSING,
    clock,
    compact,
    fixed,
    percent,
    plural,
    short,
)
from diffllm.core.errors import ConfigError
from diffllm.core.files import similar_path, user_path
from diffllm.core.printing import Table, echo, echo_json
from diffllm.distributed.launcher import own_rank
from diffllm.metrics.streams import messages_on_stderr, result
from diffllm.statistics.gap_tests import ALPHA, MOST_ALPHA
from diffllm.statistics.seed_variance import UPPER

if TYPE_CHECKING:
    from diffllm.compare.study.file import Study

STUDY = """\
diffllm study run STUDY.yaml out=DIR [--json] [--dry-run] [pilot=DIR] [gpu=NAME]
                  [hydra/launcher=...]
diffllm study verdict STUDY.yaml out=DIR [--json]
diffllm study verdict STUDY.yaml values=FILE [--json]
All accept plugins=[MODULE,...] and --config-dir DIR, for arms with code or YAML files of your own.

A study is a YAML file with a claim, the compared arms, their seeds, and the decision rule.
docs/studies.md lists the keys.

run       trains all unfinished runs in DIR; after an interruption, resumes
verdict   prints shown, refuted, equivalent, underpowered, not comparable or exploratory, with
          numbers; writes DIR/verdict.html, DIR/verdict.md and DIR/values.json; values=FILE reads
          such a values.json instead of run directories, and writes no files
--dry-run checks all runs and prints their cost; hours follow from FLOPs and the speed of finished
          runs of the study, or else of the runs in pilot=DIR; gpu=h100 [mfu=0.25] assumes a speed
--json    prints only the verdict, the costs of --dry-run, or the states of the runs, as JSON"""
POWER = """\
diffllm power pilot=DIR... gap=NATS [key=value ...]: estimate seeds, tokens and hours for a gap

A pilot consists of finished runs: a sweep, a directory of runs, or a quoted glob, with two or more
seeds of at least one arm. The command estimates the standard deviation of final held-out losses
between seeds, and of their differences between arms at equal seeds. It computes the seeds per arm
that find the gap in a paired test, from the upper 80% confidence limit.

diffllm power pilot=outputs/first gap=0.02
diffllm power pilot=outputs/first gap=0.02 power=0.9 comparisons=3 --json"""


@dataclass
class SharedStudyArguments(CommandArguments):
    study: list[str] = argument("STUDY.yaml, with or without study=", [], words="plain")
    out: str = argument("directory of the study's runs", "", path=True)
    plugins: str = plugins_argument()


@dataclass
class VerdictArguments(SharedStudyArguments):
    values: str = argument("values.json of a verdict, instead of out=", "", path=True)


@dataclass
class StudyRunArguments(SharedStudyArguments):
    dry_run: bool = flag("check all runs and print their cost")
    pilot: list[str] = argument("finished runs, to estimate the speed", [], path=True)
    gpu: str = argument("GPU to estimate hours for, such as h100", "")
    mfu: float = argument("assumed model FLOPs utilisation on this GPU", 0.25, above=0, most=1)


@dataclass
class PowerArguments(CommandArguments):
    pilot: list[str] = argument(
        "runs, a sweep, or a quoted glob, with or without pilot=; repeatable",
        path=True,
        words="plain",
    )
    gap: float = argument("true difference to find, nats per token", above=0, below=math.inf)
    alpha: float = argument(
        "probability of reporting a gap that does not exist", ALPHA, above=0, most=MOST_ALPHA
    )
    power: float = argument("probability of finding the gap", 0.8, above=0, below=1)
    sides: int = argument("1 if the sign of the gap is stated in advance", 2, least=1, most=2)
    comparisons: int = argument("number of gaps in the family, for Holm's correction", 1, least=1)
    plugins: str = plugins_argument()


def study_command(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        echo(STUDY)
        return 0
    if argv[:1] == ["verdict"]:
        asked = parse(VerdictArguments, argv[1:], STUDY)
        if asked.values and asked.out:
            raise ConfigError("out=DIR cannot be combined with values=FILE; remove one of them")
        study, place = study_and_directory(asked.study, asked.values or asked.out)
        judge_study(study, place, bool(asked.values), asked.json)
        return 0
    if argv[:1] != ["run"]:
        raise ConfigError(
            f"unknown command {' '.join(['diffllm study', *argv[:1]])!r}; use diffllm study run "
            "or diffllm study verdict"
        )
    args = parse(StudyRunArguments, argv[1:], STUDY)
    launcher = [w for w in args.study if w.startswith(("hydra/launcher=", "hydra.launcher."))]
    files = [word for word in args.study if word not in launcher]
    study, out = study_and_directory(files, args.out)
    if args.dry_run:
        dry_run(study, out, args)
        return 0
    if args.gpu:
        raise ConfigError(f"gpu={args.gpu} is only for estimates; add --dry-run or remove gpu=")
    from diffllm.compare.study.running import run_study
    from diffllm.config.plugins import launch_words

    with messages_on_stderr(args.json):
        status, content = run_study(study, out, launcher, launch_words(args.plugins))
    if args.json and own_rank() == 0:
        with result():
            echo_json(content)
    return status


def study_and_directory(files: list[str], out: str) -> "tuple[Study, Path]":
    from diffllm.compare.study.file import load_study

    if len(files) != 1:
        wrong = f"unknown argument {files[-1]!r}" if files else "no study file"
        raise ConfigError(f"{wrong}; write, for example, diffllm study run STUDY.yaml out=DIR")
    if not out:
        raise ConfigError("missing out=DIR, the directory of the study's runs")
    return load_study(user_path(files[0], "STUDY")), Path(out)


def dry_run(study: "Study", out: Path, args: StudyRunArguments) -> None:
    from diffllm.compare.study.costs import (
        START_S,
        budget_sentences,
        costs,
        spending_numbers,
        spending_table,
    )
    from diffllm.compare.study.design import design_notes
    from diffllm.compare.study.running import check_study_runs
    from diffllm.metrics.devices import DEVICES, device_named

    device = device_named(args.gpu)
    if args.gpu and device is None:
        names = ", ".join(known.name for known in DEVICES)
        raise ConfigError(f"gpu={args.gpu} is unknown; choose from {names}")
    check_study_runs(study, out, 1)
    assumed = device and args.mfu * device.peak_flops
    found = costs(study, out, [Path(word) for word in args.pilot], assumed)
    rows = [
        [cost.stage, cost.arm, f"{cost.runs}", f"{cost.ended}", compact(cost.tokens),
         compact(cost.flops), MISSING if cost.hours is None else f"{cost.hours:.2g}"]
        for cost in found
    ]  # fmt: skip
    runs, ended = sum(cost.runs for cost in found), sum(cost.ended for cost in found)
    tokens = sum((cost.runs - cost.ended) * cost.tokens for cost in found)
    flops = sum((cost.runs - cost.ended) * cost.flops for cost in found)
    notes = design_notes(study)
    if args.json:
        stages = [{**vars(cost), "hours": cost.hours} for cost in found]
        remaining = {"runs": runs - ended, "tokens": tokens, "flops": flops}
        content = {
            "study": str(study.path), "budget": spending_numbers(study), "stages": stages,
            "left": remaining, "notes": notes,
        }  # fmt: skip
        echo_json(content)
        return
    heads = ["stage", "arm", "runs", "ended", "tokens per run", "FLOPs per run", "hours left"]
    echo(f"{study.path}: {study.claim}\n\n{Table.of(heads, rows)}\n")
    if sentences := budget_sentences(study):
        echo(f"{' '.join(sentences)}\n\n{spending_table(study)}\n")
    time = "unknown time: no run has finished here, set pilot=DIR or gpu=NAME for an estimate"
    if None not in (hours := [cost.hours for cost in found]):
        where = "here" if device is None else f"on one {device.name}"
        if any(cost.by_profile for cost in found):
            where = "of training steps on the machine of the profile"
        time = f"about {clock(3600 * sum(filter(None, hours)))} {where}, one run after another"
    state = f"{runs} runs; {ended} finished" if ended else f"{runs} runs"
    echo(f"{state}. Left: {compact(tokens)} tokens, {compact(flops)} training FLOPs, {time}.")
    if device:
        echo(f"assumed, not measured: mfu={args.mfu:g}, {START_S:g} s to start each run")
    for note in notes:
        echo(f"note: {note}")


def judge_study(study: "Study", place: Path, from_values: bool, as_json: bool) -> None:
    from diffllm.compare.study.raw_values import read_values
    from diffllm.compare.study.verdict import judge, judge_evidence
    from diffllm.compare.study.verdict_page import verdict_page, write_verdict

    if from_values:
        if not place.exists():
            raise ConfigError(f"values={place} does not exist{similar_path(place, Path.is_file)}")
        found, files = judge_evidence(study, read_values(study, place)), []
    else:
        found = judge(study, place)
        files = write_verdict(found, place)
    if as_json:
        echo_json(found.numbers())
    else:
        text = verdict_page(found, with_picture=False).text()
        echo("\n".join([text, *map(str, files)]))


def power_command(argv: list[str]) -> None:
    args = vars(parse(PowerArguments, argv, POWER))
    from diffllm.compare.report.pilot import Goal, power_numbers

    goal = Goal(*(args[name] for name in ("gap", "alpha", "power", "sides", "comparisons")))
    if (power := args["power"]) <= (alpha := args["alpha"]):
        raise ConfigError(f"power={power:g} must be between alpha={alpha:g} and 1")
    found = power_numbers([Path(word) for word in args["pilot"]], goal)
    if args["json"]:
        echo_json(found)
        return
    for name, text in pilot_lines(found):
        echo(f"{name:<10}{text}".replace("\u2212", "-"))
    print_needs(found)


def pilot_lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for each printed line about a pilot.

    The runs of a pilot estimate the variance between seeds. `found` is the result of
    `power_numbers`.
    """
    arms, runs = found["arms"], found["runs"]
    seconds = f", {short(found['seconds'])} s" if found["seconds"] else ", of unknown time"
    said = f"{found['pilot']}: {runs} finished runs of {plural(len(arms), 'arm')}"
    yield "pilot", f"{said}; {compact(found['tokens'])} tokens per run{seconds}"
    interval = f"(95%: {fixed(found['sd_low'])} to {fixed(found['sd_high'])})"
    freedom = f"{found['df']} degrees of freedom"
    yield "seeds", f"sd {fixed(found['sd'])} nats per token {interval}, {freedom}"
    yield "", "by arm: " + ", ".join(f"{arm['arm']} {fixed(arm['sd'])}" for arm in arms)
    if seeds := found["common_seeds"]:
        r = found["correlation"]
        said = f"correlation {r:+.2f}" if r is not None else "no variation"
        yield "pairs", f"{said} over {plural(seeds, 'common seed')}"
    if found["diverged"]:
        share = f"{found['diverged']} of {runs} runs diverged"
        yield "diverged", f"{share}: the seeds below exclude diverged runs, start more"
    yield from (("note", note) for note in found["notes"])


def print_needs(found: dict[str, Any]) -> None:
    from diffllm.compare.report.pilot import POWER_SEEDS

    comparisons = found["comparisons"]
    family = f", the smallest of {comparisons} by Holm" if comparisons > 1 else ""
    sides = "two-sided" if found["sides"] == 2 else "one-sided"
    need = found["need"]
    seeds = ["many" if need[key] is None else f"{need[key]:,}" for key in ("seeds", "seeds_by_sd")]
    cost = compact(need["total_tokens"]), short(need["hours"])
    power = [f"{need['power_by_seeds'][n]:.2f}" for n in POWER_SEEDS]
    row = [fixed(need["sd"]), fixed(need["sd_upper"]), *seeds, *cost, *power]
    heads = ["sd", "upper", "seeds per arm", "by sd", "total tokens", "total hours"]
    heads += [f"power with {POWER_SEEDS[0]}", *map(str, POWER_SEEDS[1:])]
    echo(
        f"\na gap of {found['gap']:g} nats per token between two arms, found with power "
        f"{found['power']:g} at alpha {found['alpha']:g}, {sides}{family}\n"
        f"{Table.of(heads, [row])}\n\n"
        "sd: standard deviation between seeds of the differences between two arms\n"
        f"upper: upper {100 * UPPER:g}% confidence limit of sd, used for seeds, tokens, hours and "
        "power. by sd: seeds computed from sd\n"
        "hours: on the pilot's machine, one run after another\n"
    )
    print_risks(found)


def print_risks(found: dict[str, Any]) -> None:
    """Print how often pilots of the same size as a given pilot recommend too few seeds.

    `found` is the result of `power_numbers` for the given pilot.
    """
    from diffllm.compare.report.pilot import HALF

    wanted, keys = found["power"], ("too_few", "far_too_few", "too_few_by_sd", "far_too_few_by_sd")
    need = found["need"]
    row = [f"{need['df']}", *(percent(need[key]) for key in keys)]
    heads = ["degrees of freedom", f"power below {wanted:g}", f"below {HALF:g}"]
    heads += [f"by sd: below {wanted:g}", f"below {HALF:g}"]
    echo(
        "how often a pilot of this size recommends too few seeds, if sd is the true standard "
        "deviation\n"
        f"{Table.of(heads, [row])}"
    )
