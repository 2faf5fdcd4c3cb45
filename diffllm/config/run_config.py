"""Config sections of a run: name and directory, evaluations, profile and computed values."""

from dataclasses import dataclass
from typing import Any

from diffllm.config.matching import Matched
from diffllm.core.errors import ConfigError
from diffllm.core.keys import key

CARRIED_PREFIXES = {"weights": ("model.",), "stage": ("model.", "optim.")}
"""Prefixes of the names of tensors that a new run takes from a checkpoint, by kind of resume.

The kinds are those of resume=weights:PATH and resume=stage:PATH. Schedule, data order, random
generators, spike windows and the guard of skipped updates always begin anew.
"""


@dataclass
class RunConfig:
    """Name and directory of a run, keys that may change at resume, and the run's sweep or study."""

    name: str | None = key(
        None,
        effect="none",
        kind="sweep",
        help="Name of the run; null: generated from the variant and the time.",
    )
    dir: str | None = key(
        None,
        effect="none",
        kind=("path", "sweep"),
        help="Directory of the run; null: outputs/<name>, or outputs/<sweep>/<name>.",
    )
    allow_changes: list[str] = key(
        [],
        effect="none",
        help="Keys or sections that may change when a run resumes. Also `corpus`, `tokenizer` "
        "and `tokens`, which are compared by content, and `plugins`, compared by code.",
    )
    report: bool = key(
        True,
        effect="none",
        help="Write report.html and report.csv at the end of training.",
    )
    sweep: str | None = key(
        None,
        effect="none",
        help="Name of the sweep that the run belongs to; set by `train.py -m`.",
    )
    swept: list[str] = key(
        [],
        effect="none",
        kind="sweep",
        help="Keys whose values name the runs of a sweep; set by `train.py -m`.",
    )
    study: str | None = key(
        None,
        effect="none",
        resumable=False,
        help="Study of the run, with stage and arm; set by `diffllm study run`.",
    )


@dataclass
class EvalConfig:
    """Evaluations during training: held-out loss and tasks, with their intervals and sizes."""

    interval: int = key(
        100,
        least=1,
        effect="logging",
        help="Steps between evaluations; the last step always has an evaluation.",
    )
    sequences: int = key(
        64,
        least=1,
        effect="measurement",
        help="Held-out sequences per evaluation, spread evenly over the split; always the same "
        "ones.",
    )
    tokens: float | None = key(
        None,
        above=0,
        effect="measurement",
        fact="heldout_tokens",
        auto="${auto_tokens:}",
        help="Held-out tokens for the last loss; auto: 1/4 of the run's tokens, at most 1e7; "
        "null: all. Documents are complete, spread evenly over the split, and equal in runs of "
        "equal length. The last document can exceed the number.",
    )
    suites: list[str] = key(
        [],
        effect="measurement",
        help="Tasks to evaluate during training, such as [mqar,needle]. A suite name, such as "
        "claims, selects all tasks of the suite; a file of examples ends with .jsonl or .ndjson; "
        "see docs/evaluation.md.",
    )
    suites_interval: int = key(
        500,
        least=1,
        effect="measurement",
        help="Steps between evaluations of eval.suites; the last step always has an evaluation.",
    )
    suites_limit: int = key(
        64,
        least=1,
        effect="measurement",
        help="Maximum examples per task, over all levels; always the same examples.",
    )
    levels: dict[str, Any] = key(
        {},
        effect="measurement",
        help="Difficulty of tasks in eval.suites, for example {mqar: {filler: 64}}. All other "
        "tasks use all levels that fit seq_len.",
    )


@dataclass
class ProfileConfig:
    """Range of training steps to profile."""

    steps: list[int] = key(
        [],
        effect="speed",
        help="First and last step to trace, such as [10,12], on every rank; empty: no trace.",
    )

    def validate(self, steps: int) -> None:
        if self.steps and not (
            len(self.steps) == 2 and 1 <= self.steps[0] <= self.steps[1] <= steps
        ):
            raise ConfigError(
                f"profile.steps={self.steps} must be [first,last] with "
                f"1 <= first <= last <= {steps}, the last training step"
            )


@dataclass
class ResolvedConfig:
    """Values that loading computes; overrides cannot set these keys."""

    choices: dict[str, str] = key(
        {},
        effect="none",
        help="The YAML chosen in each group, or an imported model's name.",
    )
    defaults: str | None = key(
        None,
        effect="none",
        kind="machine",  # The reason can contain a path.
        compare=False,
        help="The set of defaults below the overrides, and the reason for this set; null if an "
        "override sets the experiment.",
    )
    schemas: dict[str, str] = key(
        {},
        effect="numbers",
        may_differ=("report", "study"),
        help="Registered class names of model.attention and, if not the default class, of data. "
        "Readers of a run directory use these names.",
    )
    matched: Matched | None = key(
        None,
        effect="none",
        help="The widths solved by model.match_params_to or match_flops_to.",
    )
