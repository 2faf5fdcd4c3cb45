"""Which part of a model a parameter belongs to, from its name."""

GROUPS = ("embedding", "attention", "lambda", "ffn", "norm", "router", "output")


def group_of(name: str) -> str:
    """The group of a parameter name such as `layers.3.attention.wq.weight`."""
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
