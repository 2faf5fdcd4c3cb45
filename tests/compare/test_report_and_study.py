"""A report and a study compute the same gap from the same run directories."""

import numpy as np
import pytest
from runs.written import loaded, study_file, write_arms

from diffllm.compare.report.comparison import compare
from diffllm.compare.study.verdict import judge
from diffllm.evaluation.heldout import DocumentLosses

RULE = "{kind: difference, arm: v2, against: standard, below: 0.0}"
BASE = "model=tiny, steps=20, seq_len=32, global_batch_size=8, eval.tokens=null"
ARMS = "{standard: [attention=standard], v2: [attention=diff_v2]}"
MASKED = "data.mask_documents=true, data.visible_keys=10"
STAGE = {"previous": {"path": "stage-0/checkpoints/step-00000100", "tokens": 51_200}}
NAN = float("nan")


def write_documents(run, seed):
    rng = np.random.default_rng(seed)
    tokens = np.arange(20, 60)
    nats = rng.normal(4, 0.3, len(tokens)) * tokens
    numbers = np.arange(len(tokens), dtype=np.int64)
    DocumentLosses(nats, tokens, 4 * tokens, numbers, 0 * numbers).save(run, 20)


@pytest.mark.parametrize(
    ("base", "facts", "standard", "v2"),
    [
        (BASE, {}, [4.0, 4.1, 4.23], [3.9, 4.05, 4.1]),
        (f"{BASE}, {MASKED}", {"flops_per_visible_key": 1e3}, [4.0, 4.1, 4.23], [3.9, 4.05, 4.1]),
        (BASE, STAGE, [4.0, 4.1, 4.23], [3.9, 4.05, 4.1]),
        (BASE, {}, [4.0, 4.1, 4.23], [3.9, NAN, 4.1]),
        (BASE, {}, [4.0, 4.1, 4.23], [NAN, NAN, NAN]),
    ],
    ids=["plain", "masked", "stage", "diverged seed", "diverged arm"],
)
def test_report_and_study_of_same_runs_have_equal_gap(tmp_path, base, facts, standard, v2):
    study = study_file(tmp_path / "study.yaml", RULE, base=f"[{base}]", arms=ARMS)
    out = tmp_path / "out"
    write_arms(study, out, {"standard": standard, "v2": v2}, **facts)
    directories = sorted(path for path in out.iterdir() if path.is_dir())
    for place, directory in enumerate(directories):
        write_documents(directory, place)
    (rule,) = judge(study, out).tested
    row = compare(loaded(directories)).rows[1]
    assert row.outcome.full == rule.gap
    assert (row.outcome.candidate, row.outcome.base) == (rule.outcome.candidate, rule.outcome.base)
    is_diverged = np.isnan(v2).all()
    assert (row.gap is None) == is_diverged
    if not is_diverged:
        assert row.gap.mean == rule.gap.mean
        assert rule.gap.document_error > 0
