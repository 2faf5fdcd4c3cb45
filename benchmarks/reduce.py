"""Time of a step that reduces gradients once against one that does after every micro-batch.

    python benchmarks/reduce.py [overrides] [--ranks 2] [--rounds 12] [--json FILE]

The two kinds of steps alternate in the same processes, of one thread each, over gloo on this
machine. The ratio is that of `parallel.reduce=last` over `every` in the same round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measuring import ratios, with_quartiles, write

from diffllm.config import load_config
from diffllm.distributed.mesh import Reduce
from diffllm.distributed.weights import Sharded
from diffllm.training.build import build
from diffllm.training.step import train_step

WARMUP = 2


def measure(rank: int, store: str, args: argparse.Namespace, results: Any) -> None:
    """Alternate both kinds of steps on one rank; rank 0 puts their seconds into `results`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, args.ranks), rank=rank, world_size=args.ranks
    )
    cfg = load_config(args.overrides)
    t = build(cfg, torch.device("cpu"))
    assert isinstance(t.weights, Sharded)
    micro, count = cfg.micro_batches(args.ranks)
    seconds: dict[Reduce, list[float]] = {kind: [] for kind in Reduce}
    for round_ in range(args.rounds + WARMUP):
        for kind in Reduce:
            t.weights.reduce = kind
            tokens = torch.randint(0, cfg.model.vocab_size, (count, micro, cfg.seq_len + 1))
            dist.barrier()
            start = time.perf_counter()
            train_step(t, ((part[:, :-1], part[:, 1:]) for part in tokens), 0)
            dist.barrier()
            if round_ >= WARMUP:
                seconds[kind].append(time.perf_counter() - start)
    if rank == 0:
        results.put({kind.name: values for kind, values in seconds.items()})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.overrides = [
        "model=mini",
        "seq_len=256",
        "global_batch_size=8",
        "micro_batch_size=1",
        *args.overrides,
    ]
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        ranks = (str(Path(directory) / "store"), args, results)
        mp.spawn(measure, ranks, nprocs=args.ranks, join=True)
    seconds = results.get()
    medians = {kind: statistics.median(values) for kind, values in seconds.items()}
    print(
        f"{args.ranks} ranks, {' '.join(args.overrides)}: last over every (quartiles) "
        f"{with_quartiles(ratios(seconds['last'], seconds['every']))}; "
        f"last {1e3 * medians['last']:.0f} ms, every {1e3 * medians['every']:.0f} ms"
    )
    if args.json:
        facts = {"overrides": args.overrides, "ranks": args.ranks, "rounds": args.rounds}
        write(args.json, torch.device("cpu"), {"seconds": seconds}, **facts)


if __name__ == "__main__":
    main()
