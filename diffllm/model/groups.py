"""The part of a model that a parameter belongs to, told from its name."""

from functools import cache

ATTENTION_COMPONENTS = ("wq", "wk", "wv", "wo", "lambda/gate", "head norms")
OTHER_COMPONENTS = ("ffn", "router", "norms", "embeddings/output")
GROUPS = ("embedding", "attention", "lambda", "ffn", "norm", "router", "output")


@cache
def group_of(name: str) -> str:
    """Return the group of a parameter name such as `layers.3.attention.wq.weight`."""
    parts = name.split(".")
    if "tok_embeddings" in parts:
        return "embedding"
    if parts[0] == "output":
        return "output"
    if any(part.endswith("norm") for part in parts):
        return "norm"
    if any("lambda" in part for part in parts):
        return "lambda"
    if "router" in parts:
        return "router"
    return "attention" if "attention" in parts else "ffn"


def component_of(name: str) -> str:
    """Return the part of a model that a parameter counts to: finer than its group inside attention.

    It is one of ATTENTION_COMPONENTS or OTHER_COMPONENTS. Any other parameter of an attention goes
    by its own name, e.g. `sink`.
    """
    group, parts = group_of(name), name.split(".")
    if "attention" not in parts:
        renamed = {"norm": "norms", "embedding": "embeddings/output", "output": "embeddings/output"}
        return renamed.get(group, group)
    own = parts[parts.index("attention") + 1]
    if group == "norm":
        return "head norms"
    return "lambda/gate" if group == "lambda" or "gate" in own else own
