"""The held-out loss of a model: of sequences, and of whole documents."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.errors import DataError
from diffllm.model.documents import Documents

T = TypeVar("T")


@torch.no_grad()
def heldout_loss(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    shape: tuple[int, int],
    rounds: int,
    device: torch.device,
    documents: Callable[[Tensor], Documents] | None = None,
) -> tuple[float, DataError | None]:
    """Compute the mean cross-entropy, in nats per token, over the batches of all ranks.

    Every rank must call this. If a batch cannot be read, this rank continues with empty batches and
    returns the error next to the loss, so that all ranks run equally many forward passes.

    Args:
        batches: this rank's (inputs, targets), each (b, T) int64 with b <= shape[0].
        shape: (B, T) of every forward pass; short batches are padded with ignored targets, because
            sharded ranks must run passes of one shape.
        rounds: forward passes of every rank; at least the number of `batches`.
        documents: finds the documents of a CPU batch (B, T), with boundaries on `device`; None if
            documents are not masked.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    own, failure = iter(batches), None
    for _ in range(rounds):
        (inputs, targets), error = read(own, (torch.zeros(0, shape[1], dtype=torch.int64),) * 2)
        failure = failure or error
        missing = shape[0] - inputs.shape[0]
        inputs = F.pad(inputs, (0, 0, 0, missing))
        targets = F.pad(targets, (0, 0, 0, missing), value=-1).to(device)
        masked = documents(inputs) if documents else None
        sums[0] += model(inputs.to(device), targets, documents=masked).loss.nll
        sums[1] += (targets >= 0).sum()
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item(), failure


def read(batches: Iterator[T], empty: T) -> tuple[T, DataError | None]:
    """Return the next batch, or `empty` after the last one or with the error if reading fails."""
    try:
        return next(batches, empty), None
    except DataError as error:
        return empty, error


class DocumentSums:
    """Sums of the losses of `count` documents, which may lie in sequences of several ranks.

    Args:
        documents: as for `heldout_loss`.
    """

    def __init__(
        self,
        model: nn.Module,
        count: int,
        device: torch.device,
        documents: Callable[[Tensor], Documents] | None = None,
    ):
        self.model, self.documents = model, documents
        self.sums = torch.zeros(count, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, batch: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add this rank's (inputs, targets, document of each target), (B, T) int64 each, on the
        CPU. Ranks must add equally many batches. Negative targets are ignored."""
        inputs, targets, owners = batch
        device = self.sums.device
        masked = self.documents(inputs) if self.documents else None
        losses = self.model(inputs.to(device), targets.to(device), documents=masked, by_token=True)
        self.sums.index_add_(0, owners.flatten().to(device), losses.flatten().double())

    def total(self) -> Tensor:
        """Return the sums over all ranks, (count,) float64 in nats. Every rank must call this."""
        dist.all_reduce(self.sums)
        return self.sums
