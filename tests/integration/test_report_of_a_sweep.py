"""`diffllm report` on what training really leaves behind."""

import json

import pytest
from runs.command import tool, train

from diffllm.compare.report.comparison import read


@pytest.mark.slow
def test_a_sweep_of_two_variants_and_two_seeds(tmp_path, tiny, environment):
    words = ["-m", "attention=standard,diff_v2", "seed=0,1", "run.sweep=pair"]
    assert train([*words, *tiny], tmp_path, environment).code == 0
    sweep = tmp_path / "outputs" / "pair"
    result = tool(["report", "outputs/pair"], tmp_path, environment)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-2:] == ["outputs/pair/report.html", "outputs/pair/report.csv"]
    comparison, _ = read([sweep])
    assert comparison.differences == []
    (note,) = comparison.notes
    assert "more parameters than standard; model.match_params_to=diff_v2" in note
    losses = {
        run.name: json.loads((run / "summary.json").read_text())["heldout_loss"]
        for run in sweep.glob("*-seed?")
    }
    gaps = [losses[f"diff_v2-{seed}"] - losses[f"standard-{seed}"] for seed in ("seed0", "seed1")]
    standard, diff_v2 = comparison.rows
    assert diff_v2.gap is not None
    assert diff_v2.gap.mean == pytest.approx(sum(gaps) / 2)
    ends = ("", "_judged", "_per_1000", "_low", "_high")
    too_short = {f"{series}_events{end}" for series in ("loss", "grad") for end in ends}
    too_few = {"seed_correlation", "gap_documents_low", "gap_documents_high"}
    never = {"incomparable", "group", "perf/mfu", *too_short, *too_few}
    of_gaps = {name for name in standard.values if name.startswith("gap")}
    unknown = {*of_gaps, "diverged_p", "baseline", *never}
    assert {name for name, value in standard.values.items() if value is None} == unknown
    missing = {name for name, value in diff_v2.values.items() if value is None}
    at_equal_time = {name for name in of_gaps if name.startswith("gap_at_seconds")}
    assert missing - at_equal_time == never, "a slow run may end before the other is evaluated"
