"""Convert checkpoints: `diffllm consolidate`, `diffllm export` and `diffllm import`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diffllm.cli.arguments import (
    CommandArguments,
    RunArguments,
    argument,
    parse,
    plugins_argument,
)
from diffllm.core.atomic_directories import scratch_directory
from diffllm.core.errors import ConfigError
from diffllm.core.files import read_bytes, readable, sync
from diffllm.core.printing import echo, echo_json
from diffllm.core.run_files import CONSOLIDATED, RunFile, step_name, step_of

if TYPE_CHECKING:
    from diffllm.config import TrainConfig

CONSOLIDATE_USAGE = """\
diffllm consolidate run=<dir> [key=value ...]: write a checkpoint's parameters as safetensors.

Writes model.safetensors, config.yaml and tokenizer.model. Above max_shard_size, writes several
files and model.safetensors.index.json, like Hugging Face libraries.

diffllm consolidate run=outputs/mine step=2000 out=exported dtype=bf16

To load it again:
  cfg = diffllm.config.saved.load_run_config(Path("exported"))
  model = diffllm.build_model(cfg.model)
  model.load_state_dict(safetensors.torch.load_file("exported/model.safetensors"))"""
EXPORT_USAGE = """\
diffllm export run=<dir> out=<dir> [key=value ...]: write a checkpoint for transformers.

Softmax attention becomes Llama, Qwen3 (with QK-norm) or Qwen3Moe (a mixture that follows the rules
of Qwen3Moe). DIFF V1 becomes DiffLlama. All other models get a diffllm modelling file, which needs
trust_remote_code=True. The directory also contains a fast tokenizer and a model card.

diffllm export run=outputs/mine step=2000 out=mine-hf dtype=bf16"""
IMPORT_USAGE = """\
diffllm import hf=<dir or owner/name> out=<dir> [key=value ...]: make a run from another model.

Llama, Qwen3, Qwen3Moe, DiffLlama and diffllm exports are imported unchanged, from safetensors.
hf= may also name a run. Code and pickle files of the model are never used.

attention=diff_v2 converts softmax attention to DIFF V2 without a change of the model's function;
perturb=0.01 adds noise of 1% of the weights to second queries. attention=standard converts DIFF V2
with a constant lambda to softmax attention.

