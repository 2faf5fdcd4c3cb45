"""Texts printed at the start and end of a run; content of run.json and summary.json."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffllm.checkpoint.hf.layout import layout_of
from diffllm.checkpoint.hf.tokenizer import export_obstacle
from diffllm.config import TrainConfig
from diffllm.config.help import variant_line
from diffllm.config.plugins import plugin_versions
from diffllm.core.errors import ConfigError
from diffllm.core.run_files import RunFolder
from diffllm.data.heldout import heldout_tokens
from diffllm.data.prepared import Prepared
from diffllm.data.sequences import packing_counts, sequences_of_epoch
from diffllm.data.shards import thin_heldout
from diffllm.data.tokenizer import eos_text, guesses_eos, tokenizer_in
from diffllm.distributed.launcher import in_sweep
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.metrics.display import duration, frequency_text, spike_text
from diffllm.metrics.wandb_config import resolve_mode, with_variables
from diffllm.metrics.wandb_directories import sync_command, wandb_parent
from diffllm.model.auto_setting import dtype_name
from diffllm.training.build import Training, for_json
from diffllm.training.loop import Trained
from diffllm.training.state import LoopState, samples_of


def headline(cfg: TrainConfig, facts: dict[str, Any], data: Prepared, path: Path, step: int) -> str:
    """Return the text printed before training.

    `step` is the step of the checkpoint to resume from, or 0 if the run is not resumed. `facts` is
    the content of run.json, and `path` is the run directory.
    """
    lines = []
    if step:
        lines.append(f"{path} resumes from step {step}")
    lines.append(model_line(cfg, facts))
    if cfg.resolved.defaults:
        lines.append(f"defaults: {cfg.resolved.defaults}")
    if cfg.resolved.matched:
        lines.append(f"matched: {cfg.resolved.matched.text()}")
    lines += origin_lines(facts)
    lines += data_lines(cfg, facts, data)
    # A sweep prints one command that uploads all of its runs.
    if not (in_sweep() and resolve_mode(cfg.wandb) == "offline"):
        lines.append(f"wandb: {wandb_text(cfg, path, facts['wandb_id'])}")
    lines.append("chosen for this device:")
    for name, setting in facts["choices"].items():
        lines.append(f"  {name.replace('_', ' '):<16}{setting['value']} ({setting['reason']})")
    return "\n".join(lines)


def model_line(cfg: TrainConfig, facts: dict[str, Any]) -> str:
    choices = cfg.resolved.choices
    millions = facts["parameters"] / 1e6
    device = facts["device"]
    if device == "CPU":
        threads = torch.get_num_threads()
        device = "CPU with 1 thread" if threads == 1 else f"CPU with {threads} threads"
    return (
        f"{choices['attention']} / {choices['model']}: {millions:.2f}M parameters, "
        f"{facts['ranks']} x {device}, {facts['compute_dtype']}"
    )


def data_lines(cfg: TrainConfig, facts: dict[str, Any], data: Prepared) -> list[str]:
    """Describe the training data, its tokenizer and its packing; `facts` as in `headline`."""
    choices = cfg.resolved.choices
    manifest = data.manifest
    train = manifest.splits["train"]
    heldout = manifest.splits["heldout"]
    source = f" ({manifest.source})" if choices["data"] == "files" else ""
    share = f", {train.share_predicted:.0%} of them targets" if train.masked else ""
    cut = ", cut from one text" if manifest.cut else ""
    lines = [
        f"{choices['data']}{source}: {train.tokens:,} training tokens{share}, "
        f"{heldout.tokens:,} held out{cut}; "
        f"{cfg.steps:,} steps of {cfg.global_batch_size} x {cfg.seq_len} tokens, "
        f"{epochs_text(cfg, data)}"
    ]
    if cfg.data.tokenizer:
        lines.append(eos_text(facts["eos_token"], manifest.eos_id, facts["eos_guessed"]))
    lines += export_notes(cfg, tokenizer_in(data.directory))
    thin_note = thin_heldout(heldout.documents, heldout.tokens)
    if thin_note:
        lines.append(thin_note)
    if manifest.note:
        lines.append(f"corpus: {manifest.note}")
    lines += sources_text(cfg, data)
    counts = packing_counts(data, cfg.data, cfg.seq_len)
    if counts:
        lines.append(f"packing: {counts.text()}")
    return lines


def origin_lines(facts: dict[str, Any]) -> list[str]:
    """Describe the weights or the previous stage from which a run starts; [] for a new model."""
    origin = facts.get("weights") or facts.get("previous")
    if not origin:
        return []
    source = origin["path"]
    if origin["step"] is not None:
        source += f", step {origin['step']:,}"
    if not origin["corpus"]:
        source += ", trained on an unknown corpus"
    if origin["differs"]:
        source += f"; differs: {origin['differs']}"
    if "previous" in facts:
        lines = [f"next stage of {source}; the schedule and data start from the beginning"]
    else:
        lines = [f"weights of {source}; optimizer and data start from the beginning"]
    if origin["bos_token"]:
        lines.append(
            f"the tokenizer of these weights puts the BOS {origin['bos_token']!r} before each "
            "text; the training data contains no BOS"
        )
    return lines


def export_notes(cfg: TrainConfig, tokenizer: Path) -> list[str]:
    """Return why `diffllm export` will refuse this run; the result is empty for most runs."""
    notes = []
    try:
        layout_of(cfg.model)
    except ConfigError as error:
        notes.append(f"diffllm export will refuse this run: {error}")
    obstacle = export_obstacle(tokenizer)
    if obstacle:
        notes.append(f"diffllm export will refuse the tokenizer of this run, because {obstacle}")
    return notes


def epochs_text(cfg: TrainConfig, data: Prepared) -> str:
    sequences = sequences_of_epoch(data, cfg.data, cfg.seq_len)
    epochs = cfg.steps * cfg.global_batch_size / sequences
    number = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    return "1 epoch" if number == "1" else f"{number} epochs"


def sources_text(cfg: TrainConfig, data: Prepared) -> list[str]:
    """Return one line per source of a data mixture: share of training tokens, epochs and size."""
    if not data.sources:
        return []
    sequences = cfg.steps * cfg.global_batch_size
    consumed = samples_of(cfg, data).consumed(sequences)
    lines = []
    for name, source in data.sources.items():
        share = consumed[f"data/tokens/{name}"] / (sequences * cfg.seq_len)
        epochs = consumed[f"data/epochs/{name}"]
        tokens = source.manifest.splits["train"].tokens
        lines.append(
            f"  {name:<16}{share:.1%} of the run, {epochs:.2g} epochs of {tokens:,} tokens"
        )
    return lines


def wandb_text(cfg: TrainConfig, path: Path, run_id: str) -> str:
    mode = resolve_mode(cfg.wandb)
    if mode == "disabled":
        return "off"
    if mode == "offline":
        return f"offline; `{sync_command(wandb_parent(path), run_id)}` uploads it"
    wandb_config = with_variables(cfg.wandb)
    project = "/".join(filter(None, (wandb_config.entity, wandb_config.project)))
    return f"online, project {project}, a copy in {wandb_parent(path) / RunFolder.WANDB}"


def describe(cfg: TrainConfig, t: Training, data: Prepared) -> dict[str, Any]:
    """Return properties of a run that are not in the config, such as the device, for run.json."""
    heldout = data.split("heldout")
    eos_id = data.manifest.eos_id
    packing = packing_counts(data, cfg.data, cfg.seq_len)
    return {
        "parameters": sum(p.numel() for p in t.params.values()),
        "active_parameters": t.model.active_parameters(),
        "flops_per_token": t.model.flops_per_token(),  # Without document masks.
        "flops_per_visible_key": t.model.flops_per_visible_key(),
        "corpus": data.manifest.corpus,
        "corpus_note": data.manifest.note,
        "tokenizer": data.manifest.pieces_hash,
        "eos_token": data.tokenizer().eos_token,
        "eos_guessed": guesses_eos(cfg.data.tokenizer, cfg.data.eos_token),
        "heldout_unigram_entropy": data.manifest.heldout_unigram_entropy,
        "heldout_tokens": heldout_tokens(heldout, eos_id, cfg.eval.tokens),
        "heldout_split_tokens": heldout_tokens(heldout, eos_id),
        "packing": packing.numbers() if packing else None,
        "device": torch.cuda.get_device_name(t.device) if t.device.type == "cuda" else "CPU",
        "ranks": dist.get_world_size(),
        "compute_dtype": dtype_name(t.compute_dtype),
        "torch": torch.__version__,
        "plugin_code": plugin_versions(cfg.plugins),
        "variant_line": variant_line(cfg.resolved.choices["attention"], cfg.model.attention),
        "compiled": t.choices["compile"].value,
        "choices": for_json(t.choices),
    }


def summarise(
    t: Training,
    state: LoopState,
    data: Prepared,
    trained: Trained,
    losses: DocumentLosses | None,
) -> dict[str, Any]:
    """Return the content of summary.json; numbers that are not finite become None.

    `losses` are the losses of held-out documents; None if the run diverged.
    """
    cfg = t.cfg
    train_loss = state.spikes.recent_loss(20)
    visible_keys = state.visible_keys.mean if t.documents else None
    packing = packing_counts(data, cfg.data, cfg.seq_len)
    bits = samples_of(cfg, data, state.stage).bits_per_nat(state.tokens // cfg.seq_len)
    diverged = losses is None or not math.isfinite(losses.loss)
    reason = trained.diverged
    if diverged and not reason:
        reason = "no finite held-out loss"
    values = {
        "variant": cfg.resolved.choices["attention"],
        "state": "diverged" if diverged else "finished",
        "reason": reason,
        "diverged": diverged,
        "stopped": trained.diverged,
        "steps": state.step,
        "tokens": state.tokens,
        "train_loss": train_loss,
        "train_bits_per_byte": None if bits is None else bits * train_loss,
        **heldout_values(losses, list(data.sources)),
        "heldout_tokens": int(losses.tokens.sum()) if losses else 0,
        "heldout_documents": len(losses.tokens) if losses else 0,
        "heldout_unigram_entropy": data.manifest.heldout_unigram_entropy,
        "packing": packing.numbers() if packing else None,
        "visible_keys": visible_keys,
        "flops_per_token": t.model.flops_per_token(visible_keys),
        "tokens_per_s": trained.speed,
        "seconds": state.seconds,
        "matched": cfg.resolved.matched.numbers() if cfg.resolved.matched else None,
        **state.spikes.metrics(),
    }
    # JSON has no NaN and no infinity.
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return values


def heldout_values(losses: DocumentLosses | None, sources: list[str]) -> dict[str, float | None]:
    """Return held-out losses and bits per byte by metric name, in total and per data source.

    A source without held-out documents is omitted. If `losses` is None, all values are None.
    """
    losses_by_suffix: dict[str, DocumentLosses | None] = {"": losses}
    for i, name in enumerate(sources):
        losses_of_source = losses.of_source(i) if losses else None
        if losses_of_source or not losses:
            losses_by_suffix[f"/{name}"] = losses_of_source
    values = {}
    for suffix, part in losses_by_suffix.items():
        values[f"heldout_loss{suffix}"] = part.loss if part else None
    for suffix, part in losses_by_suffix.items():
        values[f"heldout_bits_per_byte{suffix}"] = part.bits_per_byte if part else None
    return values


def summary_text(cfg: TrainConfig, summary: dict[str, Any], path: Path, report: str) -> str:
    """Return the text printed at the end of a run in directory `path`.

    `report` is the path of the report, or the reason why the report is missing.
    """
    speed = "no steps were left to train"
    if summary["tokens_per_s"]:
        speed = f"{summary['tokens_per_s']:,.0f} tokens per second, median of logged steps"
    skipped = summary["spikes/skipped_total"]
    generate = f'{shlex.join(["diffllm", "generate", f"run={path}"])} prompt="..."'
    if cfg.plugins:
        generate += f" plugins=[{','.join(cfg.plugins)}]"
    rows = {
        "train loss": train_loss_text(summary),
        "held-out loss": heldout_words(summary),
        "  of sources": source_losses_text(summary),
        "tokens": f"{summary['tokens']:,} in {duration(summary['seconds'])}",
        "speed": speed,
        "visible keys": keys_text(summary["visible_keys"], cfg.seq_len),
        "spikes": spike_text(summary),
        "skipped": f"{skipped:.0f} updates" if skipped else "",
        "matched": cfg.resolved.matched.text() if cfg.resolved.matched else "",
        "run": f"{path}/: metrics.jsonl, checkpoints/, config.yaml",
        "report": report,
        "sample again": generate,
    }
    table = "\n".join(f"{name:<14}{text}" for name, text in rows.items() if text)
    prompt = cfg.data.sample_prompt
    start = "the beginning of the held-out text" if prompt is None else json.dumps(prompt)
    return f"\nsample after {start}:\n{summary['sample']}\n\n{table}"


def train_loss_text(summary: dict[str, Any]) -> str:
    loss = summary["train_loss"]
    if loss is None:
        return "not finite at any step"
    steps = "the last 20 steps" if summary["steps"] > 20 else "all steps"
    bits = bits_text(summary.get("train_bits_per_byte"), "; {}")
    return f"{loss:.3f} nats per token, mean of {steps}{bits}"


def source_losses_text(summary: dict[str, Any]) -> str:
    texts = []
    for name, loss in summary.items():
        if name.startswith("heldout_loss/") and loss is not None:
            bits = bits_text(summary[name.replace("loss", "bits_per_byte", 1)], " ({})")
            texts.append(f"{name.partition('/')[2]} {loss:.3f}{bits}")
    return ", ".join(texts)


def keys_text(keys: float | None, seq_len: int) -> str:
    if keys is None:
        return ""
    without_masks = (seq_len + 1) / 2
    return f"{keys:,.4g} per query, {without_masks:,.10g} in whole sequences"


def heldout_words(summary: dict[str, Any]) -> str:
    if summary.get("stopped"):
        return "not measured: the run diverged"
    loss, entropy = summary["heldout_loss"], summary["heldout_unigram_entropy"]
    if loss is None or not math.isfinite(loss):
        return "not finite: the run diverged"
    count = summary["heldout_documents"]
    documents = "1 document" if count == 1 else f"{count:,} documents"
    return (
        f"{loss:.3f}, {frequency_text(loss, entropy)} ({entropy:.3f}); "
        f"{bits_text(summary['heldout_bits_per_byte'], '{}; ')}"
        f"{summary['heldout_tokens']:,} tokens, {documents}"
    )


def bits_text(bits: float | None, form: str) -> str:
    return "" if bits is None else form.format(f"{bits:.2f} bits per byte")
