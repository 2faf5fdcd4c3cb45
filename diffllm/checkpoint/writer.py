"""Save checkpoints on a background thread, and report failed saves."""

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from diffllm.checkpoint.manifest import FORMAT, Manifest, complete, file_records
from diffllm.checkpoint.reader import failure_reason
from diffllm.checkpoint.run_checkpoints import CheckpointConfig, prune, remove, set_aside
from diffllm.core.atomic_directories import publish
from diffllm.core.errors import AgreedByAll, AgreedError, CheckpointError
from diffllm.core.files import replace_file
from diffllm.core.printing import to_stderr
from diffllm.core.run_files import RunFile, checkpoint_path, hidden_path, list_checkpoints, step_of
from diffllm.distributed.world import BACKGROUND

Part = Manifest | str
"""The files that a rank wrote, or the reason for a failed write."""

DIRECTORY_REMOVED = "the run directory was removed"
WRAPPING = 2048
"""Bytes that DCP adds to each piece of a tensor, in its file and in the index."""


class TensorWriter(FileSystemWriter):
    """Storage writer for torch.distributed.checkpoint; failed writes raise the original OSError."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise (cause or error) from None


class Stager(DefaultStager):
    """Copies tensors to host memory before a save, and reuses the host memory for later saves.

    The base class of torch 2.11 frees the host memory after each copy.
    """

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._end = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def close(self) -> None:
        super().close()
        self._end()


class Checkpointer:
    """Saves the checkpoints of one run on a background thread, one at a time.

    Every rank must create a Checkpointer, and call the same methods at the same training steps.

    Args:
        directory: directory with the checkpoints of the run.
        step: training step at which the run starts or resumes. If checkpoints of later steps exist
            at this time, they must be damaged: the run would otherwise resume from one of them.
            The Checkpointer does not delete these checkpoints, and they do not count as newest
            checkpoints for `cfg.keep_last`.
    """

    def __init__(self, directory: Path, cfg: CheckpointConfig, step: int = 0):
        self.directory = directory
        self.cfg = cfg
        self.run = identity(directory.parent)
        self.skipped = {path for path in list_checkpoints(directory) if step_of(path) > step}
        self.seconds = cfg.seconds
        self.since = monotonic()
        # Collectives in the background must not mix with the training's in one group.
        self.group = dist.new_group(backend="gloo")
        BACKGROUND.add(self.group.group_name)
        self.rank = dist.get_rank()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        gpu = torch.cuda.is_available()
        # Reuse the host memory of copies: fresh pages cost more than the copy.
        self.stager = Stager(
            StagingOptions(
                use_pinned_memory=gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=gpu,
            )
        )
        self.pending: Future[None] | None = None

    def save(
        self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], final: bool = False
    ) -> None:
        """Copy the tensors, and start to write a checkpoint in the background.

        First wait until the previous save ends. `state` contains entries for state.json. `final`
        marks the last save of the run.

        If the last checkpoint of the run cannot be written, `save` or `wait` raises AgreedByAll on
        all ranks. If an earlier checkpoint cannot be written, rank 0 prints a warning and training
        continues. If the run directory was removed, `save` raises AgreedByAll on all ranks for
        every checkpoint.
        """
        self.wait()
        self.since = monotonic()
        state_json = json.dumps({"format": FORMAT, "step": step, **state})
        hidden = hidden_path(self.directory, step)
        # Every rank calls this before it starts to write: the directory must exist.
        refused = self._decided_by_rank_0(lambda: self._make_room(hidden, tensors, len(state_json)))
        if refused:
            self._failed(step, refused, final or refused == DIRECTORY_REMOVED)
            return
        # Copy before training continues: the next step changes the tensors in place.
        staged = self.stager.stage(tensors)
        self.pending = self.pool.submit(self._write, hidden, step, staged, state_json, final)

    def due(self) -> bool:
        """Return whether the timer has reached the time `cfg.interval`; if so, restart the timer.

        `save` also restarts the timer. Only rank 0 uses the timer: all other ranks return False.
        If `cfg.interval` is a number of steps, rank 0 also returns False.
        """
        if self.rank > 0 or self.seconds is None or monotonic() - self.since < self.seconds:
            return False
        self.since = monotonic()
        return True

    def wait(self) -> None:
        """Wait until the save in progress is complete.

        Raises AgreedByAll on all ranks if the last save of the run failed. Raises CheckpointError
        if the ranks cannot communicate.
        """
        # Reset first: a later call, such as in `close`, must not raise the same error again.
        pending = self.pending
        self.pending = None
        try:
            if pending:
                pending.result()
        except AgreedError:
            raise
        except Exception as error:
            reason = failure_reason(error)
            raise CheckpointError(
                f"the ranks could not communicate while saving a checkpoint to {self.directory}: "
                f"{reason}; run the same command again to resume"
            ) from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self.pool.shutdown()
            self.stager.close()

    def _write(self, hidden: Path, step: int, tensors: Any, state_json: str, final: bool) -> None:
        """Write this rank's tensor files to directory `hidden`; rank 0 completes the checkpoint.

        Runs on the background thread. If the save fails and `final` is true, all ranks raise
        AgreedByAll. If the save fails and `final` is false, rank 0 prints a warning.
        """
        try:
            dcp.save(tensors, storage_writer=TensorWriter(hidden), process_group=self.group)
            # Each rank hashes only its own files, at the same time as the other ranks.
            part: Part = file_records(hidden.glob(f"__{self.rank}_*.distcp"))
        # CheckpointException is a BaseException, but not an Exception.
        except (Exception, CheckpointException) as error:
            part = failure_reason(error)
        # A rank whose write failed must also reach these collectives.
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, part, group=self.group)
        failure = self._decided_by_rank_0(lambda: self._complete(hidden, step, parts, state_json))
        if failure:
            self._failed(step, failure, final)

    def _complete(self, hidden: Path, step: int, parts: list[Part], state_json: str) -> str | None:
        """Write state.json and manifest.json, rename `hidden`, and delete old checkpoints.

        Runs on rank 0. Returns the reason why the save failed, or None after success. `parts` has
        one entry per rank. If the rank wrote its files, the entry contains their sizes and
        checksums; otherwise, it is the error message.
        """
        final = checkpoint_path(self.directory, step)
        files = Manifest()
        try:
            for part in parts:
                if isinstance(part, str):
                    raise CheckpointError(part)
                files |= part
            complete(hidden, step, state_json, files)
            # The rename is the commit: a killed save leaves only the hidden directory.
            if os.path.lexists(final):
                set_aside(final)
            publish(hidden, final, files_synced=True)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(hidden, ignore_errors=True)
            return failure_reason(error)
        saved = self.directory.parent / RunFile.SAVED
        try:
            replace_file(saved, json.dumps({"step": step}) + "\n")
        except OSError as error:
            to_stderr(f"warning: {saved} cannot be written: {error.strerror or error}")
        # The new checkpoint replaces a damaged one of a later step, see `set_aside`.
        self.skipped.discard(final)
        paths = [path for path in list_checkpoints(self.directory) if path not in self.skipped]
        prune(paths, self.cfg)
        return None

    def _decided_by_rank_0(self, choose: Callable[[], str | None]) -> str | None:
        # A broadcast that every rank must reach. The ranks could see different states of a shared
        # file system, so only rank 0 decides.
        decision = [choose() if self.rank == 0 else None]
        dist.broadcast_object_list(decision, src=0, group=self.group)
        return decision[0]

    def _make_room(self, hidden: Path, tensors: Mapping[str, Tensor], extra: int) -> str | None:
        """Create the empty directory `hidden` for a new checkpoint, and check the free disk space.

        Returns the reason why the checkpoint cannot be written, or None if it can be written.
        `extra` is the number of bytes that the checkpoint needs in addition to `tensors`.
        """
        # `mkdir` below would create a removed run directory again.
        if identity(self.directory.parent) != self.run:
            return DIRECTORY_REMOVED
        try:
            # A killed save may have left its directory.
            if os.path.lexists(hidden):
                remove(hidden)
            hidden.mkdir(parents=True)
            disk = shutil.disk_usage(hidden)
            needed = needed_bytes(tensors) + extra
            # Some network file systems report sizes of 0.
            if disk.total and disk.free < needed:
                hidden.rmdir()
                return f"a checkpoint needs {needed:,} bytes, but only {disk.free:,} are free"
        except OSError as error:
            return failure_reason(error)
        return None

    def _failed(self, step: int, reason: str, final: bool) -> None:
        # After the last save, all ranks raise the error. Otherwise, one warning is enough.
        if not final and self.rank > 0:
            return
        newest = "there is no checkpoint yet"
        advice = "start again"
        for path in list_checkpoints(self.directory):
            if path not in self.skipped:
                newest = f"the newest checkpoint is {path.name}"
                advice = "the same command resumes from it"
        message = f"step {step} could not be saved under {self.directory}: {reason}; {newest}"
        if not final:
            to_stderr(f"warning: {message}; training continues")
            return
        if reason != DIRECTORY_REMOVED:
            message += f"; free disk space, then {advice}"
        raise AgreedByAll(message)


def identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of `path`, which change if `path` is removed and made again."""
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def needed_bytes(tensors: Mapping[str, Tensor]) -> int:
    pieces = len(tensors) * dist.get_world_size()
    content = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return content + WRAPPING * pieces


def write_parameters(
    directory: Path, tensors: Mapping[str, Tensor], parameters: Iterable[str]
) -> Path:
    """Write a checkpoint of step 0 that contains only parameters and router state.

    Return the new checkpoint directory, a subdirectory of `directory`. `tensors` contains
    parameters and router state by name; `parameters` contains the names of the parameters.
    """
    path = checkpoint_path(directory, 0)
    path.mkdir(parents=True)
    named_tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(named_tensors, storage_writer=TensorWriter(path), no_dist=True)
    shapes = {}
    for name in parameters:
        shapes[name] = list(tensors[name].shape)
    state = {"format": FORMAT, "step": 0, "parameters": shapes, "ranks": 1, "loop": None}
    complete(path, 0, json.dumps(state), file_records(path.glob("*.distcp")))
    return path
