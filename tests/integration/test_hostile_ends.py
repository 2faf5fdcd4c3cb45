"""Drawn cases of streams that fail and of values that end runs, as real commands."""

import random
from pathlib import Path

import pytest
from hostile import ends, outputs

CASES = [(what, number) for what in ("outputs", "ends") for number in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "number"), CASES)
def test_a_drawn_case_ends_as_it_should(what, number, corpus, environment, tmp_path: Path, rng):
    draw = {"outputs": outputs.draw, "ends": ends.draw}[what]
    drawn = draw(rng)
    ended = outputs.started(drawn, tmp_path, (f"data.paths=[{corpus}]",), environment)
    assert outputs.problems(drawn, ended, tmp_path) == [], (drawn, ended)


def test_the_same_seed_draws_the_same_case():
    for module in (outputs, ends):
        drawn = [[module.draw(random.Random(n)) for n in range(300)] for _ in range(2)]
        assert drawn[0] == drawn[1]
        kinds = {one.expected for one in drawn[0]}
        assert {"finished", "refused"} <= kinds
    assert "diverged" in kinds
