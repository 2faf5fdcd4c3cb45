"""The config of the ``data`` group."""

from dataclasses import dataclass, field
from enum import Enum

from diffllm.bounds import bounded, check_bounds
from diffllm.errors import ConfigError
from diffllm.registry import SOURCES


class SampleBy(Enum):
    """The unit of a plain-text file that becomes one document, in the terms of `datasets`."""

    document = "document"
    paragraph = "paragraph"
    line = "line"


READ_BY = {"paths": "files", "dataset": "hub", "name": "hub", "revision": "hub"}
"""The fields that one source alone of ours reads, each with that source."""
OURS = ("stdlib", "files", "hub")


@dataclass
class DataConfig:
    """The config of a corpus; `source` says which of the fields below it apply."""

    source: str = "stdlib"
    cache_dir: str = "${oc.env:DIFFLLM_CACHE,'~/.cache/diffllm'}"
    tokenizer: str | None = None
    """A sentencepiece .model file; null trains one on the corpus."""
    vocab_size: int = bounded("${model.vocab_size}", least=1, most=2**24)
    """Number of pieces of a tokenizer that is trained here."""
    tokenizer_sample_bytes: int = bounded(100_000_000, least=1)
    """Bytes of text that a tokenizer is trained on, spread evenly over the corpus."""
    heldout_fraction: float = bounded(0.02, above=0, below=1)
    """Share of documents that are never trained on, chosen by a hash of their text."""
    num_workers: int = bounded(1, least=0, most=256)
    """Loader processes a rank; 0 reads in the training process."""
    prefetch_factor: int = bounded(4, least=1, most=10_000)
    """Micro-batches each loader process prepares ahead."""
    paths: list[str] = field(default_factory=list)
    """Files or globs (data=files): parquet, jsonl, json or txt; the last three also .gz or .zst."""
    text_column: str = "text"
    sample_by: SampleBy = SampleBy.document
    dataset: str | None = None
    """Hub dataset or local dataset directory (data=hub), with its `name`, `split`, `revision`."""
    name: str | None = None
    split: str = "train"
    revision: str | None = None

    mask_documents: bool = False
    """Keep attention inside a document, and start positions at 0 in each."""
    sample_prompt: str | None = None
    """Text that the sample at the end of a run continues; null: the first held-out tokens."""

    def validate(self) -> None:
        """Raise ConfigError for values that no corpus can satisfy."""
        check_bounds("data.", self)
        if self.source not in SOURCES:
            raise ConfigError(f"data.source={self.source!r} is not one of {', '.join(SOURCES)}")
        for name, source in READ_BY.items():
            if getattr(self, name) and self.source in OURS and self.source != source:
                raise ConfigError(
                    f"data.{name}={getattr(self, name)} needs data={source}, not {self.source}"
                )
        if self.source == "files" and not self.paths:
            raise ConfigError("data=files needs data.paths=[file, glob, ...]")
        if self.source == "hub" and not self.dataset:
            raise ConfigError("data=hub needs data.dataset=<owner/name>")
