"""The held-out loss of a model: of sequences, and of whole documents."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from diffllm.model.documents import Documents


@torch.no_grad()
def heldout_loss(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    shape: tuple[int, int],
    rounds: int,
    device: torch.device,
    documents: Callable[[Tensor], Documents | None] = lambda inputs: None,
) -> float:
    """Compute the mean cross-entropy, in nats a token, over the batches of all ranks.

    Args:
        batches: this rank's (inputs, targets), each (b, T) int64 with b <= shape[0].
        shape: (B, T) that every forward pass has; short batches are padded with ignored targets,
            because sharded ranks must run equally many passes of one shape.
        rounds: forward passes of every rank; at least the number of `batches`.
        documents: returns the document boundaries of a CPU batch (B, T), moved to `device`; None
            if unmasked.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    own = iter(batches)
    for _ in range(rounds):
        inputs, targets = next(own, (torch.zeros(0, shape[1], dtype=torch.int64),) * 2)
        missing = shape[0] - inputs.shape[0]
        inputs = F.pad(inputs, (0, 0, 0, missing))
        targets = F.pad(targets, (0, 0, 0, missing), value=-1).to(device)
        masked = documents(inputs)
        sums[0] += model(inputs.to(device), targets, documents=masked).loss.nll
        sums[1] += (targets >= 0).sum()
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[1]).item()


@torch.no_grad()
def document_nats(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor, Tensor]],
    count: int,
    device: torch.device,
    documents: Callable[[Tensor], Documents | None] = lambda inputs: None,
) -> Tensor:
    """Sum the loss of each document over the batches of all ranks: (count,) float64, in nats.

    A document may lie in any number of sequences, of any ranks.

    Args:
        batches: this rank's (inputs, targets, document of each target), (B, T) int64 each, on the
            CPU; as many on every rank. Negative targets are ignored.
        documents: as for `heldout_loss`.
    """
    model.eval()
    sums = torch.zeros(count, dtype=torch.float64, device=device)
    for inputs, targets, owners in batches:
        losses = model(
            inputs.to(device), targets.to(device), documents=documents(inputs), by_token=True
        )
        sums.index_add_(0, owners.flatten().to(device), losses.flatten().double())
    dist.all_reduce(sums)
    model.train()
    return sums
