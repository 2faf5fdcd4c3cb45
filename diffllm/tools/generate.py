"""diffllm generate run=<dir> prompt="...": continue prompts with a trained run."""

from dataclasses import dataclass, field

import torch

from diffllm.errors import ConfigError
from diffllm.model.generate import generate
from diffllm.run.model import load_model
from diffllm.tools.arguments import parse, plugins_field


@dataclass
class Arguments:
    """The arguments of `diffllm generate`."""

    run: str = field(metadata={"help": "run directory"})
    prompt: list[str] = field(metadata={"help": "text to continue, taken verbatim; repeatable"})
    max_new_tokens: int = field(default=128, metadata={"help": "tokens to add at most"})
    temperature: float = field(default=0.8, metadata={"help": "0 takes the likeliest token"})
    top_p: float = field(default=0.95, metadata={"help": "nucleus to sample from"})
    seed: int = field(default=0, metadata={"help": "of the sampling"})
    step: int = field(default=0, metadata={"help": "checkpoint; 0 is the newest whole one"})
    plugins: str = plugins_field()


def main(argv: list[str]) -> None:
    """Print the prompt and its continuation."""
    args = parse(Arguments, argv, __doc__)
    if not args.temperature >= 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1:
        raise ConfigError("temperature must be >= 0, top_p in (0, 1], max_new_tokens >= 1")
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"seed={args.seed} must fit into 64 bits")
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
    print(f"\n{'-' * 79}\n".join(tokenizer.decode(text) for text in texts))
