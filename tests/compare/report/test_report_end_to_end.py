"""From run directories to a page and a table."""

import csv
import json

from runs.written import metric_lines, sweep, write_run
from test_report_page import Reader, figures_of

from diffllm.compare.report import write_report


def test_a_page_of_run_directories_holds_their_rows_and_figures(tmp_path):
    root = tmp_path / "pair"
    sweep(root, {"standard": [4.0, 4.2], "diff_v2": [3.9, 4.0]})
    diverged = metric_lines(20, 256, 5.0)
    diverged[-1] |= {"train/loss": None, "eval/loss": None}
    words = ("attention=gated", "seed=0")
    summary = {"heldout_loss": None}
    write_run(root / "gated-seed0", *words, lines=diverged, summary=summary)
    write_run(root / "gated-seed1", "attention=gated", "seed=1", loss=None)
    planned = ["gated-seed2", *(path.name for path in root.iterdir())]
    (root / "sweep.json").write_text(json.dumps({"runs": {name: [] for name in planned}}))

    html, table = write_report([root])
    with open(table) as file:
        lines = list(csv.DictReader(file))
    labels = [line["variant"] for line in lines]
    assert labels == ["standard", "gated", "diff_v2"]
    assert [line["seeds_diverged"] for line in lines] == ["0", "1", "0"]
    assert [(line["baseline"], line["gap_seeds"]) for line in lines] == [
        *(("", ""), ("", ""), ("standard", "2")),
    ]
    text = html.read_text()
    assert "1 of 7 runs of" in text
    assert len(figures_of(text)) > 3
    said = Reader(text).text
    assert all(label in said for label in labels)
