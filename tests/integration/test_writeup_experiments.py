"""Experiments of the DIFF V2 writeup train at their own widths, with one layer.

Memory and time limit both models to a vocabulary of 2,048, and the mixture to 16 of 128 experts.
"""

import pytest
from runs.command import metrics, success_of, train

SMALL = (
    *("model.n_layers=1", "model.vocab_size=2048", "data.vocab_size=300", "data.tokenizer=null"),
    "compile=false",
    *("steps=2", "seq_len=64", "global_batch_size=1", "micro_batch_size=1", "optim.warmup_steps=1"),
    *("eval.sequences=1", "eval.tokens=100", "wandb.mode=disabled", "run.report=false"),
    *("diagnostics.interval=1", "diagnostics.probe_interval=1"),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "shape"), [("writeup_dense", []), ("writeup_moe", ["model.moe.n_experts=16"])]
)
def test_writeup_experiment_with_one_layer_trains_two_steps_and_logs_spikes_and_outliers(
    corpus, tmp_path, environment, experiment, shape
):
    data = ["data=files", f"data.paths=[{corpus}]"]
    words = [f"experiment={experiment}", "attention=diff_v2", *data, *SMALL, *shape]
    success_of(train([*words, "run.dir=run"], tmp_path, environment))
    steps = metrics(tmp_path / "run")
    assert steps[-1]["step"] == 2
    logged = {part for step in steps for key in step for part in key.split("/")}
    scores = {"loss_score", "grad_score"}
    assert scores | {"hidden_top1", "attn_logit_top1", "context_rms_max"} <= logged
