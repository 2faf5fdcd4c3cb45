"""A sentencepiece model as a fast tokenizer of Hugging Face's library, with the same ids."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sentencepiece import SentencePieceProcessor

from diffllm.core.errors import DataError
from diffllm.data.tokenizer import BEHAVIOUR_PROBE, SPACE_MARK

if TYPE_CHECKING:
    import tokenizers

UNIGRAM, BPE = 1, 2
"""Kinds of sentencepiece models, as their files number them."""


def fast_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """Return a tokenizer that encodes every text as `diffllm.data.Tokenizer` does.

    In its vocabulary a space is a space: U+2581, which sentencepiece writes for one, is then a
    character like any other, which comes in bytes as it does here. It decodes to the same texts,
    but for bytes that are no text, each of which is U+FFFD there. Raises DataError for a model that
    changes texts before it encodes them, that is no BPE, or that cannot spell all bytes.
    """
    import tokenizers
    from tokenizers import decoders, models

    processor = SentencePieceProcessor(model_file=str(model))
    check_convertible(processor, model)
    pieces = [spelt(processor, i) for i in range(processor.vocab_size())]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    fast = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_of(processor, vocabulary),
            unk_token=pieces[processor.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = [i for i in range(len(pieces)) if processor.is_control(i) or processor.is_unknown(i)]
    fast.add_special_tokens([tokenizers.AddedToken(pieces[i], normalized=False) for i in special])
    fast.encode_special_tokens = True
    return fast


def check_convertible(processor: SentencePieceProcessor, model: Path) -> None:
    """Raise DataError for a model whose ids no fast tokenizer of this kind would give."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    content = proto.ModelProto.FromString(processor.serialized_model_proto())
    if content.trainer_spec.model_type != BPE:
        raise DataError(f"{model}: only BPE models become fast tokenizers, which this is not")
    if processor.normalize(BEHAVIOUR_PROBE) != BEHAVIOUR_PROBE.replace(" ", SPACE_MARK):
        raise DataError(f"{model}: it changes texts before it encodes them")
    if not all(processor.is_byte(processor.piece_to_id(f"<0x{i:02X}>")) for i in range(256)):
        raise DataError(f"{model}: it has no pieces for single bytes")


def spelt(processor: SentencePieceProcessor, token: int) -> str:
    """Return a piece as the fast vocabulary has it: with spaces where it has their mark."""
    return str(processor.id_to_piece(token)).replace(SPACE_MARK, " ")


def merges_of(
    processor: SentencePieceProcessor, vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """List all pairs of pieces that make a piece, those of the best piece first.

    Of one piece's pairs that with the longer left side comes first: in a run of one character,
    where several would do, sentencepiece merges from the left.
    """
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for piece, token in vocabulary.items():
        if not normal(processor, token):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            known = left in vocabulary and right in vocabulary
            if known and all(normal(processor, vocabulary[part]) for part in (left, right)):
                found.append((-processor.get_score(token), token, -cut, (left, right)))
    return [pair for *_, pair in sorted(found)]


def normal(processor: SentencePieceProcessor, token: int) -> bool:
    """Whether a piece stands for text, and not for a byte or for nothing."""
    return not (
        processor.is_byte(token) or processor.is_control(token)
        or processor.is_unknown(token) or processor.is_unused(token)
    )  # fmt: skip
