"""diffllm generate run=<dir> prompt="...": continue prompts with a trained run."""

from dataclasses import dataclass

from diffllm.cli.arguments import RunArguments, argument, parse
from diffllm.core.errors import ConfigError
from diffllm.core.printing import echo, echo_json


@dataclass
class GenerateArguments(RunArguments):
    prompt: list[str] = argument("text to continue, taken verbatim; repeatable")
    max_new_tokens: int = argument("maximum tokens to add", 128, least=1)
    temperature: float = argument("0: always the most likely token", 0.8, least=0, most=1e6)
    top_p: float = argument("probability mass of nucleus sampling", 0.95, above=0, most=1)
    seed: int = argument("seed of the sampling", 0, least=-(2**63), most=2**63 - 1)
    step: int = argument("step of the checkpoint; 0: the newest complete checkpoint", 0, least=0)


def generate_command(argv: list[str]) -> None:
    args = parse(GenerateArguments, argv, __doc__)
    import torch

    from diffllm.evaluation.load import load_model
    from diffllm.model.generate import generate

    model, tokenizer = load_model(args.run, args.step)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts = []
    for prompt in args.prompt:
        tokens = tokenizer.encode(prompt)
        if not tokens:
            # An empty prompt becomes an EOS, after which a document starts.
            tokens = [tokenizer.eos_id]
        prompts.append(tokens)
    longest = max(map(len, prompts))
    if longest >= model.cfg.seq_len:
        raise ConfigError(
            f"the longest prompt has {longest} tokens, but must be shorter than "
            f"seq_len={model.cfg.seq_len} of the run"
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
    decoded = [tokenizer.decode(text) for text in texts]
    if args.json:
        items = []
        for prompt, text in zip(args.prompt, decoded, strict=True):
            items.append({"prompt": prompt, "text": text})
        echo_json(items)
    else:
        echo(f"\n{'-' * 79}\n".join(decoded))
