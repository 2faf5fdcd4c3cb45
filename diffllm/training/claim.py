"""The lock on the run directory, and the checkpoint or weights from which the run starts."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from diffllm.config import TrainConfig
from diffllm.config.plugins import plugin_versions
from diffllm.config.saved import flatten, yaml_dict
from diffllm.core.errors import UserError
from diffllm.core.keys import declaration_of, declarations
from diffllm.core.run_files import RunFile, read_facts, stopped_text
from diffllm.data.preparation.prepare import RunHashes
from diffllm.distributed.consistency import check_same, code_version
from diffllm.distributed.launcher import ranks_on_first_node
from diffllm.training.checks import check_pieces, former_eos
from diffllm.training.memory import check_memory
from diffllm.training.process import Process
from diffllm.training.run_directory import RunDirectory, claim_directory, ending
from diffllm.training.starting_point import previous_stage, starting_point
from diffllm.training.state import continuation, corpus_of


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
