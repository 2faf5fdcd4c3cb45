"""Tokenizers: sentencepiece models and Hugging Face tokenizer.json files."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.files import (
    open_regular,
    read_bytes,
    read_text,
    readable,
    replace_file,
    similar_path,
)
from diffllm.data.verified import usable

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

MODEL, FAST, FAST_CONFIG = "tokenizer.model", "tokenizer.json", "tokenizer_config.json"
TOKENIZER_FILES = (MODEL, FAST, FAST_CONFIG)
LARGEST_TOKENIZER = 2**30
"""Limit in bytes, about 30 times the largest known tokenizer."""
SPACE_MARK = "\u2581"
"""U+2581: sentencepiece writes spaces as U+2581, so U+2581 in a text would decode to a space."""
PART = 100_000
"""Characters encoded at once, because encoding time grows faster than the length."""
BEHAVIOUR_PROBE = " a  b\n\n\tc\r\n \u00a0\ufb01\uff21\u0065\u0301 0123 \U0001f600 "
USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
"""Names of the EOS, if no tokenizer_config.json names an EOS."""


class Tokenizer:
    """Tokenizer that uses a sentencepiece model; the model must have an EOS.

    If diffllm trained the model, decoding returns exactly the encoded text. Other models may
    normalise the text.
    """

    def __init__(self, processor: "SentencePieceProcessor", source: str) -> None:
        self._processor = processor
        self.vocab_size: int = processor.vocab_size()
        self.eos_id: int = processor.eos_id()
        self.eos_token: str = processor.id_to_piece(max(self.eos_id, 0))
        if self.eos_id < 0:
            raise DataError(
                f"{source}: the tokenizer has no end-of-sentence token (EOS); "
                "choose a tokenizer with an EOS"
            )
        mark = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._mark_bytes = mark if all(map(processor.is_byte, mark)) else None

    @staticmethod
    def from_file(path: str | Path) -> "Tokenizer":
        """Load a tokenizer from a file, a directory or a hub repository (owner/name).

        Raises DataError for a missing or unusable file, or for a tokenizer without an EOS.
        """
        path = located(path)
        if path.suffix == ".json":
            return FastTokenizer(path)
        from sentencepiece import SentencePieceProcessor

        try:
            processor = SentencePieceProcessor(model_file=str(path))
            processor.id_to_piece(
                list(range(processor.vocab_size()))
            )  # raises for a piece that is not UTF-8
        except (RuntimeError, TypeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}: not a valid sentencepiece model; "
                f"choose a sentencepiece model or a {FAST} file"
            ) from error
        return Tokenizer(processor, str(path))

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text], threads=1)[0]

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Encode each text to token ids, without EOS.

        Long texts are encoded in several parts, which saves time and does not change the ids.
        """
        cut = [self._parts(text) for text in texts]
        parts = [part for of_text in cut for part in of_text]
        ids = self._processor.encode(parts, num_threads=threads)
        if self._mark_bytes is not None:
            for i, part in enumerate(parts):
                if SPACE_MARK in part:  # encoded as bytes, to decode exactly
                    first, *rest = self._processor.encode(part.split(SPACE_MARK))
                    ids[i] = first + [id for some in rest for id in (*self._mark_bytes, *some)]
        left = iter(ids)
        return [
            next(left) if len(of_text) == 1 else [token for _ in of_text for token in next(left)]
            for of_text in cut
        ]

    def _parts(self, text: str) -> list[str]:
        """Cut a long text into parts whose token ids, concatenated, are the ids of the whole text.

        Each cut is between two characters that are not adjacent in any vocabulary piece. Returns
        [text] if the text is short, or if the model changes characters before encoding.
        """
        if len(text) <= 2 * PART:
            return [text]
        probe = self._processor.normalize(BEHAVIOUR_PROBE)
        if probe != BEHAVIOUR_PROBE.replace(" ", SPACE_MARK):
            return [text]
        parts, start = [], 0
        while len(text) - start > 2 * PART:
            cut = start + PART
            while text[cut - 1 : cut + 1].replace(" ", SPACE_MARK) in self._pairs:
                cut += 1
            parts.append(text[start:cut])
            start = cut
        return [*parts, text[start:]]

    @cached_property
    def _pairs(self) -> frozenset[str]:
        pieces = map(self.piece, range(self.vocab_size))
        return frozenset(piece[i : i + 2] for piece in pieces for i in range(len(piece) - 1))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids to text; EOS and other control tokens give no text."""
        return self._processor.decode(list(ids))

    def piece(self, token: int) -> str:
        """Return the vocabulary piece of a token id; sentencepiece writes a space as U+2581."""
        return self._processor.id_to_piece(token)

    @cached_property
    def pieces_hash(self) -> str:
        """SHA-256 of all vocabulary pieces, ordered by token id, and of the ids of a fixed text.

        The ids of this text show how the model normalises text. The model file is not hashed,
        because training twice on the same text can write different files.
        """
        processor = self._processor
        facts = (
            processor.id_to_piece,
            processor.get_score,
            processor.is_control,
            processor.is_unknown,
            processor.is_byte,
            processor.is_unused,
        )
        pieces = [[fact(index) for fact in facts] for index in range(self.vocab_size)]
        behaviour = [pieces, self.eos_id, processor.encode(BEHAVIOUR_PROBE)]
        return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()


class FastTokenizer(Tokenizer):
    """Hugging Face tokenizer (tokenizer.json) that encodes a text like "<eos>" as ordinary text."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers

            self._fast = tokenizers.Tokenizer.from_file(str(path))
            self._fast.encode(BEHAVIOUR_PROBE)  # fails for an unknown token without a piece
        except ImportError as error:
            raise DataError(f"{path} needs a library: pip install tokenizers") from error
        except Exception as error:
            raise DataError(f"{path}: not a valid tokenizer.json ({error})") from error
        self._fast.encode_special_tokens = True
        self._fast.no_truncation()
        self._fast.no_padding()
        vocabulary = self._fast.get_vocab()
        self.vocab_size: int = 1 + max(vocabulary.values(), default=0)  # ids may have gaps
        if self.vocab_size > 2**24:
            raise DataError(
                f"{path}: the largest token id {self.vocab_size - 1} must be below {2**24}; "
                "choose another tokenizer"
            )
        self.eos_token = find_eos(path, vocabulary)
        self.eos_id = int(vocabulary[self.eos_token])

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        encoded = self._fast.encode_batch(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        return str(self._fast.id_to_token(token))

    @cached_property
    def pieces_hash(self) -> str:
        content = [json.loads(self._fast.to_str()), self.eos_token]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def find_eos(path: Path, vocabulary: dict[str, int]) -> str:
    """Return the EOS token of the tokenizer.json file `path`.

    The EOS is `eos_token` in the tokenizer_config.json of the same directory. If that key or file
    is missing, the EOS is the first token of USUAL_ENDS that `vocabulary` contains. `vocabulary`
    maps tokens to ids. Raises DataError if it does not contain the EOS.
    """
    config = path.with_name(FAST_CONFIG)
    try:
        # Not `read_json`: many configs have a model_max_length beyond 64 bits.
        content = json.loads(read_text(config, follow=True)) if config.exists() else {}
        said = content.get("eos_token")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"{config}: not a valid tokenizer config ({error})") from error
    said = said.get("content") if isinstance(said, dict) else said
    named = USUAL_ENDS if said is None else [said]
    for name in named:
        if isinstance(name, str) and name in vocabulary:
            return name
    raise DataError(
        f"{path}: the vocabulary contains no EOS {' or '.join(map(repr, named))}; "
        f"set eos_token in {config} to a token of the vocabulary"
    )


