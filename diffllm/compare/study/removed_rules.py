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
