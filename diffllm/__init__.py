"""diffllm: pretraining decoders to see what an attention variant does, everything else equal."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffllm.config import load_config
    from diffllm.model import build_model

__version__ = "0.1.0"
__all__ = ["build_model", "load_config"]


def __getattr__(name: str) -> Any:
    """Import torch and Hydra only when one of the two entry points is used."""
    if name == "load_config":
        from diffllm.config import load_config

        return load_config
    if name == "build_model":
        from diffllm.model import build_model

        return build_model
    raise AttributeError(f"module 'diffllm' has no attribute {name!r}")
