"""The cost of packing documents, once for a corpus and then for each sequence.

    python benchmarks/packing.py [--documents 1000000] [--seq-len 512 2048 8192] [--json FILE]

Documents have lognormal lengths, 600 tokens in the mean. Times are of this process alone: to find
where documents end, to pack them, and to write the whole plan, the tokens once hashed. Sequences
are read in random order, eight at a time, those of a stream and packed ones in turns.
"""

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import write

from diffllm.data import TokenStream
from diffllm.data.packing.best_fit import best_fit_decreasing
from diffllm.data.packing.pieces import BLOCK, pieces, windows
from diffllm.data.packing.plan import WINDOW, Plan, slots, write_plan
from diffllm.data.packing.sequences import PackedSequences
from diffllm.data.sequences import Sequences, StreamSequences
from diffllm.data.shards import Manifest, Shard, Split

MEAN, SIGMA, VOCAB, EOS = 600, 1.2, 50_000, 0
READ, ROUNDS = 256, 8


def corpus(documents: int, directory: Path) -> TokenStream:
    """Write documents of random tokens, and open them."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, documents).astype(np.int64) + 1
    shards = []
    for number, part in enumerate(np.array_split(lengths, -(-documents // 50_000))):
        tokens = rng.integers(1, VOCAB, part.sum(), np.uint16)
        tokens[np.cumsum(part) - 1] = EOS
        file = directory / f"train-{number:05d}.bin"
        file.write_bytes(tokens.astype("<u2").tobytes())
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shards.append(Shard(file.name, len(tokens), digest))
    splits = {"train": Split(documents, int(lengths.sum()), 0, shards)}
    manifest = Manifest(1, "random", "", "", VOCAB, EOS, "uint16", 0, 0, 0.0, splits)
    return TokenStream(directory, manifest, "train")


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that a call takes, and what it returns."""
    start = time.perf_counter()
    found = what()
    return time.perf_counter() - start, found


def read_seconds(sequences: Sequences, places: np.ndarray) -> float:
    """Return the seconds that a sequence takes to read."""
    batches = places.reshape(-1, 8) % len(sequences)
    return timed(lambda: [sequences.read(batch) for batch in batches])[0] / len(places)


def measure(stream: TokenStream, seq_len: int, directory: Path) -> dict[str, float]:
    """Measure one length of sequences."""
    found, parts = timed(lambda: list(windows(pieces(stream, EOS, seq_len), WINDOW)))
    packing, _ = timed(
        lambda: [best_fit_decreasing(slots(part, seq_len), seq_len) for part in parts]
    )
    directory.mkdir()
    whole, _ = timed(lambda: write_plan(stream, EOS, seq_len, directory))
    packed = PackedSequences(stream, EOS, seq_len, Plan(directory))
    whole_sequences = StreamSequences(stream, seq_len)
    rng = np.random.default_rng(1)
    rounds = []
    for round_ in range(ROUNDS + 1):
        places = rng.integers(0, 2**40, READ)
        both = read_seconds(whole_sequences, places), read_seconds(packed, places)
        rounds += [both] if round_ else []
    plain, own = np.median(rounds, axis=0)
    counts = packed.plan.counts
    return {
        "seq_len": seq_len,
        "tokens": counts.tokens,
        "pieces": sum(part.shape[1] for part in parts),
        "find_ends_s": found,
        "pack_s": packing,
        "whole_plan_s": whole,
        "padding_share": counts.padding_share,
        "read_stream_us": 1e6 * plain,
        "read_packed_us": 1e6 * own,
        "read_packed_over_stream": float(np.median([b / a for a, b in rounds])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=int, default=10**6)
    parser.add_argument("--seq-len", type=int, nargs="*", default=[512, 2048, 8192])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        stream = corpus(args.documents, directory)
        for start in range(0, len(stream), BLOCK):  # hashed, and read into memory
            stream.tokens(start, min(start + BLOCK, len(stream)))
        results = [measure(stream, n, directory / str(n)) for n in args.seq_len]
    for each in results:
        print(", ".join(f"{name} {value:,.4g}" for name, value in each.items()))
    if args.json:
        write(args.json, torch.device("cpu"), results, documents=args.documents)


if __name__ == "__main__":
    main()
