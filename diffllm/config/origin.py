"""Find the model and the tokenizer at the path in `resume=weights:PATH` or `resume=stage:PATH`.

PATH is a run directory, a checkpoint of a run, or a model directory of transformers.
"""

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig

from diffllm.checkpoint.hf.layout import VARIANTS
from diffllm.checkpoint.hf.model_directory import CONFIG, ModelDirectory
from diffllm.checkpoint.hf.tokenizer import imported_prefix
from diffllm.checkpoint.run_checkpoints import find_checkpoint
from diffllm.config.changes import is_of_model
from diffllm.config.compose import (
    compose_config,
    defaults_text,
    variant_config,
    variants,
    yaml_names,
)
from diffllm.config.overrides import check_shared
from diffllm.config.run_config import CARRIED_PREFIXES
from diffllm.config.saved import changes_to, flatten, load_run_config, yaml_dict
from diffllm.config.words import as_text, unquoted
from diffllm.core.errors import CheckpointError, ConfigError, DataError
from diffllm.core.files import similar_path, user_path
from diffllm.core.keys import declaration_of, declarations
from diffllm.core.run_files import RunFile, RunFolder, read_facts, step_of
from diffllm.data.tokenizer import tokenizer_of
from diffllm.data.tokenizer_config import FAST, added_bos, listed_tokens
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.config import ModelConfig


class Named(NamedTuple):
    """A value of `resume` that names another model: weights:PATH[@STEP] or stage:PATH[@STEP]."""

    kind: str
    """A key of CARRIED_PREFIXES."""
    path: Path
    step: int = 0
    """Step of the checkpoint; 0 is the newest undamaged checkpoint."""


@dataclass
class Origin:
    """A trained model whose weights a new run loads: a run, or a model directory of transformers.

    Exactly one of `run` and `directory` is set.
    """

    path: Path
    model: ModelConfig
    step: int = 0
    """Step of the checkpoint in a run; 0 is the newest undamaged checkpoint."""
    chosen: str | None = None
    """Attention YAML of a run; None for a model directory."""
    name: str = ""
    """Model YAML of a run; for other models, the name of the directory or the repository."""
    run: Path | None = None
    directory: ModelDirectory | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Content of run.json; empty for a model directory."""

    @cached_property
    def attention(self) -> str:
        """Name of the attention YAML of the model, such as "diff_v2".

        For a run, return the YAML chosen in the run. For a model directory, return the first YAML
        that has the same attention class and the same values as the model. If no YAML has these
        values, return the YAML named after the class.
        """
        if self.chosen:
            return self.chosen
        attention = self.model.attention
        base = next(name for name, cls in VARIANTS.items() if type(attention) is cls)
        names = [name for name in variants() if name.startswith(f"{base}_")]
        for name in (base, *names):
            if not differing(attention, name):
                return name
        return base

    @property
    def tokenizer(self) -> Path:
        """Path of the model's tokenizer file; raises CheckpointError if the file is missing."""
        if self.directory:
            return self.directory.tokenizer
        assert self.run
        return tokenizer_of(self.run)

    @property
    def text_prefix(self) -> list[str]:
        """Tokens that the tokenizer of an imported model puts before each text; mostly one BOS."""
        if self.directory:
            return imported_prefix(self.directory.tokenizer)
        bos_token = added_bos(self.tokenizer)
        return [] if bos_token is None else [bos_token]

    @property
    def bos_token(self) -> str | None:
        """BOS that the tokenizer of an imported model puts before each text; None without BOS.

        Raises DataError if the tokenizer puts several tokens before each text.
        """
        prefix = self.text_prefix
        if len(prefix) > 1:
            raise DataError(
                f"{self.tokenizer.with_name(FAST)}: the post-processor puts {len(prefix)} tokens "
                f"before each text ({listed_tokens(prefix)}), but diffllm supports only one BOS; "
                "change post_processor in this file"
            )
        return prefix[0] if prefix else None

    @property
    def architecture(self) -> str | None:
        """Class name of an imported model in transformers; None for a model trained by diffllm."""
        imported = self.facts.get("imported") or {}
        return self.directory.architecture if self.directory else imported.get("architecture")

    def checkpoint(self) -> Path | None:
        """Return the checkpoint at `path`, or the newest undamaged checkpoint if `path` is a run.

        Return None if `path` is a model directory. Raises CheckpointError if the checkpoint is
        damaged, or if all checkpoints of the run are damaged or missing.
        """
        if self.run is None:
            return None
        return find_checkpoint(self.run, self.step)


def origin_of(path: Path, step: int = 0) -> Origin:
    """Read the model at a path; raises CheckpointError if the path contains no model.

    If the path is a run, `step` selects a checkpoint; 0 selects the newest undamaged checkpoint
    when the weights are read.
    """
    if (path / RunFile.CONFIG).is_file():
        return origin_of_run(path, path, step)
    checkpoints = path.absolute().parent
    is_in_run = (checkpoints.parent / RunFile.CONFIG).is_file()
    if checkpoints.name == RunFolder.CHECKPOINTS and is_in_run:
        if step:
            raise CheckpointError(f"{path} is a checkpoint, so remove @{step} from resume")
        return origin_of_run(path, checkpoints.parent, step_of(path))
    if (path / CONFIG).is_file():
        if step:
            raise CheckpointError(f"{path} is a model directory, so remove @{step} from resume")
        directory = ModelDirectory(path)
        return Origin(path, directory.model, name=name_from(path), directory=directory)
    reason = "" if path.exists() else ": it does not exist"
    raise CheckpointError(
        f"{path} is neither a run, a checkpoint of a run nor a model directory{reason}"
        f"{similar_path(path, os.path.isdir)}"
    )


