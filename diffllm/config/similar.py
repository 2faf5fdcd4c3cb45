"""Fast reader for configs of many runs that differ only in a few values, such as the seed."""

import re
from dataclasses import replace
from pathlib import Path

from diffllm.config.saved import load_run_config
from diffllm.config.schema import TrainConfig
from diffllm.config.yaml_file import LARGEST_YAML
from diffllm.core.files import read_text, readable

WHOLE = re.compile(r"0|[1-9]\d{0,17}")
FLOAT = re.compile(r"\d+\.\d+(e[+-]\d{2})?")
PATH = re.compile(r"[\w.+-]*/[\w./+-]*")
"""Patterns of plain values that YAML reads as an integer, a float or a string."""
READ = {"seed": WHOLE, "model.init_seed": WHOLE, "optim.lr": FLOAT, "run.dir": PATH,
        "run.study": PATH}  # fmt: skip
"""Keys of config.yaml that may differ between similar runs."""


class SimilarConfigs:
    """Reader for the configs of many runs.

    The files of similar runs differ only in the values of the keys in READ, such as the seed. Only
    one of these files is parsed in full.
    """

    def __init__(self) -> None:
        self.known: dict[str, TrainConfig] = {}

    def load(self, run: Path) -> TrainConfig:
        """Load the config of a run directory; the result equals that of `load_run_config`."""
        file = run / "config.yaml"
        if not file.is_file():
            return load_run_config(run)
        with readable(file):
            common, own = split(read_text(file, 4 * LARGEST_YAML))
        if own is None:
            return load_run_config(run)
        if common not in self.known:
            self.known[common] = load_run_config(run)
        cfg = self.known[common]
        return replace(
            cfg,
            seed=int(own["seed"]),
            model=replace(cfg.model, init_seed=int(own["model.init_seed"])),
            optim=replace(cfg.optim, lr=float(own["optim.lr"])),
            run=replace(cfg.run, dir=own["run.dir"], study=own["run.study"]),
        )


def split(text: str) -> tuple[str, dict[str, str] | None]:
    """Split a config.yaml into (text without the values of the keys in READ, {key: value}).

    The dict contains the removed values. If a key in READ is missing, or if its value is not a
    plain number or path, return None instead of the dict.
    """
    section, kept, own = "", [], {}
    lines = text.splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        name, _, value = line.partition(":")
        if line[:1] not in (" ", "-"):
            section = name
        key = name if line[:1] != " " else f"{section}.{name[2:]}"
        if key in READ and key not in own and not after.startswith("    "):
            own[key] = value.strip()
            line = f"{name}:"
        kept.append(line)
    if own.keys() != READ.keys() or not all(READ[key].fullmatch(own[key]) for key in READ):
        return text, None
    usual = 1e-20 < float(own["optim.lr"]) < 1e20
    return "\n".join(kept), own if usual else None
