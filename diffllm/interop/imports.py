"""Import a model into a new run directory; optionally convert the attention."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from diffllm.checkpoint.hf.conversion import converted
from diffllm.checkpoint.hf.layout import Mapped
from diffllm.checkpoint.hf.safetensors import writing
from diffllm.checkpoint.reader import load_tensors
from diffllm.checkpoint.writer import write_parameters
from diffllm.config import load_config
from diffllm.config.origin import Origin, implied, name_from, origin_of
from diffllm.core.atomic_directories import new_directory
from diffllm.core.errors import ConfigError
from diffllm.core.files import check_absent, user_path
from diffllm.core.run_files import RunFile, RunFolder, step_of
from diffllm.data.tokenizer import TOKENIZER_FILES, Tokenizer, tokenizer_files
from diffllm.model import without_storage

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
WANTED = ("config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES)
"""Files downloaded from a hub repository: no code and no pickle files."""


def import_model(
    source: str, out: Path, attention: str | None = None, perturb: float = 0.0, seed: int = 0
) -> Origin:
    """Create the run directory `out`, which contains a model as the checkpoint of step 0.

    Return an `Origin`, which describes the new model. The directory appears only when complete. All
    parameters are in memory at once: 4 bytes per parameter, or 8 for a converted model.

    Args:
        source: a Hugging Face model directory, a run directory, or owner/name[@revision] of the
            hub.
        attention: attention of the new model, "diff_v2" or "standard"; None keeps the attention.
        perturb: only for "diff_v2": standard deviation of noise that is added to the query weights
            of the second head of each pair, relative to the RMS of the query weights.

    Raises ConfigError for an invalid argument or an unsupported model, and CheckpointError for
    missing or damaged files.
    """
    check_absent(out, "out")
    path, facts = locate_model(source)
    origin = origin_of(path)
    if "revision" in facts:
        # The name of the downloaded directory is the commit.
        origin.name = name_from(Path(facts["from"]))
    checkpoint = origin.checkpoint()
    new = origin
    mapped_parameters = None
    facts |= {"attention": origin.attention, "architecture": origin.architecture}
    if attention is not None:
        model, mapped_parameters = converted(origin.model, attention, perturb, seed)
        new = replace(origin, model=model, chosen=None)
        facts |= {"converted": attention, "perturb": perturb, "seed": seed}
    elif perturb:
        raise ConfigError(
            f"perturb={perturb} is only supported with attention=diff_v2; "
            "add attention=diff_v2 or remove perturb"
        )
    # Before `out` is written, because unsupported tokenizers raise errors here.
    tokenizer = origin.tokenizer
    bos_token = origin.bos_token
    facts["bos_token"] = bos_token
    facts["step"] = step_of(checkpoint) if checkpoint else None
    with writing(f"out={out}"), new_directory(out) as hidden:
        tensors = parameters_of(origin, checkpoint)
        if mapped_parameters is not None:
            tensors = mapped_tensors(mapped_parameters, tensors)
        parameters = [name for name, _ in without_storage(new.model).named_parameters()]
        write_parameters(hidden / RunFolder.CHECKPOINTS, tensors, parameters)
        for file, content in tokenizer_files(tokenizer, bos_token=bos_token).items():
            (hidden / file).write_bytes(content)
        copy = Tokenizer.from_file(hidden / tokenizer.name)
        (hidden / RunFile.CONFIG).write_text(config_yaml(new, out, tokenizer), encoding="utf-8")
        run = {
            "parameters": sum(tensors[name].numel() for name in parameters),
            "eos_token": copy.eos_token,
            "imported": facts,
        }
        (hidden / RunFile.FACTS).write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
    return new


def locate_model(source: str) -> tuple[Path, dict[str, Any]]:
    """Return the directory of a model, and a dict for run.json that describes the source.

    `source` is a directory, or owner/name[@revision] of the hub, which is downloaded. The dict is
    like {"from": "owner/name", "revision": "<commit>"}. Raises ConfigError if no model is found.
    """
    path = user_path(source, "hf")
    if path.is_dir():
        return path, {"from": source}
    match = HUB_ID.fullmatch(source)
    if path.exists() or not match:
        raise ConfigError(f"hf={source} must be a directory or owner/name[@revision] of the hub")
    from huggingface_hub import HfApi, snapshot_download

    name = match["name"]
    revision = match["revision"]
    try:
        # Download the commit, so that run.json records exactly the downloaded files.
        sha = HfApi().model_info(name, revision=revision, timeout=60).sha
        fetched = snapshot_download(name, revision=sha, allow_patterns=list(WANTED))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"hf={source} is not a directory, and the download from the hub failed: {reason}"
        ) from error
    return Path(fetched), {"from": name, "revision": sha}


def mapped_tensors(rules: Sequence[Mapped], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the tensors of a converted model, by name, from those of the original model."""
    converted_tensors = {}
    # The rules define all parameters; the buffers of routers stay as they are.
    for name, tensor in tensors.items():
        if ".router." in name:
            converted_tensors[name] = tensor
    for rule in rules:
        converted_tensors[rule.name] = rule.of(tensors)
    return converted_tensors


def parameters_of(origin: Origin, checkpoint: Path | None) -> dict[str, Tensor]:
    """Read the parameters and router buffers of a model in float32, by their names in diffllm.

    If `checkpoint` is None, read the Hugging Face directory of `origin`; otherwise read the
    checkpoint.
    """
    model = without_storage(origin.model).to_empty(device="cpu")
    # Some model directories lack these buffers, which then keep their initial values.
    for mixture in model.mixtures:
        mixture.router.reset_buffers()
    tensors = {name: param.detach() for name, param in model.named_parameters()}
    tensors |= model.router_state()
    if checkpoint:
        # Loaded in place, so `tensors` has the values.
        checkpoint_tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        load_tensors(checkpoint, checkpoint_tensors, no_dist=True)
    else:
        assert origin.directory
        for name in origin.directory.names:
            tensors[name].copy_(origin.directory.tensor(name))
    return tensors


def config_yaml(origin: Origin, out: Path, tokenizer: Path) -> str:
    """Return the content of config.yaml for a run directory `out` with an imported model.

    `tokenizer` is the original tokenizer file. The config contains the path of its copy in `out`.
    """
    overrides = ["experiment=none"]
    for override in implied(origin, {}):
        # The config names the copy of the tokenizer in `out` instead.
        if not override.startswith("data.tokenizer="):
            overrides.append(override)
    overrides.append(f"seq_len={origin.model.seq_len}")
    cfg = load_config(overrides)
    cfg.data.tokenizer = str((out / tokenizer.name).absolute())
    cfg.run.name = out.name
    cfg.resolved.choices["model"] = origin.name
    return OmegaConf.to_yaml(OmegaConf.structured(cfg))
