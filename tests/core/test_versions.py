"""The package works with the installed version of torch: names and initial values."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import diffllm
from diffllm.model.init import Initializer

ROOT = Path(diffllm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def torch_names(tree: ast.AST) -> dict[str, str]:
    """Map local names in a source to the full names of imports from torch."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if of_torch(alias.name):
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and of_torch(node.module or ""):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def of_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


def full_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return the full name of an expression such as `dist.ProcessGroup`; None outside torch."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        inside = full_name(node.value, names)
        return f"{inside}.{node.attr}" if inside else None
    return None


def uses(source: str) -> Iterator[str]:
    """Yield all full names of torch that a source imports or reads, also inside functions."""
    tree = ast.parse(source)
    names = torch_names(tree)
    yield from names.values()
    yield from filter(None, (full_name(node, names) for node in ast.walk(tree)))


def resolve(name: str) -> Any:
    """Return the module or object of a full name; raises AttributeError if torch has none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        outer, _, inner = name.rpartition(".")
        return getattr(resolve(outer), inner)


def test_installed_torch_version_contains_every_torch_name_in_source_code():
    """Include private names, and names needed only on GPUs or after rare failures."""
    names = {name for path in FILES for name in uses(path.read_text(encoding="utf-8"))}
    assert "torch.nn.attention._fa4.register_flash_attention_fa4" in names, "imported in a function"
    for name in names:
        resolve(name)
    with pytest.raises(AttributeError):
        resolve("torch._gone.f")


def test_initial_parameters_match_recorded_values():
    """Truncation at one standard deviation redraws a third of the values."""
    param = torch.empty(300, 7)
    Initializer(0, {param: "w"}).normal_(param, 0.02, truncate=1.0)
    first = torch.tensor([-0.0105505809, 0.0196981728, 0.0033966042, 0.0074329511])
    torch.testing.assert_close(param.flatten()[:4], first, rtol=1e-6, atol=0)
    assert param.abs().max() <= 0.02
    assert param.double().sum().item() == pytest.approx(0.24270444, rel=1e-6)
