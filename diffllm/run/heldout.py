"""The last evaluation of a run: the loss of every held-out document, by all ranks."""

from collections.abc import Iterator
from itertools import repeat

import numpy as np
import torch
import torch.distributed as dist

from diffllm.build import Training
from diffllm.data import heldout_documents
from diffllm.data.heldout import OwnedBatch
from diffllm.distributed.failures import raise_together, together
from diffllm.distributed.stop import Agreement
from diffllm.errors import DataError
from diffllm.evaluate import document_nats
from diffllm.heldout import DocumentLosses
from diffllm.run.session import Session


class StoppedLate(Exception):
    """A signal, the argument, ended the evaluation on all ranks; nothing of it is kept."""


def measure_documents(session: Session, t: Training) -> DocumentLosses:
    """Compute the loss of each of `eval.tokens` held-out documents, but for those that are only
    context; every rank calls it, after the last step. Raises StoppedLate, on all ranks at one
    batch, where one of them got a signal, and DataFailed where one cannot read its part."""
    cfg, data = t.cfg, session.data
    rank, world_size = dist.get_rank(), dist.get_world_size()
    session.watch.reached("the choice of held-out documents")
    eos_id = data.manifest.eos_id
    whole = cfg.data.whole_documents
    chosen = together(
        lambda: heldout_documents(data.split("heldout"), eos_id, cfg.eval.tokens, whole=whole)
    )
    shape = cfg.seq_len, cfg.micro_batches(world_size)[0]
    rounds, tokens = chosen.rounds(*shape, world_size), int(chosen.lengths.sum())
    failed: list[DataError] = []
    batches = as_many(chosen.batches(*shape, rank, world_size), shape, rounds, failed)
    watched = until_stopped(session, batches, rounds, tokens)
    nats = document_nats(t.model, watched, len(chosen), t.device, t.documents)
    raise_together(failed[0] if failed else None)
    t.weights.rest()
    session.watch.reached("the text of held-out documents")
    found = together(lambda: np.stack(chosen.texts(data.tokenizer(), rank, world_size)))
    texts = torch.from_numpy(found).to(t.device)
    dist.all_reduce(texts)
    sizes, hashes = texts.cpu().numpy()
    ends = np.cumsum([source.manifest.splits["heldout"].tokens for source in data.sources.values()])
    sources = np.searchsorted(ends, chosen.starts, side="right").astype(np.int64)
    columns = (nats.cpu().numpy(), chosen.predicted, sizes, hashes, sources)
    return DocumentLosses(*(values[chosen.predicted > 0] for values in columns))


def as_many(
    batches: Iterator[OwnedBatch], shape: tuple[int, int], rounds: int, failed: list[DataError]
) -> Iterator[OwnedBatch]:
    """Yield batches, and where they cannot be read empty ones in their place, for the other ranks
    run as many; what is wrong is added to `failed`.

    Args:
        shape: tokens of a sequence, and sequences of a batch.
    """
    for done in range(rounds):
        try:
            yield next(batches)
        except DataError as error:
            failed.append(error)
            nothing = torch.zeros(shape[::-1], dtype=torch.int64)
            yield from repeat((nothing, nothing - 1, nothing), rounds - done)
            return


def until_stopped(
    session: Session, batches: Iterator[OwnedBatch], rounds: int, tokens: int
) -> Iterator[OwnedBatch]:
    """Yield a rank's batches, tell how far they are, and raise StoppedLate on all ranks at once."""
    agreement = Agreement(session.stop, session.cfg.distributed.timeout)
    for i, batch in enumerate(batches):
        stopping = agreement.step().stopping
        if stopping:
            agreement.close()
            raise StoppedLate(stopping)
        session.watch.reached(f"held-out batch {i + 1} of {rounds}")
        session.display.evaluate(i * tokens // rounds, tokens)
        yield batch
    agreement.close()
