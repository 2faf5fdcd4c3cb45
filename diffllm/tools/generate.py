"""diffllm generate run=<dir> prompt="...": continue prompts with a trained run."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from diffllm.checkpoint import check_parameters, find_checkpoint, load_tensors, read_state
from diffllm.config.saved import load_run_config
from diffllm.data import Tokenizer
from diffllm.errors import ConfigError
from diffllm.model import Transformer
from diffllm.model.attention.ops import Backend
from diffllm.model.generate import generate
from diffllm.tools.arguments import parse


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


def load_model(run: Path, step: int = 0) -> Transformer:
    """Load a run's decoder at a step (0: the newest), float32 on the default device.

    Raises CheckpointError without a run or such a checkpoint, or if it is damaged or of another
    model.
    """
    cfg = load_run_config(run)
    path = find_checkpoint(run, step)
    cfg.model.attention.backend = Backend.sdpa  # the run's may not exist here
    model = Transformer(cfg.model)
    params = dict(model.named_parameters())
    check_parameters(path, read_state(path), params)
    model.reset_parameters()
    tensors = {**{n: p.detach() for n, p in params.items()}, **model.router_state()}
    load_tensors(path, {f"model.{n}": tensor for n, tensor in tensors.items()}, no_dist=True)
    return model


def main(argv: list[str]) -> None:
    """Print the prompt and its continuation."""
    args = parse(Arguments, argv, __doc__)
    if not args.temperature >= 0 or not 0 < args.top_p <= 1 or args.max_new_tokens < 1:
        raise ConfigError("temperature must be >= 0, top_p in (0, 1], max_new_tokens >= 1")
    if not -(2**63) <= args.seed < 2**63:
        raise ConfigError(f"seed={args.seed} must fit into 64 bits")
    run = Path(args.run)
    model = load_model(run, args.step)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = Tokenizer.from_file(run / "tokenizer.model")
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
