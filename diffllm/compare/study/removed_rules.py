"""Rules that older versions of diffllm judged, and their replacements.

A study that began under an older version still loads. Its removed rules get no test, but Holm's
correction counts them: otherwise a removal after the runs would make the other rules easier to
show. A new study with a removed rule does not start.
"""

from diffllm.compare.study.file import POSITION, TOKENS, Rule, Study


def replacement_of(study: Study, rule: Rule) -> str:
    """Return one line that names a removed setting and its replacement; "" for other rules."""
    if rule.at == "flops":
        return (
            "at=flops is removed, because it read losses before the end of the learning rate "
            "schedule; set budget: flops to compare arms at equal FLOPs"
        )
    if study.test == "welch" and rule.kind != "log_rank":
        return "test=welch is removed; remove the key, because arms are compared at equal seeds"
    if (rule.below or 0.0) > 0 or (rule.above or 0.0) < 0:
        side, bound = ("below", rule.below) if rule.above is None else ("above", rule.above)
        return (
            f"{side}={bound:g} includes a gap of 0, so the rule shows no difference; "
            f"use {side}=0, or kind=equivalence with margin={abs(bound or 0.0):g}"
        )
    if rule.over == TOKENS:
        return (
            "kind=trend over=tokens is removed, because the learning rate falls over the same "
            "tokens; the verdict page and the report state this trend without a rule"
        )
    if rule.over == POSITION:
        return (
            "kind=trend over=position is removed, because its octaves could be chosen after the "
            "runs; compare the loss of one octave, such as metric: position/1024"
        )
    return ""


def margin_note(rule: Rule) -> str:
    """Return one line about a margin that has no effect; "" for other rules."""
    if rule.kind != "difference" or rule.margin is None:
        return ""
    return (
        f"margin={rule.margin:g} has no effect with kind=difference; to test whether arms are "
        "equivalent, add a rule with kind=equivalence to also"
    )
