"""Conditions of a start that need no run."""

from dataclasses import dataclass

import pytest

from diffllm import load_config
from diffllm.core.errors import ConfigError
from diffllm.model.attention.diff_v2 import DiffV2Config
from diffllm.optim import learning_rate
from diffllm.training.checks import check_named, learning_rate_jump

WORDS = ["model=tiny", "steps=80", "optim.lr=1e-3", "optim.warmup_steps=10"]


@dataclass
class MyConfig(DiffV2Config):
    """A class that no YAML names."""


def test_a_class_that_its_name_does_not_stand_for_is_refused():
    cfg = load_config([*WORDS, "attention=diff_v2"])
    check_named(cfg)
    cfg.model.attention = MyConfig()
    with pytest.raises(ConfigError, match=r"class MyConfig, .*attention=diff_v2, .*DiffV2Config"):
        check_named(cfg)


STEPS = {"steps": (40, 80)}
SCHEDULE = {"optim.schedule": ("cosine", "wsd"), "optim.min_lr_ratio": (0.1, 0.0)}


def test_more_steps_or_another_schedule_raise_the_learning_rate_and_it_is_said():
    cfg = load_config(WORDS)
    said = learning_rate_jump(cfg, STEPS, 40)
    was, now = learning_rate(cfg.optim, 39, 40), learning_rate(cfg.optim, 40, 80)
    assert now > 2 * was
    assert f"from {was:.2g} to {now:.2g} at step 41" in said
    assert "over all 80 steps" in said
    assert learning_rate_jump(load_config([*WORDS, "optim=wsd"]), SCHEDULE, 60)


@pytest.mark.parametrize(
    ("changes", "step"), [(STEPS, 0), (STEPS, 5), (SCHEDULE, 5), ({"seed": (0, 1)}, 40)]
)
def test_a_learning_rate_that_goes_on_is_not_mentioned(changes, step):
    assert learning_rate_jump(load_config(WORDS), changes, step) is None
