"""How long a step waits for its data, with shards that fit into memory and with more than that.

    python benchmarks/loading.py [--gigabytes 4] [--memory 1] [--written] [--tokens-per-second 4e5]
        [--workers 0 1 2] [--seconds 20] [--json FILE]

A consumer takes a node's tokens at a rate, as a step on its GPUs would: it sleeps for what the step
would take, and what it waits for the next batch beyond that is counted. Its samples lie anywhere
in the shards, as in training. A loader alone, without a consumer that sleeps, says how many tokens
a second there could be.

The shards have --gigabytes; they are sparse files, which cost page cache but no reading from disk,
or with --written of random tokens. --memory limits what processes and page cache may take together,
by a control group, which root alone may make: shards of several times that never stay in memory.
"""

import argparse
import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from measuring import markdown, write

from diffllm.data.loader import TrainLoader
from diffllm.data.samples import ShuffledSequences
from diffllm.data.sequences import StreamSequences
from diffllm.data.shards import FORMAT_VERSION, SHARD_TOKENS, Manifest, Shard, Split, TokenStream
from diffllm.data.verified import identity_of, leave_mark

GROUP = Path("/sys/fs/cgroup")
SEQ_LEN = 4096
WARMUP = 5
"""Steps before those that count."""


def make_shards(directory: Path, gigabytes: float, written: bool) -> TokenStream:
    """Write so many bytes of shards that are known to be whole."""
    shards = []
    for number in range(max(1, round(gigabytes * 1e9 / (2 * SHARD_TOKENS)))):
        path = directory / f"train-{number:05d}.bin"
        with path.open("wb") as file:
            if written:
                tokens = np.random.default_rng(number).integers(0, 2**16, SHARD_TOKENS, np.uint16)
                file.write(tokens.data)
                os.fsync(file.fileno())
            file.truncate(2 * SHARD_TOKENS)
        shards.append(
            Shard(path.name, SHARD_TOKENS, hashlib.sha256(path.name.encode()).hexdigest())
        )
        leave_mark(path, shards[-1].sha256, identity_of(path))
    tokens_in_all = SHARD_TOKENS * len(shards)
    manifest = Manifest(
        FORMAT_VERSION, "made here", "", "", 2**16, 0, "uint16", 0, 0, 0.0,
        {"train": Split(1, tokens_in_all, 0, shards)},
    )  # fmt: skip
    manifest.save(directory)
    return TokenStream(directory, manifest, "train")


@contextlib.contextmanager
def limited(gigabytes: float) -> Iterator[None]:
    """Keep this process, its children and their page cache within so much memory; 0 for all."""
    if not gigabytes:
        yield
        return
    unified = (GROUP / "cgroup.controllers").exists()
    parent = GROUP if unified else GROUP / "memory"
    group = parent / f"diffllm-loading-{os.getpid()}"
    group.mkdir()
    limit = group / ("memory.max" if unified else "memory.limit_in_bytes")
    before = next(
        line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
        if (":memory:" in line) or (unified and line.startswith("0::"))
    )  # fmt: skip
    try:
        limit.write_text(str(int(gigabytes * 1e9)))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (parent / before.lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        with contextlib.suppress(OSError):
            group.rmdir()


def drop_page_cache(directory: Path) -> None:
    """Forget what of the shards is in memory."""
    for path in directory.glob("*.bin"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def consume(stream: TokenStream, workers: int, rate: float, seconds: float) -> dict[str, float]:
    """Take batches at a rate for so long; a rate of 0 takes them as they come.

    Returns the share of the time that was waited for data, and tokens a second.
    """
    batch = max(1, round(rate / SEQ_LEN / 4)) if rate else 24  # four steps a second
    step_seconds = batch * SEQ_LEN / rate if rate else 0.0
    samples = ShuffledSequences(StreamSequences(stream, SEQ_LEN), seed=0)
    loader = TrainLoader(samples, batch, batch, num_workers=workers)
    waited, steps, longest = 0.0, -WARMUP, 0.0
    started = time.perf_counter()
    while steps <= 0 or time.perf_counter() - started < seconds:
        asked = time.perf_counter()
        next(loader)
        took = time.perf_counter() - asked
        time.sleep(step_seconds)
        steps += 1
        if steps == 0:
            started = time.perf_counter()
        elif steps > 0:
            waited, longest = waited + took, max(longest, took)
    passed = time.perf_counter() - started
    loader.close()
    return {
        "waited": waited / passed, "longest_wait_s": longest, "steps": steps,
        "tokens_per_second": steps * batch * SEQ_LEN / passed,
    }  # fmt: skip


def main() -> None:
    """Measure, print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--memory", type=float, default=1.0)
    parser.add_argument("--written", action="store_true")
    parser.add_argument("--tokens-per-second", type=float, default=4e5)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows, results = [], []
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        stream = make_shards(Path(name), args.gigabytes, args.written)
        for memory in dict.fromkeys([0.0, args.memory]):
            for workers in args.workers:
                for rate in (args.tokens_per_second, 0.0):
                    drop_page_cache(Path(name))
                    with limited(memory):
                        found = consume(stream, workers, rate, args.seconds)
                    case = {"memory_gb": memory, "workers": workers, "rate": rate}
                    results.append({**case, **found})
                    rows.append(
                        [
                            f"{memory:g} GB" if memory else "all", str(workers),
                            f"{rate:,.0f}" if rate else "as they come",
                            f"{found['tokens_per_second']:,.0f}",
                            f"{found['waited']:.2%}" if rate else "",
                            f"{found['longest_wait_s'] * 1e3:.1f}",
                        ]
                    )  # fmt: skip
                    print(*rows[-1], sep="  ", flush=True)
    columns = ["memory", "workers", "asked, tokens/s", "got", "waited", "longest wait, ms"]
    print(markdown(columns, rows))
    if args.json:
        facts = {"gigabytes": args.gigabytes, "written": args.written, "seq_len": SEQ_LEN}
        write(args.json, torch.device("cpu"), results, **facts)


if __name__ == "__main__":
    main()
