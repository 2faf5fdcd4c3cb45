"""The texts at the start and at the end of a run, and the facts in them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffllm.config import TrainConfig
from diffllm.config.help import variant_line
from diffllm.config.plugins import plugin_versions
from diffllm.data import (
    Prepared,
    heldout_tokens,
    packing_counts,
    sequences_of_epoch,
    training_samples,
)
from diffllm.data.samples import Samples
from diffllm.data.shards import Split
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.metrics.display import duration
from diffllm.metrics.wandb_run import resolve_mode
from diffllm.model.auto_setting import dtype_name
from diffllm.training.build import Training
from diffllm.training.choices import for_json
from diffllm.training.loop import Trained
from diffllm.training.state import LoopState

FEW_HELDOUT = 1000
"""Fewer held-out tokens give a noisy loss."""


def headline(cfg: TrainConfig, facts: dict[str, Any], data: Prepared, path: Path, step: int) -> str:
    """The lines printed before the first step; `facts` are those of `describe`."""
    choices, splits = cfg.run.choices, data.manifest.splits
    millions = facts["parameters"] / 1e6
    lines = [
        f"{path}" + (f" continues after step {step}" if step else ""),
        f"{choices['attention']} / {choices['model']}: {millions:.2f}M parameters, "
        f"{facts['ranks']} x {facts['device']}, {facts['compute_dtype']}",
        *([f"matched: {cfg.run.matched.text()}"] if cfg.run.matched else []),
        *([weights_text(facts["weights"])] if "weights" in facts else []),
        f"{choices['data']}: {training_text(splits['train'])}, {heldout_text(data)}; "
        f"{cfg.steps:,} steps of {cfg.global_batch_size} x {cfg.seq_len} tokens, "
        f"{epochs_text(cfg, data)}",
        *([f"corpus: {data.manifest.note}"] if data.manifest.note else []),
        *sources_text(cfg, data),
        *packing_text(cfg, data),
        f"wandb: {wandb_text(cfg, path)}",
        "chosen for this device:",
        *(
            f"  {name.replace('_', ' '):<16}{choice['value']} ({choice['reason']})"
            for name, choice in facts["choices"].items()
        ),
    ]
    return "\n".join(lines)


def weights_text(weights: dict[str, Any]) -> str:
    """Describe the origin of the weights and the model's differences."""
    step = f", step {weights['step']:,}" if weights["step"] is not None else ""
    differs = f"; differs: {weights['differs']}" if weights["differs"] else ""
    return f"weights of {weights['path']}{step}{differs}; optimizer and data begin anew"


def training_text(split: Split) -> str:
    """Return the number of training tokens and the share that is predicted."""
    predicted = f", {split.share_predicted:.0%} of them to be predicted" * split.masked
    return f"{split.tokens:,} training tokens{predicted}"


def heldout_text(data: Prepared) -> str:
    """Return the size and origin of the held-out text, with a warning if it is small."""
    tokens = data.manifest.splits["heldout"].tokens
    few = tokens < FEW_HELDOUT
    return (
        f"{tokens:,} held out{', the end of the text' * data.manifest.cut}"
        f"{', which says little: a larger data.heldout_fraction holds out more' * few}"
    )


def epochs_text(cfg: TrainConfig, data: Prepared) -> str:
    """Express the length of a run in passes over the training split."""
    sequences = sequences_of_epoch(data, cfg.data, cfg.seq_len)
    epochs = cfg.steps * cfg.global_batch_size / sequences
    number = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    return f"{number} epoch{'s' * (number != '1')}"


def sources_text(cfg: TrainConfig, data: Prepared) -> list[str]:
    """Say how much of each source of a mixture a run reads, a line each."""
    if not data.sources:
        return []
    total = cfg.steps * cfg.global_batch_size
    read = samples_of(cfg, data).consumed(total)
    lines = []
    for name, source in data.sources.items():
        tokens, epochs = read[f"data/tokens/{name}"], read[f"data/epochs/{name}"]
        lines.append(
            f"  {name:<16}{tokens / (total * cfg.seq_len):.1%} of the run, {epochs:.2g} epochs of "
            f"{source.manifest.splits['train'].tokens:,} tokens"
        )
    return lines


