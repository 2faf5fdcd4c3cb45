"""Read sentencepiece files, and change their settings."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.core.errors import DataError
from diffllm.data.tokenizer_config import EOS_KEY, FAST, listed_tokens

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor


def load_processor(path: Path, eos_token: str | None = None) -> "SentencePieceProcessor":
    """Load a sentencepiece file, with `eos_token` as its EOS if not None.

    Raises DataError if the file is not a sentencepiece model, or if `eos_token` is not a control
    token.
    """
    from sentencepiece import SentencePieceProcessor

    try:
        processor = SentencePieceProcessor(model_file=str(path))
        # Raises for a piece that is not UTF-8, which would otherwise fail much later.
        processor.id_to_piece(list(range(processor.vocab_size())))
    except (RuntimeError, TypeError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: not a valid sentencepiece model; "
            f"choose a sentencepiece model or a {FAST} file"
        ) from error
    if eos_token is None:
        return processor
    control = control_pieces(processor)
    if eos_token not in control:
        raise DataError(
            f"{EOS_KEY}={eos_token!r} must be a control token of {path}: {listed_tokens(control)}"
        )
    return edited(processor, "trainer_spec", "eos_piece", eos_token)


def control_pieces(processor: "SentencePieceProcessor") -> list[str]:
    tokens = range(processor.vocab_size())
    return [processor.id_to_piece(token) for token in tokens if processor.is_control(token)]


def proto_of(processor: "SentencePieceProcessor") -> Any:
    """Return the content of a sentencepiece file: pieces, `trainer_spec` and `normalizer_spec`."""
    from sentencepiece import sentencepiece_model_pb2

    proto: Any = sentencepiece_model_pb2
    return proto.ModelProto.FromString(processor.serialized_model_proto())


def edited(
    processor: "SentencePieceProcessor", section: str, key: str, value: Any
) -> "SentencePieceProcessor":
    """Return a copy of a sentencepiece model with another value of `key` in `section`."""
    from sentencepiece import SentencePieceProcessor

    content = proto_of(processor)
    setattr(getattr(content, section), key, value)
    return SentencePieceProcessor(model_proto=content.SerializeToString())
