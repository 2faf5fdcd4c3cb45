"""Tokenizers: sentencepiece models and Hugging Face tokenizer.json files."""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.core.errors import CheckpointError, DataError
from diffllm.core.files import (
    open_regular,
    read_bytes,
    readable,
    replace_file,
    similar_path,
)
from diffllm.data.sentencepiece_file import control_pieces, edited, load_processor
from diffllm.data.tokenizer_config import (
    CHOOSE_EOS,
    FAST,
    FAST_CONFIG,
    added_bos,
    eos_of,
    listed_tokens,
    named_eos,
)
from diffllm.data.verified import usable

if TYPE_CHECKING:
    import tokenizers
    from sentencepiece import SentencePieceProcessor

MODEL = "tokenizer.model"
TOKENIZER_FILES = (MODEL, FAST, FAST_CONFIG)
LARGEST_TOKENIZER = 2**30
"""Limit in bytes, about 30 times the largest known tokenizer."""
SPACE_MARK = "\u2581"
"""U+2581: sentencepiece writes spaces as U+2581, so U+2581 in a text would decode to a space."""
PART_CHARACTERS = 100_000
"""Characters encoded at once, because encoding time grows faster than the length."""
BEHAVIOUR_PROBE = " a  b\n\n\tc\r\n \u00a0\ufb01\uff21\u0065\u0301 0123 \U0001f600 "


