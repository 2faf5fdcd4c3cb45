"""diffllm timing STUDY.yaml out=FILE [rounds=5] [timed_steps=25] [warmup_steps=5] [--json]
diffllm timing attention=standard,diff_v2 out=FILE [overrides as for train.py -m] [--json]

Measure the time of a training step of each arm of a study, or of each run of a sweep, on this
machine, and write the times as a profile. The arms train in turns, and each turn prints one line;
if a turn fails, its whole output is printed. The time of an arm is that of its fastest block of 5
steps, because other processes only add time. Evaluation, checkpoints, diagnostics and the first
steps do not count.

diffllm timing --compare standard,gated,diff_v2 model=micro out=timing.json
torchrun --nproc-per-node 8 -m diffllm timing conf/study/loss_30m.yaml out=h100.json
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.cli.arguments import CommandArguments, argument, parse, plugins_argument, write_out
from diffllm.cli.count import compared
from diffllm.compare.arms.sentences import (
    MISSING,
    fixed,
    percent,
    plural,
    short,
)
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.printing import Table, echo, echo_json, to_stderr
from diffllm.core.standard_streams import messages_on_stderr, result
from diffllm.distributed.launcher import own_rank

if TYPE_CHECKING:
    from diffllm.compare.sweep.runs import ConfiguredRun
    from diffllm.compare.timing_profile import ArmTiming, TimingProfile


@dataclass
class TimingArguments(CommandArguments):
    out: str = argument("profile to write, a JSON file; required", "", path=True)
    compare: list[str] = argument(
        "VARIANT,VARIANT,...: the same as attention=VARIANT,VARIANT,...", [], flag=True
    )
    rounds: int = argument("turns of each arm", 5, least=2, most=1000)
    timed_steps: int = argument(
        "timed steps per turn, rounded up to whole blocks of 5", 25, least=1, most=10**6
    )
    warmup_steps: int = argument(
        "first steps of a turn, not timed; rounded up likewise", 5, least=1, most=10**6
    )
    plugins: str = plugins_argument()
    overrides: list[str] = argument("STUDY.yaml, or overrides of a sweep", [], words="overrides")


def timing_command(argv: list[str]) -> int:
    args = parse(TimingArguments, argv, __doc__)
    # A study file has a name without an equals sign, and an override needs one.
    files = [word for word in args.overrides if "=" not in word]
    overrides = [word for word in args.overrides if "=" in word]
    unknown = [word for word in files if word.startswith("-")] or files[1:]
    if unknown:
        raise ConfigError(f"unknown argument {unknown[0]!r}; name one STUDY.yaml, or overrides")
    if not args.out:
        raise ConfigError("missing out=FILE, the profile to write")
    if files and (overrides or args.compare):
        other = overrides[0] if overrides else "--compare"
        raise ConfigError(f"{other} cannot be combined with {files[0]}, which sets all overrides")
    if args.compare:
        names = compared(args.compare, overrides)
        overrides.append(f"attention={','.join(names)}")
    from diffllm.compare.study.file import load_study
    from diffllm.compare.timing import Turns, arms_of_study, arms_of_sweep, time_arms
    from diffllm.config.plugins import launch_words

    def choose_arms() -> "dict[str, ConfiguredRun]":
        if files:
            return arms_of_study(load_study(user_path(files[0], "STUDY"), is_timed=False))
        return arms_of_sweep(overrides)

    turns = Turns.of(args.rounds, args.warmup_steps, args.timed_steps)
    with messages_on_stderr(args.json):
        # The processes of the arms must import the same plugins.
        added = launch_words(args.plugins)
        status, profile = time_arms(choose_arms, turns, Path(args.out), added)
    if profile is None:
        if status and own_rank() == 0:
            to_stderr("stopped before the last turn: no profile is written")
        return status
    with result():
        content = profile.content()
        # Print first: if the file cannot be written, the measurement is not lost.
        if args.json:
            echo_json(content)
        else:
            echo(f"\n{profile_text(profile)}")
        write_out(args.out, json.dumps(content, indent=2) + "\n")
        if not args.json:
            echo(f"profile: {args.out}")
    return status


def profile_text(profile: "TimingProfile") -> str:
    """Format the step times as a table, with a warning for each arm whose rounds differ much."""
    from diffllm.compare.timing_profile import NOISY

    baseline = profile.arms[profile.baseline]
    rounds = plural(len(baseline.block_seconds), "round")
    lines = [
        f"{profile.machine(profile.arms)}, {profile.date}; {rounds} of "
        f"{plural(profile.timed_steps, 'step')} per arm"
    ]
    heads = [
        "arm", "precision", "ms per step", "median", "spread", "tokens per s",
        f"time over {profile.baseline}", f"FLOPs over {profile.baseline}",
    ]  # fmt: skip
    rows = [arm_cells(name, arm, baseline) for name, arm in profile.arms.items()]
    lines += Table.of(heads, rows, left=(0, 1)).text()
    for name, arm in profile.arms.items():
        if arm.spread > NOISY:
            lines.append(
                f"warning: the rounds of {name} differ by {percent(arm.spread)}; repeat the "
                "command on an idle machine, or with more rounds="
            )
    return "\n".join(lines)


def arm_cells(name: str, arm: "ArmTiming", baseline: "ArmTiming") -> list[str]:
    """Return the row of an arm; the ratio has its range over rounds."""
    ratios = arm.round_ratios(baseline)
    low, high = fixed(min(ratios), 3), fixed(max(ratios), 3)
    flops, baseline_flops = arm.facts.flops_per_token, baseline.facts.flops_per_token
    return [
        name,
        arm.precision,
        short(1e3 * arm.seconds_per_step, 4),
        short(1e3 * arm.median_seconds, 4),
        percent(arm.spread),
        f"{arm.tokens_per_s:,.0f}",
        f"{fixed(arm.ratio(baseline), 3)} ({low} to {high})",
        fixed(flops / baseline_flops, 3) if flops and baseline_flops else MISSING,
    ]
