"""Forged files of a run cannot run code or read secrets, in any reader."""

import contextlib
import io
import json
import os
import pickle
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs.json_files import read_json
from runs.one_rank import SMALL, gloo_group, resume, sign
from tiers import slow_but
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    MetadataIndex,
)

import diffllm
from diffllm import load_config
from diffllm.checkpoint.manifest import file_records, verify
from diffllm.checkpoint.reader import RecordUnpickler, load_tensors
from diffllm.cli import main
from diffllm.core.errors import CheckpointError, UserError
from diffllm.training.build import build
from diffllm.training.run_directory import RunDirectory
from diffllm.training.state import resume_checkpoint

ROOT = Path(diffllm.__file__).parent
CONFIG = [*SMALL, "attention=standard"]
SECRET = "hunter2-is-the-secret"


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """Return a copy of a run, which tests may forge; set a secret in the environment."""
    monkeypatch.setenv("SECRET", SECRET)
    return shutil.copytree(trained, tmp_path / "run")


class Evil:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def checkpoint_of(run: Path) -> Path:
    return run / "checkpoints" / "step-00000003"


def index_of(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


# Forged checkpoints; tests sign them, so that manifest and files agree


def pickle_as_index(path: Path, marker: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Evil(marker)))


def pickle_inside_the_index(path: Path, marker: Path) -> None:
    index = index_of(path)
    index.planner_data = {"a": Evil(marker)}
    (path / ".metadata").write_bytes(pickle.dumps(index))


def bytes_entry(path: Path, marker: Path) -> None:
    """Store a pickle as a bytes entry, under the name of a tensor that every reader loads."""
    index, name = index_of(path), "model.norm.weight"
    place = {key.fqn: place for key, place in index.storage_data.items()}[name]
    index.storage_data = {k: v for k, v in index.storage_data.items() if k.fqn != name}
    index.storage_data[MetadataIndex(name)] = place
    index.state_dict_metadata[name] = BytesStorageMetadata()
    append(path, place, marker)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def bytes_in_place_of_a_tensor(path: Path, marker: Path) -> None:
    index = index_of(path)
    append(
        path, next(v for k, v in index.storage_data.items() if k.fqn == "model.norm.weight"), marker
    )
    (path / ".metadata").write_bytes(pickle.dumps(index))


def append(path: Path, place: Any, marker: Path) -> None:
    """Append a pickle that runs code to the tensor file; make `place` point to the pickle."""
    file = path / "__0_0.distcp"
    place.offset = file.stat().st_size
    with open(file, "ab") as stream:
        torch.save(Evil(marker), stream)
    place.length = file.stat().st_size - place.offset


def path_out(target: str) -> Callable[[Path, Path], None]:
    def forge(path: Path, marker: Path) -> None:
        shutil.copy(path / "__0_0.distcp", path.parents[2] / "outside.distcp")
        index = index_of(path)
        for place in index.storage_data.values():
            place.relative_path = target.format(outside=path.parents[2])
        (path / ".metadata").write_bytes(pickle.dumps(index))

    return forge


def transformed(path: Path, marker: Path) -> None:
    index = index_of(path)
    for place in index.storage_data.values():
        place.transform_descriptors = ["stream.zstd"]
    (path / ".metadata").write_bytes(pickle.dumps(index))


FORGERIES: dict[str, Callable[[Path, Path], None]] = {
    "a pickle as index": pickle_as_index,
    "a pickle inside the index": pickle_inside_the_index,
    "a bytes entry": bytes_entry,
    "bytes in place of a tensor": bytes_in_place_of_a_tensor,
    "a relative path out": path_out("../../../outside.distcp"),
    "an absolute path": path_out("{outside}/outside.distcp"),
    "a transformation": transformed,
}


class Got:
    """An object whose pickle calls getattr, like enum members in Python 3.11.0 to 3.11.3."""

    def __init__(self, kind: Any, name: str):
        self.words = kind, name

    def __reduce__(self) -> Any:
        return getattr, self.words


def test_unpickler_of_checkpoint_index_permits_getattr_only_for_enum_members():
    def read(kind: Any, name: str) -> Any:
        return RecordUnpickler(io.BytesIO(pickle.dumps(Got(kind, name)))).load()

    for member in _MEM_FORMAT_ENCODING:
        assert read(_MEM_FORMAT_ENCODING, member.name) is member
    for kind, name in ((torch.Size, "numel"), (_MEM_FORMAT_ENCODING, "__class__"), ("a", "upper")):
        with pytest.raises(pickle.UnpicklingError, match=r"uses builtins\.getattr"):
            read(kind, name)


def resumed(run: Path) -> None:
    with gloo_group():
        path = resume_checkpoint(load_config([*CONFIG, f"resume={run}"]), [])
        assert path
        t = build(load_config(CONFIG), torch.device("cpu"))
        resume(t, path)


