"""Imports that forked processes share, and the set-up that the first use of some of them does."""

import gc

import hydra.main  # noqa: F401
import jinja2  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import parsed_yaml  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

from diffllm.config import load_config

load_config(["model=tiny"])  # Hydra looks for its plugins, and its parser learns the grammar
gc.freeze()
