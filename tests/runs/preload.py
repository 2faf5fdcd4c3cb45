"""Imports shared by forked processes, and set-up that otherwise happens at first use."""

import gc

import hydra.main  # noqa: F401
import jinja2  # noqa: F401
import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import parsed_yaml  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

from diffllm.config import load_config

load_config(["model=tiny"])  # the first call searches for Hydra's plugins and builds its parser
gc.freeze()
