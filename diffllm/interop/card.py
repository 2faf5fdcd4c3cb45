"""The model card of an export: what was measured, and nothing else."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffllm.checkpoint.hf import Layout
from diffllm.checkpoint.hf.own import ARCHITECTURE
from diffllm.checkpoint.state_file import read_state
from diffllm.config import TrainConfig
from diffllm.config.values import OF_WEIGHTS
from diffllm.data.config import DataConfig, TextConfig
from diffllm.metrics.records import read_record, read_summary

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


def write_card(
    run: Path, checkpoint: Path, directory: Path, name: str, cfg: TrainConfig, layout: Layout
) -> None:
    """Write README.md, of what the run has measured."""
    facts, summary = read_record(run / "run.json") or {}, read_summary(run)
    state = read_state(checkpoint)
    step = state["step"]
    model = {
        "variant": cfg.run.choices["attention"],
        "parameters": sum(math.prod(shape) for shape in state["parameters"].values()),
        "architecture": layout.architecture,
        **origin_or_training(facts.get("imported"), step, cfg),
    }
    ended = summary if summary is not None and summary.get("steps") == step else None
    card = card_of(name, model, facts, ended, layout.architecture == ARCHITECTURE)
    (directory / "README.md").write_text(card)


def origin_or_training(imported: Any, step: int, cfg: TrainConfig) -> dict[str, Any]:
    """Say what a model was trained on; of an imported one, where it comes from."""
    if imported:
        revision = f" at revision {imported['revision']}" if imported.get("revision") else ""
        return {"from": f"{imported.get('from')}{revision}", "changed": imported.get("converted")}
    weights = cfg.resume.removeprefix(OF_WEIGHTS) if cfg.resume.startswith(OF_WEIGHTS) else None
    tokens = step * cfg.global_batch_size * cfg.seq_len
    return {"from": weights, "step": step, "tokens": tokens, "data": data_text(cfg.data)}


def data_text(data: DataConfig) -> str:
    """Name a corpus: hub datasets with their revision, files without their directories."""
    if data.sources:
        return "; ".join(f"{name}: {source_text(of)}" for name, of in data.sources.items())
    return source_text(data)


def source_text(source: TextConfig) -> str:
    """Name one source of text."""
    if source.dataset:
        revision = f" at revision {source.revision}" if source.revision else ""
        return f"{source.dataset}{f' ({source.name})' if source.name else ''}{revision}"
    if source.paths:
        return f"files {', '.join(Path(path).name for path in source.paths[:5])}"
    return str(source.source)


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
