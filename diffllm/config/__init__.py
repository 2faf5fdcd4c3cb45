"""The config of a run: composed, typed, checked, saved and compared."""

from diffllm.config.loading import load_config
from diffllm.config.schema import Precision, RunConfig, TrainConfig

__all__ = ["Precision", "RunConfig", "TrainConfig", "load_config"]
