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

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from diffllm.checkpoint.directory import step_of, with_checkpoint
from diffllm.checkpoint.hf.safetensors import (
    DTYPES,
    check_form,
    tensors_of,
    write_safetensors,
    writing,
)
from diffllm.cli.arguments import a_path, parse, plugins_field
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config
from diffllm.core.errors import ConfigError
from diffllm.core.files import read_bytes, readable, scratch_directory, sync
from diffllm.core.printing import echo
from diffllm.data.tokenizer_files import TOKENIZER_FILES, tokenizer_of

LARGEST_FILE = 2**30
"""Limit in bytes of what is copied beside the parameters."""


@dataclass
class Arguments:
    """The arguments of `diffllm consolidate`."""

    run: str = field(metadata=a_path("run directory"))
    step: int = field(default=0, metadata={"help": "checkpoint; 0 is the newest whole one"})
    out: str = field(
        default="",
        metadata=a_path("directory, or a file that ends in .safetensors; empty: in the run"),
    )
    dtype: str = field(default="float32", metadata={"help": "float32 or bf16"})
    max_shard_size: str = field(default="5GB", metadata={"help": "of a file, as in 500MB or 5GB"})
    overwrite: bool = field(default=False, metadata={"help": "replace files that are there"})
    plugins: str = plugins_field()

    def __post_init__(self) -> None:
        check_form(self.dtype, self.max_shard_size)


def main(argv: list[str]) -> None:
    """Write the files; print where they are."""
    args = parse(Arguments, argv, __doc__)
    run = Path(args.run)
    cfg = load_run_config(run)
    with_checkpoint(run, args.step, lambda checkpoint: write(args, run, cfg, checkpoint))


def write(args: Arguments, run: Path, cfg: TrainConfig, checkpoint: Path) -> None:
    """Write the files of a checkpoint, and print where they are."""
    directory, stem = place_for(args.out, run, step_of(checkpoint))
    beside = files_beside(run, directory)
    earlier = parameter_files(directory, stem)
    there = [*earlier, *(directory / name for name in beside if (directory / name).exists())]
    if there and not args.overwrite:
        raise ConfigError(f"{there[0]} is there already; overwrite=true replaces it")
    tensors = tensors_of(cfg.model, checkpoint, DTYPES[args.dtype])
    made = not directory.exists()
    try:
        with writing(str(directory)):
            directory.mkdir(parents=True, exist_ok=True)
            with scratch_directory(directory / stem) as hidden:
                size = write_safetensors(hidden, stem, checkpoint, tensors, args.max_shard_size)
                for name, content in beside.items():
                    (hidden / name).write_bytes(content)
                complete = sorted(hidden.iterdir())
                for file in complete:
                    sync(file)
                written = [file.replace(directory / file.name) for file in complete]
                for file in set(earlier) - set(written):
                    file.unlink()
            sync(directory)
    finally:
        if made:
            with suppress(OSError):  # it holds something
                directory.rmdir()
    echo(f"step {step_of(checkpoint)}: {len(tensors)} tensors, {size / 1e6:,.1f} MB")
    echo("\n".join(map(str, written)))


def place_for(out: str, run: Path, step: int) -> tuple[Path, str]:
    """Return the directory that `out=` means, by default one in the run, and its files' stem."""
    path = Path(out) if out else run / "consolidated" / f"step-{step:08d}"
    return (path.parent, path.stem) if path.suffix == ".safetensors" else (path, "model")


def parameter_files(directory: Path, stem: str) -> list[Path]:
    """List the parameters that are there already, in however many files."""
    name = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
    return [file for file in directory.glob("*") if name.fullmatch(file.name)]


def files_beside(run: Path, directory: Path) -> dict[str, bytes]:
    """Read the files that go with the parameters, unless they go into the run itself.

    Raises CheckpointError where one is missing, or no file of the run's own: what a link in a run
    leads to is never copied.
    """
    if directory.resolve() == run.resolve():
        return {}
    tokenizer_of(run)
    content = {}
    for name in ("config.yaml", *TOKENIZER_FILES):
        with readable(run / name), suppress(FileNotFoundError):
            content[name] = read_bytes(run / name, LARGEST_FILE)
    return content
