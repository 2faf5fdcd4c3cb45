"""diffllm consolidate run=<dir>: a checkpoint's parameters as safetensors."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diffllm.checkpoint import check_parameters, find_checkpoint, load_tensors, read_state, step_of
from diffllm.checkpoint.reader import reason
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.distributed.fsdp import fp32_parameters
from diffllm.errors import CheckpointError, ConfigError
from diffllm.files import sync
from diffllm.model import Transformer
from diffllm.tools.arguments import parse

WHAT = """\
diffllm consolidate run=<dir> [key=value ...]: a checkpoint's parameters, whole and under their own
names, as model.safetensors, with the config.yaml and tokenizer.model of the run beside it

Beyond max_shard_size there are several files and model.safetensors.index.json, as Hugging Face
libraries write them. No more than one file's parameters are in memory at a time.

diffllm consolidate run=outputs/mine
diffllm consolidate run=outputs/mine step=2000 out=exported dtype=bf16

To load it again:
  cfg = diffllm.run.directory.load_run_config(Path("exported"))
  model = diffllm.build_model(cfg.model)
  model.load_state_dict(safetensors.torch.load_file("exported/model.safetensors"))"""
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
BESIDE = ("config.yaml", "tokenizer.model")
UNITS = {"MB": 10**6, "GB": 10**9}


@dataclass
class Arguments:
    """What `diffllm consolidate` takes."""

    run: str = field(metadata={"help": "run directory"})
    step: int = field(default=0, metadata={"help": "checkpoint; 0 is the newest whole one"})
    out: str = field(
        default="",
        metadata={"help": "directory, or a file that ends in .safetensors; empty: in the run"},
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or bf16"})
    max_shard_size: str = field(default="5GB", metadata={"help": "of a file, as in 500MB or 5GB"})
    overwrite: bool = field(default=False, metadata={"help": "replace files that are there"})

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={self.dtype} must be {' or '.join(DTYPES)}")
        if self.shard_bytes < 1:
            raise ConfigError(
                f"max_shard_size={self.max_shard_size} must be a size above 0, as in 500MB or 5GB"
            )

    @property
    def shard_bytes(self) -> int:
        """Most bytes of tensors in a file; 0 where max_shard_size is no size."""
        match = re.fullmatch(rf"(\d{{1,6}})({'|'.join(UNITS)})", self.max_shard_size)
        return int(match[1]) * UNITS[match[2]] if match else 0


@dataclass(frozen=True)
class Place:
    """Where files go: model.safetensors, or model-00001-of-00003.safetensors and so on."""

    directory: Path
    stem: str

    def shards(self, count: int) -> list[str]:
        """Names of `count` files."""
        if count == 1:
            return [f"{self.stem}.safetensors"]
        return [f"{self.stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]

    @property
    def index(self) -> str:
        return f"{self.stem}.safetensors.index.json"

    def earlier(self) -> list[Path]:
        """Parameters that are there already, in however many files."""
        name = re.compile(
            rf"{re.escape(self.stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?"
        )
        return [file for file in self.directory.glob("*") if name.fullmatch(file.name)]


def main(argv: list[str]) -> None:
    """Write the files; print where they are."""
    args = parse(Arguments, argv, WHAT)
    run = Path(args.run)
    cfg = load_run_config(run)
    checkpoint = find_checkpoint(run, args.step)
    place = place_for(args.out, run, step_of(checkpoint))
    there = [*place.earlier(), *(place.directory / name for name in copied(run, place))]
    there = [file for file in there if file.exists()]
    if there and not args.overwrite:
        raise ConfigError(f"{there[0]} is there already; overwrite=true replaces it")
    tensors = tensors_of(cfg, checkpoint, DTYPES[args.dtype])
    shards = split(tensors, args.shard_bytes)
    try:
        written = write(place, run, checkpoint, shards)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{place.directory} cannot be written: {reason(error)}") from error
    total = sum(t.nbytes for t in tensors.values())
    print(f"step {step_of(checkpoint)}: {len(tensors)} tensors, {total / 1e6:,.1f} MB")
    for file in written:
        print(file)


def place_for(out: str, run: Path, step: int) -> Place:
    """What `out=` means; a directory of its own in the run by default."""
    path = Path(out).expanduser() if out else run / "consolidated" / f"step-{step:08d}"
    if path.suffix == ".safetensors":
        return Place(path.parent, path.stem)
    return Place(path, "model")


def tensors_of(cfg: TrainConfig, checkpoint: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """What the files will hold, without storage, by name: parameters in `dtype`, routers' state.

    Parameters that a variant keeps in float32 stay that.

    Raises:
        CheckpointError: the checkpoint is of another model.
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


