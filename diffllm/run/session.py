"""One process of a run, from its claim on the run directory to the meeting of the ranks."""

import math
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from diffllm.checkpoint import check_parameters
from diffllm.choices import chosen_precision
from diffllm.config import TrainConfig
from diffllm.config.plugins import plugin_versions
from diffllm.data import Prepared, packing_counts, prepare
from diffllm.data.tokenizer_files import tokenizer_in
from diffllm.distributed.consistency import check_same, code_version
from diffllm.distributed.launcher import keep_mode
from diffllm.distributed.stop import StoppedEarly, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.world import World
from diffllm.errors import AgreedError, ConfigError, UserError
from diffllm.files.records import stopped_text
from diffllm.metrics.display import Display
from diffllm.metrics.log import RunLog
from diffllm.model import without_storage
from diffllm.run.checks import check_fit, check_tokenizer, corpus_facts, data_order, shared_config
from diffllm.run.continuation import Continuation, continuation
from diffllm.run.directory import RunDirectory, claim
from diffllm.run.provenance import command
from diffllm.run.weights import check_same_tokens, weights_of
from diffllm.state import LoopState, continued


class Session:
    """The knowledge and holds that one process has of a run; made once and handed on.

    `claim`, `prepare` and `meet` come in this order, on all ranks. The `with` block ends with the
    process group: a missing rank is named, and a directory in which nothing was trained removed.
    """

    path: Path
    """The run directory; from `claim` on."""
    checkpoint: Path | None
    """The checkpoint that the run goes on from; from `claim` on."""
    weights: Path | None
    """The source of the parameters of a run that goes on from no checkpoint; from `claim` on."""
    summary: dict[str, Any] | None
    """The summary of a run that has ended already; from `claim` on."""
    saved_ranks: int
    """The number of ranks that wrote it."""
    device: torch.device
    """The device of this rank; from `prepare` on."""
    data: Prepared
    """The prepared corpus; from `prepare` on."""
    state: LoopState
    """The step, spike counts and place in the data of the run; from `prepare` on."""

    def __init__(self, cfg: TrainConfig, world: World, stop: StopRequest):
        self.cfg, self.world, self.stop = cfg, world, stop
        self.watch = Watch(world, cfg.distributed.timeout, stop)
        self.log = RunLog()
        self.display = Display(cfg.steps, enabled=world.rank == 0, log=self.log)
        self.directory: RunDirectory | None = None
        """Rank 0's hold on the run directory; None on other ranks."""

    def __enter__(self) -> "Session":
        if not in_sweep():  # which logs what its jobs write to standard error
            self.log.copy_stderr(errors_only=self.world.rank > 0)
            self.log.write(f"{started()}\n" * (self.world.rank == 0))
        return self

    def claim(self) -> bool:
        """Have rank 0 claim the run directory; False if the run has ended already."""
        cfg, world = self.cfg, self.world
        self.past = Continuation()

        def on_rank_0() -> dict[str, Any]:
            self.directory = claim(cfg)
            path = self.directory.path
            self.past = continuation(cfg, self.directory)
            if not self.past.ended:
                check_tokenizer(cfg)
            starts = not self.past.ended and self.past.checkpoint is None
            weights = weights_of(cfg) if starts else None
            self.directory.forget_requeue()
            return {
                "path": str(path),
                "summary": self.past.ended,
                "checkpoint": self.past.checkpoint and str(self.past.checkpoint),
                "ranks": self.past.saved["ranks"] if self.past.saved else 0,
                "weights": weights and str(weights),
            }

        plugins = plugin_versions(cfg.plugins).items()
        check_same(world, "code", code_version() | {f"plugin {name}": v for name, v in plugins})
        check_same(world, "config", shared_config(cfg))
        claimed = world.broadcast_from_rank0("run", on_rank_0)
        self.path, self.saved_ranks = Path(claimed["path"]), claimed["ranks"]
        self.checkpoint = Path(claimed["checkpoint"]) if claimed["checkpoint"] else None
        self.weights = Path(claimed["weights"]) if claimed["weights"] else None
        self.summary = claimed["summary"]
        if self.summary:
            self.display.print(f"{self.path} {ended_text(self.summary)}")
        return not self.summary

    def prepare(self) -> None:
        """Prepare device and corpus, compare both with what the run goes on from, and begin it."""
        cfg, world = self.cfg, self.world
        self.device = world.device()
        dtype = chosen_precision(cfg.precision, self.device).value
        cfg.model.attention.prepare(cfg.model, self.device, dtype, cfg.data.mask_documents)
        self.watch.reached("the preparation of the corpus")
        if cfg.prepare.num_nodes > 1:
            raise ConfigError("prepare.num_nodes is of diffllm prepare: a run prepares on one node")
        self.data = prepare(cfg.data, cfg.prepare)
        check_fit(cfg, self.data)
        packing_counts(self.data, cfg.data, cfg.seq_len)  # packs: longer than a collective may wait
        check_same(world, "corpus", corpus_facts(self.data))

        def on_rank_0() -> dict[str, Any]:
            assert self.directory
            if self.weights:
                check_same_tokens(cfg, self.data, self.weights)
            state = self._continued(self.directory)
            self.directory.begin(tokenizer_in(self.data.directory), state.step)
            self.log.open(log_file(self.path))
            return state.state_dict()

        self.state = LoopState.of(world.broadcast_from_rank0("begin", on_rank_0))
        self.state.mkl_mode = keep_mode(self.state.mkl_mode)
        if world.rank > 0 and not in_sweep():
            self.log.open(log_file(self.path))

    def _continued(self, directory: RunDirectory) -> LoopState:
        """Load the checkpoint's loop state, if its order of data and parameters are this run's."""
        order, path, saved = data_order(self.cfg, self.data), self.checkpoint, self.past.saved
        if path is None or saved is None:
            return LoopState(order=order)
        former = self.data.former_corpus
        state, changes = continued(path, saved, order, self.cfg.run.allow_changes, former)
        directory.changes |= changes
        check_parameters(path, saved, dict(without_storage(self.cfg.model).named_parameters()))
        if directory.path not in path.parents:
            state.wandb_id = None  # another run's
        return state

    def meet(self) -> None:
        """Form the process group of all ranks."""
        torch.manual_seed(self.cfg.seed)
        self.watch.reached("the meeting of the ranks")
        self.world.init_process_group(self.device, self.cfg.distributed)
        self.watch.traces = self.path / "traces"
        self.watch.on_end = self.display.stop

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.watch.close()
            else:
                self.watch.blame(error)
        finally:
            self.display.stop()
            if error is not None and not in_sweep():
                self.log.write(last_words(error, self.world.rank))
            self.log.close()
            if dist.is_initialized():
                dist.destroy_process_group()
            if self.directory and isinstance(error, UserError):
                self.directory.withdraw()
            self.watch.close()


