"""The data pipeline: corpus, tokenizer, token shards, loader (README.md)."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import diffllm.data.text.files
import diffllm.data.text.hub
import diffllm.data.text.packages
import diffllm.data.text.synthetic

if TYPE_CHECKING:  # for those who check types; `__getattr__` finds the same names
    # ruff: noqa: F401
    from diffllm.data.heldout import (
        HeldoutDocuments,
        heldout_batches,
        heldout_documents,
        heldout_tokens,
        predicts_something,
    )
    from diffllm.data.loader import TrainLoader
    from diffllm.data.mixture import MixtureData, Prepared
    from diffllm.data.preparation.prepare import prepare
    from diffllm.data.samples import training_samples
    from diffllm.data.sequences import (
        ignores_targets,
        packing_counts,
        sequences_in,
        sequences_of_epoch,
    )
    from diffllm.data.streams import TokenStream
    from diffllm.data.token_data import TokenData
    from diffllm.data.tokenizer import Tokenizer

_HOMES = {
    "heldout": (
        "HeldoutDocuments", "heldout_batches", "heldout_documents", "heldout_tokens",
        "predicts_something",
    ),
    "loader": ("TrainLoader",),
    "mixture": ("MixtureData", "Prepared"),
    "preparation.prepare": ("prepare",),
    "samples": ("training_samples",),
    "sequences": ("ignores_targets", "packing_counts", "sequences_in", "sequences_of_epoch"),
    "streams": ("TokenStream",),
    "token_data": ("TokenData",),
    "tokenizer": ("Tokenizer",),
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import torch, numpy and sentencepiece only when something that needs them is used."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"diffllm.data.{module}"), name)
    raise AttributeError(f"module 'diffllm.data' has no attribute {name!r}")
