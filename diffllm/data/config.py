"""What the ``data`` group configures."""

from dataclasses import dataclass, field
from enum import Enum

from diffllm.bounds import bounded, check_bounds
from diffllm.errors import ConfigError


class SampleBy(Enum):
    """What one document of a plain-text file is, in the terms of `datasets`."""

    document = "document"
    paragraph = "paragraph"
    line = "line"


READ_BY = {"paths": "files", "dataset": "hub", "name": "hub", "revision": "hub"}
"""The only source that reads a field."""


@dataclass
class DataConfig:
    """Fields shared by every corpus; `source` says which fields below them apply."""

    source: str = "stdlib"
    cache_dir: str = "${oc.env:DIFFLLM_CACHE,'~/.cache/diffllm'}"
    tokenizer: str | None = None
    """A sentencepiece .model file; null trains one on the corpus."""
    vocab_size: int = bounded("${model.vocab_size}", least=1, most=2**24)
    """Pieces of a tokenizer that is trained here."""
    tokenizer_sample_bytes: int = bounded(8_000_000, least=1)
    """Text that a tokenizer is trained on, spread evenly over the corpus."""
    heldout_fraction: float = bounded(0.02, above=0, below=1)
    """Share of documents that are never trained on, chosen by a hash of their text."""
    num_workers: int = bounded(1, least=0, most=256)
    """Loader processes a rank; 0 reads in the training process."""
    prefetch_factor: int = bounded(4, least=1, most=10_000)
    """Micro-batches each loader process prepares ahead."""
    paths: list[str] = field(default_factory=list)
    """Files or globs (data=files): parquet, jsonl, json or txt, the last three also .gz or .zst."""
    text_column: str = "text"
    sample_by: SampleBy = SampleBy.document
    dataset: str | None = None
    """Hub dataset or local dataset directory (data=hub), with its `name`, `split`, `revision`."""
    name: str | None = None
    split: str = "train"
    revision: str | None = None

    mask_documents: bool = False
    """Attention stays inside a document, and positions start at 0 in each."""
    sample_prompt: str | None = None
    """What the sample at the end of a run continues; null: the first held-out tokens."""

    def validate(self) -> None:
        """Raise ConfigError for values that no corpus can satisfy."""
        check_bounds("data.", self)
        if self.source not in ("stdlib", "files", "hub"):
            raise ConfigError(f"data.source={self.source!r} is not one of stdlib, files, hub")
        for name, source in READ_BY.items():
            if getattr(self, name) and self.source != source:
                raise ConfigError(
                    f"data.{name}={getattr(self, name)} needs data={source}, not {self.source}"
                )
        if self.source == "files" and not self.paths:
            raise ConfigError("data=files needs data.paths=[file, glob, ...]")
        if self.source == "hub" and not self.dataset:
            raise ConfigError("data=hub needs data.dataset=<owner/name>")
