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
from diffllm.core.standard_streams import messages_on_stderr, result
from diffllm.distributed.launcher import own_rank
from diffllm.statistics.gap_tests import ALPHA, MOST_ALPHA
from diffllm.statistics.seed_variance import UPPER

if TYPE_CHECKING:
    from diffllm.compare.study.costs import Cost
    from diffllm.compare.study.file import Study

STUDY_USAGE = """\
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
POWER_USAGE = """\
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
        echo(STUDY_USAGE)
        return 0
    if argv[:1] == ["verdict"]:
        arguments = parse(VerdictArguments, argv[1:], STUDY_USAGE)
        if arguments.values and arguments.out:
            raise ConfigError("out=DIR cannot be combined with values=FILE; remove one of them")
        study, place = study_and_directory(arguments.study, arguments.values or arguments.out)
        judge_study(study, place, bool(arguments.values), arguments.json)
        return 0
    if argv[:1] != ["run"]:
        command = " ".join(["diffllm study", *argv[:1]])
        raise ConfigError(
            f"unknown command {command!r}; use diffllm study run or diffllm study verdict"
        )
    args = parse(StudyRunArguments, argv[1:], STUDY_USAGE)
    launcher = []
    files = []
    for word in args.study:
        if word.startswith(("hydra/launcher=", "hydra.launcher.")):
            launcher.append(word)
        else:
            files.append(word)
    study, out = study_and_directory(files, args.out)
    if args.dry_run:
        dry_run(study, out, args)
        return 0
    if args.gpu:
        raise ConfigError(f"gpu={args.gpu} is only for estimates; add --dry-run or remove gpu=")
    from diffllm.compare.study.running import run_study
    from diffllm.config.plugins import launch_words

    # The processes of the runs must import the same plugins.
    plugin_words = launch_words(args.plugins)
    with messages_on_stderr(args.json):
        status, content = run_study(study, out, launcher, plugin_words)
    # Under torchrun, all ranks run the study, but the JSON value must be printed once.
    if args.json and own_rank() == 0:
        with result():
            echo_json(content)
    return status


def study_and_directory(files: list[str], out: str) -> "tuple[Study, Path]":
    from diffllm.compare.study.file import load_study

    if len(files) != 1:
        problem = f"unknown argument {files[-1]!r}" if files else "no study file"
        raise ConfigError(f"{problem}; write, for example, diffllm study run STUDY.yaml out=DIR")
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
    from diffllm.compare.study.running import check_study_runs, design_notes
    from diffllm.core.gpus import DEVICES, device_named

    device = device_named(args.gpu)
    if args.gpu and device is None:
        choices = ", ".join(choice.name for choice in DEVICES)
        raise ConfigError(f"gpu={args.gpu} is unknown; choose from {choices}")
    check_study_runs(study, out, 1)
    assumed_speed = None
    if device:
        assumed_speed = args.mfu * device.peak_flops
    pilots = [Path(word) for word in args.pilot]
    arm_costs = costs(study, out, pilots, assumed_speed)
    remaining = remaining_work(arm_costs)
    notes = design_notes(study)
    if args.json:
        content = {
            "study": str(study.path),
            "budget": spending_numbers(study),
            "stages": [{**vars(cost), "hours": cost.hours} for cost in arm_costs],
            "left": remaining,
            "notes": notes,
        }
        echo_json(content)
        return
    echo(f"{study.path}: {study.claim}\n\n{cost_table(arm_costs)}\n")
    sentences = budget_sentences(study)
    if sentences:
        budget = " ".join(sentences)
        echo(f"{budget}\n\n{spending_table(study)}\n")
    place = "here" if device is None else f"on one {device.name}"
    echo(remaining_text(arm_costs, remaining, place))
    if device:
        echo(f"assumed, not measured: mfu={args.mfu:g}, {START_S:g} s to start each run")
    for note in notes:
        echo(f"note: {note}")


def remaining_text(arm_costs: "list[Cost]", remaining: dict[str, Any], place: str) -> str:
    """Return the sentence on finished runs and remaining work; `place` is as in `time_words`."""
    runs = sum(cost.runs for cost in arm_costs)
    state = f"{runs} runs"
    n_finished = runs - remaining["runs"]
    if n_finished:
        state += f"; {n_finished} finished"
    tokens = compact(remaining["tokens"])
    flops = compact(remaining["flops"])
    time = time_words(arm_costs, place)
    return f"{state}. Left: {tokens} tokens, {flops} training FLOPs, {time}."


def remaining_work(arm_costs: "list[Cost]") -> dict[str, Any]:
    """Return the numbers of runs, tokens and FLOPs of all unfinished runs."""
    return {
        "runs": sum(cost.remaining for cost in arm_costs),
        "tokens": sum(cost.remaining * cost.tokens for cost in arm_costs),
        "flops": sum(cost.remaining * cost.flops for cost in arm_costs),
    }


def cost_table(arm_costs: "list[Cost]") -> Table:
    heads = ["stage", "arm", "runs", "ended", "tokens per run", "FLOPs per run", "hours left"]
    rows = []
    for cost in arm_costs:
        hours = MISSING if cost.hours is None else f"{cost.hours:.2g}"
        sizes = [compact(cost.tokens), compact(cost.flops)]
        rows.append([cost.stage, cost.arm, f"{cost.runs}", f"{cost.ended}", *sizes, hours])
    return Table.of(heads, rows)


def time_words(arm_costs: "list[Cost]", place: str) -> str:
    """Return the remaining time of a study; `place` names the machine if speeds were measured."""
    total = 0.0
    for cost in arm_costs:
        if cost.hours is None:
            return (
                "unknown time: no run has finished here, set pilot=DIR or gpu=NAME for an estimate"
            )
        if cost.by_profile:
            place = "of training steps on the machine of the profile"
        total += cost.hours
    return f"about {clock(3600 * total)} {place}, one run after another"


