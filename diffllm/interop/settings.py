"""The settings that transformers needs beside parameters and pieces."""

from typing import Any

from diffllm.checkpoint.hf import Layout
from diffllm.data import Tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """Return the ids of special tokens: a document's end is all that there is, and pads, too."""
    return {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.eos_id,
    }


def model_settings(layout: Layout, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the content of config.json but for the dtype and what finds our modelling file."""
    return {
        "architectures": [layout.architecture],
        **layout.config,
        **special_ids(tokenizer),
        "use_cache": True,
    }


def tokenizer_settings(tokenizer: Tokenizer, length: int) -> dict[str, Any]:
    """Return the arguments of a fast tokenizer.

    Args:
        length: most tokens that the model takes.
    """
    return {
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.eos_token,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "model_max_length": length,
        "model_input_names": ["input_ids", "attention_mask"],
    }
