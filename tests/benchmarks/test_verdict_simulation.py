"""benchmarks/verdict_simulation.py has results within its limits and detects a broken rule."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from runs.json_files import read_json

from diffllm.compare.study import rule_tests

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import verdict_simulation as simulation

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_verdict_error_rates_stay_within_limits_in_simulation():
    # Four standard errors: some of about 100 shares exceed two standard errors by chance.
    rows = simulation.run(150, echo=lambda line: None, errors=4)
    assert [row for row in rows if row["beyond_limits"]] == []
    by_name = {(row["scenario"], row["seeds"]): row for row in rows}
    assert by_name["large gap", 8]["decided"] == 1
    assert by_name["log-rank, sooner", 8]["decided"] > 0.9


def test_verdict_simulation_detects_rule_that_ignores_diverged_runs(monkeypatch):
    scenario = simulation.SCENARIOS["better, but diverges"]
    rng = np.random.default_rng(1)
    honest = simulation.simulate(scenario, 5, 40, rng)
    assert simulation.problems(scenario, honest, 40) == []
    monkeypatch.setattr(rule_tests, "sides_of_diverged", lambda study, rule, outcome: None)
    rng = np.random.default_rng(1)
    broken = simulation.simulate(scenario, 5, 40, rng)
    assert "shown" in simulation.problems(scenario, broken, 40)


def test_more_looks_at_same_studies_show_more_false_differences():
    # The same draws: three looks have each false verdict of the last look, and further ones.
    last, three = (
        simulation.simulate_looks(looks, 100, np.random.default_rng(1))
        for looks in [(8,), (3, 5, 8)]
    )
    assert last["shown"] < three["shown"]
    assert last["refuted"] < three["refuted"]


def test_page_has_the_simulated_shares_of_early_looks():
    content = read_json(ROOT / "benchmarks/results/verdict_simulation.json")
    page = (ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .* \| ([\d.]+)% \| ([\d.]+)% \|$", page, re.M)
    shares = [(row["shown"], row["refuted"]) for row in content["looks"]]
    assert len(rows) == len(shares) == len(simulation.LOOKS)
    for cells, row in zip(rows, shares, strict=True):
        percentages = [float(cell) for cell in cells]
        np.testing.assert_allclose(percentages, 100 * np.array(row), atol=0.0501)
