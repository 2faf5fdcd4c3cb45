"""Plugins: modules and directories of YAMLs from outside the package.

Only the modules in `plugins=[...]` on a command line or in Python overrides are imported. A run
directory or an installed package can never cause an import.
"""

import importlib
import importlib.util
import re
import sys
import traceback
from argparse import ArgumentError, ArgumentParser
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from diffllm.config.overrides import CONFIG_GROUPS, check_interpolations
from diffllm.config.plugin_code import LOADED, loaded_version, sources
from diffllm.config.words import check_texts
from diffllm.config.yaml_file import read_yaml
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.distributed.consistency import hash_sources

ENTRY_POINTS = "diffllm.plugins"
MODULE_NAME = re.compile(r"[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*")
PLUGINS_OVERRIDE = re.compile(r"\+{0,2}plugins=(.*)", re.S)

_DIRECTORIES: list[Path] = []


def config_directory() -> Path:
    """Return conf/, the directory of built-in YAML files, in the installed package or checkout."""
    packaged = Path(__file__).parents[1] / "conf"
    return packaged if packaged.is_dir() else packaged.parents[1] / "conf"


class BuiltInYaml(FileConfigSource):
    """Hydra config source for the files in conf/, to which users of a checkout add experiments."""

    @staticmethod
    def scheme() -> str:
        return "builtin"

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        content = OmegaConf.to_container(result.config)
        file = Path(self.path, self._normalize_file_name(config_path))
        section = section_of(config_path, result.header)
        check_texts(content, file, section)
        return result


class SharedYaml(FileConfigSource):
    """Hydra config source for the YAML files of plugins and of --config-dir.

    Reject YAML files that configure Hydra, and YAML files that interpolate environment variables.
    """

    @staticmethod
    def scheme() -> str:
        return "shared"

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        # The key `setup` of a Hydra launcher runs shell commands.
        if config_path.startswith("hydra/"):
            raise ConfigError(f"{file}: a file cannot set Hydra's own keys; delete the file")
        content, text = read_yaml(file)
        words = [f"{key}={value}" for key, value in content.items()]
        check_interpolations(words, f"{file}: ")
        header = self._get_header_dict(text[:512].decode(errors="ignore"))
        section = section_of(config_path, header)
        check_texts(content, file, section)
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(content), header)


def section_of(config_path: str, header: dict[str, str | None]) -> str:
    """Return the config section that a YAML file sets, such as "model.attention"; "" for all.

    Args:
        config_path: group and name of the file, such as "attention/diff_v2".
        header: the keys of the comments at the start of the file, such as "package".
    """
    group = config_path.rpartition("/")[0].replace("/", ".")
    package = header["package"] or "_group_"
    return package.replace("_group_", group).removeprefix("_global_").strip(".")


