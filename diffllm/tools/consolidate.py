"""diffllm consolidate run=<dir> [key=value ...]: a checkpoint's parameters as safetensors.

They are written whole and under their own names, as model.safetensors, with the config.yaml and
tokenizer.model of the run beside it. Beyond max_shard_size there are several files and
model.safetensors.index.json, as Hugging Face libraries write them. No more than one file's
parameters are in memory at a time.

diffllm consolidate run=outputs/mine
diffllm consolidate run=outputs/mine step=2000 out=exported dtype=bf16

To load it again:
  cfg = diffllm.config.saved.load_run_config(Path("exported"))
  model = diffllm.build_model(cfg.model)
  model.load_state_dict(safetensors.torch.load_file("exported/model.safetensors"))
"""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diffllm.checkpoint import check_parameters, find_checkpoint, load_tensors, read_state, step_of
from diffllm.checkpoint.reader import reason
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.data.tokenizer_files import TOKENIZER_FILES, tokenizer_in
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.errors import CheckpointError, ConfigError
from diffllm.files import sync
from diffllm.model import Transformer
from diffllm.tools.arguments import parse, plugins_field

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
SIZE = re.compile(r"0*[1-9]\d{0,5}[KMGT]B")


@dataclass
class Arguments:
    """The arguments of `diffllm consolidate`."""

    run: str = field(metadata={"help": "run directory"})
    step: int = field(default=0, metadata={"help": "checkpoint; 0 is the newest whole one"})
    out: str = field(
        default="",
        metadata={"help": "directory, or a file that ends in .safetensors; empty: in the run"},
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or bf16"})
    max_shard_size: str = field(default="5GB", metadata={"help": "of a file, as in 500MB or 5GB"})
    overwrite: bool = field(default=False, metadata={"help": "replace files that are there"})
    plugins: str = plugins_field()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype} must be {' or '.join(DTYPES)}")
        if not SIZE.fullmatch(self.max_shard_size):
            raise ConfigError(
                f"max_shard_size={self.max_shard_size} must be a size above 0, as in 500MB or 5GB"
            )


def main(argv: list[str]) -> None:
    """Write the files; print where they are."""
    args = parse(Arguments, argv, __doc__)
    run = Path(args.run)
    cfg = load_run_config(run)
    checkpoint = find_checkpoint(run, args.step)
    directory, stem = place_for(args.out, run, step_of(checkpoint))
    beside = files_beside(run, directory)
    earlier = parameter_files(directory, stem)
    there = [*earlier, *(directory / name for name in beside if (directory / name).exists())]
    if there and not args.overwrite:
        raise ConfigError(f"{there[0]} is there already; overwrite=true replaces it")
    tensors = tensors_of(cfg, checkpoint, DTYPES[args.dtype])
    pattern = stem.replace("{", "{{").replace("}", "}}") + "{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern=pattern, max_shard_size=args.max_shard_size
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".consolidate-", dir=directory) as temporary:
            hidden = Path(temporary)
            for name, held in split.filename_to_tensors.items():
                save_file(loaded(checkpoint, tensors, held), hidden / name, {"format": "pt"})
                shutil.copymode(checkpoint / "state.json", hidden / name)  # not only the owner's
            for name in beside:
                shutil.copyfile(run / name, hidden / name)
            if split.is_sharded:
                content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
                index = hidden / f"{stem}.safetensors.index.json"
                index.write_text(json.dumps(content, indent=2))
            complete = sorted(hidden.iterdir())
            for file in complete:
                sync(file)
            written = [file.replace(directory / file.name) for file in complete]
        for file in set(earlier) - set(written):
            file.unlink()
        sync(directory)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{directory} cannot be written: {reason(error)}") from error
    size = split.metadata["total_size"] / 1e6
    print(f"step {step_of(checkpoint)}: {len(tensors)} tensors, {size:,.1f} MB")
    print(*written, sep="\n")


def place_for(out: str, run: Path, step: int) -> tuple[Path, str]:
    """Return the directory that `out=` means, by default one in the run, and its files' stem."""
    path = Path(out).expanduser() if out else run / "consolidated" / f"step-{step:08d}"
    return (path.parent, path.stem) if path.suffix == ".safetensors" else (path, "model")


def parameter_files(directory: Path, stem: str) -> list[Path]:
    """List the parameters that are there already, in however many files."""
    name = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    return [file for file in directory.glob("*") if name.fullmatch(file.name)]


def files_beside(run: Path, directory: Path) -> list[str]:
    """List the files that go with the parameters, unless they go into the run itself."""
    if directory.resolve() == run.resolve():
        return []
    names = [name for name in ("config.yaml", *TOKENIZER_FILES) if (run / name).is_file()]
    for name in ("config.yaml", tokenizer_in(run).name):
        if name not in names:
            raise CheckpointError(f"{run} has no {name}")
    return names


def tensors_of(cfg: TrainConfig, checkpoint: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """Name the files' tensors, without storage: parameters in `dtype`, routers' state.

    Parameters that a variant keeps in float32 stay that. Raises CheckpointError for a checkpoint of
    another model.
    """
    with torch.device("meta"):
        model = Transformer(cfg.model)
    params = dict(model.named_parameters())
    check_parameters(checkpoint, read_state(checkpoint), params)
    kept = fp32_parameters(model)
    return {
        **{name: p.detach().to(p.dtype if p in kept else dtype) for name, p in params.items()},
        **model.router_state(),
    }


def loaded(checkpoint: Path, tensors: dict[str, Tensor], names: list[str]) -> dict[str, Tensor]:
    """Read the values of a file's tensors to the CPU; float32 is what checkpoints hold."""
    whole = {}
    for name in names:
        dtype = torch.float32 if tensors[name].is_floating_point() else tensors[name].dtype
        whole[f"model.{name}"] = torch.empty(tensors[name].shape, dtype=dtype)
    load_tensors(checkpoint, whole, no_dist=True)
    return {name: whole[f"model.{name}"].to(tensors[name].dtype) for name in names}
