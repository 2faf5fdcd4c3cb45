"""Held-out loss of a model, and the file with the loss of each held-out document.

This is the only module of `diffllm.evaluation` that `diffllm.training` imports.
"""

import io
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.files import open_regular, write_atomic
from diffllm.core.run_files import RunFolder, step_name
from diffllm.data.shards import bits_per_byte
from diffllm.model.attention.masks import Documents, moved
from diffllm.model.attention.slices import Slices
from diffllm.model.loss import Term
from diffllm.model.transformer import Transformer

LARGEST_LOSSES_FILE = 2**34
"""Limit of the file in bytes."""
T = TypeVar("T")


@torch.no_grad()
def heldout_loss(
    model: Transformer,
    batches: Iterable[tuple[Tensor, Tensor]],
    shape: tuple[int, int],
    rounds: int,
    device: torch.device,
    documents: Callable[[Tensor], Documents] | None = None,
    slices: Slices | None = None,
) -> tuple[float, DataError | None]:
    """Return the mean held-out loss over all ranks in nats per token, and the error of this rank.

    Every rank must call this function. The error is the DataError of reading `batches`, or None.
    After an error, this rank continues with empty batches, because a sharded model (FSDP) needs
    the same number of forward passes on all ranks.

    Args:
        batches: inputs and targets of this rank, int64, each with at most B rows of T tokens.
        shape: (B, T) of every forward pass; smaller batches are padded with ignored targets.
        rounds: number of forward passes per rank, at least the number of batches.
        documents: function that returns the document boundaries of inputs (B, T) on the CPU. They
            mask attention between documents. None disables this mask.
        slices: the ranks that share each sequence, which read equal batches; None: one rank.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    no_rows = torch.zeros(0, shape[1], dtype=torch.int64)
    empty = no_rows, no_rows
    iterator = iter(batches)
    failure: DataError | None = None
    for _ in range(rounds):
        (inputs, targets), error = next_batch(iterator, empty)
        if failure is None:
            failure = error
        # All batches have one shape, so that a compiled model is not compiled again.
        missing = shape[0] - inputs.shape[0]
        inputs = F.pad(inputs, (0, 0, 0, missing))
        targets = F.pad(targets, (0, 0, 0, missing), value=-1)
        # The boundaries are those of the complete sequences, so they are computed before the cut.
        masked = documents(inputs).to(device) if documents else None
        if slices:
            inputs, targets = slices.cut(inputs), slices.cut(targets)
        inputs, targets = moved(inputs, device), moved(targets, device)
        losses = model.loss(inputs, targets, masked, slices).losses
        sums[0] += losses[Term.cross_entropy]
        sums[1] += (targets >= 0).sum()
    # A collective that every rank must call, also after an error.
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item(), failure


def next_batch(batches: Iterator[T], empty: T) -> tuple[T, DataError | None]:
    """Return (next batch, None); if reading raises a DataError, return (`empty`, this error).

    If no batch remains, return (`empty`, None).
    """
    try:
        return next(batches, empty), None
    except DataError as error:
        return empty, error


@dataclass
class DocumentSums:
    """Adds up the token losses of each of `count` documents, batch by batch.

    `documents` and `slices` have the same meaning as in `heldout_loss`.
    """

    model: Transformer
    count: int
    device: torch.device
    documents: Callable[[Tensor], Documents] | None = None
    slices: Slices | None = None

    def __post_init__(self) -> None:
        self.sums = torch.zeros(self.count, dtype=torch.float64, device=self.device)

    @torch.no_grad()
    def add(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Compute the token losses of one batch, and add them to the sums of this rank.

        Every rank must add the same number of batches.

        Args:
            batch: inputs, targets, and the document index of each target. All three are (B, T)
                int64 on the CPU. Negative targets are ignored.
        """
        device = self.device
        inputs, targets, owners = batch
        masked = self.documents(inputs).to(device) if self.documents else None
        if self.slices:
            inputs, targets, owners = map(self.slices.cut, batch)
        losses = self.model.token_losses(
            moved(inputs, device), moved(targets, device), masked, self.slices
        )
        # Sums of many float32 losses would lose digits.
        nats = losses.flatten().double()
        self.sums.index_add_(0, moved(owners.flatten(), device), nats)

    def total(self) -> Tensor:
        """Return the loss of each document in nats, summed over all ranks, (count,) float64.

        Every rank must call this method once.
        """
        dist.all_reduce(self.sums)
        return self.sums


