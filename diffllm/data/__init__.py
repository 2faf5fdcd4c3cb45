"""The data pipeline: corpus, tokenizer, token shards, loader (README.md)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import diffllm.data.text.files
import diffllm.data.text.hub
import diffllm.data.text.packages
import diffllm.data.text.synthetic  # noqa: F401  register our sources

if TYPE_CHECKING:
    from diffllm.data.heldout import HeldoutDocuments, heldout_documents, heldout_tokens
    from diffllm.data.loader import (
        TrainLoader,
        heldout_batches,
        predicts_something,
        training_samples,
    )
    from diffllm.data.mixture.prepared import MixtureData, Prepared
    from diffllm.data.preparation.prepare import prepare
    from diffllm.data.sequences import sequences_in
    from diffllm.data.shards import TokenStream
    from diffllm.data.token_data import TokenData
    from diffllm.data.tokenizer import Tokenizer
    from diffllm.data.training_sequences import (
        ignores_targets,
        packing_counts,
        sequences_of_epoch,
    )

__all__ = [
    "HeldoutDocuments",
    "MixtureData",
    "Prepared",
    "TokenData",
    "TokenStream",
    "Tokenizer",
    "TrainLoader",
    "heldout_batches",
    "heldout_documents",
    "heldout_tokens",
    "ignores_targets",
    "packing_counts",
    "predicts_something",
    "prepare",
    "sequences_in",
    "sequences_of_epoch",
    "training_samples",
]

_HOMES = {
    "HeldoutDocuments": "heldout",
    "MixtureData": "mixture.prepared",
    "Prepared": "mixture.prepared",
    "TokenData": "token_data",
    "TokenStream": "shards",
    "Tokenizer": "tokenizer",
    "TrainLoader": "loader",
    "heldout_batches": "loader",
    "heldout_documents": "heldout",
    "heldout_tokens": "heldout",
    "ignores_targets": "training_sequences",
    "packing_counts": "training_sequences",
    "predicts_something": "loader",
    "prepare": "preparation.prepare",
    "sequences_in": "sequences",
    "sequences_of_epoch": "training_sequences",
    "training_samples": "loader",
}


def __getattr__(name: str) -> Any:
    """Import torch, numpy and sentencepiece only when something that needs them is used."""
    if name in _HOMES:
        return getattr(import_module(f"diffllm.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'diffllm.data' has no attribute {name!r}")
