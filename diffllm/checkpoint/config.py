"""The config of checkpoints: when they are written, and which of them stay."""

import re
from dataclasses import dataclass

from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError

SECONDS = {"s": 1, "min": 60, "h": 3600}
SAVED = "saved.json"
"""The file of a run that says which step was saved last; beside `checkpoints/`, which may lie on a
disk of its own."""
DURATION = re.compile(rf"(\d+(?:\.\d+)?)({'|'.join(SECONDS)})")


@dataclass
class CheckpointConfig:
    """When checkpoints are written, and how many of them stay."""

    interval: int | str = 100
    """Steps (100) or time (30min, 90s, 1.5h) between checkpoints. The last step always has one."""
    keep_last: int = bounded(2, least=0)
    """Number of newest checkpoints that stay; 0 keeps all."""
    keep_every: int = bounded(0, least=0)
    """Checkpoints at multiples of this many steps stay for good; 0 is off."""

    @property
    def steps(self) -> int:
        """Steps between checkpoints; 0 where a time is between them."""
        return self.interval if isinstance(self.interval, int) else 0

    @property
    def seconds(self) -> float | None:
        """Seconds between checkpoints; None where steps are between them."""
        match = DURATION.fullmatch(str(self.interval))
        return float(match[1]) * SECONDS[match[2]] if match else None

    def validate(self) -> None:
        """Raise ConfigError for values outside their range."""
        check_bounds("checkpoint.", self)
        if self.steps < 1 and not self.seconds:
            raise ConfigError(
                f"checkpoint.interval={self.interval} must be steps, as in 100, or a time above 0, "
                "as in 90s, 30min or 1.5h"
            )
