"""Counts with exact intervals: spike events of a row's seeds, and runs that diverged."""

import math

import pytest
from report_pages import columns_of, csv_rows, page_text, undrawn_page
from runs.written import loaded, runs_in, sweep, write_run
from scipy import stats

from diffllm.compare.arms.sentences import compact, fixed
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.page_tables import cost_columns
from diffllm.compare.report.tables import fold_constant, table_columns
from diffllm.compare.report.terminal import table_text
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


def diverging(root, *, gave_up):
    """Return runs of standard with three finite seeds, and of gated with a diverged third seed."""
    losses = {"standard": [4.0, 4.1, 4.2], "gated": [3.9, 4.0, math.nan]}
    paths = sweep(root, losses)
    if gave_up:
        summary = '{"steps": 10, "stopped": "skips"}'
        (paths[-1] / "summary.json").write_text(summary, encoding="utf-8")
    return compare(loaded(paths))


@pytest.mark.parametrize("gave_up", [False, True])
def test_diverged_seed_is_reported_in_every_output_format(tmp_path, snapshot, gave_up):
    comparison = diverging(tmp_path, gave_up=gave_up)
    gated = comparison.rows[1]
    assert (gated.diverged, len(gated.ended), gated.loss.seeds) == (1, 3, 2)
    assert gated.loss.mean == pytest.approx(3.95)
    notes = [note for note in comparison.notes if "is not finite" in note]
    assert len(notes) == (0 if gave_up else 1)
    share = "1 of 3 seeds diverged (33%, 0.84% to 91%)"

    text = table_text(comparison)
    assert text == snapshot
    assert all(line.isascii() and len(line) <= 100 for line in text.splitlines())

    columns = columns_of(comparison)
    assert columns["Held-out loss"].cells[1].tag == "1 of 3 seeds diverged"
    assert columns["Gap to standard"].cells[1].tag == "1 of 3 seeds diverged"
    tags_of_seeds = [cell.tag for cell in columns["Seeds"].cells]
    assert tags_of_seeds == ["", "1 diverged: 33%, 0.84% to 91%"]
    (equal,) = cost_columns(comparison.rows)
    assert equal.cells[1].small[-1] == "1 of 3 seeds diverged"

    shown = page_text(comparison)
    assert share in shown
    assert ("diverged, stopped" if gave_up else "diverged") in shown

    standard_line, gated_line = csv_rows(comparison)
    assert (standard_line["seeds_diverged"], standard_line["seeds_ended"]) == ("0", "3")
    assert (gated_line["seeds_diverged"], gated_line["seeds_ended"]) == ("1", "3")
    expected = stats.binomtest(1, 3).proportion_ci(method="exact")
    assert float(gated_line["diverged_low"]) == pytest.approx(expected.low)
    assert float(gated_line["diverged_high"]) == pytest.approx(expected.high)
    assert float(standard_line["diverged_low"]) == 0


def test_report_contains_no_loss_if_all_runs_of_variant_diverged(tmp_path):
    comparison = compare(loaded(sweep(tmp_path, {"standard": [math.nan] * 2})))
    assert "standard: 2 of 2 seeds diverged (100%, 16% to 100%)" in page_text(comparison)
    columns = table_columns(comparison.rows, comparison.baseline)
    table, sentences = fold_constant(Table(columns))
    assert "Seeds" in [column.title for column in table.columns]
    assert "Seeds" not in " ".join(sentences)
    assert comparison.rows[0].values["loss"] is None
    assert "0 of 2, 2 diverged" in table_text(comparison)


@pytest.mark.parametrize(
    ("cells", "expected"),
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
def test_report_replaces_constant_column_by_sentence(cells, expected):
    names = TableColumn("Row", [Cell("a"), Cell("b")][: len(cells)])
    table, sentences = fold_constant(Table([names, TableColumn("Events", cells, "per step")]))
    assert sentences == expected
    assert len(table.columns) == (1 if expected else 2)


def with_events(root, name, seed, total, judged, **more):
    words = (f"attention={name}", f"seed={seed}")
    counts = {"spikes_detrended/loss_total": total, "spikes_detrended/loss_judged": judged}
    return write_run(root / f"{name}{seed}", *words, summary={**counts, **more})


def test_spike_rate_is_computed_over_all_seeds(tmp_path):
    with_events(tmp_path, "standard", 0, 2.0, 300.0)
    # Events of diverged runs count.
    with_events(tmp_path, "standard", 1, 1.0, 200.0, heldout_loss=math.nan)
    with_events(tmp_path, "gated", 0, 0.0, 500.0)
    comparison = compare(runs_in(tmp_path))
    assert "All zero" not in undrawn_page(comparison)
    standard, gated = comparison.rows
    rate = standard.events("loss")
    assert (rate, rate.value) == (Rate(3, 500), 6.0)
    assert standard.events("grad") is None
    columns = columns_of(comparison)
    standard_cell, gated_cell = columns["Loss spikes"].cells
    assert (standard_cell.text, standard_cell.small) == ("6", ("1.2 to 18",))
    assert (gated_cell.text, gated_cell.small[0]) == ("0", "0 to 7.4")
    assert columns["Loss spikes"].unit == "events per 1,000 steps"
    assert "Gradient spikes" not in columns, "no run counted events of it"
    line = csv_rows(comparison)[0]
    counts = [line["loss_events"], line["loss_events_judged"], line["loss_events_per_1000"]]
    assert counts == ["3", "500", "6.0"]
    assert float(line["loss_events_low"]) == rate.low
    assert float(line["loss_events_high"]) == rate.high
    assert line["grad_events_per_1000"] == ""
    assert gated.values["loss_events"] == 0