def refused(run: Path, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the error line of each reader of tensors; assert that all readers fail."""
    capfd.readouterr()
    with pytest.raises(CheckpointError) as caught:
        resumed(run)
    said = [str(caught.value)]
    for words in (
        ["generate", f"run={run}", "prompt=a"],
        ["consolidate", f"run={run}", f"out={run.parent / 'out'}"],
    ):
        capfd.readouterr()
        assert main(words) == 2, words
        error = capfd.readouterr().err
        assert error.startswith("error: ")
        said.append(error.rstrip("\n"))
    assert all("\n" not in line for line in said)
    assert not (run.parent / "out" / "model.safetensors").exists()
    return said


def listed_and_reported(run: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Run the commands that need no tensors, which may succeed; return their output."""
    capfd.readouterr()
    assert main(["checkpoints", f"run={run}"]) in (0, 1)
    assert main(["report", str(run), f"out={run.parent / 'report'}"]) in (0, 2)
    said = capfd.readouterr()
    return said.out + said.err


@pytest.mark.parametrize("name", slow_but(["a pickle as index", "a relative path out"], FORGERIES))
def test_forged_checkpoint_is_refused_by_every_command(run, tmp_path, name, capfd):
    path, marker = checkpoint_of(run), tmp_path / "marker"
    FORGERIES[name](path, marker)
    sign(path)
    assert verify(path) == []
    refused(run, capfd)
    listed_and_reported(run, capfd)
    assert not marker.exists()


@pytest.mark.parametrize("forge", [pickle_as_index, pickle_inside_the_index, bytes_entry])
def test_torch_load_function_executes_code_in_forged_checkpoint(run, tmp_path, forge):
    path, marker = checkpoint_of(run), tmp_path / "marker"
    forge(path, marker)
    with warnings.catch_warnings(), contextlib.suppress(Exception, CheckpointException):
        warnings.simplefilter("ignore")
        dcp.load({"model.norm.weight": torch.zeros(32)}, checkpoint_id=path, no_dist=True)
    assert marker.exists()


def test_checkpoint_index_with_wrong_checksum_is_not_unpickled(run, tmp_path, capfd, monkeypatch):
    """The forged index is not signed, so even the restricted unpickler must not open the index."""
    opened: list[object] = []
    monkeypatch.setattr("diffllm.checkpoint.reader.RecordUnpickler", opened.append)
    pickle_as_index(checkpoint_of(run), tmp_path / "marker")
    assert all(".metadata has" in line for line in refused(run, capfd))
    with pytest.raises(CheckpointError, match=r"\.metadata has"):
        load_tensors(checkpoint_of(run), {"model.norm.weight": torch.zeros(32)}, no_dist=True)
    assert opened == []
    assert not (tmp_path / "marker").exists()


def also(run: Path, name: str) -> str:
    """Return the manifest with an additional file `name`, whose record fits a file outside."""
    outside = run.parent / "outside"
    outside.write_text("not of the checkpoint", encoding="utf-8")
    manifest = read_json(checkpoint_of(run) / "manifest.json")
    files = {**manifest["files"], name: vars(file_records([outside])["outside"])}
    return json.dumps({**manifest, "files": files})


OUT = ("../../../outside", "{parent}/outside", "./state.json", "..", ".", "", "a\0b", "\x1b[31m\n/")


@pytest.mark.parametrize("name", slow_but(OUT[:2], OUT))
def test_manifest_with_path_outside_of_checkpoint_is_refused(run, name, capfd):
    file = checkpoint_of(run) / "manifest.json"
    file.write_text(also(run, name.format(parent=run.parent)), encoding="utf-8")
    said = refused(run, capfd)
    assert all("which cannot be a file of a checkpoint" in line for line in said), said
    assert all(line.isprintable() for line in said), said
    assert "damaged" in listed_and_reported(run, capfd)


CONFIGS = {
    "a call": "!!python/object/apply:os.mkdir [{marker}]\n",
    "a new object": "seed: !!python/object/new:os.mkdir [{marker}]\n{rest}",
    "a name": "seed: !!python/name:os.mkdir\n{rest}",
    "_target_": "{rest}_target_: os.mkdir\n_args_: [{marker}]\n",
    "_target_ inside": "{model}  _target_: os.mkdir\n  _args_: [{marker}]\n{after}",
    "a secret": "{named}  name: ${{oc.env:SECRET}}\n{unnamed}",
    "a created node": "{named}  name: ${{oc.create:{{a: 1}}}}\n{unnamed}",
    "depth": "a: " + "[" * 3000 + "]" * 3000 + "\n",
}


@pytest.mark.parametrize("name", slow_but(["a call", "a created node"], CONFIGS))
def test_forged_run_config_is_refused_by_every_command(run, tmp_path, name, capfd):
    file, marker = run / "config.yaml", tmp_path / "marker"
    rest = file.read_text(encoding="utf-8")
    before, _, after = rest.partition("model:\n")
    named, _, unnamed = rest.partition("run:\n")
    unnamed = "\n".join(line for line in unnamed.split("\n") if not line.startswith("  name:"))
    file.write_text(
        CONFIGS[name].format(
            marker=marker,
            rest=rest,
            model=f"{before}model:\n",
            after=after,
            named=f"{named}run:\n",
            unnamed=unnamed,
        ),
        encoding="utf-8",
    )
    capfd.readouterr()
    with pytest.raises(CheckpointError, match=r"config\.yaml (is not|is nested|has) ") as caught:
        RunDirectory(run, load_config(CONFIG)).check()
    said = str(caught.value)
    for words in (
        ["generate", f"run={run}", "prompt=a"],
        ["consolidate", f"run={run}", f"out={tmp_path / 'out'}"],
        ["attention-map", f"run={run}", "prompt=a"],
        ["outliers", f"run={run}", "tokens=1"],
    ):
        assert main(words) == 2, words
    said += listed_and_reported(run, capfd)
    assert "Traceback" not in said
    assert SECRET not in said
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    reports = [
        f.read_text(encoding="utf-8") for f in (tmp_path / "report").glob("*") if f.is_file()
    ]
    assert not any(SECRET in text for text in reports)


# Plugins named in a run directory must not be imported


@pytest.fixture
def evil(tmp_path, monkeypatch):
    """Install a plugin that creates a directory when imported; return the directory's path."""
    site, marker = tmp_path / "site", tmp_path / "imported"
    facts = site / "evil_plugin-1.0.dist-info"
    facts.mkdir(parents=True)
    (site / "evil_plugin.py").write_text(
        f"import os\nos.mkdir({str(marker)!r})\n", encoding="utf-8"
    )
    (facts / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: evil-plugin\nVersion: 1.0\n", encoding="utf-8"
    )
    (facts / "entry_points.txt").write_text(
        "[diffllm.plugins]\nstandard = evil_plugin\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(str(site))
    yield marker
    sys.modules.pop("evil_plugin", None)


NAMED = {
    "plugins alone": [],
    "a variant": [("    attention: standard\n", "    attention: evil_plugin\n")],
    "a source": [("  source: stdlib\n", "  source: evil_plugin\n")],
    "an entry point": [
        ("plugins:\n- evil_plugin\n", "plugins:\n- standard\n"),
        ("    attention: standard\n", "    attention: evil_plugin\n"),
    ],
}


@pytest.mark.parametrize("name", slow_but(["plugins alone", "a variant"], NAMED))
def test_commands_do_not_import_plugins_named_in_run_config(run, evil, name, capfd):
    file = run / "config.yaml"
    text = file.read_text(encoding="utf-8")
    for old, new in [("plugins: []\n", "plugins:\n- evil_plugin\n"), *NAMED[name]]:
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text, encoding="utf-8")
    out = f"out={run.parent / 'out'}"
    for words in (
        ["generate", f"run={run}", "prompt=a", "max_new_tokens=1"],
        ["consolidate", f"run={run}", out],
        ["attention-map", f"run={run}", "prompt=a"],
        ["report", str(run), out],
        ["checkpoints", f"run={run}"],
    ):
        capfd.readouterr()
        code, said = main(words), capfd.readouterr().err
        if not NAMED[name] or words[0] == "checkpoints":
            assert "if you trust" not in said, words
            continue
        assert code == 2, words
        assert "if you trust the code of the plugin, add plugins=[" in said
        assert said.count("\n") == 1
    with contextlib.suppress(UserError):
        resumed(run)
    with contextlib.suppress(UserError):
        RunDirectory(run, load_config(CONFIG)).check()
    assert not evil.exists()


def test_plugin_named_in_command_line_argument_is_imported(run, evil):
    """Control: the plugin of the previous test can be imported."""
    assert main(["generate", f"run={run}", "prompt=a", "plugins=[evil_plugin]"]) in (0, 2)
    assert evil.exists()


UNSAFE = re.compile(
    r"pickle\.(loads?|Unpickler)\b|(?<![.\w])(eval|exec)\(|yaml\.(unsafe_|full_)?load\("
    r"|\binstantiate\b|hydra\.utils\.call|register_new_resolver|(joblib|shelve|marshal)\.\w"
    r"|from (pickle|marshal) import|from (torch|yaml) import .*\bload\b"
    r"|torch\.load\((?!.*weights_only=True)"
    r"|(trust_remote_code|allow_pickle)=(?!False)"
)
"""Calls that could run code from data."""
GUARDED = [
    ("checkpoint/reader.py", "pickle.Unpickler"),  # Restricted to metadata of tensors.
    ("cli/convert.py", "trust_remote_code="),  # A help text.
    ("config/compose.py", "register_new_resolver"),  # Arithmetic; not used for saved configs.
    ("config/compose.py", "register_new_resolver"),
    ("interop/export.py", "trust_remote_code="),  # The README of an export.
    ("interop/export.py", "trust_remote_code="),
]


def test_unsafe_loaders_are_called_only_in_allowlisted_files():
    found = [
        (str(path.relative_to(ROOT)), match.group())
        for path in sorted(ROOT.rglob("*.py"))
        for match in UNSAFE.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == GUARDED
    for line in ("loads = pickle.loads", "from torch import load", "torch.load(f)", "eval(x)"):
        assert UNSAFE.search(line)
    assert not UNSAFE.search("torch.load(f, weights_only=True); model.eval()")
