"""Results of evaluations in the report: means, gaps paired by seed, and skipped results."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from report_pages import csv_rows, undrawn_page
from runs.written import edit_text, write_run

from diffllm.compare.report.comparison import Comparison, read
from diffllm.compare.report.page_tables import score_table
from diffllm.evaluation.evaluation import SHARE, all_results, results_of, store_result
from diffllm.statistics.estimates import estimate

KEY = {"evaluation": "mqar", "tokenizer": "t", "levels": [{"pairs": 4}, {"pairs": 8}]}
EASY = {"standard": [0.5, 0.6, 0.7], "diff_v2": [0.6, 0.8, 0.75]}
HARD = {"standard": [0.2, 0.3, 0.1], "diff_v2": [0.4, 0.3, 0.3]}


def write_result(
    run: Path,
    *scores: dict[str, Any],
    step: int = 20,
    name: str = "mqar",
    unit: str = SHARE,
    **key: Any,
) -> None:
    first = {"key": {**KEY, "checkpoint": str(run), **key}, "unit": unit, "scores": list(scores)}
    store_result(results_of(run, step) / f"{name}.jsonl", first, [])


def score(of: str, value: float | None, **more: Any) -> dict[str, Any]:
    return {"of": of, "value": value, "chance": 0.25, "examples": 50, **more}


@pytest.fixture(scope="module")
def evaluated_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("evaluated")
    for variant in EASY:
        for seed in range(3):
            run = place / f"{variant}{seed}"
            write_run(run, f"attention={variant}", f"seed={seed}")
            easy, hard = EASY[variant][seed], HARD[variant][seed]
            write_result(run, score("pairs 4", easy), score("pairs 8", hard))
    return place


@pytest.fixture
def copied_runs(evaluated_runs: Path, tmp_path: Path) -> Path:
    return shutil.copytree(evaluated_runs, tmp_path / "runs")


def compared(runs: Path) -> Comparison:
    return read([runs])[0]


def test_report_contains_mean_score_for_each_needle_depth(copied_runs):
    for variant, shares in {"standard": (0.2, 0.4, 0.3), "diff_v2": (0.5, 0.4, 0.6)}.items():
        for seed, share in enumerate(shares):
            depths = {"0.25": share, "0.75": 1.0}
            needle = score("512", 0.7, by_depth=depths)
            write_result(copied_runs / f"{variant}{seed}", needle, name="needle")
    comparison = compared(copied_runs)
    (needle,) = (each for each in comparison.evaluated if each.name == "needle")
    assert [line.name for line in needle.parts] == ["512, depth 0.25", "512, depth 0.75"]
    standard, diff_v2 = needle.parts[0].cells
    assert standard.mean == estimate([0.2, 0.4, 0.3])
    assert diff_v2.gap == estimate([0.5 - 0.2, 0.4 - 0.4, 0.6 - 0.3])
    assert "512, depth 0.75" in undrawn_page(comparison)


def test_mean_and_gap_of_each_evaluation_score_match_reference(copied_runs):
    (mqar,) = compared(copied_runs).evaluated
    assert (mqar.name, mqar.unit) == ("mqar", SHARE)
    assert [line.name for line in mqar.lines] == ["mean of all levels", "pairs 4", "pairs 8"]
    assert mqar.lines[1].chance == 0.25
    for line, values in zip(mqar.lines[1:], (EASY, HARD), strict=True):
        standard, diff_v2 = line.cells
        assert standard.gap is None
        assert standard.mean == estimate(values["standard"]).within(0, 1)
        assert diff_v2.mean == estimate(values["diff_v2"]).within(0, 1)
        pairs = zip(values["diff_v2"], values["standard"], strict=True)
        assert diff_v2.gap == estimate([own - base for own, base in pairs])
    of_all = mqar.lines[0].cells[1]
    means = [(a + b) / 2 for a, b in zip(EASY["diff_v2"], HARD["diff_v2"], strict=True)]
    assert of_all.mean.mean == pytest.approx(sum(means) / 3)


def test_report_page_and_csv_file_contain_evaluation_score_gaps(copied_runs):
    comparison = compared(copied_runs)
    html = undrawn_page(comparison)
    assert "Evaluations" in html
    assert "mqar, share of right answers" in html
    assert "gap +0.117 (" in html  # pairs 4
    assert '>Chance</th><th scope="col">standard</th>' in html
    first, second = csv_rows(comparison)
    assert float(first["mqar: pairs 8"]) == pytest.approx(0.2)
    assert first["mqar: pairs 8, gap"] == ""
    assert float(second["mqar: pairs 8, gap"]) == pytest.approx(2 / 15)
    assert float(second["mqar: pairs 8, gap_low"]) < float(second["mqar: pairs 8, gap_high"])


def test_report_excludes_evaluation_result_if_step_differs_from_other_runs(copied_runs):
    run = copied_runs / "diff_v21"
    (run / "evaluation/step-00000020/mqar.jsonl").unlink()
    write_result(run, score("pairs 4", 0.0), step=10)
    comparison = compared(copied_runs)
    (mqar,) = comparison.evaluated
    cell = mqar.lines[1].cells[1]
    assert (cell.mean.seeds, cell.gap.seeds) == (2, 2)
    assert any("diff_v21, evaluated after another number of tokens" in n for n in comparison.notes)


def test_table_of_scores_omits_rows_without_evaluation(copied_runs):
    write_run(copied_runs / "gated0", "attention=gated", "seed=0")
    comparison = compared(copied_runs)
    table = score_table("mqar", comparison.evaluated[0].lines, comparison.rows)
    heads = [column.title for column in table.columns]
    assert [row.label for row in comparison.rows] == ["standard", "gated", "diff_v2"]
    assert heads == ["mqar", "Chance", "standard", "diff_v2"]


@pytest.mark.parametrize(
    ("shares", "text"),
    [
        ({0: 0.3}, "0.191 to 0.438 over examples"),
        ({0: 0.3, 1: 0.3}, "equal in all seeds"),
        ({0: 0.0, 1: 1.0}, "0.000 to 1.000, uninformative"),
        ({0: 0.9, 1: 0.95}, "0.607 to 1.000"),
    ],
)
def test_confidence_intervals_of_accuracy_are_between_0_and_1(tmp_path, shares, text):
    for variant in EASY:
        for seed, share in shares.items():
            run = write_run(tmp_path / f"{variant}{seed}", f"attention={variant}", f"seed={seed}")
            write_result(run, score("pairs 4", share if variant == "standard" else 1 - share))
    comparison = compared(tmp_path)
    cells = score_table("mqar", comparison.evaluated[0].lines, comparison.rows).rows[0]
    assert text in cells[2].small
    gap = comparison.evaluated[0].lines[0].cells[1].gap
    assert gap.low is None or -1 <= gap.low <= gap.high <= 1


@pytest.mark.parametrize(
    ("unit", "text"),
    [
        ("magnitude, largest of layers", "0.000 to 14.206"),
        ("nats per token", "0.000 to 14.206"),
        ("nats a token", "0.000 to 14.206"),
        ("change of loss, nats per token", "−11.206 to 14.206"),
    ],
)
def test_confidence_interval_excludes_negative_values_except_for_loss_change(tmp_path, unit, text):
    for seed, value in enumerate((0.5, 2.5)):
        run = write_run(tmp_path / str(seed), "attention=standard", f"seed={seed}", loss=value)
        write_result(run, score("top_1", value), unit=unit)
    comparison = compared(tmp_path)
    cells = score_table("outliers", comparison.evaluated[0].lines, comparison.rows).rows[0]
    assert cells[2].small[0] == text
    assert comparison.rows[0].loss.low == 0.0


def test_confidence_interval_stays_within_value_range_of_score(copied_runs):
    for variant, (first, second) in {"standard": (0.0, 1.0), "diff_v2": (0.9, 0.95)}.items():
        for seed, value in enumerate((first, second, second)):
            one = score("target", value, range=[0, 1], by_layer={"0": value})
            free = score("signed target", value, range=None)
            write_result(copied_runs / f"{variant}{seed}", one, free, name="mass", unit="attention")
    (mass,) = (each for each in compared(copied_runs).evaluated if each.name == "mass")
    limited, free = mass.lines
    for line in (limited, *mass.parts):
        standard, diff_v2 = line.cells
        assert (standard.mean.low, standard.mean.high) == (0, 1)
        assert diff_v2.mean.high <= 1
        assert -1 <= diff_v2.gap.low <= diff_v2.gap.high <= 1
    assert free.cells[0].mean.high > 1


def test_confidence_interval_of_small_score_has_two_significant_digits(tmp_path):
    for seed, value in enumerate((0.0003, 0.00031)):
        run = write_run(tmp_path / f"standard{seed}", "attention=standard", f"seed={seed}")
        write_result(run, score("weights 8", value))
    comparison = compared(tmp_path)
    cell = score_table("quantise", comparison.evaluated[0].lines, comparison.rows).rows[0][2]
    assert (cell.text, cell.small[0]) == ("0.0003", "0.00024 to 0.00037")


def test_report_does_not_compare_scores_of_different_difficulty_levels(copied_runs):
    for seed in range(3):
        write_result(copied_runs / f"diff_v2{seed}", score("pairs 4", 1.0), levels=[{"pairs": 4}])
    comparison = compared(copied_runs)
    standard_first = [line.cells for line in comparison.evaluated[0].lines]
    assert all((a is None) != (b is None) for a, b in standard_first)
    assert any(note.startswith("mqar: ") for note in comparison.notes)


def test_mean_evaluation_score_excludes_seed_with_null_score(copied_runs):
    write_result(copied_runs / "standard0", score("pairs 4", None), score("pairs 8", 0.2))
    (mqar,) = compared(copied_runs).evaluated
    standard, diff_v2 = mqar.lines[1].cells
    assert (standard.mean.seeds, diff_v2.mean.seeds, diff_v2.gap.seeds) == (2, 3, 2)


def test_report_page_escapes_html_in_score_names(copied_runs):
    for run in copied_runs.iterdir():
        write_result(run, {"of": "<b>", "value": 0.5}, {"of": "x", "value": 0.1})
    html = undrawn_page(compared(copied_runs))
    assert "&lt;b&gt;" in html
    assert "<b>" not in html


def test_report_skips_invalid_evaluation_file_and_adds_note(copied_runs):
    place = results_of(copied_runs / "standard0", 20)
    (place / "mqar.jsonl").write_text("{}", encoding="utf-8")
    (place / "directory.jsonl").mkdir()
    (place.parent / "step-x").mkdir()
    (place.parent / "step-00000099").write_text("a file", encoding="utf-8")
    problems: dict[str, list[str]] = {}
    assert all_results(copied_runs / "standard0", problems) == {}
    names = [Path(file).name for files in problems.values() for file in files]
    assert names == ["directory.jsonl", "mqar.jsonl"]
    comparison = compared(copied_runs)
    assert comparison.evaluated[0].lines[1].cells[0]
    assert any(f"{place / 'mqar.jsonl'}: " in note for note in comparison.notes)


def test_report_skips_evaluation_result_with_edited_scores(copied_runs):
    file = results_of(copied_runs / "standard0", 20) / "mqar.jsonl"
    edit_text(file, '"value": 0.5', '"value": 0.9871')
    comparison = compared(copied_runs)
    (standard, _) = comparison.evaluated[0].lines[1].cells
    assert standard.mean == estimate(EASY["standard"][1:]).within(0, 1)
    said = f"{file}: was changed after it was written: its checksum differs; skipped."
    assert said in comparison.notes


def test_report_shows_stored_results_of_removed_evaluations(copied_runs):
    for run in copied_runs.iterdir():
        right = 0.5 if run.name.startswith("standard") else 0.75
        about = {"shortened": 0, "shots": 0, "version": 1.0, "interval": [0.25, 0.9]}
        values = {"acc,none": right, "bits_per_byte,none": 2 * right}
        scores = [{"of": of, "value": value, **about} for of, value in values.items()]
        key = {"evaluation": "lm_eval-mine", "checkpoint": str(run), "limit": None}
        first = {"key": key, "unit": "metric of lm-eval", "scores": scores}
        store_result(results_of(run, 20) / "lm_eval-mine.jsonl", first, [{"values": values}])
        write_result(run, score("entries 3", right, level={"entries": 3}), name="phonebook")
    comparison = compared(copied_runs)
    harness, _, phonebook = comparison.evaluated
    assert (harness.name, phonebook.name) == ("lm_eval-mine", "phonebook")
    assert [line.name for line in harness.lines] == ["acc,none", "bits_per_byte,none"]
    for line, factor in ((harness.lines[0], 1), (harness.lines[1], 2), (phonebook.lines[-1], 1)):
        assert [cell and cell.mean.mean for cell in line.cells] == [0.5 * factor, 0.75 * factor]
    assert "lm_eval-mine, metric of lm-eval" in undrawn_page(comparison)
