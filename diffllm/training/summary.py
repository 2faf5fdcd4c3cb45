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
from diffllm.data.heldout import heldout_tokens
from diffllm.data.mixture import Prepared
from diffllm.data.sequences import packing_counts, sequences_of_epoch
from diffllm.data.shards import SPLITS, thin_heldout
from diffllm.data.tokenizer import eos_text, guesses_eos, tokenizer_in
from diffllm.evaluation.heldout import DocumentLosses
from diffllm.metrics.display import duration, frequency_text, spike_text
from diffllm.metrics.wandb_config import resolve_mode, with_variables
from diffllm.metrics.wandb_directories import sync_command, wandb_parent
from diffllm.model.auto_setting import dtype_name
from diffllm.training.build import Training, for_json
from diffllm.training.loop import Trained
from diffllm.training.process import in_sweep
from diffllm.training.state import LoopState, samples_of


def headline(cfg: TrainConfig, facts: dict[str, Any], data: Prepared, path: Path, step: int) -> str:
    """Return the text printed before training.

    `step` is the step of the checkpoint to resume from, or 0 if the run is not resumed. `facts` is
    the content of run.json, and `path` is the run directory.
    """
    choices, manifest = cfg.resolved.choices, data.manifest
    train, heldout = (manifest.splits[split] for split in SPLITS)
    millions = facts["parameters"] / 1e6
    device = facts["device"]
    if device == "CPU":
        threads = torch.get_num_threads()
        device = "CPU with 1 thread" if threads == 1 else f"CPU with {threads} threads"
    files = f" ({manifest.source})" * (choices["data"] == "files")
    predicted = f", {train.share_predicted:.0%} of them targets" * train.masked
    lines = [
        *([f"{path} resumes from step {step}"] if step else []),
        f"{choices['attention']} / {choices['model']}: {millions:.2f}M parameters, "
        f"{facts['ranks']} x {device}, {facts['compute_dtype']}",
    ]
    if cfg.resolved.defaults:
        lines.append(f"defaults: {cfg.resolved.defaults}")
    if cfg.resolved.matched:
        lines.append(f"matched: {cfg.resolved.matched.text()}")
    if weights := facts.get("weights") or facts.get("previous"):
        of_step = "" if weights["step"] is None else f", step {weights['step']:,}"
        differs = f"; differs: {weights['differs']}" if weights["differs"] else ""
        unknown = "" if weights["corpus"] else ", trained on an unknown corpus"
        source = f"{weights['path']}{of_step}{unknown}{differs}"
        if "previous" in facts:
            lines.append(f"next stage of {source}; the schedule and data start from the beginning")
        else:
            lines.append(f"weights of {source}; optimizer and data start from the beginning")
        if weights["bos_token"]:
            lines.append(
                f"the tokenizer of these weights puts the BOS {weights['bos_token']!r} before each "
                "text; the training data contains no BOS"
            )
    lines.append(
        f"{choices['data']}{files}: {train.tokens:,} training tokens{predicted}, "
        f"{heldout.tokens:,} held out{', cut from one text' * manifest.cut}; "
        f"{cfg.steps:,} steps of {cfg.global_batch_size} x {cfg.seq_len} tokens, "
        f"{epochs_text(cfg, data)}"
    )
    if cfg.data.tokenizer:
        lines.append(eos_text(facts["eos_token"], manifest.eos_id, facts["eos_guessed"]))
    lines += export_notes(cfg, tokenizer_in(data.directory))
    if thin := thin_heldout(heldout.documents, heldout.tokens):
        lines.append(thin)
    if manifest.note:
        lines.append(f"corpus: {manifest.note}")
    lines += sources_text(cfg, data)
    if counts := packing_counts(data, cfg.data, cfg.seq_len):
        lines.append(f"packing: {counts.text()}")
    # A sweep prints one command that uploads all of its runs.
    if not (in_sweep() and resolve_mode(cfg.wandb) == "offline"):
        lines.append(f"wandb: {wandb_text(cfg, path, facts['wandb_id'])}")
    lines.append("chosen for this device:")
    lines += [
        f"  {name.replace('_', ' '):<16}{setting['value']} ({setting['reason']})"
        for name, setting in facts["choices"].items()
    ]
    return "\n".join(lines)


def export_notes(cfg: TrainConfig, tokenizer: Path) -> list[str]:
    """Return why `diffllm export` will refuse this run; the result is empty for most runs."""
    notes = []
    try:
        layout_of(cfg.model, own=False)
    except ConfigError as error:
        notes.append(f"diffllm export will refuse this run: {error}")
    if obstacle := export_obstacle(tokenizer):
        notes.append(f"diffllm export will refuse the tokenizer of this run, because {obstacle}")
    return notes


def epochs_text(cfg: TrainConfig, data: Prepared) -> str:
    sequences = sequences_of_epoch(data, cfg.data, cfg.seq_len)
    epochs = cfg.steps * cfg.global_batch_size / sequences
    number = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
    return f"{number} epoch{'s' * (number != '1')}"


def sources_text(cfg: TrainConfig, data: Prepared) -> list[str]:
    """Return one line per source of a data mixture: share of training tokens, epochs and size."""
    total = cfg.steps * cfg.global_batch_size
    read = samples_of(cfg, data).consumed(total) if data.sources else {}
    return [
        f"  {name:<16}{read[f'data/tokens/{name}'] / (total * cfg.seq_len):.1%} of the run, "
        f"{read[f'data/epochs/{name}']:.2g} epochs of "
        f"{source.manifest.splits['train'].tokens:,} tokens"
        for name, source in data.sources.items()
    ]