def split(tensors: dict[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    """Tensors in their order, in files of at most `most` bytes or of one tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > most:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def loaded(checkpoint: Path, shard: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of a file's tensors on the CPU; float32 is what checkpoints hold."""
    whole = {
        f"model.{name}": torch.empty(
            tensor.shape, dtype=torch.float32 if tensor.is_floating_point() else tensor.dtype
        )
        for name, tensor in shard.items()
    }
    load_tensors(checkpoint, whole, no_dist=True)
    return {name: whole[f"model.{name}"].to(tensor.dtype) for name, tensor in shard.items()}


def write(place: Place, run: Path, checkpoint: Path, shards: list[dict[str, Tensor]]) -> list[Path]:
    """Every file under a hidden name first, so that none is ever there in part."""
    place.directory.mkdir(parents=True, exist_ok=True)
    replaced = place.earlier()
    names = place.shards(len(shards))
    made: dict[str, Path] = {}
    try:
        for name, content in contents(place, run, checkpoint, shards):
            made[name] = place.directory / f".{name}.{os.getpid()}"
            content(made[name])
            sync(made[name])
        for name, hidden in made.items():
            hidden.replace(place.directory / name)
    finally:
        for hidden in made.values():
            hidden.unlink(missing_ok=True)
    for file in replaced:
        if file.name not in made:
            file.unlink()
    sync(place.directory)
    return [place.directory / name for name in sorted(made, key=lambda n: n not in names)]


def contents(
    place: Place, run: Path, checkpoint: Path, shards: list[dict[str, Tensor]]
) -> Iterator[tuple[str, Callable[[Path], object]]]:
    """(name, what writes it) of every file, in the order in which they appear."""
    for name in copied(run, place):
        yield name, partial(shutil.copyfile, run / name)
    names = place.shards(len(shards))
    for name, shard in zip(names, shards, strict=True):
        yield name, partial(save_shard, checkpoint, shard)
    if len(shards) > 1:
        text = json.dumps(index(names, shards), indent=2)
        yield place.index, partial(write_text, text)


def copied(run: Path, place: Place) -> list[str]:
    """Files that go with the parameters, unless they go into the run itself."""
    if place.directory.resolve() == run.resolve():
        return []
    for name in BESIDE:
        if not (run / name).is_file():
            raise CheckpointError(f"{run} has no {name}")
    return list(BESIDE)


def save_shard(checkpoint: Path, shard: dict[str, Tensor], file: Path) -> None:
    """Read a file's tensors and write them."""
    save_file(loaded(checkpoint, shard), file, {"format": "pt"})
    shutil.copymode(checkpoint / "state.json", file)  # the library's files are the owner's alone


def write_text(text: str, file: Path) -> None:
    file.write_text(text)


def index(names: list[str], shards: list[dict[str, Tensor]]) -> dict[str, object]:
    """Which file holds which tensor, as Hugging Face libraries expect it."""
    pairs = list(zip(names, shards, strict=True))
    return {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
        "weight_map": {tensor: name for name, shard in pairs for tensor in shard},
    }