diffllm import hf=Qwen/Qwen3-0.6B@main out=outputs/qwen3
diffllm import hf=my-llama out=outputs/llama-v2 attention=diff_v2
python train.py resume=weights:outputs/llama-v2 data.paths=[a.parquet] seq_len=2048 optim.lr=1e-5"""
PARAMETERS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
LARGEST_COPIED_FILE = 2**30
"""Limit in bytes of a file that is copied next to the parameters."""


@dataclass(kw_only=True)
class FormatArguments(RunArguments):
    step: int = argument("step of the checkpoint; 0: the newest complete checkpoint", 0)
    dtype: str = argument("float32 or bf16", "float32")
    max_shard_size: str = argument("maximum size of a file, such as 500MB or 5GB", "5GB")


@dataclass
class ConsolidateArguments(FormatArguments):
    out: str = argument("directory; empty: in the run directory", "", path=True)
    overwrite: bool = argument("replace existing files", False)


@dataclass
class ExportArguments(FormatArguments):
    out: str = argument("new directory", path=True)
    format: str = argument("hf: format of the transformers library", "hf")
    own: bool = argument("use the diffllm modelling file even if another fits", False)


@dataclass
class ImportArguments(CommandArguments):
    hf: str = argument("transformers directory, run, or owner/name[@revision]", path=True)
    out: str = argument("new run directory", path=True)
    attention: str | None = argument("convert to diff_v2, or from DIFF V2 to standard", None)
    perturb: float = argument(
        "noise on second queries, relative to the weights", 0.0, least=0, most=1
    )
    seed: int = argument("seed of the noise", 0)
    plugins: str = plugins_argument()


def consolidate_command(argv: list[str]) -> None:
    args = parse(ConsolidateArguments, argv, CONSOLIDATE_USAGE)
    from diffllm.checkpoint.hf.safetensors import check_form
    from diffllm.checkpoint.run_checkpoints import with_checkpoint
    from diffllm.config.saved import load_run_config

    check_form(args.dtype, args.max_shard_size)
    run = Path(args.run)
    cfg = load_run_config(run)
    # Training may delete the checkpoint during the call; `with_checkpoint` then repeats it.
    with_checkpoint(run, args.step, lambda path: consolidate(args, run, cfg, path))


def consolidate(
    args: ConsolidateArguments, run: Path, cfg: "TrainConfig", checkpoint: Path
) -> None:
    """Write a checkpoint as safetensors files and print their paths.

    Raises CheckpointError if a file of the checkpoint is missing or damaged, and ConfigError if an
    output file exists and args.overwrite is false.
    """
    from diffllm.checkpoint.hf.safetensors import DTYPES, tensors_of, write_safetensors, writing

    step = step_of(checkpoint)
    directory = run / CONSOLIDATED / step_name(step)
    if args.out:
        directory = Path(args.out)
    copies: dict[str, bytes] = {}
    if directory.resolve() != run.resolve():
        copies = files_next_to_parameters(run)
    old_shards = [file for file in directory.glob("*") if PARAMETERS.fullmatch(file.name)]
    existing = list(old_shards)
    for name in copies:
        if (directory / name).exists():
            existing.append(directory / name)
    if existing and not args.overwrite:
        raise ConfigError(f"{existing[0]} already exists; set overwrite=true to replace the file")
    tensors = tensors_of(cfg.model, checkpoint, DTYPES[args.dtype])
    is_new = not directory.exists()
    try:
        with writing(str(directory)):
            directory.mkdir(parents=True, exist_ok=True)
            with scratch_directory(directory / "model") as hidden:
                size = write_safetensors(hidden, "model", checkpoint, tensors, args.max_shard_size)
                for name, content in copies.items():
                    (hidden / name).write_bytes(content)
                # Write all data to the disk before the first rename, so that a crash leaves either
                # old or complete files.
                complete = sorted(hidden.iterdir())
                for file in complete:
                    sync(file)
                written = [file.replace(directory / file.name) for file in complete]
                # Shards of a former export with other sizes would mix with the new ones.
                for file in set(old_shards) - set(written):
                    file.unlink()
            sync(directory)
    finally:
        if is_new:
            with suppress(OSError):  # the directory is not empty
                directory.rmdir()
    files = [str(file) for file in written]
    if args.json:
        echo_json({"step": step, "tensors": len(tensors), "bytes": size, "files": files})
    else:
        echo(f"step {step}: {len(tensors)} tensors, {size / 1e6:,.1f} MB")
        echo("\n".join(files))


def files_next_to_parameters(run: Path) -> dict[str, bytes]:
    """Read the config and the tokenizer of a run; raise an error if the tokenizer is missing."""
    from diffllm.data.tokenizer import TOKENIZER_FILES, tokenizer_of

    tokenizer_of(run)  # raises if the run has no tokenizer
    contents = {}
    for name in (RunFile.CONFIG, *TOKENIZER_FILES):
        # A run may lack some of these files.
        with readable(run / name), suppress(FileNotFoundError):
            contents[name] = read_bytes(run / name, LARGEST_COPIED_FILE)
    return contents


@contextmanager
def needing_interop(command: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"diffllm {command} needs transformers 5: {error}; run "
            "pip install -c constraints.txt -e '.[interop]'"
        ) from error


def export_command(argv: list[str]) -> None:
    args = parse(ExportArguments, argv, EXPORT_USAGE)
    from diffllm.checkpoint.hf.safetensors import DTYPES, check_form

    if args.format != "hf":
        raise ConfigError(f"format={args.format} is unknown; the only format is hf")
    check_form(args.dtype, args.max_shard_size)
    with needing_interop("export"):
        from diffllm.interop.export import export
    run, out = Path(args.run), Path(args.out)
    dtype = DTYPES[args.dtype]
    layout, step = export(run, out, args.step, dtype, args.max_shard_size, args.own)
    if args.json:
        echo_json({"step": step, "architecture": layout.architecture, "out": str(out)})
    else:
        echo(f"step {step} as {layout.architecture}: {out}")


def import_command(argv: list[str]) -> None:
    args = parse(ImportArguments, argv, IMPORT_USAGE)
    from diffllm.config.matching import totals
    from diffllm.config.words import printed_override
    from diffllm.data.tokenizer import Tokenizer, eos_text, guesses_eos, tokenizer_of

    with needing_interop("import"):
        from diffllm.interop.imports import import_model
    out = Path(args.out)
    origin = import_model(args.hf, out, args.attention, args.perturb, args.seed)
    parameters = totals(origin.model)["params"]
    copy = Tokenizer.from_file(tokenizer_of(out))
    if args.json:
        facts = {
            "model": origin.name,
            "attention": origin.attention,
            "parameters": parameters,
            "eos_token": copy.eos_token,
            "bos_token": origin.bos_token,
            "out": str(out),
        }
        echo_json(facts)
        return
    size = f"{parameters / 1e6:,.2f}M parameters"
    echo(f"{origin.name}: {size}, {origin.attention}: {out}")
    is_guessed = guesses_eos(str(origin.tokenizer), None)
    echo(eos_text(copy.eos_token, copy.eos_id, is_guessed))
    if origin.bos_token:
        echo(
            f"BOS: {origin.bos_token}, before each text in generate, evaluate and exports, but not "
            "in training data"
        )
    weights = printed_override("resume", f"weights:{out}")
    echo(f"python train.py {weights} data.paths=[...] trains with these weights")
