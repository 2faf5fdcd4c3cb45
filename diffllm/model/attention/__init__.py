"""The attention variants: one file each, found by importing every module of this folder."""

import importlib
import pkgutil


def discover() -> None:
    """Import every module of this folder, so that each variant registers its config."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
