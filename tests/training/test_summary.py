"""The text that ends a run says of its numbers what they are."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffllm import load_config
from diffllm.training.summary import epochs_text, heldout_text, summary_text, wandb_text


@pytest.mark.parametrize(("steps", "mean_of"), [(15, "all steps"), (21, "the last 20 steps")])
def test_the_training_loss_says_over_which_steps_it_is_a_mean(steps, mean_of):
    counts = {
        "sample": "a sample",
        "spikes/loss_total": 0,
        "spikes/grad_total": 0,
        "spikes/skipped_total": 0,
    }
    counts |= {"spikes_detrended/loss_total": 2.0, "spikes_detrended/grad_total": 5.0}
    losses = {"train_loss": 4.25, "heldout_loss": 4.5, "heldout_unigram_entropy": 6.0}
    losses |= {"heldout_bits_per_byte": 1.972, "heldout_tokens": 152221, "heldout_documents": 29}
    numbers = {"steps": steps, "tokens": 100, "seconds": 3.0, "tokens_per_s": 50.0}
    cfg = load_config(["model=tiny"])
    text = summary_text(cfg, counts | losses | numbers, Path("run"), "off")
    assert f"train loss    4.250 nats a token, mean of {mean_of}\n" in text
    assert (
        "held-out loss 4.500, 1.50 under the unigram entropy 6.000; 1.97 bits a byte; "
        "152,221 tokens, 29 documents\n"
    ) in text
    assert "spikes        loss 0, gradient norm 0; events without the trend 2, 5\n" in text
    assert "of sources" not in text
    in_bits = losses | {"train_bits_per_byte": 1.5}
    text = summary_text(cfg, counts | in_bits | numbers, Path("run"), "off")
    assert f"train loss    4.250 nats a token, mean of {mean_of}; 1.50 bits a byte\n" in text
    own = {"heldout_loss/code": 4.125, "heldout_loss/prose": 4.75}
    own |= {"heldout_bits_per_byte/code": 1.5, "heldout_bits_per_byte/prose": 2.25}
    mixed = summary_text(cfg, counts | losses | own | numbers, Path("run"), "off")
    of_sources = "code 4.125 (1.50 bits a byte), prose 4.750 (2.25 bits a byte)"
    assert f"29 documents\n  of sources  {of_sources}\n" in mixed
    diverged = summary_text(
        cfg, counts | losses | numbers | {"heldout_loss": math.nan}, Path("run"), "off"
    )
    assert "held-out loss not finite: the run diverged\n" in diverged


def test_the_head_says_epochs_held_out_tokens_and_where_wandb_writes():
    data = SimpleNamespace(
        manifest=SimpleNamespace(splits={"heldout": SimpleNamespace(tokens=999)}, cut=False),
        split=lambda name: range({"train": 100 * 32 + 1}[name]),
    )
    cfg = load_config(["model=tiny", "steps=12", "global_batch_size=8", "seq_len=32"])
    assert epochs_text(cfg, data) == "0.96 epochs"
    assert heldout_text(data).startswith("999 held out, which says little: a larger data.heldout_f")
    data.manifest.splits["heldout"].tokens, data.manifest.cut = 1000, True
    assert heldout_text(data) == "1,000 held out, the end of the text"
    assert wandb_text(load_config(["wandb.mode=disabled"]), Path("run")) == "off"
    online = load_config(["wandb.mode=online", "wandb.entity=me"])
    assert wandb_text(online, Path("run")) == "online, project me/diffllm, a copy in run/wandb"
