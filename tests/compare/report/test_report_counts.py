"""Counts with exact intervals: spike events of a row's seeds, and runs that diverged."""

import csv
import io
import json
import math

import pytest
from runs.written import loaded, write_run
from scipy import stats
from test_report_page import Reader

from diffllm.compare.arms.sentences import compact, fixed
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.page_tables import cost_columns
from diffllm.compare.report.report_page import page
from diffllm.compare.report.tables import csv_text, fold_constant, table_columns
from diffllm.compare.report.terminal import table_text
from diffllm.compare.sweep.command import print_outcomes
from diffllm.compare.sweep.directory import SweepDirectory
from diffllm.compare.sweep.job import Ending, Job
from diffllm.core.printing import Cell, Table, TableColumn
from diffllm.statistics.estimates import Rate


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (999.94, "999.9"), (999.96, "1k"), (-999.96, "−1k"), (999_949, "999.9k"),
        (999_960, "1M"), (1e9 - 1, "1B"), (999.96e9, "1T"), (1e12 - 1e9, "999B"), (3e-9, "3e−09"),
        (1e21, "1000E"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_compact_chooses_unit_prefix_from_rounded_number(value, text):
    assert compact(value) == text


def test_number_rounded_to_zero_is_formatted_without_minus_sign():
    assert [fixed(x, 2, signed=True) for x in (-0.001, 0.0, -0.006)] == ["+0.00", "+0.00", "−0.01"]


@pytest.mark.parametrize(("events", "steps"), [(0, 500), (1, 300), (7, 2000)])
def test_confidence_interval_of_event_rate_matches_scipy(events, steps):
    rate = Rate(events, steps)
    low, high = (stats.chi2.ppf(q, 2 * k) / 2 for q, k in ((0.025, events), (0.975, events + 1)))
    assert rate.value == 1000 * events / steps
    assert (rate.low, rate.high) == pytest.approx(
        (1000 * low / steps if events else 0, 1000 * high / steps)
    )
    # At each end, at most or at least this many events have a probability of 2.5%.
    assert stats.poisson.cdf(events, rate.high * steps / 1000) == pytest.approx(0.025)


def diverging(root, *, gave_up=False):
    """Return runs of standard with three finite seeds, and of gated with a diverged third seed."""
    for seed in range(3):
        write_run(
            root / f"standard{seed}", "attention=standard", f"seed={seed}", loss=4.0 + seed / 10
        )
        words = ("attention=gated", f"seed={seed}")
        if seed < 2:
            write_run(root / f"gated{seed}", *words, loss=3.9 + seed / 10)
        elif gave_up:
            write_run(root / "gated2", *words, loss=None)
            (root / "gated2" / "summary.json").write_text(
                '{"steps": 10, "stopped": "skips"}', encoding="utf-8"
            )
        else:
            write_run(root / "gated2", *words, loss=math.nan)
    return compare(loaded(sorted(root.iterdir())))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("gave_up", [False, True])
def test_diverged_seed_is_reported_in_every_output_format(tmp_path, gave_up):
    found = diverging(tmp_path, gave_up=gave_up)
    gated = found.rows[1]
    assert (gated.diverged, len(gated.ended), gated.loss.seeds) == (1, 3, 2)
    told = "1 of 3 seeds diverged (33%, 0.84% to 91%)"

    text = table_text(found)
    assert f"gated: {told}.\nLosses and gaps exclude diverged runs" in text
    assert "2 of 3, 1 diverged" in text
    assert "standard: " not in text
    assert all(line.isascii() and len(line) <= 100 for line in text.splitlines())

    columns = {each.title: each.cells for each in table_columns(found.rows, found.baseline)}
    assert columns["Held-out loss"][1].tag == columns["Gap to standard"][1].tag
    assert columns["Held-out loss"][1].tag == "1 of 3 seeds diverged"
    assert columns["Seeds"][1].tag == "1 diverged: 33%, 0.84% to 91%"
    assert columns["Seeds"][0].tag == ""
    (equal,) = cost_columns(found.rows)
    assert equal.cells[1].small[-1] == "1 of 3 seeds diverged"

    shown = Reader(page(found)).text
    assert told in shown
    assert ("diverged, stopped" if gave_up else "diverged") in shown

    lines = list(csv.DictReader(io.StringIO(csv_text(found.rows))))
    assert [line["seeds_diverged"] for line in lines] == ["0", "1"]
    assert [line["seeds_ended"] for line in lines] == ["3", "3"]
    expected = stats.binomtest(1, 3).proportion_ci(method="exact")
    assert float(lines[1]["diverged_low"]) == pytest.approx(expected.low)
    assert float(lines[1]["diverged_high"]) == pytest.approx(expected.high)
    assert float(lines[0]["diverged_low"]) == 0


def test_report_contains_no_loss_if_all_runs_of_variant_diverged(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", "attention=standard", f"seed={seed}", loss=math.nan)
    found = compare(loaded(sorted(tmp_path.iterdir())))
    assert "standard: 2 of 2 seeds diverged (100%, 16% to 100%)" in Reader(page(found)).text
    kept, said = fold_constant(Table(table_columns(found.rows, found.baseline)))
    assert "Seeds" in [column.title for column in kept.columns]
    assert "Seeds" not in " ".join(said)
    assert found.rows[0].values["loss"] is None
    assert "0 of 2, 2 diverged" in table_text(found)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([Cell("1"), Cell("2")], []),
        ([Cell("3"), Cell("3")], ["Equal as shown in all rows: Events per step 3."]),
        ([Cell("3", small=("1 to 8",)), Cell("3", small=("1 to 9",))], []),
        ([Cell("–"), Cell("–")], ["Not measured: Events."]),
        (
            [Cell("0", 2.0, ("0 to 2",)), Cell("0", 3.7, ("0 to 3.7",))],
            ["All zero: Events (0 to 3.7 per step)."],
        ),
        ([Cell("0"), Cell("0")], ["All zero: Events per step."]),
        ([Cell("3", tag="1 diverged")] * 2, []),
        ([Cell("3")], []),
    ],
)
def test_report_replaces_constant_column_by_sentence(cells, said):
    names = TableColumn("Row", [Cell("a"), Cell("b")][: len(cells)])
    table, found = fold_constant(Table([names, TableColumn("Events", cells, "per step")]))
    assert found == said
    assert len(table.columns) == (1 if said else 2)


