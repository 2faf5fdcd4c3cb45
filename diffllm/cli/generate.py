"""diffllm generate run=<dir> prompt="...": continue prompts with a trained run."""

from dataclasses import dataclass, field

import torch

from diffllm.cli.arguments import a_path, parse, plugins_field
from diffllm.core.bounds import bounded, check_bounds
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo
from diffllm.evaluation.load import load_model
from diffllm.model.generate import generate


@dataclass
class Arguments:
    """The arguments of `diffllm generate`."""

    run: str = field(metadata=a_path("run directory"))
    prompt: list[str] = field(metadata={"help": "text to continue, taken verbatim; repeatable"})
    max_new_tokens: int = bounded(128, help="tokens to add at most", least=1)
    temperature: float = bounded(0.8, help="0 takes the likeliest token", least=0, most=1e6)
    top_p: float = bounded(0.95, help="nucleus to sample from", above=0, most=1)
    seed: int = bounded(0, help="of the sampling", least=-(2**63), most=2**63 - 1)
    step: int = bounded(0, help="checkpoint; 0 is the newest whole one", least=0)
    plugins: str = plugins_field()

    def __post_init__(self) -> None:
        check_bounds("", self)


def main(argv: list[str]) -> None:
    """Print the prompt and its continuation."""
    args = parse(Arguments, argv, __doc__)
    model, tokenizer = load_model(args.run, args.step)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts = [tokenizer.encode(prompt) or [tokenizer.eos_id] for prompt in args.prompt]
    longest = max(map(len, prompts))
    if longest >= model.cfg.seq_len:
        raise ConfigError(
            f"the prompt has {longest} tokens, but the model reads {model.cfg.seq_len} in all"
        )
    texts = generate(
        model.to(device),
        prompts,
        args.max_new_tokens,
        args.temperature,
        args.top_p,
        args.seed,
        vocab_size=tokenizer.vocab_size,
        stop_token=tokenizer.eos_id,
    )
    echo(f"\n{'-' * 79}\n".join(tokenizer.decode(text) for text in texts))
