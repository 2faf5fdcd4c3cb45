"""Equal seeds draw equal cases in every process, different seeds draw different cases."""

import os
import sys
from pathlib import Path

import pytest
from runs.command import command, success_of

TESTS = Path(__file__).parent
MODULE = """
import os
from hypothesis import given, strategies as st

def record(*drawn):
    with open(os.environ["RECORD"], "a") as file:
        print(*map(ascii, drawn), file=file)

@given(st.integers(), st.text(), st.floats(), st.sets(st.text()))
def test_by_hypothesis(a, b, c, d):
    record(a, b, c, sorted(d))

def test_by_generator(rng):
    record(rng.random())

def test_without_cases():
    record("not a drawing test")
"""


@pytest.mark.slow
def test_random_test_cases_depend_only_on_fuzz_seed(tmp_path):
    """Cases do not depend on the hash seed, on imported modules or on constants in modules."""
    (tmp_path / "test_drawing.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "constants.py").write_text(
        f"A = {list(range(1000, 1500))}\nB = 'not drawn'\n", encoding="utf-8"
    )

    def drawn(seed: str, hash_seed: str, *plugins: str) -> str:
        record = tmp_path / f"record-{seed}-{hash_seed}"
        words = [word for name in ("conftest", *plugins) for word in ("-p", name)]
        words = [sys.executable, "-m", "pytest", *words, "-m", "fuzz", "test_drawing.py"]
        path = os.pathsep.join([str(TESTS), str(TESTS.parent), str(tmp_path)])
        seeds = {"FUZZ_SEED": seed, "PYTHONHASHSEED": hash_seed}
        variables = {**seeds, "PYTHONPATH": path, "RECORD": str(record)}
        success_of(command(words, tmp_path, os.environ | variables))
        return record.read_text(encoding="utf-8")

    first = drawn("1", "1")
    assert len(first.splitlines()) > 100
    assert "not a drawing test" not in first
    assert drawn("1", "2", "constants") == first
    assert drawn("2", "1") != first
