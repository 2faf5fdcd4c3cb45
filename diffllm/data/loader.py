"""Training batches of token sequences, in an order that depends only on the seed and the step.

Symbols in shapes: T tokens per sequence, m sequences per micro-batch.
"""

import atexit
import itertools
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from diffllm.core.bounds import check_counts, check_rank
from diffllm.core.errors import ConfigError, DataError
from diffllm.data.preparation.workers import ignore_signals, signals_blocked
from diffllm.data.samples import Samples
from diffllm.data.sequences import Batch


class TrainLoader:
    """Infinite iterator over training micro-batches, which can resume at any step.

    A micro-batch has m sequences of T tokens: (inputs, targets), (m, T) int64 each. With a global
    batch size G, step s reads the samples s*G to (s+1)*G - 1. With world size W, micro-step k of
    this step reads m samples on rank r, starting at sample s*G + k*W*m + r*m. So the data of a step
    does not depend on the world size, the micro-batch size or the number of loader processes.
    """

    def __init__(
        self,
        samples: Samples,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        num_workers: int = 1,
        prefetch_factor: int = 4,
        pin_memory: bool = False,
    ) -> None:
        """Start at the first sample; no data is read before the first iteration.

        Raises ConfigError if an argument is out of range, or if global_batch_size is not a multiple
        of micro_batch_size times world_size.

        Args:
            num_workers: number of loader processes; with 0, this process reads the data.
            prefetch_factor: number of micro-batches that each loader process prepares ahead.
        """
        sizes = {"global_batch_size": global_batch_size, "micro_batch_size": micro_batch_size}
        check_counts(least=1, **sizes)
        check_counts(least=0, num_workers=num_workers)
        # Without loader processes, the prefetch factor is not used.
        least_prefetch_factor = 1 if num_workers > 0 else 0
        check_counts(least=least_prefetch_factor, prefetch_factor=prefetch_factor)
        check_rank(rank, world_size)
        if global_batch_size % (micro_batch_size * world_size):
            raise ConfigError(
                f"global_batch_size={global_batch_size} must be a multiple of micro_batch_size="
                f"{micro_batch_size} times world_size={world_size}; change one of these sizes"
            )
        self.samples = samples
        self._start = 0
        self._global_batch_size = global_batch_size
        self._micro_batch_size = micro_batch_size
        self._rank = rank
        self._world_size = world_size
        self._options: dict[str, Any] = {
            "num_workers": num_workers,
            # PyTorch refuses a prefetch factor without workers.
            "prefetch_factor": prefetch_factor if num_workers else None,
            "pin_memory": pin_memory,
        }
        self._batches: Any = None
        self._consumed = 0
        self._micro_steps = global_batch_size // (micro_batch_size * world_size)
        self._ahead: deque[Batch] = deque()
        self.failed: DataError | None = None
        """Error of the first batch that could not be read; raised when that batch is due."""
        self.waited_s = 0.0
        """Seconds spent in `read_ahead`."""
        # Workers ignore SIGTERM, so the exit handler must stop all workers.
        atexit.register(self.close)

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Batch:
        """Read a micro-batch; raise DataError for unreadable data or a dead loader process."""
        if not self._ahead:
            if self.failed:
                raise self.failed
            self._ahead.append(self._read())
        self._consumed += 1
        return self._ahead.popleft()

    def read_ahead(self, steps: int) -> DataError | None:
        """Read the micro-batches of the next `steps` optimizer steps into a buffer.

        If a read raises DataError, stop reading and return this error. Otherwise, return None.
        """
        started = time.perf_counter()
        while not self.failed and len(self._ahead) < steps * self._micro_steps:
            try:
                self._ahead.append(self._read())
            except DataError as error:
                self.failed = error
        self.waited_s += time.perf_counter() - started
        return self.failed

    def _read(self) -> Batch:
        if self._batches is None:
            self._batches = self._started()
        try:
            batch = next(self._batches)
        # OSError and EOFError are broken pipes of a dead loader process.
        except (RuntimeError, OSError, EOFError) as error:
            # PyTorch reports a dead worker as RuntimeError; others are errors of the code.
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a data loader process died, perhaps because memory ran out; resume with a lower "
                f"data.num_workers: {error}"
            ) from error
        if isinstance(batch, DataError):
            raise batch
        inputs, targets = batch
        return inputs, targets

    @property
    def sample(self) -> int:
        # Whole steps only: a resumed run repeats the micro-steps of an unfinished step.
        steps = self._consumed // self._micro_steps
        return self._start + steps * self._global_batch_size

    def state_dict(self) -> dict[str, Any]:
        return self.samples.state(self.sample)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position `state`, a result of `state_dict`.

        World size, micro-batch size and `num_workers` may differ from those at the time of saving.
        Raises CheckpointError if `state` belongs to a different order of samples.
        """
        # The workers have prefetched batches of the old position.
        self._stop_workers()
        self._start = self.samples.sample_of(state)
        self._consumed = 0
        self._ahead.clear()
        self.failed = None

    def close(self) -> None:
        self._stop_workers()
        atexit.unregister(self.close)

    def _started(self) -> Iterator[Any]:
        """Start the loader processes and return the iterator over their batches.

        Restore the previous SIGCHLD handler, because the handler that PyTorch installs could raise
        an error anywhere in the main thread. `_read` detects dead loader processes instead.
        """
        from torchdata.stateful_dataloader import StatefulDataLoader

        m = self._micro_batch_size
        # Steps and their micro-steps are contiguous, so one counter covers all micro-steps.
        starts = itertools.count(self._start + self._rank * m, self._world_size * m)
        micro_batches = (range(start, start + m) for start in starts)
        with warnings.catch_warnings():
            # torchdata calls the deprecated function.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = StatefulDataLoader(
                _Stacked(self.samples),
                batch_size=None,
                sampler=micro_batches,
                worker_init_fn=ignore_signals,
                # A separate generator: drawing worker seeds must not advance the model's generator.
                generator=torch.Generator(),
                # Never take snapshots: the library's state would fix the number of workers.
                snapshot_every_n_steps=2**62,
                **self._options,
            )
        handler = signal.getsignal(signal.SIGCHLD)
        # A signal before `ignore_signals` would run the handlers of the trainer in a worker.
        with signals_blocked():
            batches = iter(loader)
        # Python sets handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler)
        return batches

    def _stop_workers(self) -> None:
        batches = self._batches
        self._batches = None
        if hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()
            # PyTorch ends a hanging worker by SIGTERM, which the workers ignore.
            for worker in batches._workers:
                if worker.is_alive():
                    worker.kill()


class _Stacked(Dataset[Tensor | DataError]):
    """Dataset that returns the inputs and targets of m samples as one tensor (2, m, T).

    A loader process sends each tensor as a separate message, so one tensor is faster than two.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, samples: range) -> Tensor | DataError:
        batch = self._samples[samples]
        return batch if isinstance(batch, DataError) else torch.stack(batch)
