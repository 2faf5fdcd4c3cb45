"""Measure the model of a run on held-out samples, evaluation tasks and held-out documents."""

import math
import signal
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.config import TrainConfig
from diffllm.core.errors import AgreedByAll
from diffllm.data.heldout import HeldoutDocuments, HeldoutSample, heldout_documents
from diffllm.data.prepared import Prepared
from diffllm.data.shards import bits_per_byte
from diffllm.distributed.stop import Agreement, raise_together, read_together
from diffllm.evaluation.heldout import DocumentLosses, DocumentSums, heldout_loss, next_batch
from diffllm.model.transformer import Transformer
from diffllm.training.build import Training
from diffllm.training.process import Process
from diffllm.training.step import Due

Tasks = Callable[[Transformer], dict[str, float]]
"""Measures a model on tasks and returns values by metric name. Every rank must call it."""


class Evaluation:
    """Measures the model of a run during training, on held-out samples and on tasks."""

    def __init__(self, t: Training, data: Prepared, tasks: Tasks | None) -> None:
        """Count the bytes of the sampled text. Every rank must call this.

        Raises AgreedByAll if a rank cannot read the held-out data.
        """
        self.t = t
        self.data = data
        self.tasks = tasks
        samples = heldout_samples(t.cfg, data)
        self.bits_per_nat = sample_bits_per_nat(list(samples.values()), data, t.device)

    def measure(self, due: Due) -> tuple[dict[str, float], AgreedByAll | None]:
        """Compute held-out losses if `due.sample` is true; call `tasks` if `due.tasks` is true.

        Return (values by metric name, error). If a rank could not read held-out data, the error is
        an AgreedByAll, otherwise None. Every rank must call this.
        """
        values: dict[str, float] = {}
        failure = None
        if due.sample:
            try:
                values = self.sample_losses()
            except AgreedByAll as error:
                failure = error
        if due.tasks and self.tasks:
            values |= self.tasks(self.t.model)
            self.t.weights.reshard()
        return values, failure

    def sample_losses(self) -> dict[str, float]:
        """Return held-out losses and bits per byte; raise AgreedByAll if a rank cannot read."""
        # Open the files each time: an open file would hide that it was removed.
        samples = read_together(partial(heldout_samples, self.t.cfg, self.data))
        values = {}
        for (name, sample), bits in zip(samples.items(), self.bits_per_nat, strict=True):
            suffix = f"/{name}" if name else ""
            loss = sample_loss(self.t, sample)
            values[f"eval/loss{suffix}"] = loss
            if bits is not None:
                values[f"eval/bits_per_byte{suffix}"] = bits * loss
        return values


def heldout_samples(cfg: TrainConfig, data: Prepared) -> dict[str, HeldoutSample]:
    """Return the held-out samples by source name.

    The first sample has the name "" and covers all data. For a data mixture, one sample for each
    source follows.
    """
    sequences = cfg.eval.sequences
    # Rounded up, so that each source has at least one sequence.
    sequences_per_source = math.ceil(sequences / max(1, len(data.sources)))
    parts = {"": data, **data.sources}
    samples = {}
    for name, part in parts.items():
        samples[name] = HeldoutSample(
            part.split("heldout"),
            cfg.seq_len,
            sequences_per_source if name else sequences,
            part.manifest.eos_id,
            cfg.data.whole_documents,
        )
    return samples


def sample_bits_per_nat(
    samples: list[HeldoutSample], data: Prepared, device: torch.device
) -> list[float | None]:
    """Return the factor that converts the loss of each sample to bits per byte of its text.

    The factor is None for a sample without text. Each rank decodes a part of the sequences. Every
    rank must call this. Raises AgreedByAll if a rank cannot read the data.
    """
    # Agree on read errors first: the other ranks would wait in the all-reduce for a failed rank.
    counts_by_sample = read_together(partial(counts_of_rank, samples, data))
    counts = torch.tensor(counts_by_sample, device=device)
    dist.all_reduce(counts)
    return [bits_per_byte(tokens, size) for tokens, size in counts.tolist()]


def counts_of_rank(samples: list[HeldoutSample], data: Prepared) -> list[tuple[int, int]]:
    """Count predicted tokens and their bytes in this rank's sequences of each sample."""
    tokenizer = data.tokenizer()
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    return [sample.predicted_text(tokenizer, rank, world_size) for sample in samples]


