"""The start of a run, from the lock on the run directory to the initial parameter values.

Every rank calls `claim`, `prepare_data`, `begin`, `meet` and `fill`, in this order.
"""

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from diffllm.checkpoint.manifest import check_parameters, read_state, tokens_of
from diffllm.config import TrainConfig
from diffllm.config.changes import Changes, changes_text, is_of_model, is_within
from diffllm.config.compose import variant_config
from diffllm.config.origin import named_in, origin_of
from diffllm.config.plugins import plugin_versions
from diffllm.config.run_config import CARRIED
from diffllm.config.saved import changes_to, flatten, yaml_dict
from diffllm.core.errors import CheckpointError, DataError, UserError
from diffllm.core.keys import declaration_of, declarations
from diffllm.data.mixture import Prepared
from diffllm.data.preparation.prepare import RunHashes, prepare
from diffllm.data.sequences import packing_counts
from diffllm.data.text.skipped import rule_text, skipped_text
from diffllm.data.tokenizer import tokenizer_in
from diffllm.distributed.consistency import check_same, check_tensors, code_version
from diffllm.distributed.gradients import local
from diffllm.distributed.launcher import keep_mode, ranks_on_first_node
from diffllm.distributed.world import World
from diffllm.metrics.events import Event, append_stall
from diffllm.metrics.records import read_record, stopped_text
from diffllm.model import without_storage
from diffllm.model.config import InitMatch
from diffllm.model.init_match import write_factors
from diffllm.training.build import Training, chosen_precision
from diffllm.training.checks import (
    check_fit,
    check_pieces,
    check_same_tokens,
    corpus_facts,
    former_eos,
    starting_point,
)
from diffllm.training.directory import REQUEUE_FILE, RunDirectory, claim_directory, ending
from diffllm.training.memory import check_memory
from diffllm.training.process import Process, in_sweep, log_file
from diffllm.training.state import (
    LoopState,
    continuation,
    continued,
    corpus_of,
    restore,
    samples_of,
)
from diffllm.training.wandb_id import choose_wandb_id


class Claimed(NamedTuple):
    """The locked run directory `path`, and the checkpoint or other model to start from."""

    path: Path
    ended: dict[str, Any] | None
    """Summary of the run if the run is already finished, else None."""
    checkpoint: Path | None
    ranks: int
    """World size of the checkpoint; 0 without a checkpoint."""
    origin: Path | None
    """Checkpoint or model directory of resume=weights:PATH or stage:PATH; None in a resumed run."""
    eos_token: str | None
    """Result of `former_eos`, or data.eos_token in a new run."""
    hashes: RunHashes
    """Corpus hash of the checkpoint, and tokenizer hash of the resumed run or previous stage."""
    directory: RunDirectory | None
    """Holds the lock on rank 0; None on other ranks."""
    saved: dict[str, Any] | None
    """Content of the checkpoint's state.json; None on other ranks than 0 or without checkpoint."""


def claim(cfg: TrainConfig, here: Process) -> Claimed:
    """Check that code and config are equal on all ranks, and lock the run directory on rank 0.

    Return the run directory, and the checkpoint or weights to start from.
    """
    plugins = plugin_versions(cfg.plugins).items()
    check_same(here.world, "code", code_version() | {f"plugin {name}": v for name, v in plugins})
    declared = declarations(cfg)
    shared = {
        key: value
        for key, value in flatten(yaml_dict(cfg)).items()
        if "machine" not in declaration_of(key, declared).kinds
    }
    check_same(here.world, "config", shared)
    told, kept = here.world.broadcast_and_keep("run", lambda: claim_on_rank_0(cfg, here.world.size))
    directory, saved = kept or (None, None)
    path, checkpoint, origin = (text and Path(text) for text in told["paths"])
    if told["ended"]:
        here.display.print(f"{path} {ended_text(told['ended'])}")
    return Claimed(
        path, told["ended"], checkpoint, told["ranks"], origin, told["eos_token"],
        RunHashes(*told["hashes"]), directory, saved,
    )  # fmt: skip


def claim_on_rank_0(
    cfg: TrainConfig, world_size: int
) -> tuple[dict[str, Any], tuple[RunDirectory, dict[str, Any] | None]]:
    """Lock the run directory, and choose the checkpoint or weights to start from.

    Raises ConfigError if the run cannot fit into memory. An error removes a new directory again.

    Return (shared, private). `shared` contains JSON values, from which every rank makes its
    `Claimed`. `private` is only for rank 0: the locked directory, and the content of the
    checkpoint's state.json. Without a checkpoint, None takes the place of this content.
    """
    directory = claim_directory(cfg)
    checkpoint = saved = origin = tokenizer_hash = None
    eos_token = cfg.data.eos_token
    try:
        directory.check()
        ended = ending(directory.path, cfg)
        if not ended:
            check_memory(cfg, world_size, ranks_on_first_node())
            checkpoint, saved = continuation(cfg, directory)
            origin = None if checkpoint else starting_point(cfg)
            if former := checkpoint or previous_stage(cfg, origin):
                run = former.absolute().parent.parent
                eos_token = former_eos(run, cfg.data)
                tokenizer_hash = (read_record(run / "run.json") or {}).get("tokenizer")
            check_pieces(cfg, eos_token)
        (directory.path / REQUEUE_FILE).unlink(missing_ok=True)
    except UserError:
        directory.withdraw()
        raise
    paths = [place and str(place) for place in (directory.path, checkpoint, origin)]
    ranks = saved["ranks"] if saved else 0
    corpus = corpus_of(saved) if saved else None
    told = {"paths": paths, "ended": ended, "ranks": ranks, "eos_token": eos_token}
    told["hashes"] = [corpus, tokenizer_hash]
    return told, (directory, saved)


