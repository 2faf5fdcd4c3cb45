"""diffllm power pilot=DIR... gap=NATS: the seeds, tokens and hours that a gap takes."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from diffllm.cli.arguments import a_path, parse, plugins_field
from diffllm.cli.table import print_table, table
from diffllm.compare.report.numbers import compact, fixed, short
from diffllm.compare.study.pilot import SHOWN, Need, Pilot, Wanted, needs, read_pilot
from diffllm.core.printing import echo, echo_json
from diffllm.statistics.gap_tests import ALPHA
from diffllm.statistics.power_analysis import pairing_pays_above

WHAT = """\
diffllm power pilot=DIR... gap=NATS [key=value ...] [--json]: seeds, tokens and hours for a gap

A pilot is runs that were made: a sweep, a directory of runs, or a quoted glob of them, with two
seeds or more of an arm. From how much their final held-out losses vary between seeds follows how
many seeds of each of two arms find a true gap of that size.

diffllm power pilot=outputs/first gap=0.02
diffllm power pilot=outputs/first gap=0.02 power=0.9 comparisons=3 --json"""


@dataclass
class Arguments:
    """The arguments of `diffllm power`."""

    pilot: list[str] = field(metadata=a_path("runs, a sweep, or a quoted glob; several times"))
    gap: float = field(metadata={"help": "true difference to be found, nats a token"})
    alpha: float = field(default=ALPHA, metadata={"help": "chance of showing a gap that is none"})
    power: float = field(default=0.8, metadata={"help": "chance of finding the gap"})
    sides: int = field(default=2, metadata={"help": "1 where the gap's sign was said before"})
    comparisons: int = field(
        default=1, metadata={"help": "gaps of one family, for Holm's correction"}
    )
    plugins: str = plugins_field()


def main(argv: list[str]) -> None:
    """Print what a gap takes, as a table or as JSON."""
    words = [word if is_option(word) else f"pilot={word}" for word in argv if word != "--json"]
    args = parse(Arguments, words, WHAT)
    wanted = Wanted(args.gap, args.alpha, args.power, args.sides, args.comparisons)
    pilot = read_pilot([Path(word) for word in args.pilot])
    found = needs(pilot, wanted)
    if "--json" in argv:
        echo_json(numbers(pilot, wanted, found))
        return
    for line in pilot_lines(pilot):
        echo(line)
    show(wanted, found)


def is_option(word: str) -> bool:
    """Whether a word is no directory of a pilot that follows the first."""
    return "=" in word or word.startswith("-")


def numbers(pilot: Pilot, wanted: Wanted, found: list[Need]) -> dict[str, Any]:
    """All that the text says, under stable names."""
    low, high = pilot.spread.interval
    between = pilot.pairs
    arms = [
        {"arm": arm.label, "seeds": len(arm.losses), "diverged": arm.diverged, "sd": arm.sd}
        for arm in pilot.arms
    ]
    return {
        **asdict(wanted),
        "pilot": pilot.title,
        "arms": arms,
        "runs": pilot.runs,
        "diverged": pilot.diverged,
        "tokens": pilot.tokens,
        "seconds": pilot.seconds,
        "sd": pilot.spread.sd,
        "sd_low": low,
        "sd_high": high,
        "df": pilot.spread.df,
        "correlation": between and between.correlation,
        "sd_of_differences": between and between.differences.sd,
        "trend": pilot.trend and asdict(pilot.trend),
        "no_trend": pilot.no_trend or None,
        "needs": [asdict(each) for each in found],
        "notes": pilot.notes,
    }


def pilot_lines(pilot: Pilot) -> list[str]:
    """Lines on what the pilot says of seeds."""
    arms, (low, high) = pilot.arms, pilot.spread.interval
    seconds = f", {short(pilot.seconds)} s" if pilot.seconds else ", of unknown time"
    rows = [
        (
            "pilot",
            f"{pilot.title}: {pilot.runs} finished runs of {len(arms)} "
            f"{'arm' if len(arms) == 1 else 'arms'}; {compact(pilot.tokens)} tokens a run{seconds}",
        ),
        (
            "seeds",
            f"sd {fixed(pilot.spread.sd)} nats a token (95%: {fixed(low)} to {fixed(high)}), "
            f"{pilot.spread.df} degrees of freedom",
        ),
        ("", "by arm: " + ", ".join(f"{arm.label} {fixed(arm.sd)}" for arm in arms)),
    ]
    if pilot.pairs:
        r, n = pilot.pairs.correlation, pilot.pairs.seeds
        said = f"correlation {r:+.2f}" if r is not None else "nothing varies"
        rows.append(
            (
                "pairs",
                f"sd of differences {fixed(pilot.pairs.differences.sd)}, {said} over {n} seeds; "
                f"pairing pays above {pairing_pays_above(n):.2f} with {n}",
            )
        )
    else:
        rows.append(("pairs", "unknown: it takes two arms with two seeds in common"))
    if found := pilot.trend:
        rows.append(
            (
                "length",
                f"sd ~ tokens^{found.slope:.2f} (95%: {found.low:.2f} to {found.high:.2f}), from "
                f"{found.points} evaluations of {found.seeds} seeds, within runs of one length",
            )
        )
    else:
        rows.append(("length", f"how sd changes with tokens cannot be told: {pilot.no_trend}"))
    if pilot.diverged:
        share = f"{pilot.diverged} of {pilot.runs} runs diverged"
        rows.append(("diverged", f"{share}: seeds below are of runs that end finite, start more"))
    rows += [("note", note) for note in pilot.notes]
    return [f"{name:<10}{text}".replace("\u2212", "-") for name, text in rows]


def show(wanted: Wanted, found: list[Need]) -> None:
    """Print what each design takes, and the power of a few numbers of seeds."""
    family = f", the smallest of {wanted.comparisons} by Holm" if wanted.comparisons > 1 else ""
    sides = "two-sided" if wanted.sides == 2 else "one-sided"
    rows = table(
        "design", "tokens a run", "sd", "seeds an arm", "by sd", "tokens in all", "hours in all"
    )
    for each in found:
        ends = " to ".join(map(seeds_text, (each.seeds_low, each.seeds_high)))
        rows.add_row(
            each.design,
            f"{compact(each.tokens)}{f' ({each.factor}x)' if each.factor > 1 else ''}",
            fixed(each.sd),
            seeds_text(each.seeds),
            ends,
            compact(each.total_tokens),
            short(each.hours),
        )
    echo(
        f"\na gap of {wanted.gap:g} nats a token between two arms, found with power "
        f"{wanted.power:g} at alpha {wanted.alpha:g}, {sides}{family}"
    )
    print_table(rows)
    echo("\npower with so many seeds an arm")
    rows = table("design", "tokens a run", *map(str, SHOWN))
    for each in found:
        cells = [f"{each.power_by_seeds[n]:.2f}" for n in SHOWN]
        rows.add_row(each.design, compact(each.tokens), *cells)
    print_table(rows)
    echo("\nhours: of the pilot's machine, one run after another")


def seeds_text(seeds: int | None) -> str:
    return "many" if seeds is None else f"{seeds:,}"
