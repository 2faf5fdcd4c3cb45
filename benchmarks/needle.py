"""The time that needle questions of a length take, and what it goes to.

    python benchmarks/needle.py [--length 8192] [--cases 250] [--model mini] [--attention standard]
                                [--threads 2] [--json FILE]

The model has random weights, and the tokenizer is trained on other questions. Times are of making
and encoding the questions, and of scoring all candidates; operators are those of one text's
questions, by the profiler. Peak memory is of the process.
"""

import argparse
import json
import random
import resource
import tempfile
import time
from pathlib import Path

import torch
from measuring import write
from torch.profiler import ProfilerActivity, profile

from diffllm import build_model, load_config
from diffllm.data import Tokenizer
from diffllm.data.preparation.train_tokenizer import train_tokenizer
from diffllm.evaluation.answers import questions
from diffllm.evaluation.scoring import score
from diffllm.tasks.task import TASKS

NEEDLES = {"needles": 6, "asked": 2}
ROOM = 64
"""Tokens that levels stay below the model's length."""


def words_of(text: str) -> int:
    return len(text.split())


def own_tokenizer(vocab_size: int) -> Tokenizer:
    """Train a tokenizer on questions of another seed."""
    level = {"length": 400, **NEEDLES}
    texts = [e.prompt for e in TASKS["needle"].examples(level, 300, "tokenizer", words_of)]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "tokenizer.model"
        file.write_bytes(train_tokenizer((text for text in texts), vocab_size, 1))
        return Tokenizer.from_file(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--cases", type=int, default=250)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--attention", default="standard")
    parser.add_argument("--vocab-size", type=int, default=400, help="of the tokenizer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    random.seed(0)
    tokenizer = own_tokenizer(args.vocab_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words = [f"model={args.model}", f"attention={args.attention}", f"seq_len={args.length}"]
    model = build_model(load_config(words).model).to(device).eval()
    level = {"length": args.length - ROOM, **NEEDLES}
    settings = {"levels": [level], "examples": [args.cases], "seed": 0}
    began = time.perf_counter()
    asked = [q for _, _, q in questions(TASKS["needle"], settings, tokenizer, args.length)]
    encoded = time.perf_counter()
    score(model, asked)
    if device.type == "cuda":
        torch.cuda.synchronize()
    scored = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        score(model, asked[: NEEDLES["needles"]])
    events = profiled.key_averages()
    whole = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:5]
    lengths = [len(question.context) for question in asked]
    results = {
        "model": args.model,
        "attention": args.attention,
        "parameters": sum(p.numel() for p in model.parameters()),
        "cases": len(asked),
        "tokens": round(sum(lengths) / len(lengths)),
        "examples_and_encoding_s": round(encoded - began, 1),
        "scoring_s": round(scored - encoded, 1),
        "operators_of_a_text": {
            event.key: round(event.self_cpu_time_total / whole, 3) for event in largest
        },
        "peak_memory_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
    }
    print(json.dumps(results, indent=2))
    if args.json:
        write(args.json, device, results)


if __name__ == "__main__":
    main()