def samples_of(cfg: TrainConfig, data: Prepared) -> Samples:
    """Return the samples of the run in their order."""
    total = cfg.steps * cfg.global_batch_size
    return training_samples(data, cfg.data, cfg.seq_len, cfg.seed, total)


def packing_text(cfg: TrainConfig, data: Prepared) -> list[str]:
    """Describe the packing of the training split, if any."""
    counts = packing_counts(data, cfg.data, cfg.seq_len)
    return [f"packing: {counts.text()}"] if counts else []


def packing_facts(cfg: TrainConfig, data: Prepared) -> dict[str, float] | None:
    """Return packing counts for run.json; None without packing."""
    counts = packing_counts(data, cfg.data, cfg.seq_len)
    return counts.numbers() if counts else None


def wandb_text(cfg: TrainConfig, path: Path) -> str:
    """Say where wandb records a run, and how to upload what was recorded offline."""
    mode, place = resolve_mode(cfg.wandb), path / "wandb"
    if mode == "disabled":
        return "off"
    if mode == "offline":
        return f"offline; `wandb sync {place}/offline-run-*` uploads it"
    project = "/".join(filter(None, (cfg.wandb.entity, cfg.wandb.project)))
    return f"online, project {project}, a copy in {place}"


def describe(cfg: TrainConfig, t: Training, data: Prepared) -> dict[str, Any]:
    """Facts about a run beyond its config, for run.json and wandb's config."""
    params = sum(p.numel() for p in t.params.values())
    heldout, eos_id = data.split("heldout"), data.manifest.eos_id
    return {
        "parameters": params,
        "active_parameters": t.model.active_parameters(),
        "flops_per_token": t.model.flops_per_token(),
        "corpus": data.manifest.corpus,
        "corpus_note": data.manifest.note,
        "tokenizer": data.manifest.pieces_hash,
        "heldout_unigram_entropy": data.manifest.heldout_unigram_entropy,
        "heldout_tokens": heldout_tokens(heldout, eos_id, cfg.eval.tokens),
        "packing": packing_facts(cfg, data),
        "device": torch.cuda.get_device_name(t.device) if t.device.type == "cuda" else "CPU",
        "ranks": dist.get_world_size(),
        "compute_dtype": dtype_name(t.compute_dtype),
        "torch": torch.__version__,
        "plugin_code": plugin_versions(cfg.plugins),
        "variant_line": variant_line(cfg.run.choices["attention"], cfg.model.attention),
        "compiled": t.choices["compile"].value,
        "choices": for_json(t.choices),
    }


def summarise(
    cfg: TrainConfig,
    state: LoopState,
    data: Prepared,
    trained: Trained,
    losses: DocumentLosses | None,
) -> dict[str, Any]:
    """Return the numbers of a run that has ended; None for numbers that are not finite.

    Args:
        losses: losses of held-out documents; None if the run stopped because it diverged.
    """
    entropy, train_loss = data.manifest.heldout_unigram_entropy, state.spikes.recent_loss(20)
    bits = samples_of(cfg, data).bits_per_nat(state.step * cfg.global_batch_size)
    found = {
        "variant": cfg.run.choices["attention"],
        "diverged": losses is None or not math.isfinite(losses.loss),
        "stopped": trained.diverged,
        "steps": state.step,
        "tokens": state.step * cfg.global_batch_size * cfg.seq_len,
        "train_loss": train_loss,
        "train_bits_per_byte": None if bits is None else bits * train_loss,
        **heldout_numbers(losses, list(data.sources)),
        "heldout_tokens": int(losses.tokens.sum()) if losses else 0,
        "heldout_documents": len(losses.tokens) if losses else 0,
        "heldout_unigram_entropy": entropy,
        "packing": packing_facts(cfg, data),
        "tokens_per_s": trained.speed,
        "seconds": state.seconds,
        "matched": cfg.run.matched.numbers() if cfg.run.matched else None,
        **state.spikes.metrics(),
    }
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in found.items()
    }