class SearchPath(SearchPathPlugin):
    """Hydra plugin that sets the sources of the built-in YAML files and of added directories."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for place in search_path.get_path():
            # A script that imports diffllm may have another Hydra config directory.
            if place.path == str(config_directory()):
                place.path = f"{BuiltInYaml.scheme()}://{place.path}"
        for directory in _DIRECTORIES:
            search_path.append("plugins", f"shared://{directory}")


for plugin in (BuiltInYaml, SharedYaml, SearchPath):
    Plugins.instance().register(plugin)


def directories() -> list[Path]:
    return list(_DIRECTORIES)


def plugins_in(words: list[str]) -> list[str]:
    """Return the names in the last override plugins=[...], or [] if no override sets plugins.

    Raises ConfigError if the value is not a list of valid module names.
    """
    names: list[str] = []
    for word in words:
        match = PLUGINS_OVERRIDE.fullmatch(word)
        if match is None:
            continue
        text = match[1].strip()
        items = text[1:-1]
        # Only the last override counts, so begin anew.
        names = []
        is_list = text[:1] == "[" and text[-1:] == "]"
        if is_list and items.strip():
            names = [name.strip().strip("'\"") for name in items.split(",")]
        if not is_list or not all(map(MODULE_NAME.fullmatch, names)):
            raise ConfigError(f"{match[0]!r} must be a list of modules, such as plugins=[mine]")
    return names


def load_plugins(words: list[str], named_directories: Iterable[Path] = ()) -> None:
    """Import the plugins in plugins=[...] and add directories to Hydra's search path.

    The added directories are `named_directories` and conf/ next to each plugin. Raises ConfigError
    if an import fails or if a directory in `named_directories` has no YAML file.
    """
    for directory in named_directories:
        if not yamls(directory):
            raise ConfigError(
                f"--config-dir {directory} has no YAML file in {'/, '.join(CONFIG_GROUPS)}/; "
                "choose a directory that contains one of these directories with a YAML file"
            )
        add_directory(directory)
    for name in plugins_in(words):
        spec = imported(name)
        if spec.origin:
            places = [Path(spec.origin).resolve().parent]
        else:
            # A namespace package has directories, but no file.
            places = [Path(place) for place in spec.submodule_search_locations or []]
        for place in places:
            conf = place / "conf"
            if conf.is_dir():
                add_directory(conf)


def imported(name: str) -> ModuleSpec:
    """Import a plugin, record the version of its code and return its module spec.

    Raises ConfigError if the import fails or if the plugin has no source files.
    """
    target = plugin_module(name)
    # A notebook may have written the file a moment ago.
    importlib.invalidate_caches()
    try:
        importlib.import_module(target)
        spec = importlib.util.find_spec(target)
        namespace = spec and not spec.origin and spec.submodule_search_locations
        if spec is None or not (spec.has_location or namespace):
            raise ConfigError(
                f"module {target} has no source file, but runs record the source of plugins; "
                "choose a module with a .py file"
            )
        # The version is that of the imported code: a later edit of the file does not change it.
        # A plugin has a new spec after its first import and after a reload.
        if target not in LOADED or LOADED[target][0] is not spec:
            places = spec.submodule_search_locations or [str(spec.origin)]
            place = Path(next(iter(places)))
            base = place.parents[spec.name.count(".")]
            files = sources(spec.name, place, base)
            LOADED[target] = spec, hash_sources(base, files)
        return spec
    except ConfigError as error:
        raise ConfigError(f"plugins=[{name}]: {error}") from error
    except BaseException as error:
        # A plugin may raise anything, such as SystemExit. Ctrl-C is reported in the same way.
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (target == missing or target.startswith(f"{missing}.")):
            raise ConfigError(
                f"plugins=[{name}]: cannot find module {missing}; add its directory to PYTHONPATH"
            ) from None
        # A wrong argument of a function of diffllm is an error in a line of the plugin.
        skipped = ("importlib", str(Path(__file__).parents[1]))
        location = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if not any(part in frame.filename for part in skipped):
                location = f" ({frame.filename}, line {frame.lineno})"
        # Not str(error), which may raise.
        message = "".join(traceback.format_exception_only(error))
        text = " ".join(message.split())
        raise ConfigError(f"plugins=[{name}] cannot be imported: {text}{location}") from error


def plugin_module(name: str) -> str:
    """Return the module of the entry point `name`, or `name` if no entry point has this name.

    Raises ConfigError if entry points called `name` refer to several modules, or if there is also a
    module called `name` outside the package of the entry point.
    """
    modules = sorted({point.module for point in entry_points(group=ENTRY_POINTS, name=name)})
    packages = [module.partition(".")[0] for module in modules]
    # `find_spec` of a dotted name would import the parent package.
    if modules and "." not in name and name not in packages:
        is_module = name in sys.modules or importlib.util.find_spec(name) is not None
        if is_module:
            modules.append(name)
    if len(modules) > 1:
        raise ConfigError(f"plugins=[{name}] is ambiguous; choose {' or '.join(modules)}")
    return modules[0] if modules else name


def plugin_versions(names: list[str]) -> dict[str, str]:
    return {module: loaded_version(module) for module in map(plugin_module, names)}


def take_directories(words: list[str]) -> tuple[list[Path], list[str]]:
    """Return (absolute paths of all --config-dir DIR, all other words of a command line).

    Raises ConfigError for --config-dir without DIR.
    """
    missing = ConfigError("--config-dir needs a directory: --config-dir DIR")
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    try:
        options, others = parser.parse_known_args(words)
    except ArgumentError:
        raise missing from None
    if not all(options.config_dir):
        raise missing
    paths = [user_path(path, "--config-dir").resolve() for path in options.config_dir]
    return paths, others


def launch_words(plugins: str) -> list[str]:
    """Return the words that give a new process the same plugins and YAML directories.

    `plugins` is the value of plugins=[...], or "".
    """
    words = []
    for directory in directories():
        if yamls(directory):
            words += ["--config-dir", str(directory)]
    if plugins:
        words.append(f"plugins={plugins}")
    return words


def add_directory(directory: Path) -> None:
    """Add `directory` to Hydra's search path for YAML files.

    Raises ConfigError if the built-in conf/ or a directory added earlier contains a YAML file with
    the same relative path, such as attention/mine.yaml.
    """
    built_in = config_directory()
    if directory in (built_in.resolve(), *_DIRECTORIES):
        return
    for other in (built_in, *_DIRECTORIES):
        # Hydra would use the first of two files with one name, without a message.
        common = sorted(yamls(directory) & yamls(other))
        if common:
            file = common[0]
            raise ConfigError(
                f"{directory / file} has the same name as {other / file}; rename one file"
            )
    _DIRECTORIES.append(directory)


def yamls(directory: Path) -> set[Path]:
    """Return the YAML files in a directory as relative paths, such as attention/mine.yaml."""
    paths: set[Path] = set()
    for group in CONFIG_GROUPS:
        for path in directory.glob(f"{group}/*.yaml"):
            paths.add(path.relative_to(directory))
    return paths
