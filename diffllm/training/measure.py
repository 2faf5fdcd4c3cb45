"""Measure the model of a run on held-out samples, evaluation tasks and held-out documents."""

import signal
from collections.abc import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist

from diffllm.config import TrainConfig
from diffllm.core.errors import AgreedByAll
from diffllm.data.heldout import heldout_batches, heldout_documents
from diffllm.data.mixture import Prepared
from diffllm.data.sequences import Batch
from diffllm.distributed.stop import Agreement, raise_together, read_together
from diffllm.evaluation.heldout import DocumentLosses, DocumentSums, heldout_loss, next_batch
from diffllm.model.transformer import Transformer
from diffllm.training.build import Training
from diffllm.training.process import Process
from diffllm.training.step import Due

Tasks = Callable[[Transformer], dict[str, float]]
"""Measures a model on tasks and returns values by metric name. Every rank must call it."""


def measure(
    t: Training, data: Prepared, tasks: Tasks | None, due: Due
) -> tuple[dict[str, float], AgreedByAll | None]:
    """Compute the held-out loss if `due.sample` is true; call `tasks` if `due.tasks` is true.

    Return (values by metric name, error). If a rank could not read held-out data, the error is an
    AgreedByAll, otherwise None. Every rank must call this.
    """
    values: dict[str, float] = {}
    failure = None
    if due.sample:
        try:
            for name, part, sequences in heldout_samples(t.cfg, data):
                end = f"/{name}" if name else ""
                values[f"eval/loss{end}"] = loss = sample_loss(t, part, sequences)
                if (bits := part.manifest.splits["heldout"].bits_per_byte(loss)) is not None:
                    values[f"eval/bits_per_byte{end}"] = bits
        except AgreedByAll as error:
            values, failure = {}, error
    if due.tasks and tasks:
        values |= tasks(t.model)
        t.weights.reshard()
    return values, failure


def heldout_samples(cfg: TrainConfig, data: Prepared) -> list[tuple[str, Prepared, int]]:
    """Return (source name, data, maximum number of sequences) for each held-out sample.

    The first sample has the name "" and covers all data. For a data mixture, one sample for each
    source follows.
    """
    wanted = cfg.eval.sequences
    share = -(-wanted // max(1, len(data.sources)))
    return [("", data, wanted), *((name, of, share) for name, of in data.sources.items())]


def sample_loss(t: Training, data: Prepared, sequences: int) -> float:
    """Return the mean loss of at most `sequences` held-out sequences, in nats per token.

    Raises AgreedByAll if a rank cannot read its batches. Every rank must call this.
    """
    cfg = t.cfg
    tokens = data.manifest.splits["heldout"].tokens
    sequences = min(sequences, (tokens - 1) // cfg.seq_len)
    rounds = -(-sequences // (t.micro_batch_size * t.group[1]))
    batches, shape = sample_batches(t, data, sequences), (t.micro_batch_size, cfg.seq_len)
    loss, failure = heldout_loss(t.model, batches, shape, rounds, t.device, t.documents, t.slices)
    t.weights.reshard()
    raise_together(failure)
    return loss


def sample_batches(t: Training, data: Prepared, sequences: int) -> Iterator[Batch]:
    """Yield this rank's micro-batches of held-out sequences.

    All ranks together get at most `sequences` sequences. The iterator raises DataError if the data
    cannot be read.
    """
    yield from heldout_batches(
        data.split("heldout"),
        t.cfg.seq_len,
        t.micro_batch_size,
        sequences,
        *t.group,
        eos_id=data.manifest.eos_id if t.cfg.data.whole_documents else None,
    )


def measure_documents(
    t: Training, data: Prepared, here: Process
) -> tuple[DocumentLosses | None, signal.Signals | None]:
    """Compute the loss of each held-out document, up to about `eval.tokens` tokens in total.

    Documents without targets are omitted. Return (losses, None), or (None, signal) if a signal
    stopped all ranks. Every rank must call this.

    Raises AgreedByAll if a rank cannot read the data.
    """
    cfg, watch = t.cfg, here.watch
    rank, world_size = dist.get_rank(), dist.get_world_size()
    watch.reached("the choice of held-out documents")
    eos_id, whole = data.manifest.eos_id, cfg.data.whole_documents
    chosen = read_together(
        lambda: heldout_documents(data.split("heldout"), eos_id, cfg.eval.tokens, whole=whole)
    )
    shape = cfg.seq_len, t.micro_batch_size
    rounds, tokens = chosen.rounds(*shape, t.group[1]), int(chosen.lengths.sum())
    batches = chosen.batches(*shape, *t.group)
    zeros = torch.zeros(shape[::-1], dtype=torch.int64)
    empty, failure = (zeros, zeros - 1, zeros), None
    sums = DocumentSums(t.model, len(chosen), t.device, t.documents, t.slices)
    agreement = Agreement(here.stop, cfg.distributed.timeout)
    t.model.eval()
    for done in range(rounds):
        batch, error = next_batch(batches, empty)
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
    found = read_together(lambda: np.stack(chosen.texts(data.tokenizer(), rank, world_size)))
    texts = torch.from_numpy(found).to(t.device)
    dist.all_reduce(texts)
    sizes, hashes = texts.cpu().numpy()
    ends = np.cumsum([source.manifest.splits["heldout"].tokens for source in data.sources.values()])
    sources = np.searchsorted(ends, chosen.starts, side="right").astype(np.int64)
    columns = (nats.cpu().numpy(), chosen.predicted, sizes, hashes, sources)
    return DocumentLosses(*(values[chosen.predicted > 0] for values in columns)), None
