"""metrics.jsonl: where every number goes."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any


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