def prepare_data(
    cfg: TrainConfig, here: Process, claimed: Claimed
) -> tuple[torch.device, Prepared]:
    """Choose the device of this rank, and prepare the corpus.

    Call this before the first collective: the preparation may take hours, but collectives have a
    timeout.
    """
    device = here.world.device()
    dtype = chosen_precision(cfg.precision, device).value
    cfg.model.attention.prepare(cfg.model, device, dtype, cfg.data.mask_documents)
    here.watch.reached("the preparation of the corpus")
    here.display.print(f"run {claimed.path}: preparing data")
    # Not stored in cfg: config.yaml must contain only the EOS that the user sets.
    with_eos = replace(cfg.data, eos_token=claimed.eos_token)
    hashes = claimed.hashes
    if is_within("corpus", cfg.run.allow_changes):
        hashes = hashes._replace(corpus=None)
    data = prepare(with_eos, cfg.prepare, hashes)
    for directory in data.directories:
        # Preparation names the files once; later runs only point to the list.
        if text := skipped_text(directory):
            here.display.print(text)
    check_fit(cfg, data)
    # Fill the cache here: counting may take longer than the timeout of collectives.
    packing_counts(data, cfg.data, cfg.seq_len)
    check_same(here.world, "corpus", corpus_facts(data))
    return device, data


def begin(cfg: TrainConfig, here: Process, claimed: Claimed, data: Prepared) -> LoopState:
    """Begin a new or resumed run in its directory; return the initial state of the training loop.

    Raises an error on all ranks if the checkpoint does not match the data or the model.
    """
    told = here.world.broadcast_from_rank0(
        "begin", lambda: begin_on_rank_0(cfg, here, claimed, data).state_dict()
    )
    state = LoopState.of(told)
    state.mkl_mode = keep_mode(state.mkl_mode)
    if here.world.rank > 0 and not in_sweep():
        here.log.open(log_file(claimed.path))
    return state


def begin_on_rank_0(cfg: TrainConfig, here: Process, claimed: Claimed, data: Prepared) -> LoopState:
    """Write config.yaml and the tokenizer to the run directory; return the initial loop state.

    Raises CheckpointError if the checkpoint to resume does not match the data or the model.
    """
    assert claimed.directory
    if claimed.origin:
        check_same_tokens(cfg, data, claimed.origin)
    order = {
        "data.packing": cfg.data.packing.name,
        "seed": cfg.seed,
        **corpus_facts(data),
        "seq_len": cfg.seq_len,
        "global_batch_size": cfg.global_batch_size,
    }
    path, saved = claimed.checkpoint, claimed.saved
    stage = 0
    if previous := previous_stage(cfg, claimed.origin):
        stage = 1 + read_state(previous)["loop"].get("stage", 0)
    state, changes = LoopState(order=order, stage=stage), Changes()
    if path and saved:
        state, changes = continued(
            path, saved, order, cfg.run.allow_changes, rule_text(data.directories)
        )
        check_parameters(path, saved, dict(without_storage(cfg.model).named_parameters()))
        if claimed.path not in path.parents:
            state.wandb_id = None  # The id belongs to the run that wrote the checkpoint.
    state.wandb_id, reason = choose_wandb_id(claimed.directory, state.wandb_id, state.step, changes)
    claimed.directory.begin(tokenizer_in(data.directory), state.step, changes)
    here.log.open(log_file(claimed.path))
    if reason:
        here.display.print(f"wandb: the new run {state.wandb_id} gets all steps, because {reason}")
    return state


def meet(
    cfg: TrainConfig, here: Process, device: torch.device, path: Path, state: LoopState
) -> None:
    """Connect the ranks, and let the watch write to the run directory `path`."""
    torch.manual_seed(cfg.seed)
    here.watch.reached("the connection of the ranks")
    here.world.init_process_group(device, cfg.distributed)
    here.watch.traces = path / "traces"
    here.watch.on_end = here.display.stop
    here.watch.on_stall = partial(record_stall, path, state)


def record_stall(run: Path, state: LoopState, message: str) -> None:
    """Write a stall to events.jsonl.

    A full or missing disk is ignored, because the message is also on stderr.
    """
    with suppress(OSError):
        append_stall(run, stall(state, message))


def stall(state: LoopState, message: str) -> Event:
    """Return the event of a stall; arguments as in `record_stall`."""
    return Event("stall", state.step, state.tokens, detail=message)


