"""Tokenizers of Hugging Face's `tokenizers` library: a tokenizer.json."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from diffllm.core.errors import DataError
from diffllm.core.files import read_text
from diffllm.data.tokenizer import BEHAVIOUR_PROBE, Tokenizer
from diffllm.data.tokenizer_files import FAST_CONFIG

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names of the token that ends a document, where no tokenizer_config.json says it."""


class FastTokenizer(Tokenizer):
    """A tokenizer.json with a token that ends a document.

    Special tokens are no part of text: where their names stand in one they are encoded as text is.
    """

    def __init__(self, path: Path) -> None:
        """Load it; raises DataError for what is none, or has no token that ends a document."""
        try:
            import tokenizers
        except ImportError as error:
            raise DataError(f"{path}: pip install tokenizers reads such files") from error
        try:
            self._fast = tokenizers.Tokenizer.from_file(str(path))
            self._fast.encode(BEHAVIOUR_PROBE)  # fails for an unknown token without a piece
        except Exception as error:
            raise DataError(f"{path}: not a file of tokenizers ({error})") from error
        self._fast.encode_special_tokens = True
        self._fast.no_truncation()
        self._fast.no_padding()
        vocabulary = self._fast.get_vocab()
        self.vocab_size: int = 1 + max(vocabulary.values(), default=0)  # ids may have gaps
        if self.vocab_size > 2**24:
            raise DataError(f"{path}: token id {self.vocab_size - 1} must be below {2**24}")
        self.eos_token = end_of(path, vocabulary)
        self.eos_id = int(vocabulary[self.eos_token])

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Encode each text to token ids, in order, without EOS, in threads that the library has."""
        encoded = self._fast.encode_batch(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids` to text; EOS and other special tokens are nothing in it."""
        return str(self._fast.decode(list(ids), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        return str(self._fast.id_to_token(token))

    @cached_property
    def pieces_hash(self) -> str:
        """SHA-256 of all that the file says, and of the token that ends a document."""
        content = [json.loads(self._fast.to_str()), self.eos_token]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def end_of(path: Path, vocabulary: dict[str, int]) -> str:
    """The token that ends a document: that of tokenizer_config.json beside the file, or a usual
    name; raises DataError."""
    config = path.with_name(FAST_CONFIG)
    try:
        # Not `read_json`: many have a model_max_length beyond 64 bits.
        content = json.loads(read_text(config, follow=True)) if config.exists() else {}
        said = content.get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{config}: not a tokenizer's config ({error})") from error
    name = said.get("content") if isinstance(said, dict) else said
    if name is None:
        name = next((usual for usual in USUAL_ENDS if usual in vocabulary), None)
    if not isinstance(name, str) or name not in vocabulary:
        raise DataError(
            f"{path}: it has no token {name!r} to end a document with"
            if name is not None
            else f"{path}: nothing says which token ends a document; {FAST_CONFIG} beside it does, "
            'with {"eos_token": "..."}'
        )
    return name
