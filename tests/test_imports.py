"""Allowed imports between packages, and cheap import of the top-level package."""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs.command import command, success_of

import diffllm

ROOT = Path(diffllm.__file__).parent
FLOORS = (
    ("core",),
    ("statistics",),
    ("data", "model", "optim"),
    ("distributed", "metrics"),
    ("checkpoint",),
    ("config",),
    ("evaluation",),
    ("training",),
    ("compare", "interop", "plan"),
    ("cli",),
)
"""Floors of packages, lowest first; a package imports only from lower floors."""
DIAGRAM = ROOT.parent / "docs" / "architecture.md"
STANDALONE = ("data", "optim", "checkpoint", "metrics", "core")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(*parts: str) -> list[Path]:
    """Return the files of a package or module below diffllm/."""
    path = ROOT.joinpath(*parts)
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


def imported(source: str, package: str) -> Iterator[str]:
    """Yield all diffllm names that a source imports, also in functions and under TYPE_CHECKING.

    `from a import b` yields a.b, because the source does not show whether b is a module.
    """
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") in ("import_module", "__import__")
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            names = [str(node.args[0].value)]
        yield from (name for name in names if name.split(".")[0] == "diffllm")


def imports_of(path: Path) -> list[str]:
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(imported(path.read_text(encoding="utf-8"), package))


def below(name: str, *allowed: str) -> bool:
    return any(name == a or name.startswith(f"{a}.") for a in allowed)


def test_import_scanner_finds_all_forms_of_imports():
    source = """
import diffllm.data
import os, diffllm.metrics.spikes as s
from diffllm.model import x as y
from . import sibling
from ..distributed import mesh
from .attention.base import Attention
def f():
    from diffllm.training.loop import build
    importlib.import_module("diffllm.metrics.sinks")
"""
    assert sorted(imported(source, "diffllm.model")) == [
        "diffllm.data",
        "diffllm.distributed.mesh",
        "diffllm.metrics.sinks",
        "diffllm.metrics.spikes",
        "diffllm.model.attention.base.Attention",
        "diffllm.model.sibling",
        "diffllm.model.x",
        "diffllm.training.loop.build",
    ]


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("model", ("diffllm.model", "diffllm.core")),
        ("core", ("diffllm.core",)),
        ("statistics", ("diffllm.statistics",)),
    ],
)
def test_package_imports_only_allowed_packages(package, allowed):
    files = modules(package)
    assert len(files) > 5
    for path in files:
        for name in imports_of(path):
            assert below(name, *allowed), f"{path} imports {name}"


def test_distributed_package_does_not_import_attention_classes():
    files = modules("distributed")
    assert len(files) > 3
    for path in files:
        for name in imports_of(path):
            assert not below(name, "diffllm.model.attention"), f"{path} imports {name}"
            assert not name.endswith("Attention"), f"{path} imports {name}"


@pytest.mark.parametrize("part", STANDALONE)
def test_standalone_packages_do_not_import_model_or_training_package(part):
    files = [path for path in modules(part) if path.parent.name != "hf"]  # layouts of models
    assert files
    assert all(path.is_file() for path in files)
    for path in files:
        for name in imports_of(path):
            assert not below(name, "diffllm.model", "diffllm.training"), f"{path} imports {name}"
            assert not below(name, "diffllm.build_model"), f"{path} imports {name}"


def rooms() -> dict[str, set[str]]:
    """Map each top-level module or package of diffllm/ to the other imported packages."""
    doors = (ROOT / "__init__.py", ROOT / "__main__.py")
    files = [path for path in ROOT.rglob("*.py") if path not in doors]
    names = {module_name(path).split(".")[1] for path in files}
    found: dict[str, set[str]] = {name: set() for name in names}
    for path in files:
        own = module_name(path).split(".")[1]
        for name in imports_of(path):
            other = name.split(".")[1] if "." in name else own
            if other in names and other != own:  # otherwise a name in diffllm/__init__.py
                found[own].add(other)
    return found


def test_packages_import_only_packages_of_lower_layers():
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    imports = rooms()
    assert set(imports) == set(floor), "FLOORS must list every package, and no other"
    for name, others in imports.items():
        for other in others:
            assert floor[other] < floor[name], f"{name} imports {other}, not on a lower floor"


TRAINING = (
    ("build", "clock", "memory", "profiling", "provenance", "run_directory", "starting_point"),
    ("state", "step", "wandb_description", "wandb_id"),
    ("record", "stalls"),
    ("process",),
    ("measure",),
    ("checks", "loop"),
    ("claim", "summary"),
    ("initial_values", "outputs", "preparation", "start"),
    ("run",),
)
"""Layers of modules in `training`; a module imports only from earlier layers."""


def test_training_package_imports_only_heldout_module_of_evaluation_package():
    files = modules("training")
    assert len(files) > 10
    for path in files:
        for name in imports_of(path):
            assert name.count(".") > 1, f"{path} imports {name}; import from its module instead"
            other = ("evaluation", "compare", "plan", "interop", "cli")
            allowed = below(name, "diffllm.evaluation.heldout")
            assert allowed or not below(name, *(f"diffllm.{each}" for each in other)), (path, name)


def test_training_modules_import_only_training_modules_of_lower_layers():
    floor = {name: number for number, names in enumerate(TRAINING) for name in names}
    assert set(floor) == {path.stem for path in modules("training")} - {"__init__"}
    for path in modules("training"):
        for name in imports_of(path):
            if below(name, "diffllm.training"):
                other = name.split(".")[2]
                assert floor[other] < floor[path.stem], f"{path} imports {other}"


def test_package_has_at_most_16_top_level_modules():
    assert len(list(ROOT.glob("*.py"))) <= 16


def reachable(imports: dict[str, set[str]], name: str) -> set[str]:
    below_it = imports[name]
    return below_it.union(*(reachable(imports, other) for other in below_it))


def test_architecture_diagram_matches_package_imports():
    """The diagram has one arrow per import, except imports that follow from other arrows."""
    imports = rooms()
    expected = {
        (name, other)
        for name, others in imports.items()
        for other in others
        if not any(other in reachable(imports, between) for between in others)
    }
    drawn = re.findall(r"^ +(\w+) --> (\w+)$", DIAGRAM.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(drawn) == sorted(expected)


def imported_packages(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules))"
    done = success_of(command([sys.executable, "-c", script], ROOT.parent, os.environ))
    return {name.partition(".")[0] for name in done.out.split()}


def test_import_of_diffllm_loads_neither_torch_nor_hydra():
    names = "{'load_config', 'build_model', 'load_model', 'train'}"
    code = f"import diffllm\nassert {names} <= set(diffllm.__all__)"
    heavy = {"torch", "hydra", "omegaconf", "numpy", "wandb", "datasets", "sentencepiece", "rich"}
    assert not heavy & imported_packages(code)


def test_help_of_console_script_loads_neither_torch_nor_hydra():
    code = "from diffllm.cli import main\nassert main(['--help']) == 0"
    assert not {"torch", "hydra"} & imported_packages(code)


def test_head_of_plan_loads_no_compiler_of_torch():
    code = "from diffllm.cli.plan_text import Cluster, head_text, plan\n"
    code += "print(head_text(plan(Cluster(), set(), ['model=tiny'])))"
    assert "sympy" not in imported_packages(code)


def test_unknown_attribute_of_diffllm_raises_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = diffllm.nonsense
