"""Export a checkpoint as a Hugging Face model directory: weights, tokenizer and model card."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import tokenizers
import torch

from diffllm.checkpoint.hf.layout import ARCHITECTURE, Layout, layout_of
from diffllm.checkpoint.hf.safetensors import tensors_of, write_safetensors, writing
from diffllm.checkpoint.hf.tokenizer import fast_tokenizer
from diffllm.checkpoint.manifest import read_state, tokens_of
from diffllm.checkpoint.run_checkpoints import with_checkpoint
from diffllm.config import TrainConfig
from diffllm.config.origin import named_in
from diffllm.config.saved import load_run_config
from diffllm.core.atomic_directories import new_directory
from diffllm.core.errors import CheckpointError
from diffllm.core.files import check_absent
from diffllm.core.run_files import read_facts, read_summary, step_of
from diffllm.data.config import TextConfig
from diffllm.data.tokenizer import FAST, MODEL, Tokenizer, tokenizer_files, tokenizer_of
from diffllm.model.auto_setting import dtype_name
from diffllm.model.config import ModelConfig

MODELLING = Path(__file__).with_name("modeling_diffllm.py")
OLDEST = "5.4.0"
"""Oldest version of transformers that supports the modelling file of diffllm."""


def export(
    run: Path, out: Path, step: int, dtype: torch.dtype, shard_size: str, uses_own_class: bool
) -> tuple[Layout, int]:
    """Export a checkpoint of a run as a Hugging Face model directory `out`.

    Return the `Layout`, which names the model class, and the training step of the checkpoint. The
    directory appears only when complete.

    Args:
        step: training step of the checkpoint; 0 selects the newest undamaged checkpoint.
        dtype: dtype of the exported parameters, except parameters that must stay in float32.
        shard_size: maximum size of a weights file, such as 500MB.
        uses_own_class: use modeling_diffllm.py even if a class of transformers fits.

    Raises CheckpointError for a missing or damaged checkpoint, ConfigError if `out` exists or the
    model cannot be exported, and DataError if the tokenizer cannot be converted to a fast
    tokenizer.
    """
    cfg = load_run_config(run)
    layout = layout_of(cfg.model, uses_own_class)
    check_absent(out, "out")

    # Called again with a newer checkpoint if training deletes this one during the export.
    def write(checkpoint: Path) -> int:
        with writing(f"out={out}"), new_directory(out) as hidden:
            tensors = tensors_of(cfg.model, checkpoint, dtype)
            write_safetensors(hidden, "model", checkpoint, tensors, shard_size, layout.exported)
            tokenizer = export_tokenizer(run, hidden, cfg.model)
            write_configs(hidden, layout, tokenizer, dtype)
            write_card(run, checkpoint, hidden, cfg, layout, out.name)
        return step_of(checkpoint)

    return layout, with_checkpoint(run, step, write)


def export_tokenizer(run: Path, directory: Path, model: ModelConfig) -> Tokenizer:
    """Write the tokenizer of a run to `directory` as a fast tokenizer; return the tokenizer.

    Also copy a sentencepiece file. Raises CheckpointError if the tokenizer has more than
    `model.vocab_size` tokens, and DataError if it cannot be converted to a fast tokenizer.
    """
    path = tokenizer_of(run)
    tokenizer = Tokenizer.from_file(path)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"the tokenizer {path} has {tokenizer.vocab_size} tokens, more than model.vocab_size="
            f"{model.vocab_size}; restore the tokenizer that the run was trained with"
        )
    if path.name == MODEL:
        (directory / MODEL).write_bytes(tokenizer_files(path)[MODEL])
    (directory / FAST).write_text(exported_tokenizer(path, tokenizer).to_str(), encoding="utf-8")
    return tokenizer


def exported_tokenizer(path: Path, tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """Convert `tokenizer`, which was loaded from `path`, to a fast tokenizer with equal ids.

    transformers adds tokens to texts as the post-processor says. Training adds only an EOS after
    each document, so the result has no post-processor, except for the BOS of an imported model.
    """
    if path.name == MODEL:
        fast = fast_tokenizer(path)
    else:
        content = json.loads(path.read_bytes())
        content |= {"post_processor": None, "truncation": None, "padding": None}
        fast = tokenizers.Tokenizer.from_str(json.dumps(content))
    if tokenizer.bos_id is not None:
        bos = tokenizer.piece(tokenizer.bos_id)
        special = [(bos, tokenizer.bos_id)]
        fast.post_processor = tokenizers.processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=special
        )
    return fast


def write_configs(
    directory: Path, layout: Layout, tokenizer: Tokenizer, dtype: torch.dtype
) -> None:
    """Write config.json, generation_config.json and tokenizer_config.json into `directory`.

    If the layout uses the class in modeling_diffllm.py, copy modeling_diffllm.py as well.
    """
    # The EOS is the padding, too.
    ids = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.eos_id,
    }
    bos_token = {}
    if tokenizer.bos_id is not None:
        bos_token["bos_token"] = tokenizer.piece(tokenizer.bos_id)
    config = {
        "architectures": [layout.architecture],
        **layout.config,
        **ids,
        "use_cache": True,
        "dtype": dtype_name(dtype),
    }
    if layout.architecture == ARCHITECTURE:
        shutil.copyfile(MODELLING, directory / MODELLING.name)
        config["transformers_version"] = OLDEST
        config["auto_map"] = {
            "AutoConfig": "modeling_diffllm.DiffLLMConfig",
            "AutoModel": "modeling_diffllm.DiffLLMModel",
            "AutoModelForCausalLM": f"modeling_diffllm.{ARCHITECTURE}",
        }
    files = {
        "config": config,
        "generation_config": {**ids, "do_sample": False},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **bos_token,
            "eos_token": tokenizer.eos_token,
            "pad_token": tokenizer.eos_token,
            # Generation continues the last column of a batch.
            "padding_side": "left",
            # Decode and encode like `Tokenizer`: all spaces stay, and the text of a special token
            # is ordinary text.
            "clean_up_tokenization_spaces": False,
            "split_special_tokens": True,
            "model_max_length": layout.config["max_position_embeddings"],
            "model_input_names": ["input_ids", "attention_mask"],
        },
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(
            json.dumps(content, indent=2) + "\n", encoding="utf-8"
        )


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

These are the numbers of one run. The model has not been evaluated on tasks or for safety.{carried}
"""
RESULTS = {
    "train_loss": "training loss, mean of the last steps, in nats per token",
    "heldout_loss": "held-out loss, in nats per token",
    "heldout_bits_per_byte": "held-out bits per byte",
}
"""Rows of the model card: key in summary.json, and title."""
MODELING_NOTE = """ `modeling_diffllm.py`
implements the model for transformers 5.4 or later; load it with `trust_remote_code=True`, or
`import diffllm.interop` first."""