def ended_text(summary: dict[str, Any]) -> str:
    if summary.get("stopped"):
        text = stopped_text(summary)
        return f"diverged and {text}; to train with other settings, set run.allow_changes"
    loss = summary.get("heldout_loss") or math.nan  # Older versions wrote NaN instead of null.
    ended = f"held-out loss {loss:.3f}" if math.isfinite(loss) else "the run diverged"
    more = "to train further, set more steps= and run.allow_changes"
    return f"is finished: {summary['steps']} steps, {ended}; {more}"


BASELINE = "standard"
SEQUENCES, MOST_TOKENS = 8, 32_768
"""Sequences that `match_initial_values` reads: as many as these tokens hold, at least one."""


def fill(
    t: Training, here: Process, claimed: Claimed, data: Prepared, state: LoopState
) -> dict[str, Any]:
    """Set the initial parameters: load a checkpoint or weights, or apply model.init_match.

    Return the new entry of run.json as a dict: "weights" after resume=weights:PATH, "previous"
    after resume=stage:PATH, "init_match" after model.init_match. Without a new entry, the dict is
    empty. Every rank must call this function.
    """
    facts: dict[str, Any] = {}
    if claimed.checkpoint:
        here.watch.reached(f"the loading of {claimed.checkpoint.name}")
        restore(t, state, claimed.checkpoint, claimed.ranks)
    elif claimed.origin:
        here.watch.reached(f"the loading of {claimed.origin}")
        key = "previous" if carried(t.cfg) == CARRIED["stage"] else "weights"
        facts[key] = start_from(t, claimed.origin)
    elif t.cfg.model.init_match is not InitMatch.none:
        facts["init_match"] = match_initial_values(t, data, here.world)
    check_tensors(t.tensors(), t.meshes.dense.size(1))
    return facts


def match_initial_values(t: Training, data: Prepared, world: World) -> list[float]:
    """Multiply the output projection `wo` of each attention layer by a factor (model.init_match).

    With these factors, the attention output of each layer initially has the same RMS as with
    standard attention. Rank 0 measures the factors on training sequences. Return one factor per
    layer. Every rank must call this.
    """
    factors = world.broadcast_from_rank0("init_match", partial(measured_factors, t, data))
    with torch.no_grad():
        for i, factor in enumerate(factors):
            local(t.params[f"layers.{i}.attention.wo.weight"]).mul_(factor)
    t.weights.changed()
    return factors


def measured_factors(t: Training, data: Prepared) -> list[float]:
    count = max(1, min(SEQUENCES, MOST_TOKENS // t.cfg.seq_len))
    first = samples_of(t.cfg, data)[range(count)]
    if isinstance(first, DataError):
        raise first
    documents = t.documents(first[0]).to(t.device) if t.documents else None
    tokens = first[0].to(t.device)
    return write_factors(t.cfg.model, variant_config(BASELINE), tokens, documents)


def carried(cfg: TrainConfig) -> tuple[str, ...]:
    """Return the prefixes of the tensors that this run takes over from another model."""
    named = named_in(cfg.resume)
    return CARRIED[named.kind] if named else ()


def previous_stage(cfg: TrainConfig, origin: Path | None) -> Path | None:
    """Return `origin` if this is the checkpoint of resume=stage:PATH, else None."""
    return origin if carried(cfg) == CARRIED["stage"] else None


def start_from(t: Training, path: Path) -> dict[str, Any]:
    """Load the carried tensors from a checkpoint, or parameters from a Hugging Face directory.

    Return an entry of run.json. Its keys "path", "step", "tokens", "corpus" and "bos_token"
    describe the other model; "tokens" includes all earlier stages. Its key "differs" lists the
    model settings that differ between the other model and this run. Every rank must call this.
    """
    from diffllm.checkpoint.reader import load_tensors  # A slow import: loads DCP.

    origin = origin_of(path)
    tensors = {name: x for name, x in t.tensors().items() if name.startswith(carried(t.cfg))}
    if origin.directory is None:
        load_tensors(path, tensors)
    else:  # Tensors that are not in the directory keep their initial values.
        for name in origin.directory.names:
            if f"model.{name}" not in tensors:
                raise CheckpointError(
                    f"{path} contains the tensor {name}, but the model does not; "
                    "use the model config of these weights"
                )
            block, offset, _ = t.weights.block(tensors[f"model.{name}"])
            part = tuple(slice(at, at + size) for at, size in zip(offset, block.shape, strict=True))
            block.copy_(origin.directory.tensor(name)[part])
    t.weights.changed()
    changes = changes_to(origin.model, t.cfg.model, is_of_model)
    named = {f"model.{key}": pair for key, pair in changes.items()}
    differs = changes_text(named, "the weights") or None
    state = read_state(path) if origin.run else {}
    step, corpus = state.get("step"), origin.facts.get("corpus")
    tokens = None
    if loop := state.get("loop"):
        before = (origin.facts.get("previous") or {}).get("tokens", 0)
        tokens = before + tokens_of(loop)
    return {
        "path": str(path), "step": step, "tokens": tokens, "differs": differs, "corpus": corpus,
        "bos_token": " ".join(origin.text_prefix) or None,
    }  # fmt: skip
