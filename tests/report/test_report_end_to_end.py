"""From run directories to a page in a browser."""

import csv
import json

import pytest
from test_report_browser import CHROMIUM, asked
from written_runs import metric_lines, sweep, write_run

from diffllm.compare.report import write_report


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_page_of_run_directories_opens_and_holds_their_rows(tmp_path):
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
    views = [("runs", 360, False), ("runs", 1400, True)]
    for (_, width, _), answers in asked(tmp_path, {"runs": text}, views).items():
        assert answers["errors"] == []
        assert answers["wide"] <= width
        assert answers["beyond"] == 0
        assert answers["figures"] > 3
        assert answers["unsorted"] == labels