def with_events(root, name, seed, total, judged, **more):
    words = (f"attention={name}", f"seed={seed}")
    counts = {"spikes_detrended/loss_total": total, "spikes_detrended/loss_judged": judged}
    return write_run(root / f"{name}{seed}", *words, summary={**counts, **more})


def test_spike_rate_is_computed_over_all_seeds(tmp_path):
    with_events(tmp_path, "standard", 0, 2.0, 300.0)
    # Events of diverged runs count.
    with_events(tmp_path, "standard", 1, 1.0, 200.0, heldout_loss=math.nan)
    with_events(tmp_path, "gated", 0, 0.0, 500.0)
    found = compare(loaded(sorted(tmp_path.iterdir())))
    assert "All zero" not in page(found)
    standard, gated = found.rows
    rate = standard.events("loss")
    assert (rate.count, rate.steps, rate.value) == (3, 500, 6.0)
    assert rate == Rate(3, 500)
    assert standard.events("grad") is None
    columns = {each.title: each for each in table_columns(found.rows, found.baseline)}
    cell, none = columns["Loss spikes"].cells
    assert (cell.text, cell.small) == ("6", ("1.2 to 18",))
    assert (none.text, none.small[0]) == ("0", "0 to 7.4")
    assert columns["Loss spikes"].unit == "events per 1,000 steps"
    assert "Gradient spikes" not in columns, "no run counted events of it"
    line = next(csv.DictReader(io.StringIO(csv_text(found.rows))))
    assert [line[f"loss_events{end}"] for end in ("", "_judged", "_per_1000")] == [
        "3",
        "500",
        "6.0",
    ]
    assert float(line["loss_events_low"]) == rate.low
    assert float(line["loss_events_high"]) == rate.high
    assert line["grad_events_per_1000"] == ""
    assert gated.values["loss_events"] == 0


def test_sweep_prints_outcome_of_each_run(tmp_path, capsys):
    jobs = []
    for number, loss in enumerate((4.0, math.nan, None)):
        path = tmp_path / f"run{number}"
        path.mkdir()
        jobs.append(Job(number + 1, 3, path.name, str(path), 20, 1e9, [], False))
        if loss is not None:
            (path / "summary.json").write_text(json.dumps({"heldout_loss": loss}), encoding="utf-8")
    stopped = {"steps": 10, "stopped": "9 updates in a row were skipped"}
    (tmp_path / "run2" / "summary.json").write_text(json.dumps(stopped), encoding="utf-8")
    assert print_outcomes(jobs, {"run2": Ending("finished")}, SweepDirectory(tmp_path)) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/run0  held-out loss 4.0000" in said
    assert f"{tmp_path}/run1  diverged: no finite held-out loss" in said
    assert f"{tmp_path}/run2  diverged, stopped after step 10: 9 updates in a row" in said
