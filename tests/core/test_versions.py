"""Every version of torch runs the same code: what differs is asked for in one module."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import diffllm
from diffllm.core import torch_versions
from diffllm.model.init import Initializer

ROOT = Path(diffllm.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ONE_PLACE = Path(torch_versions.__file__)


def torch_names(tree: ast.AST) -> dict[str, str]:
    """The full names of all that a source imports from torch, by the names it gives them."""
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
    """The full name of an expression such as `dist.ProcessGroup`; None if it is none of torch's."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        inside = full_name(node.value, names)
        return f"{inside}.{node.attr}" if inside else None
    return None


def parents(tree: ast.AST) -> dict[ast.AST, ast.AST]:
    return {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}


def questions(source: str) -> Iterator[str]:
    """The expressions in a source by which it finds out which torch it runs on.

    These are versions that are more than shown, `inspect.signature`, `hasattr` and `getattr` of
    something of torch's, and imports of torch that may fail.
    """
    tree = ast.parse(source)
    names, above = torch_names(tree), parents(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and full_name(node, names) in (
            "torch.__version__",
            "torch.version",
            "torch.torch_version",
        ):
            if not is_shown(above[node]):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and node.args:
            asks = ast.unparse(node.func).rpartition(".")[2] in ASKING
            if asks and full_name(node.args[0], names):
                yield ast.unparse(node)
        elif isinstance(node, ast.Try) and any(map(is_import_error, node.handlers)):
            inside = ast.Module(body=node.body, type_ignores=[])
            yield from torch_names(inside).values()


ASKING = ("hasattr", "getattr", "signature", "getfullargspec")


def is_shown(parent: ast.AST) -> bool:
    """Whether a value goes as it is into a report or a message, or gets a name there."""
    return isinstance(parent, (ast.Dict, ast.FormattedValue, ast.Assign))


def is_import_error(handler: ast.ExceptHandler) -> bool:
    """Whether it catches what a name that torch lacks raises, `except Exception` aside."""
    caught = ast.unparse(handler.type) if handler.type else "ImportError"
    return any(name in caught for name in ("ImportError", "ModuleNotFoundError", "AttributeError"))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\nif torch.__version__ >= '2.12': pass", ["torch.__version__"]),
        ("import torch\nfacts = {'torch': torch.__version__}", []),
        ("import torch\ncuda = torch.version.cuda > '13'", ["torch.version"]),
        ("from torch.a import f\nimport inspect\ninspect.signature(f)", ["inspect.signature(f)"]),
        ("import torch\nhasattr(layer, 'x')\ngetattr(torch, name)()", ["getattr(torch, name)"]),
        ("try:\n  from torch.a import b\nexcept ImportError:\n  b = None", ["torch.a.b"]),
        ("try:\n  import flash_attn\nexcept ImportError:\n  pass", []),
    ],
)
def test_the_reader_of_questions_sees_every_form(source, found):
    assert list(questions(source)) == found


def test_which_torch_it_is_is_asked_in_one_module():
    assert len(FILES) > 50
    for path in FILES:
        found = list(questions(path.read_text()))
        assert bool(found) == (path == ONE_PLACE), f"{path} asks {found}"


def uses(source: str) -> Iterator[str]:
    """Every full name of torch's that a source imports or reads, in functions too."""
    tree = ast.parse(source)
    names = torch_names(tree)
    yield from names.values()
    yield from filter(None, (full_name(node, names) for node in ast.walk(tree)))


def resolve(name: str) -> Any:
    """The module or object of a full name; raises AttributeError if torch lacks it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        outer, _, inner = name.rpartition(".")
        return getattr(resolve(outer), inner)


def test_every_name_of_torchs_is_there_private_ones_too():
    """Also those that only a GPU or a rare failure would come to."""
    names = {name for path in FILES for name in uses(path.read_text())}
    assert "torch.nn.attention._fa4.register_flash_attention_fa4" in names, "imported in a function"
    for name in names:
        resolve(name)
    with pytest.raises(AttributeError):
        resolve("torch._gone.f")


def test_initial_values_are_the_same_with_every_torch():
    """With so tight a bound a third of the values is drawn again."""
    param = torch.empty(300, 7)
    Initializer(0, {param: "w"}).normal_(param, 0.02, truncate=1.0)
    first = torch.tensor([-0.0146635156, -0.0071417526, -0.0184584111, -0.0116849821])
    torch.testing.assert_close(param.flatten()[:4], first, rtol=1e-6, atol=0)
    assert param.abs().max() <= 0.02
    assert param.double().sum().item() == pytest.approx(0.60381997, rel=1e-6)
