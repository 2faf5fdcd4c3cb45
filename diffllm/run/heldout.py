"""The last evaluation of a run: the loss of every held-out document, by all ranks."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from diffllm.build import Training
from diffllm.data import heldout_documents
from diffllm.data.heldout import OwnedBatch
from diffllm.distributed.stop import Agreement
from diffllm.evaluate import document_nats
from diffllm.heldout import DocumentLosses
from diffllm.run.session import Session


class StoppedLate(Exception):
    """A signal, the argument, ended the evaluation on all ranks; nothing of it is kept."""


def measure_documents(session: Session, t: Training) -> DocumentLosses:
    """Compute the loss of each of `eval.tokens` held-out documents, but for those that are only
    context; every rank calls it, after the last step. Raises StoppedLate, on all ranks at one
    batch, where one of them got a signal."""
    cfg, data = t.cfg, session.data
    rank, world_size = dist.get_rank(), dist.get_world_size()
    session.watch.reached("the choice of held-out documents")
    chosen = heldout_documents(data.split("heldout"), data.manifest.eos_id, cfg.eval.tokens)
    shape = cfg.seq_len, cfg.micro_batches(world_size)[0]
    rounds, tokens = chosen.rounds(*shape, world_size), int(chosen.lengths.sum())
    batches = chosen.batches(*shape, rank, world_size)
    watched = until_stopped(session, batches, rounds, tokens)
    nats = document_nats(t.model, watched, len(chosen), t.device, t.documents)
    t.weights.rest()
    session.watch.reached("the text of held-out documents")
    texts = torch.from_numpy(np.stack(chosen.texts(data.tokenizer(), rank, world_size)))
    texts = texts.to(t.device)
    dist.all_reduce(texts)
    sizes, hashes = texts.cpu().numpy()
    ends = np.cumsum([len(source.split("heldout")) for source in data.sources.values()])
    sources = np.searchsorted(ends, chosen.starts, side="right").astype(np.int64)
    found = (nats.cpu().numpy(), chosen.predicted, sizes, hashes, sources)
    return DocumentLosses(*(values[chosen.predicted > 0] for values in found))


def until_stopped(
    session: Session, batches: Iterator[OwnedBatch], rounds: int, tokens: int
) -> Iterator[OwnedBatch]:
    """Yield a rank's batches, tell how far they are, and raise StoppedLate on all ranks at once."""
    agreement = Agreement(session.stop, session.cfg.distributed.timeout)
    for i, batch in enumerate(batches):
        stopping, _ = agreement.step(save=False)
        if stopping:
            agreement.close()
            raise StoppedLate(stopping)
        session.watch.reached(f"held-out batch {i + 1} of {rounds}")
        session.display.evaluate(i * tokens // rounds, tokens)
        yield batch
    agreement.close()
