"""diffllm import hf=<dir or owner/name> out=<dir> [key=value ...]: a model from elsewhere as a run.

Llama, Qwen3, Qwen3Moe, DiffLlama and our own exports come in as they are, from safetensors; a run
of ours may be named too. No code of the model's is run, and no pickle read.

attention=diff_v2 makes a model of softmax attention one of DIFF V2 with the same function: lambda
is 1/2, both queries of a pair are equal. perturb=0.01 moves the second ones by noise of a hundredth
of the query weights' size. attention=standard makes softmax attention with twice the heads of DIFF
V2 whose lambda is constant.

diffllm import hf=Qwen/Qwen3-0.6B@main out=outputs/qwen3
diffllm import hf=my-llama out=outputs/llama-v2 attention=diff_v2
python train.py resume=weights:outputs/llama-v2 data.paths=[a.parquet] seq_len=2048 optim.lr=1e-5
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from diffllm.cli.arguments import a_path, parse, plugins_field
from diffllm.cli.extras import needing_interop
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo


@dataclass
class Arguments:
    """The arguments of `diffllm import`."""

    hf: str = field(metadata=a_path("directory of transformers, a run, or owner/name[@revision]"))
    out: str = field(metadata=a_path("new run directory"))
    attention: str | None = field(
        default=None, metadata={"help": "convert: diff_v2, or standard from DIFF V2"}
    )
    perturb: float = field(
        default=0.0, metadata={"help": "noise on second queries, over the weights' size"}
    )
    seed: int = field(default=0, metadata={"help": "of that noise"})
    plugins: str = plugins_field()

    def __post_init__(self) -> None:
        if not 0 <= self.perturb <= 1:
            raise ConfigError(f"perturb={self.perturb} must be between 0 and 1")


def main(argv: list[str]) -> None:
    """Write the run directory; print what it is, and how to go on from it."""
    args = parse(Arguments, argv, __doc__)
    with needing_interop("import"):
        from diffllm.interop.imports import import_model
    out = Path(args.out)
    origin = import_model(args.hf, out, args.attention, args.perturb, args.seed)
    model = origin.model
    echo(
        f"{origin.attention}, {model.n_layers} layers of {model.dim}: {out}\n"
        f"python train.py resume=weights:{shlex.quote(str(out))} data.paths=[...] goes on from it"
    )
