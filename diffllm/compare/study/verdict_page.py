"""The verdict of a study as a page."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.compare.arms.arm import runs_of
from diffllm.compare.arms.comparability import ATTENTION_PREFIX
from diffllm.compare.arms.gap import loss_trend
from diffllm.compare.arms.pages import (
    Block,
    Figure,
    FigureGrid,
    Items,
    Page,
    Paragraph,
    Section,
    TableBlock,
)
from diffllm.compare.arms.sentences import (
    MISSING,
    ascii_minus,
    compact,
    plural,
    range_text,
    short,
    trend_sentence,
    two_digits,
)
from diffllm.compare.report.figures import RC, WIDTH, draw_gaps, to_image
from diffllm.compare.report.styles import RowStyle, style_identity, styles_of
from diffllm.compare.study.arms import StudyArm
from diffllm.compare.study.costs import budget_sentences, spending_table
from diffllm.compare.study.decision import NO_LONGER_JUDGED, REFUTED, SHOWN, Tested
from diffllm.compare.study.file import Study
from diffllm.compare.study.rates import ChosenRate
from diffllm.compare.study.raw_values import values_text
from diffllm.compare.study.verdict import EXPLORATORY, NOT_COMPARABLE, Verdict
from diffllm.config.yaml_file import parse_yaml
from diffllm.core.files import replace_file
from diffllm.core.printing import Cell, Table
from diffllm.statistics.estimates import Estimate
from diffllm.statistics.power_analysis import paired_power

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

BOUNDS_LABEL = "one-sided bounds"
RATES_OF_CONFIGS = (
    "The study chose no learning rates: they come from its overrides, or else from the defaults."
)
REASONS = {
    "declared": "declared",
    "question": "part of the attention variant",
    "harmless": "no influence on the metric",
}
"""Text about a difference between arms, by its role."""


def write_verdict(verdict: Verdict, out: Path) -> list[Path]:
    page = verdict_page(verdict)
    texts = {
        "verdict.html": page.html(),
        "verdict.md": page.markdown(),
        "values.json": values_text(verdict.study, verdict.evidence),
    }
    for name, text in texts.items():
        replace_file(out / name, text.encode())
    return [out / name for name in texts]


def verdict_page(verdict: Verdict, with_picture: bool = True) -> Page:
    """Return the page of a verdict; equal verdicts give identical pages.

    Args:
        with_picture: whether to draw the gaps, which only HTML shows.
    """
    header = result_blocks(verdict)
    if with_picture and gaps_of_pairs(verdict):
        header.append(FigureGrid([gaps_figure(verdict)]))
    result = verdict.verdict
    if result == EXPLORATORY:
        result += f", it would be: {verdict.would_be}"
    footer = Section("", [Paragraph(origin(verdict))])
    return Page(verdict.study.claim, header, page_sections(verdict), footer, result)


def result_blocks(verdict: Verdict) -> list[Block]:
    """Return the source of the claim, the result of the first rule, and all other reasons."""
    study = verdict.study
    first_reason = verdict.tested[0].reason
    blocks: list[Block] = []
    if study.source:
        blocks.append(Paragraph(study.source, label="Source"))
    start = ""
    if NOT_COMPARABLE in (verdict.verdict, verdict.would_be):
        start = "Not comparable; the runs alone give: "
    arms = {arm.label: arm for arm in verdict.arms}
    trend = trend_text(study, arms)
    blocks.append(Paragraph(f"{start}{study.quantity}: {first_reason}. {trend}".strip()))
    problems = [reason for reason in verdict.reasons if reason != first_reason]
    if problems:
        blocks.append(Items(problems))
    return blocks


def page_sections(verdict: Verdict) -> list[Section]:
    study = verdict.study
    rules = [f"Rule: {rule_line(tested, study)}" for tested in verdict.tested]
    conditions = Paragraph(f"{conditions_text(verdict)} {power_words(study)}")
    settings = Items([*override_lines(study), *difference_lines(verdict)])
    sections = [
        Section("Conditions and rules", [conditions, Items(rules)]),
        Section("Arms", [TableBlock(arms_table(verdict), "Arms"), settings]),
    ]
    sentences = budget_sentences(study, verdict.arms)
    if sentences:
        text = Paragraph(" ".join(sentences))
        costs = TableBlock(spending_table(study, verdict.arms), "Costs of the runs of each arm")
        sections.append(Section("Budget", [text, costs]))
    if verdict.choices:
        choices = Items([choice_line(choice) for choice in verdict.choices])
        sections.append(Section("Learning rates", [choices]))
    elif not study.sets_rates:
        sections.append(Section("Learning rates", [Paragraph(RATES_OF_CONFIGS)]))
    if study.notes:
        sections.append(Section("Notes", [Paragraph(study.notes, label="From the study file")]))
    return sections


def trend_text(study: Study, arms: Mapping[str, StudyArm]) -> str:
    """Return a sentence about how the loss gap of the first rule's arms changes during training.

    Return "" if the metric is not heldout_loss on a linear scale, if the runs have too few common
    evaluations, or if they train on different numbers of tokens: after equal tokens, their learning
    rates then differ. Also return "" if the first rule is a trend rule: its one-sided test could
    contradict the two-sided confidence interval in the sentence.
    """
    rule = study.rule
    if study.metric != "heldout_loss" or study.scale != "linear" or rule.over:
        return ""
    trend = loss_trend(arms[rule.arm], arms[rule.against])
    if trend is None:
        return ""
    return ascii_minus(trend_sentence(rule.arm, rule.against, trend))


def rule_line(tested: Tested, study: Study) -> str:
    words = [f"{tested.rule.statement(study.quantity)}: {tested.verdict}; {tested.reason}"]
    if tested.verdict == NO_LONGER_JUDGED:
        return words[0]
    if study.scale == "log" and tested.gap and tested.bounds:
        texts = []
        for logarithm in (tested.gap.mean, *tested.bounds):
            # A bound can be infinite, and exp overflows above 709; e^99 is shown as missing.
            texts.append(short(math.exp(min(logarithm, 99))))
        ratio, low, high = texts
        words.append(f"a ratio of {ratio} (bounds {low} and {high})")
    side = tested.showing
    claim = ""
    if tested.verdict == REFUTED:
        side = tested.refuting
        claim = " of the opposite claim"
    if side.p is not None:
        words.append(f"p{claim} {side.p:.2g}")
        adjusted = tested.adjusted["showing"]
        # The reason states the adjusted p of a decided claim.
        if tested.verdict not in (SHOWN, REFUTED) and adjusted is not None:
            words.append(f"{adjusted:.2g} after Holm")
    if side.exact is not None:
        smallest = f"smallest possible {tested.smallest:.2g}"
        words.append(f"sign-flip test p{claim} {side.exact:.2g} ({smallest})")
    if tested.outcome.correlation is not None:
        words.append(f"correlation between seeds {tested.outcome.correlation:.2f}")
    if tested.same_size:
        words.append(tested.same_size)
    return ", ".join(words)


def arms_table(verdict: Verdict) -> Table:
    styles = arm_styles(verdict)
    heads = (
        "arm", verdict.study.quantity, "95% interval", "seeds", "diverged", "learning rate",
        "parameters", "training FLOPs per token", "tokens per run", "tokens per parameter",
    )  # fmt: skip
    rows: list[list[str | Cell]] = []
    for arm in verdict.arms:
        row: list[str | Cell] = [arm.label, MISSING, MISSING, "0", "0 of 0"]
        if arm.runs:
            name = Cell(arm.label, icon=styles[arm.label].swatch)
            row = [name, *arm_cells(arm, verdict.study)]
        while len(row) < len(heads):
            row.append(MISSING)
        rows.append(row)
    return Table.of(heads, rows, left=range(len(heads)))


def arm_cells(arm: StudyArm, study: Study) -> list[str]:
    """Return the cells of an arm with runs, without its name."""
    mean = arm.mean.within(*study.limits) if arm.mean else None
    interval = mean.interval if mean else None
    run = arm.runs[0]
    parameters = run.facts.parameters
    return [
        short(mean.mean, 5) if mean else MISSING,
        " to ".join(short(end, 5) for end in interval) if interval else MISSING,
        f"{len(arm.finite_values)}",
        f"{arm.diverged} of {len(arm.runs)}",
        range_text([run.lr for run in arm.runs], "{:g}".format),
        compact(parameters),
        compact(run.facts.flops_per_token),
        compact(run.planned_tokens),
        two_digits(run.planned_tokens / parameters) if parameters else MISSING,
    ]


def power_words(study: Study) -> str:
    """Return a sentence with the statistical power of a study for the gap in the study file.

    If the power cannot be computed, the sentence says why.
    """
    if study.power is None:
        return "The study file states no power."
    if study.rule.kind in ("equivalence", "log_rank"):
        return f"The stated power does not concern a rule of kind {study.rule.kind}."
    gap = study.power.gap
    sd = study.power.sd
    seeds = len(study.seeds)
    # The worst case of Holm's correction: the first rule has the smallest p.
    alpha = study.rule.alpha / len(study.rules)
    # The difference of two uncorrelated values has twice their variance.
    chance = paired_power(gap, sd * 2**0.5, seeds, alpha, sides=1)
    source = f" ({study.power.source})" if study.power.source else ""
    effect = "slope per doubling" if study.rule.kind == "trend" else "gap"
    return (
        f"With {plural(seeds, 'seed')} per arm and a standard deviation of {short(sd)} between "
        f"seeds{source}, the study finds a true {effect} of {short(gap)} with probability "
        f"{chance:.2f} if seeds are uncorrelated."
    )


def arm_styles(verdict: Verdict) -> dict[str, RowStyle]:
    """Return the style of each arm in figures, by name; arms without runs have none."""
    identities = {}
    # Styles are given in this order, so the baseline keeps the style of its variant.
    for arm in sorted(verdict.arms, key=lambda arm: arm.label != verdict.study.baseline):
        changes = {}
        for word in chain(verdict.study.base, verdict.study.arms[arm.label]):
            key, _, value = word.partition("=")
            if key.startswith(ATTENTION_PREFIX):
                changes[key] = parse_yaml(value)  # Spellings of one value have one style.
        if arm.runs:
            identities[arm.label] = style_identity(arm.runs[0].variant, changes)
    styles = styles_of(list(identities), list(identities.values()))
    return {style.label: style for style in styles}


def gaps_of_pairs(verdict: Verdict) -> dict[tuple[str, str], Estimate]:
    """Return the gap of each pair of arms with its bounds, by the first rule of the pair."""
    gaps: dict[tuple[str, str], Estimate] = {}
    for tested in verdict.tested:
        # Slopes have another unit.
        if tested.gap is None or tested.rule.kind == "trend":
            continue
        low, high = tested.bounds or (None, None)
        gap = Estimate(tested.gap.mean, low, high, tested.gap.seeds)
        # The first rule of a pair counts, because it may decide the study.
        gaps.setdefault((tested.rule.arm, tested.rule.against), gap)
    return gaps


def gaps_drawing(verdict: Verdict, width: float = WIDTH) -> "Drawing":
    """Draw the result of `gaps_of_pairs`, which must not be empty."""
    gaps = gaps_of_pairs(verdict)
    styles = arm_styles(verdict)
    labelled_styles = []
    for arm, against in gaps:
        labelled_styles.append(replace(styles[arm], label=f"{arm} − {against}"))
    return draw_gaps(
        list(gaps.values()),
        labelled_styles,
        width,
        verdict.study.quantity,
        sides=("lower", "higher"),
        ends=BOUNDS_LABEL,
    )


def gaps_figure(verdict: Verdict) -> Figure:
    import matplotlib

    title = "Gaps of the rules"
    caption = "Arm minus reference arm, with one-sided bounds at confidence 1 − alpha."
    with matplotlib.rc_context(RC):  # type: ignore[arg-type]
        return Figure(title, caption, to_image(gaps_drawing(verdict), title))


def conditions_text(verdict: Verdict) -> str:
    """State the number of runs and seeds, and the differences that the study declares."""
    runs = plural(len(runs_of(verdict.arms)), "run")
    counts = [len(arm.seed_values) for arm in verdict.arms if arm.runs]
    seeds = range_text(counts, str)
    text = f"{runs}, seeds per arm: {seeds}."
    if verdict.study.unequal:
        text += f" Differences that the study declares: {', '.join(verdict.study.unequal)}."
    return text


def override_lines(study: Study) -> list[str]:
    """Return one line with the overrides of each arm."""
    lines = []
    for arm, words in study.arms.items():
        overrides = " ".join(words) or "none"
        lines.append(f"Overrides of `{arm}`: `{overrides}`")
    return lines


def difference_lines(verdict: Verdict) -> list[str]:
    """Return one line for each difference between arms, with the role of the key."""
    lines = []
    for difference in verdict.differences:
        parts = [f"`{text}` in {', '.join(arms)}" for text, arms in difference.values.items()]
        role = REASONS[difference.role]
        lines.append(f"Difference in `{difference.key}` ({role}): {'; '.join(parts)}")
    return lines


def choice_line(choice: ChosenRate) -> str:
    """Return the chosen learning rate of an arm with the held-out loss at each rate."""
    rate = f"{choice.lr:g}" if choice.lr else "none"
    problem = f", {choice.problem}" if choice.problem else ""
    losses = []
    for lr, loss in choice.losses.items():
        text = "not run" if math.isnan(loss) else f"{loss:.4f}"
        losses.append(f"{lr:g}: {text}")
    return f"Learning rate of {choice.arm}: {rate}{problem}; held-out loss {', '.join(losses)}"


def origin(verdict: Verdict) -> str:
    """Return text with the hashes of the study, and the corpus and software of its runs."""
    study = verdict.study
    facts = verdict.facts
    files = study.path.name
    if not isinstance(study.budget, str):
        files += f" and {study.budget.profile}"
    corpus = ", ".join(f"`{digest}`" for digest in facts["corpus"]) or "not recorded"
    resolved = verdict.evidence.hash_of(study)
    texts = {}
    for name, values in facts.items():
        texts[name] = ", ".join(values) or "not recorded"
    return (
        f"Metric: {study.quantity}, paired over seeds. Study {files}, SHA-256 `{study.hash}`, "
        f"with resolved configs `{resolved}`. Corpus hash {corpus}. "
        f"Python {texts['python']}, torch {texts['torch']}, device {texts['device']}, "
        f"ranks `{texts['ranks']}`, code `{texts['code']}`."
    )
