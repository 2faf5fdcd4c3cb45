"""Measure training, decoding, memory and kernels on a GPU, in one command.

    python benchmarks/gpu.py [--stage A B C] --out DIR [--resume] [--only TEXT]
    python benchmarks/gpu.py --device cpu --small --out DIR       the same functions on a CPU

Stages, by default all in this order:
A: the machine, the chosen attention kernels, the tests marked `gpu`, peak memory, single settings.
B: training steps of dense models for all variants and peers; predicted and measured time by part.
C: mixtures, masked documents, decoding over a growing context, a stopped and resumed run of
train.py, the overhead of diagnostics.

Each measurement runs in a separate process with a time limit. If a measurement crashes, hangs or
runs out of memory, the script records the failure and continues. Each result is appended to
DIR/results.jsonl at once, with a hash of all sources, torch's version and the device. --resume
skips measurements that succeeded with equal arguments, sources, version and device. The tables of
all results are printed and written to DIR/table.md; DIR/logs/ contains the measurements' output.
Measurements share compiled graphs in gpu-cache/, which git ignores; so `first_steps_s` depends on
earlier measurements. To use the graphs on another machine, copy DIR/compiled.tar.gz to gpu-cache/.

For a machine without internet access, packages and data:

    make gpu-wheels gpu-data          # on this machine: wheels/ and gpu-data/, which git ignores
    pip install --no-index --no-deps --find-links wheels wheels/*.whl        # on the other machine
    python benchmarks/gpu.py --stage A --out gpu-results
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from harness import compile_cache  # noqa: E402
from harness.process import call  # noqa: E402
from harness.running import code_hash, run, table  # noqa: E402
from harness.stages import STAGES, stage  # noqa: E402

from diffllm.distributed.launcher import set_variables  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="use shapes and repeats for a CPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only", default="", help="run only measurements whose name contains this")
    parser.add_argument("--limit", type=float, default=540, help="approximate total seconds")
    args = parser.parse_args()
    end = time.monotonic() + args.limit
    if args.device == "cpu" and not args.small:
        parser.error("--device cpu needs --small, because the default shapes are for a GPU")
    items = [x for name in args.stage for x in stage(name, args.small, args.out)]
    chosen = [item for item in items if args.only in item.name]
    if not chosen:
        names = ", ".join(item.name for item in items)
        parser.error(f"--only {args.only} matches no measurement; choose from {names}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # kills the running measurement
    set_variables()  # the same environment as train.py
    compile_cache.restore(compile_cache.FOLDER)
    os.environ[compile_cache.VARIABLE] = str(compile_cache.FOLDER)
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A separate process queries the device, so that this process uses none of its memory.
    status, found = call("harness.machine.facts", {}, 180)
    if status != "ok" or found["type"] != args.device:
        raise SystemExit(f"error: no {args.device} device: {found}; try --device cpu --small")
    stamp = {"code": code_hash(), "torch": found["torch"], "device": found["device"]}
    left = run(chosen, args.out, stamp, args.resume, end)
    text = table(args.out)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    print(f"\n{text}")
    compile_cache.pack(compile_cache.FOLDER, args.out / compile_cache.ARCHIVE)
    if left:
        print(f"not measured before --limit: {', '.join(left)}; continue with --resume")


if __name__ == "__main__":
    main()