def origin_of_run(path: Path, run: Path, step: int) -> Origin:
    """Return the origin `path`, which is the directory of a run or one of its checkpoints."""
    cfg = load_run_config(run)
    choices = cfg.resolved.choices
    facts = read_facts(run)
    return Origin(path, cfg.model, step, choices["attention"], choices["model"], run, facts=facts)


def name_from(path: Path) -> str:
    """Return the last part of a path, with "-" for characters that a run name cannot contain."""
    return re.sub(r"[^\w.,+-]+", "-", path.absolute().name).lstrip(".") or "model"


def differing(attention: AttentionConfig, name: str) -> dict[str, Any]:
    """Return {key: value} for values in `attention` that differ from the attention YAML `name`."""
    changes = changes_to(variant_config(name), attention, is_of_model)
    return {key: value for key, (_, value) in changes.items()}


def named_in(resume: str) -> Named | None:
    """Return the parts of "weights:PATH[@STEP]" or "stage:PATH[@STEP]"; None for other values.

    Raises ConfigError if PATH is empty or invalid.
    """
    kind, _, text = resume.partition(":")
    if kind not in CARRIED_PREFIXES:
        return None
    if not text:
        raise ConfigError(f"resume={resume} needs a path, such as resume={kind}:outputs/mine")
    return Named(kind, *path_and_step(text, f"resume={kind}:"))


def path_and_step(text: str, key: str) -> tuple[Path, int]:
    """Return the parts of "PATH[@STEP]"; the step is 0 if `text` has none.

    An existing path that ends with @STEP has precedence. Raises ConfigError, which names `key`, if
    PATH is invalid.
    """
    path = user_path(text, key)
    parts = re.fullmatch(r"(.+)@([1-9]\d*)", text, re.DOTALL)
    if path.exists() or not parts:
        return path, 0
    return user_path(parts[1], key), int(parts[2])


def compose_with_origin(words: list[str]) -> DictConfig:
    """Compose a config from overrides; use the model and tokenizer of another model in `resume`.

    Other overrides in `words` take precedence over the values of this model. Raises ConfigError
    for an invalid override, and CheckpointError if PATH contains no model.
    """
    typed_values = {}
    for word in words:
        key, _, value = word.partition("=")
        typed_values[key.lstrip("+")] = value
    named = named_in(unquoted(typed_values.get("resume", "")))
    if named is None:
        return compose_config(words)
    origin = origin_of(named.path, named.step)
    # Of two overrides of one key, the last one applies.
    composed = compose_config([*implied(origin, typed_values), *words])
    if "model" not in typed_values:
        composed.resolved.choices["model"] = origin.name
    if "experiment" not in typed_values:
        # The user did not type the implied overrides.
        composed.resolved.defaults = defaults_text([f"resume={typed_values['resume']}"])
    return composed


def implied(origin: Origin, typed_values: dict[str, str]) -> list[str]:
    """Return overrides that set the model, attention and tokenizer of `origin`.

    `typed_values` contains the user's overrides as {key: value}. If they already choose the model,
    the attention or the tokenizer, the result does not set it. The result does not set RoPE
    settings that the YAML of an experiment sets: an experiment can extend the context of a model,
    but does not change its other settings.
    """
    words = []
    rope_keys: set[str] = set()
    if "experiment" in typed_values:
        rope_keys = rope_of_experiment(typed_values["experiment"])
    if "model" not in typed_values:
        # The YAML has the learning rate for this size, which `origin.model` does not contain.
        # Imported models have no YAML.
        if not origin.architecture and origin.name in yaml_names("model"):
            words.append(f"model={origin.name}")
        declared = declarations(origin.model)
        for key, value in flatten(yaml_dict(origin.model)).items():
            is_set_elsewhere = key.startswith("attention.") or key in rope_keys
            if is_of_model(declaration_of(key, declared)) and not is_set_elsewhere:
                words.append(f"model.{key}={as_text(value)}")
    if "attention" not in typed_values:
        words.append(f"attention={origin.attention}")
        # The run may have used a YAML that is not in the search path of this process.
        if origin.attention in variants():
            changes = differing(origin.model.attention, origin.attention)
            for key, value in changes.items():
                words.append(f"model.attention.{key}={as_text(value)}")
    if typed_values.get("data") != "tokens" and "data.tokenizer" not in typed_values:
        path = str(origin.tokenizer.absolute())
        words.append(f"data.tokenizer={as_text(path)}")
    check_shared(words, str(origin.path))
    return words


def rope_of_experiment(name: str) -> set[str]:
    """Return the keys in `model` of the RoPE settings that the YAML of an experiment sets."""
    keys = set()
    # The models have different values, so that each value of the experiment changes at least one.
    for model in ("tiny", "dense_7b"):
        default = dict(compose_config([f"model={model}", "experiment=none"]).model.rope)
        rope = dict(compose_config([f"model={model}", f"experiment={name}"]).model.rope)
        for key, value in rope.items():
            if value != default[key]:
                keys.add(f"rope.{key}")
    return keys