def located(name: str | Path) -> Path:
    """Return the path of a tokenizer file; `name` is the file or a directory that contains it.

    If the path `name` does not exist and has the form owner/name, the tokenizer of that hub
    repository is downloaded. Raises DataError if there is no usable file.
    """
    path = Path(name).expanduser()
    path = tokenizer_in(path) if path.is_dir() else path
    if path.is_file():
        with usable(path), open_regular(path, LARGEST_TOKENIZER, follow=True):
            return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or path.suffix in (".model", ".json"):
        raise DataError(f"{path}: no such tokenizer file{similar_path(path, os.path.isfile)}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        with suppress(EntryNotFoundError):
            hf_hub_download(str(name), FAST_CONFIG)
        return Path(hf_hub_download(str(name), FAST))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{name} is not a local tokenizer, and the download from the hub failed: {reason}"
        ) from error


def tokenizer_in(directory: Path) -> Path:
    fast = directory / FAST
    return fast if fast.is_file() else directory / MODEL


def tokenizer_of(run: Path) -> Path:
    for name in (FAST, MODEL):
        if os.path.lexists(run / name):
            with readable(run / name):
                open_regular(run / name, LARGEST_TOKENIZER).close()
            return run / name
    raise CheckpointError(f"{run} contains no {FAST} or {MODEL}; restore the tokenizer of this run")


def check_tokenizer(path: Path) -> None:
    with usable(path, path.parent), open_regular(path, LARGEST_TOKENIZER, follow=True):
        pass


def tokenizer_files(path: Path) -> dict[str, bytes]:
    with usable(path):
        content = read_bytes(path, LARGEST_TOKENIZER, follow=True)
    if path.suffix != ".json":
        return {MODEL: content}
    config = json.dumps({"eos_token": FastTokenizer(path).eos_token}) + "\n"
    return {FAST: content, FAST_CONFIG: config.encode()}


def write_tokenizer(path: Path, directory: Path) -> None:
    for name, content in tokenizer_files(path).items():
        replace_file(directory / name, content)