@dataclass(frozen=True)
class DocumentLosses:
    """Losses of all held-out documents of a run, in the order of the held-out split.

    Each array contains one entry per document.
    """

    nats: np.ndarray
    """Sum of the token losses in nats, float64; infinite or NaN if training diverged."""
    tokens: np.ndarray
    """Number of predicted tokens, including the EOS, int64."""
    bytes: np.ndarray
    """Bytes of the decoded text in UTF-8, int64."""
    texts: np.ndarray
    """The first 8 bytes of the SHA-256 of the decoded text, int64."""
    sources: np.ndarray
    """Index of the document's source in a mixture, int64."""

    @property
    def loss(self) -> float:
        """Mean loss in nats per token over all documents."""
        return float(self.nats.sum() / self.tokens.sum())

    def of_source(self, index: int) -> "DocumentLosses | None":
        """Return the losses of documents of data source `index`; None without such documents."""
        is_of_source = self.sources == index
        if not is_of_source.any():
            return None
        arrays = {f.name: getattr(self, f.name)[is_of_source] for f in fields(self)}
        return DocumentLosses(**arrays)

    @property
    def bits_per_byte(self) -> float:
        """Mean loss in bits per byte of text over all documents; NaN if all texts are empty."""
        bits = bits_per_byte(float(self.nats.sum()), int(self.bytes.sum()))
        return math.nan if bits is None else bits

    def save(self, run: Path, step: int) -> None:
        """Write the losses, which were measured after training step `step`, to the directory `run`.

        Raises CheckpointError if writing fails.
        """
        file = path_of(run, step)
        content = io.BytesIO()
        np.savez(content, **{f.name: getattr(self, f.name) for f in fields(self)})
        write_atomic(file, content.getvalue(), new_parents=1)


def path_of(run: Path, step: int) -> Path:
    return run / RunFolder.HELDOUT / f"{step_name(step)}.npz"


def same_documents(first: DocumentLosses, second: DocumentLosses) -> bool:
    """Return whether `first` and `second` contain the same documents in the same order."""
    have_same_texts = np.array_equal(first.texts, second.texts)
    return have_same_texts and np.array_equal(first.tokens, second.tokens)


def document_losses(run: Path, step: int | None = None) -> DocumentLosses:
    """Read the losses of a run's held-out documents.

    Raises CheckpointError if the file is missing or damaged.

    Args:
        step: training step after which the losses were measured; None selects the last measurement.
    """
    files = sorted((run / RunFolder.HELDOUT).glob("step-*.npz"))
    file = files[-1] if step is None and files else path_of(run, step or 0)
    if not files or not os.path.lexists(file):
        after = "" if step is None else f" after step {step}"
        raise CheckpointError(
            f"{run}/{RunFolder.HELDOUT} has no losses of held-out documents{after}; a run writes "
            "the losses after its last training step"
        )
    try:
        with (
            open_regular(file, LARGEST_LOSSES_FILE) as stream,
            np.load(stream, allow_pickle=False) as content,
        ):
            arrays = {f.name: content[f.name] for f in fields(DocumentLosses)}
            return _checked(DocumentLosses(**arrays))
    except Exception as error:  # numpy and zipfile raise many types.
        raise CheckpointError(f"{file} is damaged: {error}") from error


def _checked(losses: DocumentLosses) -> DocumentLosses:
    """Return `losses`; raise ValueError if the arrays have wrong types, shapes or values."""
    for f in fields(losses):
        values = getattr(losses, f.name)
        dtype = np.float64 if f.name == "nats" else np.int64
        if values.shape != losses.nats.shape or values.ndim != 1 or values.dtype != dtype:
            raise ValueError(f"{f.name} is {values.dtype} of shape {values.shape}")
    if not len(losses.nats) or (losses.tokens < 1).any() or (losses.bytes < 0).any():
        raise ValueError("no documents, or documents without tokens")
    return losses
