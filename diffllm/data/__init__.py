"""The data pipeline: corpus, tokenizer, token shards, loader (README.md)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import diffllm.data.corpus  # noqa: F401  registers our sources of text

if TYPE_CHECKING:
    from diffllm.data.heldout import HeldoutDocuments, heldout_documents, heldout_tokens
    from diffllm.data.loader import TrainLoader, heldout_batches, sequences_in
    from diffllm.data.preparation import TokenData, prepare
    from diffllm.data.shards import TokenStream
    from diffllm.data.tokenizer import Tokenizer

__all__ = [
    "HeldoutDocuments",
    "TokenData",
    "TokenStream",
    "Tokenizer",
    "TrainLoader",
    "heldout_batches",
    "heldout_documents",
    "heldout_tokens",
    "prepare",
    "sequences_in",
]

_HOMES = {
    "HeldoutDocuments": "heldout",
    "TokenData": "preparation",
    "TokenStream": "shards",
    "Tokenizer": "tokenizer",
    "TrainLoader": "loader",
    "heldout_batches": "loader",
    "heldout_documents": "heldout",
    "heldout_tokens": "heldout",
    "prepare": "preparation",
    "sequences_in": "loader",
}


def __getattr__(name: str) -> Any:
    """Import torch, numpy and sentencepiece only when something that needs them is used."""
    if name in _HOMES:
        return getattr(import_module(f"diffllm.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'diffllm.data' has no attribute {name!r}")