class Tokenizer:
    """Tokenizer that uses a sentencepiece model; the model must have an EOS.

    If the model does not normalise texts, decoding returns exactly the encoded text. A dummy prefix
    is a space before each text, which decoding removes.

    Attributes:
        bos_id: for an imported model whose own tokenizer puts a BOS before each text, the id of
            this BOS; otherwise None. Training data never contains a BOS.
    """

    def __init__(self, processor: "SentencePieceProcessor", path: Path) -> None:
        self._processor = processor
        self.vocab_size: int = processor.vocab_size()
        self.eos_id: int = processor.eos_id()
        self.eos_token: str = processor.id_to_piece(max(self.eos_id, 0))
        if self.eos_id < 0:
            raise DataError(
                f"{path}: the tokenizer has no end-of-sentence token (EOS); {CHOOSE_EOS}; its "
                f"control tokens are {listed_tokens(control_pieces(processor))}"
            )
        bos_id = processor.piece_to_id(added_bos(path) or "")
        self.bos_id: int | None = bos_id if processor.is_control(bos_id) else None
        mark_bytes = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._mark_bytes = mark_bytes if all(map(processor.is_byte, mark_bytes)) else None
        self._prefix = ""
        self._encoder = processor
        if processor.normalize(BEHAVIOUR_PROBE) == SPACE_MARK + marked(BEHAVIOUR_PROBE):
            # With an explicit prefix, parts of a text can be encoded separately.
            self._prefix = " "
            self._encoder = edited(processor, "normalizer_spec", "add_dummy_prefix", False)

    @staticmethod
    def from_file(path: str | Path, eos_token: str | None = None) -> "Tokenizer":
        """Load a tokenizer from a file, a directory or a hub repository (owner/name).

        `eos_token` is the EOS; None: the EOS that the files name, see `eos_of`. Raises DataError
        for a missing or unusable file, or if there is no such EOS.
        """
        path = located(path)
        if path.suffix == ".json":
            return FastTokenizer(path, eos_token)
        return Tokenizer(load_processor(path, eos_token), path)

    def encode(self, text: str) -> list[int]:
        """Encode a text to token ids without EOS, after the BOS if `bos_id` is not None."""
        ids = self.encode_batch([text], threads=1)[0]
        return ids if self.bos_id is None else [self.bos_id, *ids]

    @property
    def start_id(self) -> int:
        """Id of the token before the first text of a context: the BOS, otherwise the EOS."""
        return self.eos_id if self.bos_id is None else self.bos_id

    def count(self, text: str) -> int:
        return len(self.encode_batch([text], threads=1)[0])

    @property
    def spells_eos(self) -> bool:
        """Whether the text of the EOS encodes to the EOS, so that a text can end a document."""
        # The ids of a text can depend on the characters around the text.
        texts = [f"{before}{self.eos_token}{before}" for before in ("", " ", "a")]
        return any(self.eos_id in ids for ids in self.encode_batch(texts, threads=1))

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Encode each text to token ids, without BOS and EOS.

        Long texts are encoded in several parts, which saves time and does not change the ids.
        """
        parts_by_text = [self._parts(self._prefix + text if text else text) for text in texts]
        parts = list(chain.from_iterable(parts_by_text))
        ids_by_part = self._encoder.encode(parts, num_threads=threads)
        if self._mark_bytes is not None:
            for i, part in enumerate(parts):
                if SPACE_MARK in part:
                    # Encode the marks of the text as bytes, which decode to marks, not to spaces.
                    ids, *others = self._encoder.encode(part.split(SPACE_MARK))
                    for following in others:
                        ids += self._mark_bytes
                        ids += following
                    ids_by_part[i] = ids
        encoded_parts = iter(ids_by_part)
        ids_by_text: list[list[int]] = []
        for text_parts in parts_by_text:
            ids = next(encoded_parts)
            for _ in text_parts[1:]:
                ids += next(encoded_parts)
            ids_by_text.append(ids)
        return ids_by_text

    def _parts(self, text: str) -> list[str]:
        """Cut a long text into parts whose token ids, concatenated, are the ids of the whole text.

        Each cut is between two characters that are not adjacent in any vocabulary piece. Returns
        [text] if the text is short, or if the model changes characters before encoding.
        """
        if len(text) <= 2 * PART_CHARACTERS:
            return [text]
        # Cuts are chosen in the text as given, so only a model that keeps all characters qualifies.
        if self._encoder.normalize(BEHAVIOUR_PROBE) != marked(BEHAVIOUR_PROBE):
            return [text]
        parts = []
        start = 0
        while len(text) - start > 2 * PART_CHARACTERS:
            cut = start + PART_CHARACTERS
            while marked(text[cut - 1 : cut + 1]) in self._pairs:
                cut += 1
            parts.append(text[start:cut])
            start = cut
        return [*parts, text[start:]]

    @cached_property
    def _pairs(self) -> frozenset[str]:
        pairs: set[str] = set()
        for piece in map(self.piece, range(self.vocab_size)):
            pairs.update(piece[i : i + 2] for i in range(len(piece) - 1))
        return frozenset(pairs)

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
        pieces: list[list[Any]] = []
        for token in range(self.vocab_size):
            pieces.append([fact(token) for fact in facts])
        behaviour = [pieces, self.eos_id, processor.encode(BEHAVIOUR_PROBE)]
        return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()


def marked(text: str) -> str:
    return text.replace(" ", SPACE_MARK)


def load_fast(path: Path) -> "tokenizers.Tokenizer":
    try:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        # Raises here, not while texts are encoded, if the unknown token has no piece.
        tokenizer.encode(BEHAVIOUR_PROBE)
    except ImportError as error:
        raise DataError(f"{path} needs a library: pip install tokenizers") from error
    except Exception as error:
        raise DataError(f"{path}: not a valid tokenizer.json ({error})") from error
    return tokenizer


class FastTokenizer(Tokenizer):
    """Hugging Face tokenizer (tokenizer.json) that encodes a text like "<eos>" as ordinary text."""

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        self._fast = load_fast(path)
        self._fast.encode_special_tokens = True
        # The file may enable truncation and padding, which would change documents.
        self._fast.no_truncation()
        self._fast.no_padding()
        vocabulary = self._fast.get_vocab()
        # Not the number of pieces, because ids may have gaps.
        self.vocab_size: int = 1 + max(vocabulary.values(), default=0)
        if self.vocab_size > 2**24:
            raise DataError(
                f"{path}: the largest token id {self.vocab_size - 1} must be below {2**24}; "
                "choose another tokenizer"
            )
        added = self._fast.get_added_tokens_decoder().values()
        special = [token.content for token in added if token.special]
        self.eos_token = eos_of(path, vocabulary, special, eos_token)
        self.eos_id = int(vocabulary[self.eos_token])
        self.bos_id = vocabulary.get(added_bos(path) or "")

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        encodings = self._fast.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._fast.decode(list(ids), skip_special_tokens=True))

    def piece(self, token: int) -> str:
        return str(self._fast.id_to_token(token))

    @cached_property
    def pieces_hash(self) -> str:
        content = [json.loads(self._fast.to_str()), self.eos_token]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def located(name: str | Path) -> Path:
    """Return the path of a tokenizer file; `name` is the file or a directory that contains it.

    If the path `name` does not exist and has the form owner/name, the tokenizer of that hub
    repository is downloaded. Raises DataError if there is no usable file.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = tokenizer_in(path)
    if path.is_file():
        with usable(path), open_regular(path, LARGEST_TOKENIZER, follow=True):
            return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or path.suffix in (".model", ".json"):
        raise DataError(f"{path}: no such tokenizer file{similar_path(path, os.path.isfile)}")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        # The config is optional; it may name the EOS and the BOS.
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


