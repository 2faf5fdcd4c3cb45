"""Convert a sentencepiece file to a tokenizer.json, and find the BOS of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.core.errors import DataError
from diffllm.data.sentencepiece_file import load_processor, proto_of
from diffllm.data.tokenizer import BEHAVIOUR_PROBE, FAST, SPACE_MARK, load_fast
from diffllm.data.tokenizer_config import named_token, read_config

if TYPE_CHECKING:
    import tokenizers

BPE = 2
"""Value of `model_type` of BPE models in sentencepiece files."""
NORMAL, USER_DEFINED, UNUSED, BYTE = 1, 4, 5, 6
"""Values of `type` of pieces in sentencepiece files."""
LLAMA_BOS = "<s>"
"""BOS of transformers for a sentencepiece file, if tokenizer_config.json has no `bos_token`."""


def export_obstacle(path: Path) -> str | None:
    """Return why the tokenizer file `path` cannot be exported exactly, or None.

    Every tokenizer.json can be exported. A sentencepiece tokenizer can be exported if it is BPE,
    does not normalise texts apart from a dummy prefix, and encodes all bytes.
    """
    if path.suffix == ".json":
        return None
    content = proto_of(load_processor(path))
    normalizer = content.normalizer_spec
    types = [piece.type for piece in content.pieces]
    if content.trainer_spec.model_type != BPE:
        return "it is not a BPE model"
    if (
        normalizer.precompiled_charsmap
        or normalizer.remove_extra_whitespaces
        or not normalizer.escape_whitespaces
        or content.denormalizer_spec.precompiled_charsmap
        or (normalizer.add_dummy_prefix and content.trainer_spec.treat_whitespace_as_suffix)
    ):
        return "it normalises texts"
    if types.count(BYTE) < 256:
        return "it has no token for some bytes"
    if any(" " in piece.piece for piece in content.pieces):
        return "it has pieces with a space in place of U+2581"
    if UNUSED in types:
        return "it has unused pieces"
    if normalizer.add_dummy_prefix and USER_DEFINED in types:
        return "it has user-defined symbols and a dummy prefix"
    return None


def fast_tokenizer(model: Path) -> tokenizers.Tokenizer:
    """Convert a sentencepiece file to a fast tokenizer that splits texts into the same tokens.

    Like the class `Tokenizer`, the fast tokenizer decodes invalid bytes as U+FFFD. Both encode the
    character U+2581 as bytes, because sentencepiece uses U+2581 for spaces. Raises DataError if
    the conversion is not possible, see `export_obstacle`.
    """
    import tokenizers
    from tokenizers import decoders, models, normalizers

    obstacle = export_obstacle(model)
    if obstacle:
        raise DataError(
            f"the tokenizer {model} cannot be exported, because {obstacle}; train a model with a "
            "BPE tokenizer that has byte fallback and does not normalise texts"
        )
    processor = load_processor(model)
    content = proto_of(processor)
    pieces = [piece.piece.replace(SPACE_MARK, " ") for piece in content.pieces]
    fast = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: token for token, piece in enumerate(pieces)},
            merges=merges_of(content),
            unk_token=pieces[processor.unk_id()],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if content.normalizer_spec.add_dummy_prefix:
        # sentencepiece puts a space before a text, and removes it when it decodes.
        fast.normalizer = normalizers.Prepend(" ")
        steps.append(decoders.Strip(" ", 1, 0))
    fast.decoder = decoders.Sequence(steps)
    special = []
    symbols = []
    for i, piece in enumerate(pieces):
        if processor.is_control(i) or processor.is_unknown(i):
            special.append(tokenizers.AddedToken(piece, normalized=False))
        # sentencepiece never splits these symbols.
        if content.pieces[i].type == USER_DEFINED:
            symbols.append(tokenizers.AddedToken(piece, normalized=False))
    fast.add_special_tokens(special)
    fast.add_tokens(symbols)
    # As in the class `Tokenizer`, the text of a special token in a document is ordinary text.
    fast.encode_special_tokens = True
    return fast


def merges_of(content: Any) -> list[tuple[str, str]]:
    """List all BPE merges: pairs of tokens whose concatenation is a token.

    The pairs are sorted by the sentencepiece score of the concatenation, highest first. Pairs with
    the same concatenation are sorted by the length of the left token, longest first, because
    sentencepiece merges from left to right. `content` is the content of the sentencepiece file.
    """
    texts = {}
    for token, piece in enumerate(content.pieces):
        if piece.type == NORMAL:
            text = piece.piece.replace(SPACE_MARK, " ")
            texts[text] = (-piece.score, token)
    splits = []
    for text, order in texts.items():
        for cut in range(1, len(text)):
            pair = (text[:cut], text[cut:])
            if pair[0] in texts and pair[1] in texts:
                splits.append((*order, -cut, pair))
    return [pair for *_, pair in sorted(splits)]


def imported_prefix(path: Path) -> list[str]:
    """List the tokens that transformers puts before each text, for the tokenizer file `path`.

    The post-processor in tokenizer.json decides. Without a tokenizer.json, the only token is
    `bos_token` in tokenizer_config.json, if `add_bos_token` is true.
    """
    json_file = path.with_name(FAST)
    if json_file.is_file():
        # transformers 5 ignores add_bos_token if there is a tokenizer.json.
        tokenizer = load_fast(json_file)
        # Tokens of padding on the left would look like a prefix.
        tokenizer.no_padding()
        encoding = tokenizer.encode(BEHAVIOUR_PROBE)
        # 0 for the tokens of the text, None for added tokens.
        sequences = encoding.sequence_ids
        if 0 not in sequences:
            return []
        first = sequences.index(0)
        return encoding.tokens[:first]
    config = read_config(path)
    if config.get("add_bos_token") is not True:
        return []
    token = named_token({"bos_token": LLAMA_BOS} | config, "bos_token")
    if not isinstance(token, str):
        return []
    return [token]
