"""Check before the first run of a study whether the study's rules can decide the claim."""

from diffllm.compare.arms.sentences import exact_note
from diffllm.compare.study.file import Rule, Study, better
from diffllm.compare.study.removed_rules import margin_note, replacement_of
from diffllm.core.errors import ConfigError
from diffllm.statistics.gap_tests import MOST_ALPHA
from diffllm.statistics.smallest_p import seeds_for_p, smallest_p


def check_design(study: Study) -> None:
    """Raise ConfigError if a rule is removed, has an unsuitable alpha or metric, or too few seeds.

    docs/studies.md lists the conditions under "Refused designs". Studies that already have runs
    are not checked, because older versions of diffllm accepted more designs.
    """
    for key, rule in study.named_rules:
        if replacement := replacement_of(study, rule) or margin_note(rule):
            raise ConfigError(f"{key}: {replacement}")
        if rule.alpha > MOST_ALPHA:
            raise ConfigError(f"{key}.alpha={rule.alpha:g} must be at most {MOST_ALPHA:g}")
        if rule.kind == "log_rank":
            if better(study.metric) < 0:
                raise ConfigError(
                    f"{key}: kind={rule.kind} needs a metric that rises during training, but "
                    f"metric={study.metric} falls; use kind=difference"
                )
            check_smallest_p(study, key, rule)
        if study.power and rule.alpha != study.rule.alpha:
            raise ConfigError(
                f"{key}.alpha={rule.alpha:g} must equal rule.alpha={study.rule.alpha:g}, because "
                "the power of the study is computed for one alpha; use the same alpha in all rules"
            )


def check_smallest_p(study: Study, key: str, rule: Rule) -> None:
    """Raise ConfigError if the smallest possible p of a log-rank rule is not below alpha.

    The smallest possible p is first multiplied by the number of log-rank rules (Holm's correction).
    `key` is the rule's key in the study file, such as "also[0]".
    """
    n = len(study.seeds)
    rules = sum(other.kind == "log_rank" for other in study.rules)
    least = smallest_p("log_rank", n, n)
    adjusted = least * rules
    if adjusted < rule.alpha:
        return
    seeds = seeds_for_p("log_rank", rule.alpha, rules)
    fix = f"{seeds} seeds or more" if seeds else "a larger alpha"
    if rules > 1:
        fix += ", or fewer rules with kind=log_rank"
    holm = f" ({least:.2g} before Holm's correction for {rules} rules)" if rules > 1 else ""
    raise ConfigError(
        f"{key}.alpha={rule.alpha:g} must be above {min(1, adjusted):.2g}{holm}, the smallest p "
        f"of kind=log_rank with {n} seeds per arm; use {fix}"
    )


def design_notes(study: Study) -> list[str]:
    """Return a warning for each alpha that is too small for exact tests with the study's seeds."""
    alphas = [rule.alpha for rule in study.rules if rule.kind != "log_rank"]
    notes = []
    for alpha in sorted(set(alphas)):
        if note := exact_note(len(study.seeds), len(alphas), alpha, sides=1):
            notes.append(note)
    return notes