def judge_study(study: "Study", place: Path, from_values: bool, as_json: bool) -> None:
    from diffllm.compare.study.raw_values import read_values
    from diffllm.compare.study.verdict import judge, judge_evidence
    from diffllm.compare.study.verdict_page import verdict_page, write_verdict

    if from_values:
        if not place.exists():
            raise ConfigError(f"values={place} does not exist{similar_path(place, Path.is_file)}")
        verdict = judge_evidence(study, read_values(study, place))
        files = []
    else:
        verdict = judge(study, place)
        files = write_verdict(verdict, place)
    if as_json:
        echo_json(verdict.numbers())
    else:
        text = verdict_page(verdict, with_picture=False).text()
        echo("\n".join([text, *map(str, files)]))


def power_command(argv: list[str]) -> None:
    args = vars(parse(PowerArguments, argv, POWER_USAGE))
    from diffllm.compare.report.pilot import Goal, power_numbers

    goal = Goal(args["gap"], args["alpha"], args["power"], args["sides"], args["comparisons"])
    if goal.power <= goal.alpha:
        raise ConfigError(f"power={goal.power:g} must be between alpha={goal.alpha:g} and 1")
    numbers = power_numbers([Path(word) for word in args["pilot"]], goal)
    if args["json"]:
        echo_json(numbers)
        return
    for name, text in pilot_lines(numbers):
        echo(f"{name:<10}{text}".replace("\u2212", "-"))
    print_needs(numbers)


def pilot_lines(numbers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (label, text) for each printed line about a pilot.

    The runs of a pilot estimate the variance between seeds. `numbers` is the result of
    `power_numbers`.
    """
    arms, runs = numbers["arms"], numbers["runs"]
    seconds = f", {short(numbers['seconds'])} s" if numbers["seconds"] else ", of unknown time"
    pilot = f"{numbers['pilot']}: {runs} finished runs of {plural(len(arms), 'arm')}"
    yield "pilot", f"{pilot}; {compact(numbers['tokens'])} tokens per run{seconds}"
    interval = f"(95%: {fixed(numbers['sd_low'])} to {fixed(numbers['sd_high'])})"
    freedom = f"{numbers['df']} degrees of freedom"
    yield "seeds", f"sd {fixed(numbers['sd'])} nats per token {interval}, {freedom}"
    spreads = [f"{arm['arm']} {fixed(arm['sd'])}" for arm in arms]
    yield "", f"by arm: {', '.join(spreads)}"
    seeds = numbers["common_seeds"]
    if seeds:
        r = numbers["correlation"]
        correlation = f"correlation {r:+.2f}" if r is not None else "no variation"
        yield "pairs", f"{correlation} over {plural(seeds, 'common seed')}"
    if numbers["diverged"]:
        share = f"{numbers['diverged']} of {runs} runs diverged"
        yield "diverged", f"{share}: the seeds below exclude diverged runs, start more"
    for note in numbers["notes"]:
        yield "note", note


def print_needs(numbers: dict[str, Any]) -> None:
    from diffllm.compare.report.pilot import POWER_SEEDS

    comparisons = numbers["comparisons"]
    family = f", the smallest of {comparisons} by Holm" if comparisons > 1 else ""
    sides = "two-sided" if numbers["sides"] == 2 else "one-sided"
    need = numbers["need"]
    row = [fixed(need["sd"]), fixed(need["sd_upper"])]
    for key in ("seeds", "seeds_by_sd"):
        row.append("many" if need[key] is None else f"{need[key]:,}")
    row += [compact(need["total_tokens"]), short(need["hours"])]
    powers = need["power_by_seeds"]
    row += [f"{powers[n]:.2f}" for n in POWER_SEEDS]
    heads = ["sd", "upper", "seeds per arm", "by sd", "total tokens", "total hours"]
    heads += [f"power with {POWER_SEEDS[0]}", *map(str, POWER_SEEDS[1:])]
    echo(
        f"\na gap of {numbers['gap']:g} nats per token between two arms, found with power "
        f"{numbers['power']:g} at alpha {numbers['alpha']:g}, {sides}{family}\n"
        f"{Table.of(heads, [row])}\n\n"
        "sd: standard deviation between seeds of the differences between two arms\n"
        f"upper: upper {100 * UPPER:g}% confidence limit of sd, used for seeds, tokens, hours and "
        "power. by sd: seeds computed from sd\n"
        "hours: on the pilot's machine, one run after another\n"
    )
    print_risks(numbers)


def print_risks(numbers: dict[str, Any]) -> None:
    """Print how often pilots of the size of a pilot recommend too few seeds.

    The recommendations are those by the upper confidence limit of sd, and "by sd" itself. Too few
    seeds have a power below the requested power, or below LOW_POWER.

    Args:
        numbers: result of `power_numbers` for the pilot.
    """
    from diffllm.compare.report.pilot import LOW_POWER

    power = numbers["power"]
    need = numbers["need"]
    row = [f"{need['df']}"]
    for key in ("too_few", "far_too_few", "too_few_by_sd", "far_too_few_by_sd"):
        row.append(percent(need[key]))
    heads = ["degrees of freedom", f"power below {power:g}", f"below {LOW_POWER:g}"]
    heads += [f"by sd: below {power:g}", f"below {LOW_POWER:g}"]
    echo(
        "how often a pilot of this size recommends too few seeds, if sd is the true standard "
        "deviation\n"
        f"{Table.of(heads, [row])}"
    )
