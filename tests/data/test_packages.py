"""`data=packages`: equal text on every machine, and a note for a text that differs."""

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_texts import opened

from diffllm.core.errors import DataError
from diffllm.data.config import DataConfig
from diffllm.data.text import packages
from diffllm.data.text.file_index import file_facts
from diffllm.data.text.packages import REFERENCE_PACKAGES, REFERENCE_SHA256

MakeConfig = Callable[..., DataConfig]
FILES = {
    "aaa/__init__.py": "# wheels for Windows change this file\n",
    "aaa/core.py": "def core(): pass\n",
    "aaa/version.py": "version = '1'\n",
    "aaa/old/module.py": "built = 'for one Python version'\n",
    "aaa/sub/blank.py": "\n",
    "aaa/sub/z.py": "z = 1\n",
    "bbb/__init__.py": "",
    "bbb/__config__.py": "compiler = 'gcc'\n",
    "bbb/copy.py": "def core(): pass\n",
    "bbb/own.py": "own = 2\n",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_config: MakeConfig) -> Path:
    """Install two small packages and make their text the reference; return their directory."""
    root = tmp_path / "site"
    for name, content in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.setattr(packages, "ONLY_SOME_BUILDS", ("aaa/old/",))
    reference = {}
    for name, version in (("aaa", "1"), ("bbb", "2")):
        facts = file_facts(packages.package_files(name), tmp_path / "cache")
        reference[name] = (version, packages.texts_hash(facts))
    monkeypatch.setattr(packages, "REFERENCE_PACKAGES", reference)
    identity = opened(make_config(source="packages")).identity
    monkeypatch.setattr(packages, "REFERENCE_SHA256", identity)
    return root


def test_corpus_of_installed_packages_has_the_reference_hash(make_config):
    corpus = opened(make_config(source="packages"))
    assert (corpus.identity, corpus.note) == (REFERENCE_SHA256, "")
    assert 90e6 < sum(part.size for part in corpus.parts) < 140e6


def test_reference_package_versions_match_constraints_file():
    pinned = (
        (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    )
    assert {f"{name}=={version}" for name, (version, _) in REFERENCE_PACKAGES.items()} <= {*pinned}


def test_packages_corpus_omits_generated_duplicate_and_empty_files(installed, make_config):
    corpus = opened(make_config(source="packages"))
    assert [*corpus.texts()] == ["def core(): pass\n", "z = 1\n", "own = 2\n"]
    assert (corpus.note, corpus.skipped_empty) == ("", 1)


@pytest.mark.parametrize("name", ["aaa/__init__.py", "aaa/version.py", "bbb/__config__.py"])
def test_generated_file_does_not_change_the_packages_corpus(name, installed, make_config):
    (installed / name).write_text("built = 'elsewhere'\n", encoding="utf-8")
    assert opened(make_config(source="packages")).note == ""


def test_packages_corpus_notes_missing_and_changed_packages(installed, make_config, monkeypatch):
    (installed / "bbb/own.py").write_text("own = 3\n", encoding="utf-8")
    (installed / "bbb-2.dist-info").mkdir()
    (installed / "bbb-2.dist-info/METADATA").write_text("Name: bbb\nVersion: 2\n", encoding="utf-8")
    cfg = make_config(source="packages")
    edited = "not the reference corpus: bbb 2 with other files (reference 2)"
    assert opened(cfg).note == edited
    shutil.rmtree(installed / "aaa")
    importlib.invalidate_caches()
    assert opened(cfg).note == (
        "not the reference corpus: aaa missing (reference 1), bbb 2 with other files (reference 2)"
    )
    shutil.rmtree(installed / "bbb")
    importlib.invalidate_caches()
    with pytest.raises(DataError, match="none of aaa, bbb is installed;"):
        opened(cfg)
