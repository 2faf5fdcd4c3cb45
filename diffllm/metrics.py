"""Where numbers go: metrics.jsonl always, wandb when it works."""

import contextlib
import json
import math
import netrc
import os
import secrets
import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class WandbMode(Enum):
    """auto is online when an API key is present, else offline."""

    auto = "auto"
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass
class WandbConfig:
    """Weights & Biases."""

    mode: WandbMode = WandbMode.auto
    project: str = "diffllm"
    entity: str | None = None
    group: str | None = None
    """null: the attention variant."""
    tags: list[str] = field(default_factory=list)


def resolve_mode(cfg: WandbConfig) -> str:
    """The mode that wandb gets; `auto` follows WANDB_MODE, then the presence of a key."""
    if cfg.mode is not WandbMode.auto:
        return cfg.mode.value
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Whether an API key is in the environment or in netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc().authenticators("api.wandb.ai") is not None
    except (OSError, ValueError, netrc.NetrcParseError):
        return False


class MetricsFile:
    """metrics.jsonl: one JSON object a line, complete after every write.

    Args:
        path: the file; lines past `last_step`, and a line cut short, are dropped.
        last_step: where the run continues; 0 starts the file anew.
    """

    def __init__(self, path: Path, last_step: int = 0):
        kept = []
        if path.exists() and last_step:
            for line in path.read_text(errors="replace").splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    if json.loads(line)["step"] <= last_step:
                        kept.append(line + "\n")
        partial = path.with_suffix(".partial")
        partial.write_text("".join(kept))
        partial.replace(path)
        self.file = open(path, "a")  # noqa: SIM115

    def write(self, values: dict[str, Any]) -> None:
        """Append one line; values that JSON cannot hold (NaN, infinity) become null."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        self.file.write(json.dumps(finite) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class WandbRun:
    """A wandb run that may fail without the training noticing.

    Args:
        run_id: continues the run of that id; None makes a new one.
    """

    def __init__(
        self,
        cfg: WandbConfig,
        directory: Path,
        name: str,
        group: str,
        config: dict[str, Any],
        run_id: str | None,
    ):
        self.id = run_id or secrets.token_hex(4)
        self.mode = resolve_mode(cfg)
        self.run: Any = None
        if self.mode == "disabled":
            return
        try:
            import wandb

            self.run = wandb.init(
                project=cfg.project,
                entity=cfg.entity,
                name=name,
                group=cfg.group or group,
                tags=cfg.tags,
                id=self.id,
                resume="allow",
                mode=self.mode,  # type: ignore[arg-type]
                dir=directory,
                config=config,
                settings=wandb.Settings(silent=True, console="off"),
            )
            self.run.define_metric("step", hidden=True)
            self.run.define_metric("tokens", hidden=True)
            self.run.define_metric("*", step_metric="tokens")
        except Exception as error:
            self._give_up(error)

    def log(self, values: dict[str, Any]) -> None:
        """Send one step's values."""
        if self.run is None:
            return
        try:
            self.run.log(values)
        except Exception as error:
            self._give_up(error)

    def finish(self, summary: dict[str, Any] | None = None) -> None:
        """Flush and end."""
        if self.run is None:
            return
        try:
            self.run.summary.update(summary or {})
            self.run.finish()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.run = None
        print(f"wandb stopped working, training goes on: {error!r}", file=sys.stderr)