def guesses_eos(name: str | None, eos_token: str | None) -> bool:
    """Return whether the EOS of the tokenizer `name` follows from the usual names of an EOS.

    `name` and `eos_token` are data.tokenizer and data.eos_token.
    """
    if name is None or eos_token is not None:
        return False
    path = located(name)
    return path.suffix == ".json" and named_eos(path) is None


def eos_text(eos_token: str, eos_id: int, guessed: bool) -> str:
    """Describe the EOS of a prepared corpus; `guessed` is the result of `guesses_eos`."""
    text = f"EOS: {eos_token}, token {eos_id}"
    if not guessed:
        return text
    return f"{text}, guessed from its name; data.eos_token sets another EOS"


def tokenizer_of(run: Path) -> Path:
    for name in (FAST, MODEL):
        # A broken link is an unreadable tokenizer, not a missing tokenizer.
        if os.path.lexists(run / name):
            with readable(run / name):
                open_regular(run / name, LARGEST_TOKENIZER).close()
            return run / name
    raise CheckpointError(f"{run} contains no {FAST} or {MODEL}; restore the tokenizer of this run")


def check_tokenizer(path: Path) -> None:
    with usable(path, path.parent), open_regular(path, LARGEST_TOKENIZER, follow=True):
        pass


def tokenizer_files(
    path: Path, eos_token: str | None = None, bos_token: str | None = None
) -> dict[str, bytes]:
    """Return the files of a copy of the tokenizer `path`, by file name.

    Args:
        eos_token: EOS of the copy; None keeps the EOS of the tokenizer.
        bos_token: BOS that the copy adds to texts; None for a copy that adds no BOS.
    """
    with usable(path):
        content = read_bytes(path, LARGEST_TOKENIZER, follow=True)
    config: dict[str, Any] = {}
    if path.suffix == ".json":
        files = {FAST: content}
        config["eos_token"] = FastTokenizer(path, eos_token).eos_token
    else:
        if eos_token:
            content = load_processor(path, eos_token).serialized_model_proto()
        files = {MODEL: content}
    if bos_token:
        config |= {"bos_token": bos_token, "add_bos_token": True}
    if config:
        files[FAST_CONFIG] = (json.dumps(config) + "\n").encode()
    return files


def write_tokenizer(path: Path, directory: Path, eos_token: str | None = None) -> None:
    for name, content in tokenizer_files(path, eos_token).items():
        replace_file(directory / name, content)
