"""Config of a run: composition, validation, storage and comparison."""

from diffllm.config.loading import load_config
from diffllm.config.run_config import RunConfig
from diffllm.config.schema import Precision, TrainConfig

__all__ = ["Precision", "RunConfig", "TrainConfig", "load_config"]
