"""The start of a run in its directory: config.yaml, the tokenizer and the initial loop state."""

from dataclasses import replace
from pathlib import Path

from diffllm.checkpoint.manifest import check_parameters, read_state
from diffllm.config import TrainConfig
from diffllm.config.changes import Changes
from diffllm.core.run_files import RunFile, sweep_log
from diffllm.data.prepared import Prepared
from diffllm.data.text.skipped import rule_text
from diffllm.data.tokenizer import tokenizer_in
from diffllm.distributed.launcher import in_sweep, keep_mode
from diffllm.model import without_storage
from diffllm.training.checks import corpus_facts
from diffllm.training.claim import Claimed
from diffllm.training.process import Process
from diffllm.training.starting_point import check_same_tokens, previous_stage
from diffllm.training.state import LoopState, continued
from diffllm.training.wandb_id import choose_wandb_id


def begin(cfg: TrainConfig, process: Process, claimed: Claimed, data: Prepared) -> LoopState:
    """Begin a new or resumed run in its directory; return the initial state of the training loop.

    Raises an error on all ranks if the checkpoint does not match the data or the model.
    """
    state_dict = process.world.broadcast_from_rank0(
        "begin", lambda: begin_on_rank_0(cfg, process, claimed, data).state_dict()
    )
    if process.world.rank > 0 and not in_sweep():
        process.log.open(log_file(claimed.path))
    # Before the model is built: MKL reads the mode once per process.
    return LoopState.of({**state_dict, "mkl_mode": keep_mode(state_dict["mkl_mode"])})


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
    changes = Changes()
    saved_id = None
    if path and saved:
        state, changes = continued(
            path, saved, order, cfg.run.allow_changes, rule_text(data.directories)
        )
        check_parameters(path, saved, dict(without_storage(cfg.model).named_parameters()))
        # The checkpoint of another run contains the id of that run.
        if claimed.path in path.parents:
            saved_id = state.wandb_id
    else:
        state = LoopState(order=order, stage=stage_of(cfg, claimed))
    wandb_id, reason = choose_wandb_id(claimed.directory, saved_id, state.step, changes)
    claimed.directory.begin(tokenizer_in(data.directory), state.step, changes)
    process.log.open(log_file(claimed.path))
    if reason:
        process.display.print(f"wandb: the new run {wandb_id} gets all steps, because {reason}")
    return replace(state, wandb_id=wandb_id)


def stage_of(cfg: TrainConfig, claimed: Claimed) -> int:
    """Return the number of earlier stages of a new run."""
    previous = previous_stage(cfg, claimed.origin)
    if previous is None:
        return 0
    return 1 + int(read_state(previous)["loop"].get("stage", 0))


def log_file(path: Path) -> Path:
    return sweep_log(path) if in_sweep() else path / RunFile.LOG
