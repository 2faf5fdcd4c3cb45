"""Check before the first run of a study whether the study's rules can decide the claim."""

from diffllm.compare.study.file import Rule, Study, better
from diffllm.compare.study.removed_rules import margin_note, replacement_of
from diffllm.core.errors import ConfigError
from diffllm.statistics.gap_tests import MOST_ALPHA
from diffllm.statistics.smallest_p import seeds_for_p, smallest_p

PERMUTATION_KINDS = ("log_rank",)
"""Kinds of rules that a permutation test decides; t tests decide the others."""


def check_design(study: Study) -> None:
    """Raise ConfigError if a rule is removed, has an unsuitable alpha or metric, or too few seeds.

    docs/studies.md lists the conditions under "Refused designs". Studies that already have runs
    are not checked, because older versions of diffllm accepted more designs.
    """
    for where, rule in study.named_rules:
        if replacement := replacement_of(study, rule) or margin_note(rule):
            raise ConfigError(f"{where}: {replacement}")
        if rule.alpha > MOST_ALPHA:
            raise ConfigError(f"{where}.alpha={rule.alpha:g} must be at most {MOST_ALPHA:g}")
        if rule.kind in PERMUTATION_KINDS:
            if better(study.metric) < 0:
                raise ConfigError(
                    f"{where}: kind={rule.kind} needs a metric that rises during training, but "
                    f"metric={study.metric} falls; use kind=difference"
                )
            check_smallest_p(study, where, rule)
        if study.power:
            check_alpha(study, where, rule)


def check_smallest_p(study: Study, where: str, rule: Rule) -> None:
    """Raise ConfigError if the smallest possible p of a rule's permutation test is not below alpha.

    The smallest possible p is first multiplied by the number of rules with a permutation test
    (Holm's correction). `where` is the rule's key in the study file, such as "also[0]".
    """
    n, rules = len(study.seeds), sum(each.kind in PERMUTATION_KINDS for each in study.rules)
    least = smallest_p(rule.kind, n, n)
    if (adjusted := least * rules) < rule.alpha:
        return
    seeds = seeds_for_p(rule.kind, rule.alpha, rules)
    fixes = [f"{seeds} seeds or more" if seeds else "a larger alpha"]
    if fewer := max(m for m in range(rules) if least * m < rule.alpha):
        fixes.append(f"at most {fewer} rule{'s' * (fewer > 1)} with kind={rule.kind}")
    if adjusted < MOST_ALPHA:
        fixes.append(f"an alpha above {adjusted:.3g}")
    holm = f" ({least:.2g} before Holm's correction for {rules} rules)" * (rules > 1)
    raise ConfigError(
        f"{where}.alpha={rule.alpha:g} must be above {min(1, adjusted):.2g}{holm}, the smallest p "
        f"of kind={rule.kind} with {n} seeds per arm; use {', or '.join(fixes)}"
    )


def check_alpha(study: Study, where: str, rule: Rule) -> None:
    """Raise ConfigError unless all rules of a study with the key `power` have the same alpha."""
    if rule.alpha != study.rule.alpha:
        raise ConfigError(
            f"{where}.alpha={rule.alpha:g} must equal rule.alpha={study.rule.alpha:g}, because "
            "the power of the study is computed for one alpha; use the same alpha in all rules"
        )


def design_notes(study: Study) -> list[str]:
    """Return a warning for each alpha that is too small for exact tests with the study's seeds."""
    alphas = [rule.alpha for rule in study.rules if rule.kind not in PERMUTATION_KINDS]
    n, rules = len(study.seeds), len(alphas)
    notes = (exact_note(n, rules, alpha, sides=1) for alpha in sorted({*alphas}))
    return [note for note in notes if note]


def exact_note(seeds: int, tests: int, alpha: float, sides: int) -> str:
    """Return a warning if a sign-flip test of `seeds` pairs cannot have a p below `alpha`.

    The p is after Holm's correction. Return "" if the test can have such a p.

    Args:
        tests: number of tests in Holm's correction.
        sides: 1 for a one-sided test, 2 for a two-sided test.
    """
    least = smallest_p("paired", seeds, seeds, sides)
    if least * tests < alpha:
        return ""
    family = f" ({min(1, least * tests):.2g} after Holm's correction for {tests} tests)"
    side = "one-sided" if sides == 1 else "two-sided"
    enough = seeds_for_p("paired", alpha, tests, sides)
    return (
        f"the smallest {side} p of an exact sign-flip test of {seeds} pairs is "
        f"{least:.2g}{family * (tests > 1)}, not below alpha {alpha:g}: it cannot confirm the t "
        "test, which assumes normally distributed values"
        f"{f'; {enough} seeds per arm are enough' if enough else ''}"
    )