def write_card(
    run: Path, checkpoint: Path, directory: Path, cfg: TrainConfig, layout: Layout, name: str
) -> None:
    """Write README.md, the model card of an export, into `directory`.

    The card contains the losses of the run only if the checkpoint is from the last step.
    """
    facts = read_facts(run)
    summary = read_summary(run)
    state = read_state(checkpoint)
    variant = cfg.resolved.choices["attention"]
    rows = {
        "architecture": layout.architecture,
        "attention": variant,
        **origin_rows(facts, state, cfg),
        "hash of the data": facts.get("corpus"),
    }
    if summary is not None and summary.get("steps") == state["step"]:
        for key, title in RESULTS.items():
            # A diverged run has null instead of a loss.
            if summary.get(key) is not None:
                rows[title] = f"{summary[key]:.4f}"
        rows["held-out tokens"] = summary.get("heldout_tokens")
    lines = [f"| {title} | {value} |" for title, value in rows.items() if value is not None]
    n_parameters = sum(math.prod(shape) for shape in state["parameters"].values())
    has_modelling_file = layout.architecture == ARCHITECTURE
    card = CARD.format(
        name=name,
        variant=variant,
        millions=n_parameters / 1e6,
        line=facts.get("variant_line", ""),
        remote=", trust_remote_code=True" if has_modelling_file else "",
        rows="\n".join(lines),
        carried=MODELING_NOTE if has_modelling_file else "",
    )
    (directory / "README.md").write_text(card, encoding="utf-8")


def origin_rows(facts: dict[str, Any], state: dict[str, Any], cfg: TrainConfig) -> dict[str, Any]:
    """Return the rows of the model card that describe the origin of the model, by row title.

    `facts` is the content of run.json, and `state` that of the checkpoint's state.json. The rows of
    a trained model contain the training step, the tokens of all stages, and the training data. The
    rows of an imported model contain the original model and the conversion.
    """
    imported = facts.get("imported")
    if imported:
        return {
            "weights from": imported.get("from"),
            "at revision": imported.get("revision"),
            "converted to": imported.get("converted"),
        }
    resumed = named_in(cfg.resume)
    # The tokens of earlier stages; the state of the loop counts those of this stage.
    previous_tokens = (facts.get("previous") or {}).get("tokens") or 0
    tokens = tokens_of(state["loop"]) if state["loop"] else 0
    sources = [f"{name}: {source_text(source)}" for name, source in cfg.data.sources.items()]
    return {
        "weights from": str(resumed.path) if resumed else None,
        "step": f"{state['step']:,}",
        "tokens trained on": f"{previous_tokens + tokens:,}",
        "data": "; ".join(sources) or source_text(cfg.data),
    }


def source_text(source: TextConfig) -> str:
    """Return a text that describes a source of training data.

    For a hub dataset, the text contains its name and revision; for files, the first 5 file names.
    Otherwise the text is the kind of the corpus, for example "stdlib".
    """
    if source.dataset:
        text = str(source.dataset)
        if source.name:
            text += f" ({source.name})"
        if source.revision:
            text += f" at revision {source.revision}"
        return text
    if source.paths:
        names = [Path(path).name for path in source.paths[:5]]
        return f"files {', '.join(names)}"
    return str(source.source)
