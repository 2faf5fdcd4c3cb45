"""The verdict of a study as an HTML page, as Markdown and as text for a terminal."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from diffllm.compare.arms.sentences import (
    MISSING,
    compact,
    percent,
    plural,
    short,
)
from diffllm.compare.report.figures import (
    RC,
    WIDTH,
    RowStyle,
    draw_gaps,
    row_styles,
    to_image,
)
from diffllm.compare.report.keys import ATTENTION
from diffllm.compare.report.page import template
from diffllm.compare.report.rows import Row
from diffllm.compare.study.budgets import equal_gaps_table, equal_gaps_words
from diffllm.compare.study.costs import budget_sentences, spending_table
from diffllm.compare.study.decision import NO_LONGER_JUDGED, SHOWN
from diffllm.compare.study.file import TOKENS, Study
from diffllm.compare.study.raw_values import values_text
from diffllm.compare.study.rule_tests import Tested
from diffllm.compare.study.trend import loss_trend
from diffllm.compare.study.verdict import EXPLORATORY, NOT_COMPARABLE, Verdict
from diffllm.config.matching import TOLERANCE
from diffllm.config.yaml_file import parse_yaml
from diffllm.core.errors import printable
from diffllm.core.files import replace_file
from diffllm.core.printing import KEPT, Cell, Table
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.power_analysis import paired_power

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BOUNDS = "one-sided bounds"
REASONS = {
    "declared": "declared",
    "question": "part of the attention variant",
    "harmless": "no influence on the metric",
}
"""Text about a difference between arms, by its role."""
COMPARED = {
    "tokens": "tokens",
    "rates": "learning rate",
    "parameters": "parameters",
    "flops_per_token": "training FLOPs per token",
}


def write_verdict(found: Verdict, out: Path) -> list[Path]:
    texts = {
        "verdict.html": verdict_html(found),
        "verdict.md": printable(markdown(found), KEPT),
        "values.json": values_text(found.study, found.evidence),
    }
    for name, text in texts.items():
        replace_file(out / name, text.encode())
    return [out / name for name in texts]


def verdict_headline(found: Verdict) -> str:
    if found.verdict == EXPLORATORY:
        return f"{found.verdict}, it would be: {found.would_be}"
    return found.verdict


def verdict_title(found: Verdict) -> str:
    """Return the claim with its verdict on one line, as the title of a page."""
    claim = " ".join(found.study.claim.split())
    return f"{claim}: {verdict_headline(found)}"


def verdict_sentence(found: Verdict) -> str:
    """Return text with the result of the first rule and the sizes of the two compared models."""
    tested, arms = found.tested[0], found.numbers()["arms"]
    own, base = (
        [compact(arms[name][fact]) for fact in ("parameters", "flops_per_token")]
        for name in (tested.rule.arm, tested.rule.against)
    )
    comparable = NOT_COMPARABLE not in (found.verdict, found.would_be)
    return (
        f"{'' if comparable else 'Not comparable; the runs alone give: '}"
        f"{found.study.quantity}: {tested.reason}. {tested.rule.arm} has {own[0]} parameters and "
        f"{own[1]} training FLOPs per token, {tested.rule.against} has {base[0]} and {base[1]}."
    )


def trend_of(found: Verdict) -> str:
    return loss_trend(found.study, {arm.name: arm for arm in found.arms})


def problems(found: Verdict) -> list[str]:
    return [reason for reason in found.reasons if reason != found.tested[0].reason]


def rule_line(tested: Tested, study: Study) -> str:
    words = [f"{tested.rule.words(study.quantity)}: {tested.verdict}; {tested.reason}"]
    if tested.verdict == NO_LONGER_JUDGED:
        return words[0]
    if study.scale == "log" and tested.gap and tested.bounds:
        logs = (tested.gap.mean, *tested.bounds)
        ratio, low, high = (short(math.exp(min(x, 99))) for x in logs)  # e^99 is shown as missing
        words.append(f"a ratio of {ratio} (bounds {low} and {high})")
    if tested.p is not None and tested.p_adjusted is not None:
        adjusted = "" if tested.verdict == SHOWN else f", {tested.p_adjusted:.2g} after Holm"
        words.append(f"p {tested.p:.2g}{adjusted}")
    if tested.showing.exact is not None:
        smallest = f"smallest possible {tested.smallest:.2g}"
        words.append(f"sign-flip test p {tested.showing.exact:.2g} ({smallest})")
    if tested.outcome.correlation is not None:
        words.append(f"correlation between seeds {tested.outcome.correlation:.2f}")
    return ", ".join(words)


def arms_table(found: Verdict) -> Table:
    swatches = {style.label: style.swatch for style in arm_styles(found)}
    heads = ("arm", found.study.quantity, "95% interval", "seeds", "diverged", "learning rate")
    rows: list[list[str | Cell]] = []
    for arm in found.arms:
        mean, interval = arm.mean, MISSING
        rates = [run.lr for run in arm.runs]
        if mean and mean.low is not None and mean.high is not None:
            interval = f"{short(mean.low, 5)} to {short(mean.high, 5)}"
        rows.append(
            [
                Cell(arm.name, icon=swatches.get(arm.name, "")),
                short(mean.mean, 5) if mean else MISSING,
                interval,
                f"{len(arm.finite)}",
                f"{arm.diverged} of {len(arm.runs)}",
                range_text(rates, "{:g}".format) if rates else MISSING,
            ]
        )
    return Table.of(heads, rows, left=range(len(heads)))


def power_words(study: Study) -> str:
    """Return a sentence with the statistical power of a study for the gap in the study file.

    If the power cannot be computed, the sentence says why.
    """
    if study.power is None:
        return "The study file states no power."
    if study.rule.kind in ("equivalence", "log_rank"):
        return f"The stated power does not concern a rule of kind {study.rule.kind}."
    gap, sd, seeds = study.power.gap, study.power.sd, len(study.seeds)
    alpha = study.rule.alpha / len(study.rules)
    chance = paired_power(gap, sd * 2**0.5, seeds, alpha, sides=1)
    source = f" ({study.power.source})" if study.power.source else ""
    what = "slope per doubling" if study.rule.kind == "trend" else "gap"
    return (
        f"With {plural(seeds, 'seed')} per arm and a standard deviation of {short(sd)} between "
        f"seeds{source}, the study finds a true {what} of {short(gap)} with probability "
        f"{chance:.2f} if seeds are uncorrelated."
    )


def arm_styles(found: Verdict) -> list[RowStyle]:
    arms = sorted(found.arms, key=lambda arm: arm.name != found.study.baseline)
    return row_styles(
        [arm_row(found.study, arm.name, arm.runs[0].variant) for arm in arms if arm.runs]
    )


def arm_row(study: Study, name: str, variant: str) -> Row:
    """Return a row without runs, whose keys determine the style of an arm in figures."""
    keys = {"attention": variant}
    for word in [*study.base, *study.arms[name]]:
        key, _, value = word.partition("=")
        if key.startswith(ATTENTION):
            keys[key] = parse_yaml(value)  # Spellings of one value have one style.
    return Row(name, keys, [])


def gaps_image(found: Verdict) -> Markup:
    import matplotlib

    gaps: dict[tuple[str, str], Estimate] = {}
    for each in found.tested:  # the first rule of a pair of arms counts, as it may decide
        if each.gap and each.rule.kind != "trend":  # slopes have another unit
            low, high = each.bounds or (None, None)
            gap = Estimate(each.gap.mean, low, high, each.gap.seeds)
            gaps.setdefault((each.rule.arm, each.rule.against), gap)
    if not gaps:
        return Markup("")
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        figure = draw_gaps_of_arms(gaps, arm_styles(found), found.study.quantity)
        return to_image(figure, "Gaps of the rules")


def draw_gaps_of_arms(
    gaps: dict[tuple[str, str], Estimate],
    styles: list[RowStyle],
    x_label: str,
    width: float = WIDTH,
) -> "Figure":
    by_arm = {style.label: style for style in styles}
    named = [replace(by_arm[arm], label=f"{arm} − {against}") for arm, against in gaps]
    sides = ("lower", "higher")
    return draw_gaps([*gaps.values()], named, width, x_label, sides=sides, ends=BOUNDS)


def verdict_html(found: Verdict) -> str:
    """Return the HTML page of a verdict; equal verdicts give identical pages."""
    numbers = found.numbers()
    return template("verdict.html.jinja").render(
        found=found,
        study=found.study,
        headline=verdict_headline(found),
        title=verdict_title(found),
        sentence=verdict_sentence(found),
        trend=trend_of(found),
        problems=problems(found),
        gaps=gaps_image(found),
        arms=arms_table(found),
        overrides=[line.replace("`", "") for line in override_lines(found.study)],
        differences=[line.replace("`", "") for line in difference_lines(found)],
        budget=budget_sentences(found.study, found.arms),
        spending=None if not has_budget(found) else spending_table(found.study, found.arms),
        equal=equal_gaps_table(found.equal) if found.equal else None,
        equal_words=equal_gaps_words(found.study.rule.alpha),
        rules=[rule_line(each, found.study) for each in found.tested],
        power=power_words(found.study),
        conditions=conditions(numbers),
        origin=origin(numbers).replace("`", ""),
        hashed_files=hashed_files(found.study),
        study_hash=numbers["study_hash"],
    )


def conditions(numbers: dict[str, Any]) -> str:
    arms = [arm for arm in numbers["arms"].values() if arm["losses"]]
    runs = sum(len(arm["losses"]) for arm in arms)
    seeds, tokens = [len(arm["values"]) for arm in arms], [arm["tokens"] for arm in arms]
    words = [
        plural(runs, "run"),
        f"{range_text(seeds, str)} seed{'s' * (max(seeds) != 1)} per arm",
        f"{range_text(tokens)} tokens per run",
    ]
    sizes = [arm["parameters"] for arm in arms]
    if None not in sizes:
        ratios = [each / size for each, size in zip(tokens, sizes, strict=True)]
        words.append(f"{range_text(sizes)} parameters")
        words.append(f"{range_text(ratios, partial(short, digits=2))} tokens per parameter")
    equal, unequal = [], []
    for key, name in COMPARED.items():
        found = [arm[key] for arm in arms]
        if None in found:
            continue
        if all(each == found[0] for each in found):
            equal.append(name)
        elif key == "rates":
            unequal.append(name)
        elif (apart := max(found) / min(found) - 1) <= TOLERANCE:
            equal.append(f"{name} (within {percent(apart)})")
        else:
            unequal.append(f"{name} (largest {percent(apart)} above smallest)")
    said = [("Equal across arms", equal), ("Not equal", unequal)]
    said.append(("Differences that the study declares", numbers["unequal"]))
    sentences = [f"{start}: {', '.join(names)}." for start, names in said if names]
    return " ".join([f"{', '.join(words)}.", *sentences])


def range_text(values: Sequence[Any], write: Callable[[Any], str] = compact) -> str:
    return " to ".join(dict.fromkeys(map(write, (min(values), max(values)))))


def override_lines(study: Study) -> list[str]:
    """Return one Markdown line with the overrides of each arm."""
    return [f"`{arm}`: `{' '.join(words) or 'none'}`" for arm, words in study.arms.items()]


def difference_lines(found: Verdict) -> list[str]:
    """Return one Markdown line for each difference between arms, with the role of the key."""
    lines = []
    for difference in found.differences:
        parts = []
        for text, arms in difference.values.items():
            parts.append(f"`{text}` in {', '.join(arms)}")
        lines.append(f"`{difference.key}` ({REASONS[difference.role]}): {'; '.join(parts)}")
    return lines


def origin(numbers: dict[str, Any]) -> str:
    facts = numbers["facts"]
    corpus = ", ".join(f"`{each}`" for each in facts["corpus"])
    python, torch, device, ranks, code = (
        ", ".join(facts[name]) or "not recorded"
        for name in ("python", "torch", "device", "ranks", "code")
    )
    made_by = f"Python {python}, torch {torch}, device {device}, ranks `{ranks}`, code `{code}`"
    return f"Corpus hash {corpus or 'not recorded'}. {made_by}."


def has_budget(found: Verdict) -> bool:
    return found.study.budget != TOKENS


def budget_lines(found: Verdict) -> list[str]:
    """Return Markdown lines with the budget and the costs of each arm; [] if it is in tokens."""
    if not has_budget(found):
        return []
    sentences = " ".join(budget_sentences(found.study, found.arms))
    return [sentences, "", spending_table(found.study, found.arms).markdown(), ""]


def hashed_files(study: Study) -> str:
    """Return the names of the files that `study.hash` covers."""
    if isinstance(study.budget, str):
        return study.path.name
    return f"{study.path.name} and {study.budget.profile}"


def equal_lines(found: Verdict) -> list[str]:
    """Return a Markdown table of `found.equal` with notes; [] if `found.equal` is empty."""
    if not found.equal:
        return []
    return [
        equal_gaps_table(found.equal).markdown(),
        "",
        equal_gaps_words(found.study.rule.alpha),
        "",
    ]


def markdown(found: Verdict) -> str:
    study, numbers = found.study, found.numbers()
    source = [f"**Source**: {study.source}", ""] if study.source else []
    return "\n".join(
        [
            f"# {verdict_title(found)}",
            "",
            *source,
            " ".join(filter(None, (verdict_sentence(found), trend_of(found)))),
            "",
            *(f"- {problem}" for problem in problems(found)),
            *[""] * bool(problems(found)),
            f"{conditions(numbers)} {power_words(study)}",
            "",
            *(f"- Rule: {rule_line(each, study)}" for each in found.tested),
            "",
            arms_table(found).markdown(),
            "",
            *(f"- Overrides of {line}" for line in override_lines(study)),
            *(f"- Difference in {line}" for line in difference_lines(found)),
            "",
            *budget_lines(found),
            *equal_lines(found),
            f"Metric: {study.quantity}, paired over seeds. Study {hashed_files(study)}, SHA-256 "
            f"`{study.hash}`, with resolved configs `{numbers['study_hash']}`. {origin(numbers)}",
            "",
        ]
    )
