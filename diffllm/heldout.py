"""The losses of a run's held-out documents, in a file beside its checkpoints."""

import io
import math
import os
import struct
import zipfile
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from diffllm.errors import CheckpointError
from diffllm.files import write_atomic
from diffllm.files.reading import open_regular

DIRECTORY = "heldout"
LARGEST = 2**34
"""Limit in bytes."""
DAMAGED = (
    OSError, ValueError, TypeError, KeyError, AttributeError, EOFError, MemoryError,
    NotImplementedError, OverflowError, RuntimeError, SyntaxError, struct.error, zipfile.BadZipFile,
    zlib.error,
)  # fmt: skip
"""Errors of numpy and zipfile about what is in a file."""


@dataclass(frozen=True)
class DocumentLosses:
    """The loss of every held-out document, in the order of the split; arrays of one length.

    Two runs were measured on the same documents where `texts` and `tokens` are equal.
    """

    nats: np.ndarray
    """Sum of -log p over the document's tokens, float64; not finite where the model diverged."""
    tokens: np.ndarray
    """Tokens that were predicted, the one that ends the document among them, int64."""
    bytes: np.ndarray
    """Bytes of its text in UTF-8, as its tokens decode to it, int64."""
    texts: np.ndarray
    """The first 8 bytes of the SHA-256 of that text, int64."""
    sources: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """The place of its source among those of a mixture, int64; 0 where there is one source."""

    def __post_init__(self) -> None:
        if not len(self.sources):
            object.__setattr__(self, "sources", np.zeros_like(self.tokens))

    @property
    def loss(self) -> float:
        """Nats a token, over all documents together."""
        return float(self.nats.sum() / self.tokens.sum())

    def of_source(self, place: int) -> "DocumentLosses | None":
        """Those of one source of a mixture; None where there are none."""
        mine = self.sources == place
        if not mine.any():
            return None
        return DocumentLosses(**{f.name: getattr(self, f.name)[mine] for f in fields(self)})

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of text, over all documents together; NaN where there is no text."""
        size = int(self.bytes.sum())
        return float(self.nats.sum() / (math.log(2) * size)) if size else math.nan

    def save(self, run: Path, step: int) -> None:
        """Write them into a run directory, as those after `step` steps; raises CheckpointError."""
        file = path_of(run, step)
        content = io.BytesIO()
        np.savez(content, **{f.name: getattr(self, f.name) for f in fields(self)})
        try:
            file.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot write {file}: {error.strerror}") from error
        write_atomic(file, content.getvalue())


def path_of(run: Path, step: int) -> Path:
    """Return the file of the losses after `step` steps."""
    return run / DIRECTORY / f"step-{step:08d}.npz"


def document_losses(run: Path, step: int | None = None) -> DocumentLosses:
    """Read the losses of a run's held-out documents, after its last step unless another is named.

    Raises CheckpointError where there are none, or their file is damaged.
    """
    there = sorted((run / DIRECTORY).glob("step-*.npz"))
    file = there[-1] if there and step is None else path_of(run, step or 0)
    if not there or not os.path.lexists(file):
        after = "" if step is None else f" after step {step}"
        raise CheckpointError(
            f"{run} has no losses of held-out documents{after}: a run has them in {DIRECTORY}/ "
            "when it has ended, unless an older version made it"
        )
    names = [f.name for f in fields(DocumentLosses)]
    try:
        with (
            open_regular(file, LARGEST) as stream,
            np.load(stream, allow_pickle=False) as content,
        ):
            # files of older versions have no sources
            found = DocumentLosses(**{name: content[name] for name in names if name in content})
        check(found)
    except DAMAGED as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    return found


def check(losses: DocumentLosses) -> None:
    """Raise ValueError unless these can be the losses of documents."""
    for f in fields(losses):
        values = getattr(losses, f.name)
        dtype = np.float64 if f.name == "nats" else np.int64
        if values.shape != losses.nats.shape or values.ndim != 1 or values.dtype != dtype:
            raise ValueError(f"{f.name} is {values.dtype} of shape {values.shape}")
    if not len(losses.nats) or (losses.tokens < 1).any() or (losses.bytes < 0).any():
        raise ValueError("it has no documents, or some without tokens")