def ended_text(summary: dict[str, Any]) -> str:
    """Say how a run ended that is started again, and what takes it further."""
    if summary.get("stopped"):
        return (
            f"diverged and {stopped_text(summary)}; a larger train.max_consecutive_skips or other "
            "settings, with run.allow_changes, go on"
        )
    loss = summary.get("heldout_loss") or math.nan  # of older versions, not None
    ended = f"held-out loss {loss:.3f}" if math.isfinite(loss) else "it diverged"
    return (
        f"is finished: {summary['steps']} steps, {ended}; more steps= go on with run.allow_changes"
    )


def in_sweep() -> bool:
    """Whether a sweep has started this process."""
    return "DIFFLLM_SWEEP_JOB" in os.environ


def log_file(path: Path) -> Path:
    """Return the log of the run at `path`; that of a sweep's run lies beside it."""
    return path.with_name(f"{path.name}.log") if in_sweep() else path / "run.log"


def started() -> str:
    """Say when and where this process was started, and with what command."""
    when = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{when} on {socket.gethostname()}: {command(sys.orig_argv)}"


def last_words(error: BaseException, rank: int) -> str:
    """Return an error as the log of its run ends with it; nothing for one of all ranks on others
    than rank 0."""
    if isinstance(error, StoppedEarly):
        text = f"stopped by {error.args[0].name} before the first step\n"
    elif isinstance(error, UserError):
        text = f"error: {error}\n" if rank == 0 else f"error: rank {rank}: {error}\n"
    else:
        text = "".join(traceback.format_exception(error))
    return "" if rank > 0 and isinstance(error, (AgreedError, ConfigError, StoppedEarly)) else text
