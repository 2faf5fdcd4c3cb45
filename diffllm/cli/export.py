"""diffllm export run=<dir> out=<dir> [key=value ...]: a checkpoint as transformers opens it.

Softmax attention becomes Llama, or Qwen3 with QK-norm, Qwen3Moe where a mixture fits its rules;
DIFF V1 becomes DiffLlama. Everything else comes with a modelling file of ours in the directory, for
trust_remote_code=True. Beside safetensors there are a fast tokenizer and a model card.

diffllm export run=outputs/mine out=mine-hf
diffllm export run=outputs/mine step=2000 out=mine-hf dtype=bf16
"""

from dataclasses import dataclass, field
from pathlib import Path

from diffllm.checkpoint.hf.safetensors import DTYPES, check_form
from diffllm.cli.arguments import a_path, parse, plugins_field
from diffllm.cli.extras import needing_interop
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo


@dataclass
class Arguments:
    """The arguments of `diffllm export`."""

    run: str = field(metadata=a_path("run directory"))
    out: str = field(metadata=a_path("new directory"))
    step: int = field(default=0, metadata={"help": "checkpoint; 0 is the newest whole one"})
    format: str = field(default="hf", metadata={"help": "hf: of the transformers library"})
    dtype: str = field(default="float32", metadata={"help": "float32 or bf16"})
    own: bool = field(
        default=False, metadata={"help": "our own modelling file even where another fits"}
    )
    max_shard_size: str = field(default="5GB", metadata={"help": "of a file, as in 500MB or 5GB"})
    plugins: str = plugins_field()

    def __post_init__(self) -> None:
        if self.format != "hf":
            raise ConfigError(f"format={self.format} must be hf")
        check_form(self.dtype, self.max_shard_size)


def main(argv: list[str]) -> None:
    """Write the directory; print what it is."""
    args = parse(Arguments, argv, __doc__)
    with needing_interop("export"):
        from diffllm.interop.export import export
    run, out = Path(args.run), Path(args.out)
    layout, step = export(run, out, args.step, DTYPES[args.dtype], args.max_shard_size, args.own)
    echo(f"step {step} as {layout.architecture}: {out}")
