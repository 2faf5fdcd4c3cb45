"""The last evaluation of a run: the loss of every held-out document, by all ranks."""

import signal

import numpy as np
import torch
import torch.distributed as dist

from diffllm.data import Prepared, heldout_documents
from diffllm.distributed.failures import raise_together, together
from diffllm.distributed.stop import Agreement
from diffllm.evaluate import DocumentSums, read
from diffllm.heldout import DocumentLosses
from diffllm.training.build import Training
from diffllm.training.process import Process


def measure_documents(
    t: Training, data: Prepared, here: Process
) -> tuple[DocumentLosses | None, signal.Signals | None]:
    """Compute the loss of each of `eval.tokens` held-out documents with targets.

    Every rank must call this, after the last step. Returns the losses, or None and the signal that
    stopped all ranks at one batch. Raises DataFailed on every rank if one cannot read its part.
    """
    cfg, watch = t.cfg, here.watch
    rank, world_size = dist.get_rank(), dist.get_world_size()
    watch.reached("the choice of held-out documents")
    eos_id, whole = data.manifest.eos_id, cfg.data.whole_documents
    chosen = together(
        lambda: heldout_documents(data.split("heldout"), eos_id, cfg.eval.tokens, whole=whole)
    )
    shape = cfg.seq_len, cfg.micro_batches(world_size)[0]
    rounds, tokens = chosen.rounds(*shape, world_size), int(chosen.lengths.sum())
    batches = chosen.batches(*shape, rank, world_size)
    zeros = torch.zeros(shape[::-1], dtype=torch.int64)
    empty, failure = (zeros, zeros - 1, zeros), None
    sums = DocumentSums(t.model, len(chosen), t.device, t.documents)
    agreement = Agreement(here.stop, cfg.distributed.timeout)
    t.model.eval()
    for done in range(rounds):
        batch, error = read(batches, empty)
        failure = failure or error
        if stopping := agreement.all_reduce_flags().stopping:
            agreement.close()
            return None, stopping
        watch.reached(f"held-out batch {done + 1} of {rounds}")
        here.display.evaluate(done * tokens // rounds, tokens)
        sums.add(batch)
    agreement.close()
    nats = sums.total()
    t.model.train()
    t.weights.reshard()
    raise_together(failure)
    watch.reached("the text of held-out documents")
    found = together(lambda: np.stack(chosen.texts(data.tokenizer(), rank, world_size)))
    texts = torch.from_numpy(found).to(t.device)
    dist.all_reduce(texts)
    sizes, hashes = texts.cpu().numpy()
    ends = np.cumsum([source.manifest.splits["heldout"].tokens for source in data.sources.values()])
    sources = np.searchsorted(ends, chosen.starts, side="right").astype(np.int64)
    columns = (nats.cpu().numpy(), chosen.predicted, sizes, hashes, sources)
    return DocumentLosses(*(values[chosen.predicted > 0] for values in columns)), None
