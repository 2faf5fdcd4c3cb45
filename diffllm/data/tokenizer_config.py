"""Choose the EOS of a tokenizer, and read its BOS from tokenizer_config.json."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from diffllm.core.errors import DataError
from diffllm.core.files import read_text

FAST, FAST_CONFIG = "tokenizer.json", "tokenizer_config.json"
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names of an EOS that neither data.eos_token nor tokenizer_config.json names."""
EOS_KEY = "data.eos_token"
CHOOSE_EOS = f"set the token that ends a document: \"{EOS_KEY}='<...>'\""


def eos_of(
    path: Path, vocabulary: Collection[str], special: Sequence[str], chosen: str | None
) -> str:
    """Return the EOS of the tokenizer.json file `path`.

    The EOS is `chosen` (data.eos_token), or else `eos_token` in the tokenizer_config.json of the
    same directory, or else the only token of USUAL_ENDS that is special. An ordinary token is
    never chosen by its name, because texts may contain the token. Raises DataError if there is no
    EOS, or if the EOS is not in `vocabulary`.

    Args:
        special: tokens that tokenizer.json declares special.
    """
    token = named_eos(path) if chosen is None else chosen
    if token is not None:
        if isinstance(token, str) and token in vocabulary:
            return token
        key = f"eos_token in {path.with_name(FAST_CONFIG)}" if chosen is None else EOS_KEY
        raise DataError(
            f"{path}: the vocabulary contains no EOS {token!r}; set {key} to a token of the "
            "vocabulary"
        )
    usual = [name for name in USUAL_ENDS if name in special]
    if len(usual) == 1:
        return usual[0]
    if usual:
        reason = f"several special tokens may be the EOS: {listed_tokens(usual)}"
    else:
        names = " or ".join(map(repr, USUAL_ENDS))
        reason = (
            f"the vocabulary contains no EOS {names} that is special; special tokens: "
            f"{listed_tokens(special)}"
        )
    raise DataError(f"{path}: {reason}; {CHOOSE_EOS}, or eos_token in {FAST_CONFIG}")


def listed_tokens(tokens: Sequence[str]) -> str:
    names = list(map(repr, tokens[:5]))
    if len(tokens) > 5:
        names.append("...")
    return ", ".join(names) or "(no tokens)"


def read_config(path: Path) -> dict[str, Any]:
    """Read the tokenizer_config.json next to the tokenizer file `path`; {} if it is missing."""
    config = path.with_name(FAST_CONFIG)
    try:
        # Not `read_json`: many configs have a model_max_length beyond 64 bits.
        content = json.loads(read_text(config, follow=True)) if config.exists() else {}
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{config}: not a valid tokenizer config ({error})") from error
    return content


def named_token(config: dict[str, Any], key: str) -> Any:
    """Return a token of a tokenizer config, which is a text or {"content": text, ...}."""
    value = config.get(key)
    return value.get("content") if isinstance(value, dict) else value


def named_eos(path: Path) -> Any:
    """Return the EOS that the tokenizer_config.json next to `path` names; None if missing."""
    return named_token(read_config(path), "eos_token")


def added_bos(path: Path) -> str | None:
    """Return the BOS that tokenizers with the config next to `path` put before each text.

    Return None if there is no such BOS.
    """
    config = read_config(path)
    if config.get("add_bos_token") is not True:
        return None
    token = named_token(config, "bos_token")
    return token if isinstance(token, str) else None