def wandb_text(cfg: TrainConfig, path: Path, run_id: str) -> str:
    mode = resolve_mode(cfg.wandb)
    if mode == "disabled":
        return "off"
    if mode == "offline":
        return f"offline; `{sync_command(wandb_parent(path), run_id)}` uploads it"
    used = with_variables(cfg.wandb)
    project = "/".join(filter(None, (used.entity, used.project)))
    return f"online, project {project}, a copy in {wandb_parent(path) / 'wandb'}"


def describe(cfg: TrainConfig, t: Training, data: Prepared) -> dict[str, Any]:
    """Return properties of a run that are not in the config, such as the device, for run.json."""
    params = sum(p.numel() for p in t.params.values())
    heldout, eos_id = data.split("heldout"), data.manifest.eos_id
    packing = packing_counts(data, cfg.data, cfg.seq_len)
    return {
        "parameters": params,
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
    cfg, train_loss = t.cfg, state.spikes.recent_loss(20)
    visible_keys = state.visible_keys.mean if t.documents else None
    packing = packing_counts(data, cfg.data, cfg.seq_len)
    bits = samples_of(cfg, data, state.stage).bits_per_nat(state.tokens // cfg.seq_len)
    measured = {"": losses}
    measured |= {f"/{name}": losses and losses.of_source(i) for i, name in enumerate(data.sources)}
    if losses:
        measured = {end: own for end, own in measured.items() if own}
    diverged = losses is None or not math.isfinite(losses.loss)
    found = {
        "variant": cfg.resolved.choices["attention"],
        "state": "diverged" if diverged else "finished",
        "reason": trained.diverged or ("no finite held-out loss" if diverged else None),
        "diverged": diverged,
        "stopped": trained.diverged,
        "steps": state.step,
        "tokens": state.tokens,
        "train_loss": train_loss,
        "train_bits_per_byte": None if bits is None else bits * train_loss,
        **{f"heldout_loss{end}": of and of.loss for end, of in measured.items()},
        **{f"heldout_bits_per_byte{end}": of and of.bits_per_byte for end, of in measured.items()},
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
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in found.items()
    }


def summary_text(cfg: TrainConfig, summary: dict[str, Any], path: Path, report: str) -> str:
    """Return the text printed at the end of a run in directory `path`.

    `report` is the path of the report, or the reason why the report is missing.
    """
    train, bits = summary["train_loss"], summary.get("train_bits_per_byte")
    steps = "the last 20 steps" if summary["steps"] > 20 else "all steps"
    speed, skipped = summary["tokens_per_s"], summary["spikes/skipped_total"]
    sources = [name for name in summary if name.startswith("heldout_loss/")]
    again = f'{shlex.join(["diffllm", "generate", f"run={path}"])} prompt="..."'
    again += f" plugins=[{','.join(cfg.plugins)}]" if cfg.plugins else ""
    rows = {
        "train loss": "not finite at any step"
        if train is None
        else f"{train:.3f} nats per token, mean of {steps}{bits_text(bits, '; {}')}",
        "held-out loss": heldout_words(summary),
        "  of sources": ", ".join(
            f"{name.partition('/')[2]} {summary[name]:.3f}"
            f"{bits_text(summary[name.replace('loss', 'bits_per_byte', 1)], ' ({})')}"
            for name in sources
            if summary[name] is not None
        ),
        "tokens": f"{summary['tokens']:,} in {duration(summary['seconds'])}",
        "speed": f"{speed:,.0f} tokens per second, median of logged steps"
        if speed
        else "no steps were left to train",
        "visible keys": keys_text(summary["visible_keys"], cfg.seq_len),
        "spikes": spike_text(summary),
        "skipped": f"{skipped:.0f} updates" if skipped else "",
        "matched": cfg.resolved.matched.text() if cfg.resolved.matched else "",
        "run": f"{path}/: metrics.jsonl, checkpoints/, config.yaml",
        "report": report,
        "sample again": again,
    }
    table = "\n".join(f"{name:<14}{what}" for name, what in rows.items() if what)
    return f"\n{sample_label(cfg.data.sample_prompt)}\n{summary['sample']}\n\n{table}"


def sample_label(prompt: str | None) -> str:
    """Return the line above the generated text, which begins with `prompt`."""
    start = "the beginning of the held-out text" if prompt is None else json.dumps(prompt)
    return f"sample after {start}:"


def keys_text(keys: float | None, seq_len: int) -> str:
    whole = (seq_len + 1) / 2
    return "" if keys is None else f"{keys:,.4g} per query, {whole:,.10g} in whole sequences"


def heldout_words(summary: dict[str, Any]) -> str:
    if summary.get("stopped"):
        return "not measured: the run diverged"
    loss, entropy = summary["heldout_loss"], summary["heldout_unigram_entropy"]
    if loss is None or not math.isfinite(loss):
        return "not finite: the run diverged"
    documents = summary["heldout_documents"]
    return (
        f"{loss:.3f}, {frequency_text(loss, entropy)} ({entropy:.3f}); "
        f"{bits_text(summary['heldout_bits_per_byte'], '{}; ')}"
        f"{summary['heldout_tokens']:,} tokens, {documents:,} document{'s' * (documents != 1)}"
    )


def bits_text(bits: float | None, form: str) -> str:
    return "" if bits is None else form.format(f"{bits:.2f} bits per byte")
