"""Fast reader for configs of many runs that differ only in a few values, such as the seed."""

import re
from dataclasses import replace
from pathlib import Path

from diffllm.config.saved import load_run_config
from diffllm.config.schema import TrainConfig
from diffllm.config.yaml_file import LARGEST_YAML
from diffllm.core.files import read_text, readable
from diffllm.core.run_files import RunFile

WHOLE_NUMBER = re.compile(r"0|[1-9]\d{0,17}")
FLOAT = re.compile(r"\d+\.\d+(e[+-]\d{2})?")
PATH = re.compile(r"[\w.+-]*/[\w./+-]*")
"""Patterns of plain values that YAML reads as an integer, a float or a string."""
READ = {
    "seed": WHOLE_NUMBER,
    "model.init_seed": WHOLE_NUMBER,
    "optim.lr": FLOAT,
    "run.dir": PATH,
    "run.study": PATH,
}
"""Keys of config.yaml that may differ between similar runs."""


class SimilarConfigs:
    """Reader for the configs of many runs.

    The files of similar runs differ only in the values of the keys in READ, such as the seed. Only
    one of these files is parsed in full.
    """

    def __init__(self) -> None:
        self.configs: dict[str, TrainConfig] = {}
        """Parsed configs, by the first result of `split`."""

    def load(self, run: Path) -> TrainConfig:
        """Load the config of a run directory; the result equals that of `load_run_config`."""
        file = run / RunFile.CONFIG
        if not file.is_file():
            return load_run_config(run)
        with readable(file):
            common, values = split(read_text(file, 4 * LARGEST_YAML))
        if values is None:
            return load_run_config(run)
        if common not in self.configs:
            self.configs[common] = load_run_config(run)
        cfg = self.configs[common]
        return replace(
            cfg,
            seed=int(values["seed"]),
            model=replace(cfg.model, init_seed=int(values["model.init_seed"])),
            optim=replace(cfg.optim, lr=float(values["optim.lr"])),
            run=replace(cfg.run, dir=values["run.dir"], study=values["run.study"]),
        )


def split(text: str) -> tuple[str, dict[str, str] | None]:
    """Split a config.yaml into (text without the values of the keys in READ, {key: value}).

    The dict contains the removed values. If a key in READ is missing, or if its value is not a
    plain number or path, return None instead of the dict.
    """
    section = ""
    common_lines = []
    values: dict[str, str] = {}
    lines = text.splitlines()
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        name, _, value = line.partition(":")
        if line[:1] not in (" ", "-"):
            section = name
        key = name if line[:1] != " " else f"{section}.{name[2:]}"
        # A long value continues on lines that YAML indents by four spaces or more.
        is_complete = not next_line.startswith("    ")
        if key in READ and key not in values and is_complete:
            values[key] = value.strip()
            line = f"{name}:"
        common_lines.append(line)
    if values.keys() != READ.keys():
        return text, None
    if not all(READ[key].fullmatch(values[key]) for key in READ):
        return text, None
    # Only `load_run_config` checks values, so it must read an unusual one.
    is_usual = 1e-20 < float(values["optim.lr"]) < 1e20
    return "\n".join(common_lines), values if is_usual else None
