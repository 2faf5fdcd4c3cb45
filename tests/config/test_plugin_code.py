"""Versions of plugins: the covered files, and comparisons of versions."""

import sys
from pathlib import Path

import pytest

from diffllm.config import load_config, plugin_code
from diffllm.config.plugins import imported, plugin_versions
from diffllm.config.saved import warn_of_plugins
from diffllm.core.errors import ConfigError
from diffllm.core.run_files import read_changes
from diffllm.training.run_directory import RunDirectory, ending

FILES = {
    "own.py": "import beside, json, diffllm.optim\nfrom pack import part\ndef f(): import lazily\n",
    "beside.py": "import deeper\n",
    "deeper.py": "",
    "lazily.py": "def broken(:\n",
    "pack/part.py": "from .inner import X\n",
    "pack/inner.py": "X = 1\n",
    "pack/unused.py": "",
    "unused.py": "",
    "whole/__init__.py": "import beside\n",
    "whole/unused.py": "",
    "json.py": "",
    "diffllm/optim.py": "",
}


@pytest.fixture
def plugin_directory(tmp_path, monkeypatch):
    """Create importable modules; unload the modules after the test."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    plugin_code.LOADED.clear()
    yield tmp_path
    forget(tmp_path)
    plugin_code.LOADED.clear()


def forget(directory: Path) -> None:
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        places = [spec.origin, *(spec.submodule_search_locations or [])] if spec else []
        if any(str(place).startswith(str(directory)) for place in places):
            del sys.modules[name]


def version(directory: Path, name: str) -> str:
    """Import a plugin like a new process, and return the version."""
    forget(directory)
    imported(name)
    return plugin_versions([name])[name]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["own", "whole", "pack.part"])
def test_plugin_version_changes_after_edit_of_an_imported_file(plugin_directory, name):
    found = {}
    for file in FILES:
        before = version(plugin_directory, name)
        (plugin_directory / file).write_text(f"{FILES[file]}# edited\n", encoding="utf-8")
        found[file] = version(plugin_directory, name) != before
    assert [file for file in FILES if found[file]] == {
        "own": [*list(FILES)[:6]],
        "whole": ["beside.py", "deeper.py", "whole/__init__.py", "whole/unused.py"],
        "pack.part": ["pack/part.py", "pack/inner.py"],
    }[name]


def test_installed_plugin_version_ignores_files_outside_the_package(plugin_directory):
    (plugin_directory / "whole-1.0.dist-info").mkdir()
    before = version(plugin_directory, "whole")
    (plugin_directory / "beside.py").write_text("x = 1\n", encoding="utf-8")
    assert version(plugin_directory, "whole") == before
    (plugin_directory / "whole" / "unused.py").write_text("x = 1\n", encoding="utf-8")
    assert version(plugin_directory, "whole") != before


def test_plugin_version_does_not_depend_on_path_or_other_plugins(plugin_directory, tmp_path):
    alone = version(plugin_directory, "own")
    forget(plugin_directory)
    imported("whole")  # the package imports the same module
    imported("own")
    assert plugin_versions(["own"]) == {"own": alone}
    elsewhere = plugin_directory.rename(tmp_path.with_name("elsewhere"))
    sys.path[-1] = str(elsewhere)
    assert version(plugin_directory, "own") == alone
    forget(elsewhere)


ODD = {
    "BaseException": ("raise BaseException('x')", "BaseException: x"),
    "an interrupt": ("raise KeyboardInterrupt", "cannot be imported: KeyboardInterrupt"),
    "an exit": ("raise SystemExit(0)", "SystemExit: 0"),
    "str() fails": (
        "class X(Exception):\n    def __str__(self): raise ValueError\nraise X",
        "odd.X: <exception str() failed>",
    ),
    "None for itself": ("import sys\nsys.modules[__name__] = None", "odd has no source file"),
}


@pytest.mark.parametrize("name", ODD)
def test_failed_plugin_import_raises_config_error(plugin_directory, name):
    source, said = ODD[name]
    (plugin_directory / "odd.py").write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        imported("odd")
    sys.modules.pop("odd", None)
    assert str(caught.value).startswith("plugins=[odd]")
    assert said in str(caught.value)


def test_module_without_source_file_is_refused_as_plugin():
    with pytest.raises(ConfigError, match=r"plugins=\[sys\]: module sys has no source file"):
        imported("sys")


# Runs


def plugin_run_directory(path: Path, *words: str) -> RunDirectory:
    directory = RunDirectory(path, load_config(["model=tiny", "run.name=a", *words]))
    directory.lock.release()
    return directory


@pytest.fixture
def run_with_edited_plugin(plugin_directory, tmp_path, source_tokenizer) -> Path:
    """Create a run with a plugin, then edit the plugin's code."""
    directory = plugin_run_directory(tmp_path / "run", "plugins=[own]")
    directory.begin(source_tokenizer)
    directory.describe({"plugin_code": plugin_versions(["own"])})
    (plugin_directory / "own.py").write_text("x = 1\n", encoding="utf-8")
    forget(plugin_directory)
    return directory.path


def test_run_resumes_after_plugin_edit_only_if_allowed(run_with_edited_plugin, source_tokenizer):
    with pytest.raises(
        ConfigError, match=r"was made with other plugin code \(plugins: own@\w+ in the run, o"
    ):
        plugin_run_directory(run_with_edited_plugin, "plugins=[own]").check()
    allowed = plugin_run_directory(
        run_with_edited_plugin, "plugins=[own]", "run.allow_changes=[plugins]"
    )
    allowed.check()
    allowed.begin(source_tokenizer, 3)
    (line,) = read_changes(run_with_edited_plugin)
    assert line["changes"].keys() == {"plugins"}


def test_run_cannot_resume_if_plugin_is_not_imported(run_with_edited_plugin):
    plugin_code.LOADED.clear()
    with pytest.raises(
        ConfigError, match=r"plugins: own@\w+ in the run, own@not imported in this command"
    ):
        plugin_run_directory(run_with_edited_plugin).check()


def test_run_without_recorded_plugins_resumes_with_any_plugin(run_with_edited_plugin):
    for facts in ("{}", '{"plugin_code": {}}'):
        (run_with_edited_plugin / "run.json").write_text(facts, encoding="utf-8")
        plugin_run_directory(run_with_edited_plugin, "plugins=[own]").check()


def test_diverged_run_can_resume_if_plugin_change_is_allowed(run_with_edited_plugin):
    directory = plugin_run_directory(
        run_with_edited_plugin, "plugins=[own]", "run.allow_changes=[plugins]"
    )
    directory.finish({"steps": 3, "stopped": "skipped"})
    assert ending(directory.path, directory.cfg) is None


def test_warning_about_changed_plugin_code_is_printed_only_once(run_with_edited_plugin, capsys):
    for _ in range(2):
        warn_of_plugins(run_with_edited_plugin)
    assert capsys.readouterr().err == "", "the plugin is not imported, so the run does not need it"
    warn_of_plugins.cache_clear()
    imported("own")
    for _ in range(2):
        warn_of_plugins(run_with_edited_plugin)
    assert capsys.readouterr().err.count("was trained with other plugin code (plugins: own@") == 1
