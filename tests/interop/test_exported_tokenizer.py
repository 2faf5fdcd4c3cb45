"""Exported tokenizers give the same ids and texts in transformers as in the run."""

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizer_kinds
from tiers import slow_but
from tokenizer_kinds import KINDS, REFUSED, differing_texts, save_sentencepiece

import diffllm
from diffllm.checkpoint.hf.tokenizer import export_obstacle, fast_tokenizer
from diffllm.cli import main
from diffllm.core.errors import DataError
from diffllm.data.tokenizer import Tokenizer, tokenizer_in, write_tokenizer

pytest.importorskip("transformers", "5.4")

PIECES = (
    "\u2581", " ", "  ", "\n", "\r\n", "\t", "\0", "\x7f", "\U0001f600", "é", "e\u0301", "中", "ﬁ",
    "</s>", "<s>", "<unk>", "<0x0A>", "def ", "return", "    ", "aaaa", "abab", "ab", "a", "0",
    "12", "_", "==", "(", "):", "\u200b", "\ufeff", "\U0010ffff",
)  # fmt: skip


def drawn_text(rng: random.Random) -> str:
    """Draw a text of odd pieces, of any characters, or of repeated characters."""
    kind, size = rng.randrange(4), rng.randrange(30)
    if kind == 0:
        return "".join(rng.choices(PIECES, k=size))
    if kind == 1:
        ranges = ((0, 127), (0, 0xD7FF), (0xE000, 0x10FFFF))
        return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(size))
    if kind == 2:
        return rng.choice(" aA0_-=\n\t.x") * size + rng.choice(PIECES)
    return "".join(rng.choices("abdefnrtu _=.\n", k=size))


@pytest.mark.parametrize("number", slow_but([0], range(50)))
def test_exported_fast_tokenizer_matches_tokenizer_of_run(tokenizer, number, rng):
    texts = [drawn_text(rng) for _ in range(5_000)]
    slow, fast = Tokenizer.from_file(tokenizer), fast_tokenizer(tokenizer)
    encoded = fast.encode_batch(texts, add_special_tokens=False)
    expected = slow.encode_batch(texts, threads=1)
    wrong = [t for t, a, b in zip(texts, expected, encoded, strict=True) if a != b.ids]
    assert wrong == []
    assert fast.decode_batch([each.ids for each in encoded]) == texts


@pytest.fixture
def run_with_tokenizer(make_run):
    """Return a function that writes an untrained run with a tokenizer of KINDS."""

    def make(kind):
        run = make_run(kind, "attention=standard")
        KINDS[kind](run.parent / "tokenizers" / kind)
        (run / "tokenizer.model").unlink()
        write_tokenizer(tokenizer_in(run.parent / "tokenizers" / kind), run)
        return run

    return make


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_and_run_encode_and_decode_alike(run_with_tokenizer, tmp_path, kind):
    run, out = run_with_tokenizer(kind), tmp_path / "hf"
    assert main(["export", f"run={run}", f"out={out}"]) == 0
    assert differing_texts(run, out) == []


@pytest.mark.slow
@pytest.mark.parametrize("charmap", ["C", "ISO-8859-1"])
def test_exports_do_not_depend_on_the_encoding_of_the_locale(run_with_tokenizer, tmp_path, charmap):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if charmap != "C":
        if shutil.which("localedef") is None:
            pytest.skip("localedef is missing")
        words = ["localedef", "-c", "-i", "en_US", "-f", charmap, str(tmp_path / "latin")]
        subprocess.run(words, check=True, capture_output=True)
        locale |= {"LC_ALL": "latin", "LOCPATH": str(tmp_path)}
    runs = [run_with_tokenizer(kind) for kind in KINDS]
    words = [sys.executable, tokenizer_kinds.__file__, *runs, tmp_path / "hf"]
    preferred = subprocess.run(
        [sys.executable, "-c", "import locale; print(locale.getpreferredencoding())"],
        env=os.environ | locale, capture_output=True,
    ).stdout  # fmt: skip
    assert b"UTF-8" not in preferred
    path = os.pathsep.join([str(Path(diffllm.__file__).parents[1]), *sys.path])
    done = subprocess.run(
        words, env=os.environ | locale | {"PYTHONPATH": path}, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("kind", REFUSED)
def test_sentencepiece_model_without_exact_conversion_is_refused(tmp_path, kind):
    options, reason = REFUSED[kind]
    save_sentencepiece(tmp_path / kind, **options)
    model = tmp_path / kind / "tokenizer.model"
    assert export_obstacle(model) == reason
    with pytest.raises(DataError, match=f"cannot be exported, because {re.escape(reason)}"):
        fast_tokenizer(model)