def sample_loss(t: Training, sample: HeldoutSample) -> float:
    """Return the mean loss of the sequences of `sample`, in nats per token.

    Raises AgreedByAll if a rank cannot read its batches. Every rank must call this.
    """
    shape = t.micro_batch_size, t.cfg.seq_len
    group, groups = t.group
    # Every rank runs the same number of rounds: sharded models need collectives in each forward.
    rounds = math.ceil(len(sample) / (t.micro_batch_size * groups))
    batches = sample.batches(t.micro_batch_size, group, groups)
    loss, failure = heldout_loss(t.model, batches, shape, rounds, t.device, t.documents, t.slices)
    t.weights.reshard()
    # Only now: a rank that cannot read must take part in the collectives of all rounds.
    raise_together(failure)
    return loss


def measure_documents(
    t: Training, data: Prepared, process: Process
) -> tuple[DocumentLosses | None, signal.Signals | None]:
    """Compute the loss of each held-out document, up to about `eval.tokens` tokens in total.

    Documents without targets are omitted. Return (losses, None), or (None, signal) if a signal
    stopped all ranks. Every rank must call this.

    Raises AgreedByAll if a rank cannot read the data.
    """
    cfg = t.cfg
    process.watch.reached("the choice of held-out documents")
    chosen = read_together(
        lambda: heldout_documents(
            data.split("heldout"),
            data.manifest.eos_id,
            cfg.eval.tokens,
            whole=cfg.data.whole_documents,
        )
    )
    nats, stopping = document_nats(t, chosen, process)
    if nats is None:
        return None, stopping
    process.watch.reached("the text of held-out documents")
    sizes, hashes = document_texts(t, data, chosen)
    # The held-out split of a mixture contains one source after the other.
    source_tokens = [source.manifest.splits["heldout"].tokens for source in data.sources.values()]
    ends = np.cumsum(source_tokens)
    sources = np.searchsorted(ends, chosen.starts, side="right").astype(np.int64)
    columns = (nats.cpu().numpy(), chosen.predicted, sizes, hashes, sources)
    has_targets = chosen.predicted > 0
    return DocumentLosses(*(column[has_targets] for column in columns)), None


def document_nats(
    t: Training, chosen: HeldoutDocuments, process: Process
) -> tuple[Tensor | None, signal.Signals | None]:
    """Compute the loss of each document in nats, (documents,) float64, equal on all ranks.

    Return (losses, None), or (None, signal) if a signal stopped all ranks. Raises AgreedByAll if a
    rank cannot read its batches. Every rank must call this.
    """
    cfg = t.cfg
    watch = process.watch
    group, groups = t.group
    rounds = chosen.rounds(cfg.seq_len, t.micro_batch_size, groups)
    tokens = int(chosen.lengths.sum())
    batches = chosen.batches(cfg.seq_len, t.micro_batch_size, group, groups)
    # Every rank runs `rounds` forward passes: sharded models need collectives in each forward. A
    # rank without batches, or with a read error, gets empty batches, whose targets are ignored.
    zeros = torch.zeros((t.micro_batch_size, cfg.seq_len), dtype=torch.int64)
    empty = (zeros, zeros - 1, zeros)
    failure = None
    sums = DocumentSums(t.model, len(chosen), t.device, t.documents, t.slices)
    agreement = Agreement(process.stop, cfg.distributed.timeout)
    t.model.eval()
    for done in range(rounds):
        batch, error = next_batch(batches, empty)
        if failure is None:
            failure = error
        # All ranks get the same signal in the same round, so all leave the loop together.
        stopping = agreement.all_reduce_flags().stopping
        if stopping:
            agreement.close()
            return None, stopping
        watch.reached(f"held-out batch {done + 1} of {rounds}")
        process.display.evaluate(done * tokens // rounds, tokens)
        sums.add(batch)
    agreement.close()
    nats = sums.total()
    t.model.train()
    t.weights.reshard()
    raise_together(failure)
    return nats, None


def document_texts(
    t: Training, data: Prepared, chosen: HeldoutDocuments
) -> tuple[np.ndarray, np.ndarray]:
    """Return (text sizes, text hashes) of the documents; see `HeldoutDocuments.texts`.

    Raises AgreedByAll if a rank cannot read the data. Every rank must call this.
    """
    # Each rank decodes a part of the documents, and has zeros for the other documents.
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    texts_of_rank = read_together(
        lambda: np.stack(chosen.texts(data.tokenizer(), rank, world_size))
    )
    texts = torch.from_numpy(texts_of_rank).to(t.device)
    dist.all_reduce(texts)
    sizes, hashes = texts.cpu().numpy()
    return sizes, hashes
