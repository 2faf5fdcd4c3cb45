"""Traces of training steps by torch.profiler."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch.profiler import profile, record_function, schedule

from diffllm.config.run_config import ProfileConfig
from diffllm.core.printing import to_stderr


class StepProfiler:
    """Writes a torch.profiler trace of the configured steps to a file in `directory`.

    The step before the first traced step is the profiler's warm-up. `say` is a function that prints
    a message. It is called with a message that contains the file's path, after the file is written.
    """

    def __init__(self, cfg: ProfileConfig, directory: Path, rank: int, say: Callable[[str], None]):
        # Without this variable, the profiler prints messages on stderr.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.say = say
        self.first, self.last = cfg.steps or (0, -1)
        self.file = directory / f"rank{rank}-steps-{self.first}-{self.last}.json.gz"
        self.running: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Context manager of training step `number` (from 1).

        The code in this context is traced if the step is in the configured range.
        """
        if self.running is None and self.first - 1 <= number <= self.last:
            self._start(number)
        with record_function(f"step {number}") if self.running else nullcontext():
            yield
        if self.running:
            self.running.step()
            if number == self.last:
                self.close()

    def _start(self, number: int) -> None:
        warmup = int(number < self.first)
        self.running = profile(
            schedule=schedule(
                wait=0, warmup=warmup, active=self.last - number + 1 - warmup, repeat=1
            ),
            on_trace_ready=self._write,
            acc_events=True,  # otherwise torch warns that events are cleared
        )
        self.running.start()

    def close(self) -> None:
        if self.running:
            # Cleared first: if `stop` raises, `close` must not stop the profiler again.
            running, self.running = self.running, None
            running.stop()

    def _write(self, traced: profile) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            # Otherwise the trace would overwrite the target of the link.
            if self.file.is_symlink():
                self.file.unlink()
            traced.export_chrome_trace(str(self.file))
        except (OSError, RuntimeError) as error:
            to_stderr(f"warning: cannot write {self.file}, training continues: {error}")
        else:
            self.say(f"profile: {self.file} (open with ui.perfetto.dev)")