def heldout_numbers(losses: DocumentLosses | None, sources: Sequence[str]) -> dict[str, float]:
    """Return held-out losses in nats per token and bits per byte, of all documents and each source;
    NaN if not measured."""
    if losses is None:
        ends = ["", *(f"/{name}" for name in sources)]
        names = [f"heldout_{unit}{end}" for unit in ("loss", "bits_per_byte") for end in ends]
        return dict.fromkeys(names, math.nan)
    each = {"": losses}
    each |= {f"/{name}": own for i, name in enumerate(sources) if (own := losses.of_source(i))}
    nats = {f"heldout_loss{end}": of.loss for end, of in each.items()}
    return nats | {f"heldout_bits_per_byte{end}": of.bits_per_byte for end, of in each.items()}


def summary_text(
    cfg: TrainConfig, summary: dict[str, Any], path: Path, text: str, report: str
) -> str:
    """The end of a run, a sample of its text and the path of its report included."""
    spikes, events = (below(summary, name) for name in ("spikes", "spikes_detrended"))
    speed = summary["tokens_per_s"]
    skipped = summary["spikes/skipped_total"]
    steps = "the last 20 steps" if summary["steps"] > 20 else "all steps"
    train, known = summary["train_loss"], summary.get("train_bits_per_byte")
    bits = "" if known is None else f"; {known:.2f} bits a byte"
    rows = [
        (
            "train loss",
            "not finite at any step"
            if train is None
            else f"{train:.3f} nats a token, mean of {steps}{bits}",
        ),
        ("held-out loss", heldout_words(summary)),
        *sources_rows(summary),
        ("tokens", f"{summary['tokens']:,} in {duration(summary['seconds'])}"),
        (
            "speed",
            f"{speed:,.0f} tokens a second, median of logged steps"
            if speed
            else "nothing was left to train",
        ),
        (
            "spikes",
            f"loss {spikes['loss_total']:.0f}, gradient norm {spikes['grad_total']:.0f}; events "
            f"without the trend {events['loss_total']:.0f}, {events['grad_total']:.0f}",
        ),
        *([("skipped", f"{skipped:.0f} updates")] if skipped else []),
        *([("matched", cfg.run.matched.text())] if cfg.run.matched else []),
        ("run", f"{path}/: metrics.jsonl, checkpoints/, config.yaml"),
        ("report", report),
        ("sample again", f'diffllm generate run={path} prompt="..."'),
    ]
    if cfg.plugins:
        name, again = rows.pop()
        rows.append((name, f"{again} plugins=[{','.join(cfg.plugins)}]"))
    table = "\n".join(f"{name:<14}{what}" for name, what in rows)
    return f"\n{text}\n\n{table}"


def heldout_words(summary: dict[str, Any]) -> str:
    """Compare the held-out loss with the unigram entropy."""
    if summary.get("stopped"):
        return "not measured: the run diverged"
    loss, entropy = summary["heldout_loss"], summary["heldout_unigram_entropy"]
    if loss is None or not math.isfinite(loss):
        return "not finite: the run diverged"
    documents, side = summary["heldout_documents"], "under" if loss <= entropy else "over"
    bits = summary["heldout_bits_per_byte"]
    in_bits = "" if bits is None else f"{bits:.2f} bits a byte; "  # None: there is no text
    return (
        f"{loss:.3f}, {abs(entropy - loss):.2f} {side} the unigram entropy {entropy:.3f}; {in_bits}"
        f"{summary['heldout_tokens']:,} tokens, {documents:,} document{'s' * (documents != 1)}"
    )


def sources_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Format the held-out losses of sources as a row; empty without losses."""
    own, bits = below(summary, "heldout_loss"), below(summary, "heldout_bits_per_byte")
    words = [
        f"{name} {loss:.3f}" + ("" if bits[name] is None else f" ({bits[name]:.2f} bits a byte)")
        for name, loss in own.items()
        if loss is not None
    ]
    return [("  of sources", ", ".join(words))] if words else []


def below(summary: dict[str, Any], section: str) -> dict[str, float]:
    """The numbers of a section, such as one definition of a spike, by the rest of their names."""
    start = f"{section}/"
    return {n.removeprefix(start): value for n, value in summary.items() if n.startswith(start)}
