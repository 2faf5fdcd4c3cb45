"""Time of a decoding step by context length: each variant against standard attention.

    python benchmarks/decoding.py [--rounds 40] [--json benchmarks/results/NAME.json]

The decoder is `model=mini` (or --model) with random weights, batch 1; its caches hold random keys
and values up to the context length. The variants alternate in one process; a ratio is the median
over rounds of a variant's time over standard's in the same round.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")  # as train.py

import torch

from diffllm.config import load_config
from diffllm.model import Transformer, build_model
from diffllm.model.attention.base import KVCache

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
LENGTHS = (512, 1024, 2048, 4096, 8192)


def filled_caches(model: Transformer, length: int, dtype: torch.dtype) -> list[KVCache]:
    """Caches that hold `length` positions, with room for one more."""
    caches = model.new_caches(1, length + 1, dtype)
    for cache in caches:
        cache.k.normal_()
        cache.v.normal_()
        cache.length = length
    return caches


@torch.no_grad()
def step_ms(model: Transformer, caches: list[KVCache], token: torch.Tensor) -> float:
    """Milliseconds of one token; the caches are put back."""
    length = caches[0].length
    if token.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    model(token, caches=caches)
    if token.is_cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    for cache in caches:
        cache.length = length
    return 1e3 * elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--model", default="mini")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.set_default_device(device)
    models = {}
    for variant in VARIANTS:
        cfg = load_config([f"model={args.model}", f"attention={variant}", "seq_len=8193"])
        models[variant] = build_model(cfg.model).to(dtype).eval()
    token = torch.zeros(1, 1, dtype=torch.int64)
    results: dict[int, dict[str, dict[str, float]]] = {}
    print(f"{'context':>8}" + "".join(f"{name:>22}" for name in VARIANTS))
    for length in LENGTHS:
        caches = {name: filled_caches(model, length, dtype) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for round_ in range(args.rounds + 5):
            for name, model in models.items():
                ms = step_ms(model, caches[name], token)
                if round_ >= 5:
                    times[name].append(ms)
        results[length] = {}
        for name in VARIANTS:
            ratios = sorted(a / b for a, b in zip(times[name], times["standard"], strict=True))
            results[length][name] = {
                "ms": statistics.median(times[name]),
                "ratio": statistics.median(ratios),
                "ratio_low": ratios[len(ratios) // 4],
                "ratio_high": ratios[3 * len(ratios) // 4],
            }
        cells = (f"{r['ms']:.2f} ms x{r['ratio']:.2f}" for r in results[length].values())
        print(f"{length:>8}" + "".join(f"{cell:>22}" for cell in cells))
    if args.json:
        cuda = device.type == "cuda"
        meta = {
            "device": torch.cuda.get_device_name()
            if cuda
            else f"{torch.get_num_threads()} CPU cores",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "model": args.model,
            "dtype": str(dtype).removeprefix("torch."),
            "rounds": args.rounds,
        }
        args.json.write_text(json.dumps({**meta, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
