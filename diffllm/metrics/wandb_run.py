"""A wandb run whose failures never end training.

All calls of wandb run on their own thread, because they block if its service hangs. Training waits
for the thread only at start and end, for a limited time. A failure is one line on stderr;
metrics.jsonl has the same values.
"""

import contextlib
import math
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from diffllm.core.errors import ConfigError
from diffllm.core.printing import to_stderr
from diffllm.metrics.table import METRICS

ONLINE_SECONDS = 20
"""Longest wait for the server's answer, before the run is recorded offline."""
START_SECONDS = 60
FINISH_SECONDS = 60
BACKLOG = 4096
"""Lines that may wait for wandb."""
LONGEST_TAG = 64
HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")


class WandbMode(Enum):
    """auto is online when an API key is present, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class WandbConfig:
    """Where Weights & Biases keeps the run, and under what name."""

    mode: WandbMode = WandbMode.auto
    """Where wandb writes; auto: online with a key, else offline."""
    project: str = "diffllm"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project; null: the key's own."""
    group: str | None = None
    """Group of the run; null: the attention variant."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run, beside the name of its sweep."""

    def validate(self) -> None:
        for tag in self.tags:
            if not 1 <= len(tag) <= LONGEST_TAG:
                raise ConfigError(f"wandb.tags: {tag!r} must have 1 to {LONGEST_TAG} characters")


def resolve_mode(cfg: WandbConfig) -> str:
    """The mode that wandb gets; `auto` follows WANDB_MODE, then the presence of an API key for
    wandb's server in the environment or in netrc."""
    if cfg.mode is not WandbMode.auto:
        return cfg.mode.value
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    found = bool(os.environ.get("WANDB_API_KEY"))
    own = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc
    with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):
        known = netrc.netrc(os.environ.get("NETRC"))
        found = found or any(known.authenticators(host) for host in ([own] if own else HOSTS))
    return "online" if found else "offline"


class WandbRun:
    """A wandb run whose failure does not end training.

    Args:
        choices: the YAML chosen in each group: attention is wandb's group, model its job type.
        sweep: the sweep that the run belongs to; its first 64 characters are a tag.
        run_id: the run to continue; None makes a new one.
        over_tokens: further patterns of metric names that wandb draws over tokens.
    """

    def __init__(
        self,
        cfg: WandbConfig,
        directory: Path,
        choices: dict[str, str],
        sweep: str | None,
        config: dict[str, Any],
        run_id: str | None,
        over_tokens: Sequence[str] = (),
    ):
        self.id = run_id or secrets.token_hex(4)
        self.over_tokens = over_tokens
        self.mode = resolve_mode(cfg)
        self.working = self.mode != "disabled"
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue(BACKLOG)
        self.summary: dict[str, Any] = {}
        self.exit_code = 0
        self.started = threading.Event()
        if not self.working:
            return
        options = {
            "project": cfg.project,
            "entity": cfg.entity,
            "name": directory.name,
            "group": cfg.group or choices["attention"],
            "job_type": choices["model"],
            "tags": list(dict.fromkeys(filter(None, [*cfg.tags, (sweep or "")[:LONGEST_TAG]]))),
            "id": self.id,
            "resume": "allow",
            "dir": str(directory),
            "config": config,
        }
        self.thread = threading.Thread(target=self._work, args=(options,), daemon=True)
        self.thread.start()
        self.started.wait(START_SECONDS)

    def log(self, values: dict[str, Any]) -> None:
        """Queue one step's values except NaN, which wandb would keep as minimum, and infinity."""
        if not self.working:
            return
        finite = {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}
        try:
            self.lines.put_nowait(finite)
        except queue.Full:
            self._give_up(f"it has not taken the last {BACKLOG} lines")
            abandon_service()

    def finish(self, summary: dict[str, Any] | None = None, exit_code: int = 0) -> None:
        """Flush and end, within FINISH_SECONDS; a code other than 0 is a failed run."""
        if not self.working:
            return
        self.summary, self.exit_code = summary or {}, exit_code
        with contextlib.suppress(queue.Full):
            self.lines.put_nowait(None)
        self.thread.join(FINISH_SECONDS)
        if self.thread.is_alive():
            self._give_up(f"it did not finish within {FINISH_SECONDS} s")
            abandon_service()
        self.working = False

    def _work(self, options: dict[str, Any]) -> None:
        try:
            run = start(self.mode, options)
            for name in self.over_tokens:
                run.define_metric(name, step_metric="tokens")
            self.started.set()
            while (values := self.lines.get()) is not None:
                run.log(values)
            run.summary.update(self.summary)
            run.finish(exit_code=self.exit_code)
        except Exception as error:
            tear_down()  # before it is said: `finish` then waits for no more, and a process exits
            self._give_up(repr(error))
        finally:
            self.started.set()

    def _give_up(self, why: str) -> None:
        if self.working:
            self.working = False
            to_stderr(f"wandb stopped working, training continues: {why}")


def start(mode: str, options: dict[str, Any]) -> Any:
    """A wandb run with its metrics defined; offline if the server does not take it online."""
    import wandb

    wandb.setup(wandb.Settings(silent=True))  # a wandb that is not silent asks for a missing key
    settings = wandb.Settings(silent=True, console="off", init_timeout=ONLINE_SECONDS)
    try:
        run = wandb.init(mode=mode, settings=settings, **options)  # type: ignore[arg-type]
    except Exception as error:
        if mode != "online":
            raise
        to_stderr(f"wandb cannot go online, the run is recorded offline: {error!r}")
        tear_down()  # the service would refuse the run's id as one in use
        run = wandb.init(mode="offline", settings=settings, **options)
    run.define_metric("step", hidden=True)
    run.define_metric("tokens", hidden=True)
    for metric in METRICS:
        # the last value is kept anyway; asked for, it would stand under <name>.last
        asked = None if metric.summary == "last" else metric.summary
        run.define_metric(metric.name, step_metric="tokens", summary=asked)
    return run


def tear_down() -> None:
    """End wandb's service; from a dead one wandb's own hook prints a traceback at exit."""
    with contextlib.suppress(Exception, SystemExit):
        import wandb

        wandb.teardown()


def abandon_service() -> None:
    """Kill a service that hangs: wandb waits for it without end when the process exits."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.setup()._connection._proc._process.kill()  # type: ignore[union-attr]
    tear_down()
