"""Text to token ids and back, by a sentencepiece model."""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from diffllm.core.errors import DataError
from diffllm.data.tokenizer_files import located

SPACE_MARK = "\u2581"
"""U+2581, which sentencepiece writes for a space in a piece and cannot tell from one in text."""
PART = 100_000
"""Characters of the parts that long texts are encoded in: the time for one grows faster than it."""
BEHAVIOUR_PROBE = " a  b\n\n\tc\r\n \u00a0\ufb01\uff21\u0065\u0301 0123 \U0001f600 "


class Tokenizer:
    """A sentencepiece model with an end-of-document piece.

    One trained here (`train_tokenizer`) decodes every text back exactly. A model from elsewhere
    normalises as it was trained to.
    """

    def __init__(self, processor: SentencePieceProcessor, source: str) -> None:
        self._processor = processor
        self.vocab_size: int = processor.vocab_size()
        self.eos_id: int = processor.eos_id()
        self.eos_token: str = processor.id_to_piece(max(self.eos_id, 0))
        if self.eos_id < 0:
            raise DataError(f"{source}: the tokenizer has no end-of-sentence piece")
        mark = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        self._mark_bytes = mark if all(map(processor.is_byte, mark)) else None

    @staticmethod
    def from_file(path: str | Path) -> "Tokenizer":
        """Load a sentencepiece .model or a tokenizer.json, named as `located` takes it; raises
        DataError if it is missing, none of these, or has no EOS piece."""
        path = located(path)
        if path.suffix == ".json":
            from diffllm.data.fast_tokenizer import FastTokenizer

            return FastTokenizer(path)
        try:
            processor = SentencePieceProcessor(model_file=str(path))
            processor.id_to_piece(list(range(processor.vocab_size())))  # all are text
        except (RuntimeError, TypeError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a sentencepiece model") from error
        return Tokenizer(processor, str(path))

    def encode(self, text: str) -> list[int]:
        """Encode `text` to token ids, without EOS."""
        return self.encode_batch([text], threads=1)[0]

    def encode_batch(self, texts: Sequence[str], threads: int) -> list[list[int]]:
        """Encode each text to token ids, in order, without EOS, in `threads` threads.

        Long texts are encoded in parts, with the ids of one piece.
        """
        cut = [self._parts(text) for text in texts]
        parts = [part for of_text in cut for part in of_text]
        ids = self._processor.encode(parts, num_threads=threads)
        if self._mark_bytes is not None:
            ids = [
                self._encode_around_marks(part) if SPACE_MARK in part else encoded
                for part, encoded in zip(parts, ids, strict=True)
            ]
        left = iter(ids)
        return [
            next(left) if len(of_text) == 1 else [token for _ in of_text for token in next(left)]
            for of_text in cut
        ]

    def _parts(self, text: str) -> list[str]:
        """Cut a long text between two characters that no piece has side by side.

        What lies on either side is then encoded alike on its own. A text is whole where the model
        changes it beforehand.
        """
        if len(text) <= 2 * PART or not self._cuttable:
            return [text]
        parts, start = [], 0
        while len(text) - start > 2 * PART:
            cut = start + PART
            while (
                cut < len(text) and text[cut - 1 : cut + 1].replace(" ", SPACE_MARK) in self._pairs
            ):
                cut += 1
            parts.append(text[start:cut])
            start = cut
        return [*parts, text[start:]] if start < len(text) else parts

    @cached_property
    def _cuttable(self) -> bool:
        """Whether a text is taken as it is, but for the mark of a space."""
        return self._processor.normalize(BEHAVIOUR_PROBE) == BEHAVIOUR_PROBE.replace(
            " ", SPACE_MARK
        )

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """The pairs of characters that some piece has side by side."""
        pieces = map(self.piece, range(self.vocab_size))
        return frozenset(piece[i : i + 2] for piece in pieces for i in range(len(piece) - 1))

    def _encode_around_marks(self, text: str) -> list[int]:
        """Encode text with U+2581 spelt in its bytes, or it would come back as a space."""
        assert self._mark_bytes is not None
        first, *rest = self._processor.encode(text.split(SPACE_MARK))
        return first + [token for part in rest for token in (*self._mark_bytes, *part)]

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids` to text; EOS and other control pieces are nothing in it."""
        return self._processor.decode(list(ids))

    def piece(self, token: int) -> str:
        """Return a token as the vocabulary spells it: U+2581 for a space, <0x0A> for a byte."""
        return self._processor.id_to_piece(token)

    @cached_property
    def pieces_hash(self) -> str:
        """SHA-256 of what decides the tokens: the ordered pieces, and the ids of a probe text.

        The bytes of a .model file differ between equal trainings, its pieces do not; the probe
        tells apart models with one vocabulary that normalise differently.
        """
        processor = self._processor
        pieces = [
            (
                processor.id_to_piece(index),
                processor.get_score(index),
                processor.is_control(index),
                processor.is_unknown(index),
                processor.is_byte(index),
                processor.is_unused(index),
            )
            for index in range(self.vocab_size)
        ]
        behaviour = [pieces, self.eos_id, processor.encode(BEHAVIOUR_PROBE)]
        return hashlib.sha256(json.dumps(behaviour).encode()).hexdigest()
