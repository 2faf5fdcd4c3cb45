"""The lint rule that text files name their encoding."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "encodings.py"
CASES = {
    "file = path.read_text()": 'file = path.read_text(encoding="utf-8")',
    "path.write_text(text)": 'path.write_text(text, encoding="utf-8")',
    'open(path, "a",)': 'open(path, "a",encoding="utf-8")',
    "file = path.open()": 'file = path.open(encoding="utf-8")',
    'path.open(mode="w")': 'path.open(mode="w", encoding="utf-8")',
    'gzip.open(path, "rt")': 'gzip.open(path, "rt", encoding="utf-8")',
    'os.fdopen(number, "w")': 'os.fdopen(number, "w", encoding="utf-8")',
    'TemporaryFile("w+")': 'TemporaryFile("w+", encoding="utf-8")',
    "run(words, text=True, check=True)": 'run(words, encoding="utf-8", check=True)',
    'é = a.read_text() + b.read_text()': (
        'é = a.read_text(encoding="utf-8") + b.read_text(encoding="utf-8")'
    ),
}  # fmt: skip
RIGHT = (
    *CASES.values(), "path.read_bytes()", 'open(path, "rb")', 'path.open("xb")', "gzip.open(path)",
    "tarfile.open(path)", "gate.open()", "log.open(path)", "TemporaryFile()",
    "open(path, **options)", 'path.read_text("utf-8")', 'path.write_text(text, "utf-8")',
    "run(words, text=text)",
)  # fmt: skip


@pytest.fixture(scope="module")
def encodings():
    spec = importlib.util.spec_from_file_location("encodings_lint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("source", CASES)
def test_lint_rule_fixes_calls_without_encoding(encodings, source):
    assert list(encodings.calls(source))
    assert encodings.fixed(source) == CASES[source]


@pytest.mark.parametrize("source", RIGHT)
def test_lint_rule_accepts_bytes_and_calls_with_encoding(encodings, source):
    assert encodings.fixed(source) == source
