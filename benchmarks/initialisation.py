"""Drawing initial values with one thread and with all, in turns in one process.

    python benchmarks/initialisation.py [--model dense_1p3b] [--threads N] [--json FILE]

The model is built once and its parameters are filled again and again, so that neither the first
touch of memory nor torch's own initialisation counts. CPU seconds tell about the work itself where
others use the machine.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from measuring import ratios, write

from diffllm import build_model, load_config
from diffllm.model.transformer import Transformer


def filled(model: Transformer, threads: int) -> tuple[float, float]:
    """Wall and CPU seconds that filling all parameters takes."""
    torch.set_num_threads(threads)
    wall, cpu = time.perf_counter(), time.process_time()
    model.reset_parameters()
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="dense_1p3b")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = build_model(load_config([f"model={args.model}"]).model)
    n_params = sum(param.numel() for param in model.parameters())
    rounds = [(filled(model, 1), filled(model, args.threads)) for _ in range(args.rounds)]
    one, many = ([wall for wall, _ in times] for times in zip(*rounds, strict=True))
    ratio = ratios(one, many)["median"]
    print(
        f"{args.model}, {n_params / 1e9:.3f}B parameters: {statistics.median(one):.2f} s with one "
        f"thread, {statistics.median(many):.2f} s with {args.threads}, {ratio:.2f} times as fast "
        f"(median of {args.rounds}); CPU seconds of the last round "
        f"{rounds[-1][0][1]:.2f} and {rounds[-1][1][1]:.2f}"
    )
    if args.json:
        results = [
            {
                "one": {"seconds": a[0], "cpu_seconds": a[1]},
                "many": {"seconds": b[0], "cpu_seconds": b[1]},
            }
            for a, b in rounds
        ]
        facts = {"model": args.model, "parameters": n_params, "ratio": ratio}
        write(args.json, torch.device("cpu"), results, **facts, threads=args.threads)


if __name__ == "__main__":
    main()
