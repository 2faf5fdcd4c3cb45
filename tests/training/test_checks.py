"""Checks before a run starts."""

import pytest

from diffllm import load_config
from diffllm.optim import learning_rate
from diffllm.training.checks import learning_rate_jump

WORDS = ["model=tiny", "steps=80", "optim.warmup_steps=0"]
STEPS = {"steps": (40, 80)}
SCHEDULE = {"optim.schedule": ("cosine", "wsd"), "optim.min_lr_ratio": (0.1, 0.0)}


def test_resume_warns_if_changed_settings_raise_learning_rate():
    cfg = load_config(WORDS)
    said = learning_rate_jump(cfg, STEPS, 40)
    was, now = learning_rate(cfg.optim, 39, 40), learning_rate(cfg.optim, 40, 80)
    assert now > 2 * was
    assert f"from {was:.2g} to {now:.2g} at step 41" in said
    assert "covers 80 steps" in said
    assert learning_rate_jump(load_config([*WORDS, "optim=wsd"]), SCHEDULE, 60)


@pytest.mark.parametrize(
    ("changes", "step"), [(STEPS, 0), (STEPS, 5), (SCHEDULE, 5), ({"seed": (0, 1)}, 40)]
)
def test_resume_does_not_warn_if_changed_settings_keep_learning_rate(changes, step):
    assert learning_rate_jump(load_config(WORDS), changes, step) is None
