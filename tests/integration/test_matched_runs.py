"""A sweep whose variants have equal parameters: what it says, and that its runs can be used."""

import json
from pathlib import Path

import pytest
import yaml
from runs.command import Result, train

from diffllm.evaluation.load import load_model

pytestmark = pytest.mark.slow

WORDS = [
    *("-m", "attention=standard,diff_v2", "run.sweep=fair"),
    *("model.match_params_to=diff_v2", "model.ffn_dim=512"),
]
LAYER = 128 * (2 * 128 + 64 + 64 + 128 + 4) + 3 * 128 * 512 + 2 * 128
V2_PARAMS = 2 * LAYER + 128 + 2 * 512 * 128
"""Parameters of tiny diff_v2: wq, wk, wv, wo, w_lambda, feed-forward, norms, embeddings."""


@pytest.fixture(scope="module")
def swept(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: list[str],
    environment: dict[str, str],
    finished_run: Path,
) -> tuple[Path, Result]:
    cwd = tmp_path_factory.mktemp("matched")
    return cwd, train([*WORDS, *tiny], cwd, environment)


def test_every_run_says_both_totals_at_its_start_and_at_its_end(swept: tuple[Path, Result]) -> None:
    cwd, result = swept
    assert result.code == 0, result.err
    for variant in ("standard", "diff_v2"):
        run = cwd / "outputs" / "fair" / variant
        model, _ = load_model(run)
        target, _ = load_model(run.with_name("diff_v2"))
        params, width = sum(p.numel() for p in model.parameters()), model.cfg.ffn_dim
        percent = 100 * (params / V2_PARAMS - 1)
        assert abs(percent) <= 0.5
        said = (
            f"ffn_dim {width} gives {params:,} parameters, {percent:+.3f}% against diff_v2's "
            f"{V2_PARAMS:,} at ffn_dim 512"
        )
        starts = [f"matched: {said}", f"matched       {said}"]
        lines = result.out.splitlines()
        assert [line for line in lines if line in starts] == starts, result.out
        expected = {
            "target": "diff_v2",
            "target_params": V2_PARAMS,
            "target_ffn_dim": 512,
            "params": params,
            "ffn_dim": width,
            "key": "ffn_dim",
            "by": "params",
            "flops": model.flops_per_token(),
            "target_flops": target.flops_per_token(),
        }
        saved = yaml.safe_load((run / "config.yaml").read_text())
        assert saved["model"]["ffn_dim"] == width
        assert saved["run"]["matched"] == expected
        summary = json.loads((run / "summary.json").read_text())
        assert summary["matched"] == {**expected, "difference_percent": pytest.approx(percent)}
    assert load_model(cwd / "outputs" / "fair" / "diff_v2")[0].cfg.ffn_dim == 512
    assert load_model(cwd / "outputs" / "fair" / "standard")[0].cfg.ffn_dim > 512
