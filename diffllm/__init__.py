"""Pretrain decoders that differ only in the attention variant, and compare the training runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from diffllm.core import VERSION

if TYPE_CHECKING:
    from diffllm.cli.run import train
    from diffllm.config import load_config
    from diffllm.evaluation.load import load_model
    from diffllm.model import build_model

__version__ = VERSION
__all__ = ["build_model", "load_config", "load_model", "train"]

_HOMES = {
    "build_model": "diffllm.model",
    "load_config": "diffllm.config",
    "load_model": "diffllm.evaluation.load",
    "train": "diffllm.cli.run",
}


def __getattr__(name: str) -> Any:
    """Import a public function on first use, because imports of torch and Hydra are slow."""
    if name not in _HOMES:
        raise AttributeError(f"module 'diffllm' has no attribute {name!r}")
    from diffllm.distributed.launcher import set_variables

    set_variables()  # torch reads these environment variables when it is imported
    return getattr(import_module(_HOMES[name]), name)
