"""Tokenizers of several kinds, and a comparison of exported tokenizers with transformers.

python tokenizer_kinds.py RUN... OUT: export each run to OUT, and compare texts in this process,
whose locale the caller chooses.
"""

import inspect
import io
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import sentencepiece
from runs.json_files import write_json
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<unk>"]
BOS, EOS, UNK = SPECIAL
LINES = [*inspect.getsource(json).splitlines(), "größe 日本 \u00a0 fin"]
PIECES = (
    "\u2581", " ", "  ", "\n", "\r\n", "\t", "\0", "\U0001f600", "é", "e\u0301", "中", "ﬁ", "def ",
    "return", "    ", "12", "<tool>", "<user>", *SPECIAL, "</s>", "<s>", "<0x0A>", "größe 日本",
)  # fmt: skip


def save_fast(
    place: Path, byte_level: bool = True, single: str = "$A", added: tuple[str, ...] = ()
) -> None:
    """Write a BPE tokenizer.json, byte-level or with a space before texts as in Llama 2.

    `single` is the template of the post-processor; `added` are ordinary added tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if byte_level:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special = SPECIAL
    else:
        tokenizer = Tokenizer(models.BPE(unk_token=UNK, fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        alphabet = []
        special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(SPECIAL)]  # bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=list(zip(SPECIAL, range(3), strict=True))
    )
    place.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(place / "tokenizer.json"))
    write_json(place / "tokenizer_config.json", {"bos_token": BOS, "eos_token": EOS})


def save_sentencepiece(place: Path, **options: Any) -> None:
    """Write a tokenizer.model like Llama 2's, except for `options`."""
    settings = {
        "vocab_size": 380, "model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": True,
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
    }  # fmt: skip
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, minloglevel=2, **{**settings, **options}
    )
    place.mkdir(parents=True, exist_ok=True)
    (place / "tokenizer.model").write_bytes(model.getvalue())


KINDS: dict[str, Callable[[Path], None]] = {
    "byte_level": save_fast,
    "bos": partial(save_fast, single=f"{BOS} $A"),
    "two_tokens": partial(save_fast, single=f"{BOS} {UNK} $A {EOS}"),
    "eos": partial(save_fast, single=f"$A {EOS}"),
    "bos_and_eos": partial(save_fast, single=f"{BOS} $A {EOS}"),
    "added_tokens": partial(save_fast, added=("<tool>", "größe 日本"), single=f"{BOS} $A"),
    "byte_fallback": partial(save_fast, byte_level=False, single=f"{BOS} $A"),
    "sentencepiece": partial(save_sentencepiece, add_dummy_prefix=False),
    "dummy_prefix": save_sentencepiece,
    "user_defined": partial(
        save_sentencepiece, add_dummy_prefix=False, user_defined_symbols=["<user>", "größe▁日本"]
    ),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unigram": ({"model_type": "unigram"}, "it is not a BPE model"),
    "nfkc": ({"normalization_rule_name": "nmt_nfkc"}, "it normalises texts"),
    "whitespace": ({"remove_extra_whitespaces": True}, "it normalises texts"),
    "suffix": ({"treat_whitespace_as_suffix": True}, "it normalises texts"),
    "no_bytes": ({"byte_fallback": False}, "it has no token for some bytes"),
    "space": (
        {"user_defined_symbols": ["a b"]}, "it has pieces with a space in place of U+2581",
    ),
    "user_defined": (
        {"user_defined_symbols": ["<user>"]}, "it has user-defined symbols and a dummy prefix",
    ),
}  # fmt: skip


def tokenizer_texts(count: int) -> list[str]:
    rng = random.Random(20261124)
    drawn = ["".join(rng.choices(PIECES, k=rng.randrange(12))) for _ in range(count)]
    return [*LINES, "", " ", " two  spaces\n", *drawn]


def differing_texts(run: Path, exported: Path) -> list[str]:
    """Return the texts whose ids, or whose decoded ids, differ between a run and its export."""
    from transformers import AutoTokenizer

    from diffllm.data.tokenizer import Tokenizer, tokenizer_of

    ours = Tokenizer.from_file(tokenizer_of(run))
    theirs = AutoTokenizer.from_pretrained(exported)
    different = []
    for text in tokenizer_texts(300):
        ids = theirs(text)["input_ids"]
        decoded = theirs.decode(ids, skip_special_tokens=True)
        if ids != ours.encode(text) or decoded != ours.decode(ids):
            different.append(text)
    return different


if __name__ == "__main__":
    from diffllm.cli import main

    *runs, out = map(Path, sys.argv[1:])
    for run in runs:
        assert main(["export", f"run={run}", f"out={out / run.name}"]) == 0
        assert differing_texts(run, out / run.name) == [], run.name
