"""Rules that older versions of diffllm judged, and their replacements.

A study that began under an older version still loads. Its removed rules get no test, but Holm's
correction counts them: otherwise a removal after the runs would make the other rules easier to
show. A new study with a removed rule does not start.
"""

from diffllm.compare.study.file import Rule, Study


def replacement_of(study: Study, rule: Rule) -> str:
    """Return one line that names a removed setting and its replacement; "" for other rules."""
    if rule.at == "flops":
        return (
            "at=flops is removed, because it read losses before the end of the learning rate "
            "schedule; set model.match_flops_to in the arms to compare them at equal FLOPs"
        )
    if study.test == "welch" and rule.kind != "log_rank":
        return "test=welch is removed; remove the key, because arms are compared at equal seeds"
    return ""
