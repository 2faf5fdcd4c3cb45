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
    """The corpus: where its text comes from, and how it becomes tokens."""

    source: str = "stdlib"
    """Kind of the corpus; set by data=."""
    cache_dir: str = "${oc.env:DIFFLLM_CACHE,'~/.cache/diffllm'}"
    """Directory of prepared corpora and tokenizers."""
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
    """Files or globs (data=files): parquet, jsonl, json or txt, or one such path. The last three
    also .gz or .zst."""
    text_column: str = "text"
    """Column that holds the text, in any format but txt."""
    sample_by: SampleBy = SampleBy.document
    """Unit of a txt file that becomes one document."""
    dataset: str | None = None
    """Hub dataset owner/name, or a local dataset directory (data=hub)."""
    name: str | None = None
    """Configuration of the hub dataset, where it has several."""
    split: str = "train"
    """Split of the hub dataset; held-out documents are chosen from it, too."""
    revision: str | None = None
    """Branch, tag or commit of the hub dataset; null: the newest at its first use."""

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
