"""Conditions of a start that need no run."""

from dataclasses import dataclass

import pytest

from diffllm import load_config
from diffllm.core.errors import ConfigError
from diffllm.model.attention.diff_v2 import DiffV2Config
from diffllm.training.checks import check_named

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
