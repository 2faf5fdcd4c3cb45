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

from diffllm.checkpoint.manifest import check_parameters, read_state
from diffllm.config import TrainConfig
from diffllm.config.changes import Changes, is_within
from diffllm.config.plugins import plugin_versions
from diffllm.config.run_config import CARRIED_PREFIXES
from diffllm.config.saved import flatten, yaml_dict
from diffllm.core.errors import UserError
from diffllm.core.keys import declaration_of, declarations
from diffllm.core.run_files import RunFile, RunFolder, read_facts, stopped_text
from diffllm.data.mixture import Prepared
from diffllm.data.preparation.prepare import RunHashes, prepare
from diffllm.data.sequences import packing_counts
from diffllm.data.text.skipped import rule_text, skipped_text
from diffllm.data.tokenizer import tokenizer_in
from diffllm.distributed.consistency import check_same, check_tensors, code_version
from diffllm.distributed.launcher import keep_mode, ranks_on_first_node
from diffllm.metrics.events import Event, append_stall
from diffllm.model import without_storage
from diffllm.model.config import InitMatch
from diffllm.training.build import Training, chosen_precision
from diffllm.training.checks import (
    check_fit,
    check_pieces,
    check_same_tokens,
    corpus_facts,
    former_eos,
    starting_point,
)
from diffllm.training.directory import RunDirectory, claim_directory, ending
from diffllm.training.initial_values import (
    carried,
    match_initial_values,
    previous_stage,
    start_from,
)
from diffllm.training.memory import check_memory
from diffllm.training.process import Process, in_sweep, log_file
from diffllm.training.state import (
    LoopState,
    continuation,
    continued,
    corpus_of,
    restore,
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


def claim(cfg: TrainConfig, process: Process) -> Claimed:
    """Check that code and config are equal on all ranks, and lock the run directory on rank 0.

    Return the run directory, and the checkpoint or weights to start from.
    """
    world = process.world
    versions = code_version()
    for name, version in plugin_versions(cfg.plugins).items():
        versions[f"plugin {name}"] = version
    check_same(world, "code", versions)
    declared = declarations(cfg)
    values = {}
    for key, value in flatten(yaml_dict(cfg)).items():
        # Settings of a machine may differ between ranks.
        if "machine" not in declaration_of(key, declared).kinds:
            values[key] = value
    check_same(world, "config", values)
    shared, private = world.broadcast_and_keep("run", lambda: claim_on_rank_0(cfg, world.size))
    # Only rank 0 has the second result, because no other rank can hold the lock.
    directory, saved = (None, None) if private is None else private
    path_of_run, *other_paths = shared["paths"]
    path = Path(path_of_run)
    checkpoint, origin = [None if text is None else Path(text) for text in other_paths]
    if shared["ended"]:
        process.display.print(f"{path} {ended_text(shared['ended'])}")
    return Claimed(
        path=path,
        ended=shared["ended"],
        checkpoint=checkpoint,
        ranks=shared["ranks"],
        origin=origin,
        eos_token=shared["eos_token"],
        hashes=RunHashes(*shared["hashes"]),
        directory=directory,
        saved=saved,
    )


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
            # A checkpoint of this run has precedence: the origin is only for its first start.
            origin = None if checkpoint else starting_point(cfg)
            former = checkpoint or previous_stage(cfg, origin)
            if former:
                run = former.absolute().parent.parent
                eos_token = former_eos(run, cfg.data)
                record = read_facts(run)
                tokenizer_hash = record.get("tokenizer")
            check_pieces(cfg, eos_token)
        (directory.path / RunFile.REQUEUE).unlink(missing_ok=True)
    except UserError:
        directory.withdraw()
        raise
    corpus_hash = corpus_of(saved) if saved else None
    ranks = saved["ranks"] if saved else 0
    paths = (directory.path, checkpoint, origin)
    shared = {
        "paths": [None if path is None else str(path) for path in paths],
        "ended": ended,
        "ranks": ranks,
        "eos_token": eos_token,
        "hashes": [corpus_hash, tokenizer_hash],
    }
    return shared, (directory, saved)


def prepare_data(
    cfg: TrainConfig, process: Process, claimed: Claimed
) -> tuple[torch.device, Prepared]:
    """Choose the device of this rank, and prepare the corpus.

    Call this before the first collective: the preparation may take hours, but collectives have a
    timeout.
    """
    device = process.world.device()
    dtype = chosen_precision(cfg.precision, device).value
    cfg.model.attention.prepare(cfg.model, device, dtype, cfg.data.mask_documents)
    process.watch.reached("the preparation of the corpus")
    process.display.print(f"run {claimed.path}: preparing data")
    # Not stored in cfg: config.yaml must contain only the EOS that the user sets.
    with_eos = replace(cfg.data, eos_token=claimed.eos_token)
    hashes = claimed.hashes
    if is_within("corpus", cfg.run.allow_changes):
        hashes = hashes._replace(corpus=None)
    data = prepare(with_eos, cfg.prepare, hashes)
    for directory in data.directories:
        # Preparation names the files once; later runs only point to the list.
        text = skipped_text(directory)
        if text:
            process.display.print(text)
    check_fit(cfg, data)
    # Fill the cache here: counting may take longer than the timeout of collectives.
    packing_counts(data, cfg.data, cfg.seq_len)
    check_same(process.world, "corpus", corpus_facts(data))
    return device, data


def begin(cfg: TrainConfig, process: Process, claimed: Claimed, data: Prepared) -> LoopState:
    """Begin a new or resumed run in its directory; return the initial state of the training loop.

    Raises an error on all ranks if the checkpoint does not match the data or the model.
    """
    state_dict = process.world.broadcast_from_rank0(
        "begin", lambda: begin_on_rank_0(cfg, process, claimed, data).state_dict()
    )
    state = LoopState.of(state_dict)
    # Before the model is built: MKL reads the mode once per process.
    state.mkl_mode = keep_mode(state.mkl_mode)
    if process.world.rank > 0 and not in_sweep():
        process.log.open(log_file(claimed.path))
    return state


def begin_on_rank_0(
    cfg: TrainConfig, process: Process, claimed: Claimed, data: Prepared
) -> LoopState:
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
    path = claimed.checkpoint
    saved = claimed.saved
    stage = 0
    previous = previous_stage(cfg, claimed.origin)
    if previous:
        stage = 1 + read_state(previous)["loop"].get("stage", 0)
    state = LoopState(order=order, stage=stage)
    changes = Changes()
    if path and saved:
        state, changes = continued(
            path, saved, order, cfg.run.allow_changes, rule_text(data.directories)
        )
        check_parameters(path, saved, dict(without_storage(cfg.model).named_parameters()))
        if claimed.path not in path.parents:
            state.wandb_id = None  # The id belongs to the run that wrote the checkpoint.
    state.wandb_id, reason = choose_wandb_id(claimed.directory, state.wandb_id, state.step, changes)
    claimed.directory.begin(tokenizer_in(data.directory), state.step, changes)
    process.log.open(log_file(claimed.path))
    if reason:
        process.display.print(
            f"wandb: the new run {state.wandb_id} gets all steps, because {reason}"
        )
    return state


def meet(
    cfg: TrainConfig, process: Process, device: torch.device, path: Path, state: LoopState
) -> None:
    """Connect the ranks, and let the watch write to the run directory `path`."""
    torch.manual_seed(cfg.seed)
    process.watch.reached("the connection of the ranks")
    process.world.init_process_group(device, cfg.distributed)
    process.watch.traces = path / RunFolder.TRACES
    process.watch.on_end = process.display.stop
    process.watch.on_stall = partial(record_stall, path, state)


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
    loss = summary.get("heldout_loss")
    # Older versions wrote NaN instead of null.
    is_finite = loss is not None and loss != 0 and math.isfinite(loss)
    result = f"held-out loss {loss:.3f}" if is_finite else "the run diverged"
    advice = "to train further, set more steps= and run.allow_changes"
    return f"is finished: {summary['steps']} steps, {result}; {advice}"


def fill(
    t: Training, process: Process, claimed: Claimed, data: Prepared, state: LoopState
) -> dict[str, Any]:
    """Set the initial parameters: load a checkpoint or weights, or apply model.init_match.

    Return the new entry of run.json as a dict: "weights" after resume=weights:PATH, "previous"
    after resume=stage:PATH, "init_match" after model.init_match. Without a new entry, the dict is
    empty. Every rank must call this function.
    """
    facts: dict[str, Any] = {}
    if claimed.checkpoint:
        process.watch.reached(f"the loading of {claimed.checkpoint.name}")
        restore(t, state, claimed.checkpoint, claimed.ranks)
    elif claimed.origin:
        process.watch.reached(f"the loading of {claimed.origin}")
        key = "previous" if carried(t.cfg) == CARRIED_PREFIXES["stage"] else "weights"
        facts[key] = start_from(t, claimed.origin)
    elif t.cfg.model.init_match is not InitMatch.none:
        facts["init_match"] = match_initial_values(t, data, process.world)
    check_tensors(t.tensors(), t.meshes.dense.size(1))
    return facts
