"""First screen of a report: sentences, intervals, folded parts, texts and commands."""

import pytest
from report_pages import Reader, figures_of, page_text, undrawn_page, words_of
from runs.written import (
    edit_json,
    falling_lines,
    loaded,
    parameter_count,
    runs_in,
    sweep,
    write_run,
)

from diffllm.compare.report import comparison_text
from diffllm.compare.report.comparison import compare
from diffllm.compare.report.results import finding
from diffllm.compare.report.terminal import table_text
from diffllm.config.compose import variant_config, variants
from diffllm.config.help import variant_line

LOSSES = {"standard": [4.0, 4.2], "gated": [4.1, 4.4], "diff_v2": [3.8, 4.0]}


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory):
    root = tmp_path_factory.mktemp("swept")
    sweep(root, LOSSES)
    return root


def test_report_page_begins_with_loss_gap_of_each_variant_to_baseline(finished_sweep, snapshot):
    comparison = compare(runs_in(finished_sweep))
    sentences = [finding(row) for row in comparison.rows]
    assert "\n".join(sentences) == snapshot
    text = page_text(comparison)
    parts = [sentences[-1], "Gap to standard at the end", "Results"]
    parts += ["Losses in nats per token, over", "The context is the vector per token"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_comparison_text_contains_losses_gaps_and_notes(finished_sweep, tmp_path, snapshot):
    text = comparison_text([finished_sweep])
    assert text == snapshot
    lines = text.splitlines()
    end = lines.index("")
    assert "gap to diff_v2" in comparison_text([finished_sweep], "diff_v2").splitlines()[0]
    assert all(line.isascii() and len(line) <= 100 for line in lines[:end])
    long = ("optim.lr=1e-3", "optim.beta1=0.85", "optim.beta2=0.99", "optim.weight_decay=0.05")
    sweep(tmp_path / "b", LOSSES, *long)
    wide = comparison_text([finished_sweep, tmp_path / "b"]).splitlines()
    assert max(len(line) for line in wide if not line.startswith("note: ")) <= 100
    assert "diff_v2 beta1=0.85 beta2=0.99 lr=0.001 weight_decay=0.05" in wide


def test_report_page_contains_metadata_and_generated_text_of_run(tmp_path):
    summary = {"sample": "def f(<b>):\n\x1b[31mreturn\x07 1", "seconds": 243.4}
    command = "python train.py attention=gated data.sample_prompt='a <b>'"
    facts = {"command": command, "git": {"commit": "0123456789abcdef", "dirty": True}}
    description = "Description from a different machine."
    write_run(tmp_path / "a", "attention=gated", summary=summary, facts=facts)
    write_run(tmp_path / "b", "attention=diff_v1", facts={"variant_line": description})
    text = Reader(undrawn_page(compare(runs_in(tmp_path)))).text
    assert description in text
    assert "def f(<b>):\n\\x1b[31mreturn\\x07 1" in text
    assert command in text
    assert "commit0123456789ab, with uncommitted changes" in text
    assert text.count("4:03") >= 2
    assert variant_line("gated", variant_config("gated")) in text


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("value", [3, None, {"commit": 3}])
def test_report_page_omits_run_json_values_of_wrong_type(tmp_path, value):
    names = ("command", "git", "variant_line", "heldout_unigram_entropy")
    path = write_run(tmp_path / "a", "attention=gated", facts=dict.fromkeys(names, value))
    edit_json(path / "summary.json", sample=value, seconds=value)
    text = page_text(compare(loaded([path])))
    assert variant_line("gated", variant_config("gated")) in text
    assert "commit" not in text.partition("How to read")[0]


@pytest.mark.parametrize(
    ("split", "description"),
    [
        (5000, "the whole held-out split (21 documents, 5,000 tokens)"),
        (20_000, "21 documents of the held-out split (5,000 of 20,000 tokens)"),
        (None, "21 held-out documents (5,000 tokens)"),
    ],
)
def test_report_describes_heldout_text_by_recorded_token_counts(tmp_path, split, description):
    """The config key eval.tokens is null in all cases; older runs did not record the split."""
    facts = {"heldout_split_tokens": split}
    for variant in ("standard", "gated"):
        words, summary = f"attention={variant}", {"heldout_documents": 21}
        write_run(tmp_path / variant, words, facts=facts, summary=summary)
    text = page_text(compare(runs_in(tmp_path)))
    assert text.count(description) == 2
    assert ("whole held-out split" in text) == (split == 5000)


@pytest.mark.parametrize(("steps", "is_early"), [(2000, True), (100_000, False)])
def test_report_names_early_training_below_20_tokens_per_parameter(tmp_path, steps, is_early):
    words = ("attention=gated", f"steps={steps}")
    write_run(tmp_path / "a", *words, lines=falling_lines(10, 256, 4.0))
    ratio = 256 * steps / parameter_count(words)
    text = page_text(compare(runs_in(tmp_path)))
    assert f"{ratio:.2g} tokens per parameter" in text
    assert ("(early training: fewer than 20)" in text) == is_early
    assert ("Hoffmann" in text) == is_early


# The line that explains a variant


def test_every_attention_variant_has_unique_one_line_description():
    lines = [variant_line(name, variant_config(name)) for name in variants()]
    assert all(lines)
    assert len(set(lines)) == len(lines)
    assert max(map(len, lines)) < 160


def test_report_figures_show_only_first_group_of_comparable_runs(finished_sweep, tmp_path):
    lines = falling_lines(40, 256, 3.0)
    write_run(tmp_path / "longer", "attention=diff_v1", "steps=40", lines=lines)
    title = "Held-out sample loss"
    html = undrawn_page(compare([*runs_in(finished_sweep), *runs_in(tmp_path)]), title)
    assert "figures show only the first group" in html
    words = words_of(figures_of(html)[title])
    assert words[-3:] == ["standard steps=20", "gated steps=20", "diff_v2 steps=20"]
    assert "diff_v1 steps=40" in Reader(html).text
    table = table_text(compare([*loaded([finished_sweep / "gated-seed0"]), *runs_in(tmp_path)]))
    assert "2 groups of rows that cannot be compared; they differ in steps:" in table
