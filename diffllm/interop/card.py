"""The model card of an export: what was measured, and nothing else."""

from collections.abc import Mapping
from typing import Any

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [diffllm, {variant}]
---
# {name}

A decoder of {millions:,.1f}M parameters with {variant} attention, trained with diffllm. {line}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{remote})
tokenizer = AutoTokenizer.from_pretrained("{name}"{remote})
```

| | |
|---|---|
{rows}

These are the numbers of one run; it has not been evaluated on any task, nor for safety.{carried}

## Citation

```bibtex
@software{{diffllm,
  title = {{diffllm: what an attention variant does to a language model}},
  version = {{{version}}},
}}
```
"""
CARRIED = """ `modeling_diffllm.py`
computes the model in transformers 5.4 or later; `trust_remote_code=True` runs it, and so does
`import diffllm.interop`."""


def card_of(
    name: str,
    model: Mapping[str, Any],
    facts: Mapping[str, Any],
    summary: Mapping[str, Any] | None,
    carried: bool,
) -> str:
    """Write the card.

    Args:
        model: "variant", "parameters", "architecture"; and "from", "changed", "step", "tokens",
            "data" as far as they are known.
        facts: the content of the run's run.json.
        summary: that of its summary.json, if the export is of the run's last step.
        carried: whether the modelling file is ours.
    """
    rows = {
        "architecture": model["architecture"],
        "attention": model["variant"],
        "weights from": model.get("from"),
        "converted to": model.get("changed"),
        "step": with_commas(model.get("step")),
        "tokens trained on": with_commas(model.get("tokens")),
        "data": model.get("data"),
        "hash of the data": facts.get("corpus"),
    }
    if summary is not None:
        rows |= {
            "training loss, mean of the last steps": nats(summary.get("train_loss")),
            "held-out loss": nats(summary.get("heldout_loss")),
            "held-out bits a byte": number(summary.get("heldout_bits_per_byte")),
            "held-out tokens": summary.get("heldout_tokens"),
        }
    known = [f"| {key} | {value} |" for key, value in rows.items() if value is not None]
    version = (facts.get("diffllm") or {}).get("version", "")
    return CARD.format(
        name=name,
        variant=model["variant"],
        millions=model["parameters"] / 1e6,
        line=facts.get("variant_line", ""),
        remote=", trust_remote_code=True" if carried else "",
        rows="\n".join(known),
        carried=CARRIED if carried else "",
        version=version,
    )


def with_commas(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"


def nats(value: Any) -> str | None:
    found = number(value)
    return None if found is None else f"{found} nats a token"


def number(value: Any) -> str | None:
    is_number = isinstance(value, int | float) and value == value and abs(value) != float("inf")
    return f"{value:.4f}" if is_number else None
