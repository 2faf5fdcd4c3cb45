"""The files and directories of a run that a start writes: each is missing, or what it has to be."""

from pathlib import Path

from diffllm.checkpoint.config import SAVED
from diffllm.data.tokenizer_files import TOKENIZER_FILES
from diffllm.errors import CheckpointError
from diffllm.files.paths import why_no_file

REQUEUE_FILE = "requeue"
FILES = (
    "config.yaml", *TOKENIZER_FILES, "metrics.jsonl", "run.log", "run.json", "changes.jsonl",
    "summary.json", "diverged.json", "report.html", "report.csv", SAVED, REQUEUE_FILE,
)  # fmt: skip
DIRECTORIES = ("checkpoints", "heldout", "traces", "profile", "tensorboard", "wandb", "evaluation")


def check_own_files(run: Path) -> None:
    """Raise CheckpointError where a start would write into what is no file of this run's.

    Through a symbolic link in place of a file another's would be overwritten. A link to a directory
    is a user's choice of a disk, and has to lead to one.
    """
    for file in (*(run / name for name in FILES), *sorted(run.glob("heldout/*.npz"))):
        if wrong := why_no_file(file):
            raise CheckpointError(
                f"{file} {wrong}; move it away, or choose another run.name or run.dir"
            )
    for name in DIRECTORIES:
        place = run / name
        if place.is_symlink() and not place.is_dir():
            raise CheckpointError(
                f"{place} is a link to {place.readlink()}, which is no directory: is its disk "
                "mounted?"
            )
        if place.exists() and not place.is_dir():
            raise CheckpointError(f"{place} is not a directory; move it away")
