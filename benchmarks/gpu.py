"""Everything that wants a GPU, in one command.

    python benchmarks/gpu.py [--stage A B C] --out DIR [--resume] [--only TEXT]
    python benchmarks/gpu.py --device cpu --small --out DIR       the same functions on a CPU

A: the machine, the attention kernels that are chosen, the tests marked `gpu`. B: training steps of
dense models, ours in every variant and peers, sweeps, and a step broken down. C: mixtures, masked
documents, decoding over a growing context, a run of train.py that is stopped and continued, cost of
diagnostics, peak memory. No stage means all.

A measurement is a process of its own with a time limit. One that crashes, hangs or runs out of
memory is recorded as such, and the next one begins. Contestants of a group are built side by side,
each in its own process, make their first steps (which compile) a few at a time, and then take
turns: a contestant is told to make some steps while the others wait, gives its free memory back,
and the next one's turn begins; every second round the order is reversed. Ratios are paired by
round. What memory cannot hold side by side runs alone.

A stage ends by itself after --limit seconds: what it did not begin is left, and named. Every
measurement is appended to DIR/A.jsonl, B.jsonl or C.jsonl as it is made, with its key: the content
of all sources, torch's version, the device's name and the measurement's config. --resume skips what
has succeeded with the same key. The last output is a table of all that is in DIR, also written to
DIR/table.md; what the processes printed is in DIR/logs/.

A machine without this project's packages, and without the datasets library:

    make gpu-wheels gpu-data          # here: wheels/ and gpu-data/, which git ignores
    pip install --no-index --no-deps --find-links wheels wheels/*.whl        # there, once
    python benchmarks/gpu.py --stage A --out gpu-results
"""

import argparse
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from harness.records import Records, code_hash  # noqa: E402
from harness.running import Runner  # noqa: E402
from harness.stages import GPU, SMALL, STAGES, Sizes, stage  # noqa: E402
from harness.table import table  # noqa: E402
from harness.worker import Worker  # noqa: E402

from diffllm.distributed.launcher import set_variables  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="shapes and repeats for a CPU")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--only", default="", help="measurements whose name holds this")
    parser.add_argument("--limit", type=float, default=450, help="seconds a stage, about")
    args = parser.parse_args()
    sizes = SMALL if args.small else GPU
    if args.device == "cpu" and not args.small:
        parser.error("--device cpu goes with --small: the other shapes are a GPU's")
    names = [item.name for name in args.stage for item in stage(name, sizes, args.out)]
    if not any(args.only in name for name in names):
        parser.error(
            f"--only {args.only}: no measurement is called so; there are {', '.join(names)}"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    set_variables()  # as train.py
    # Several processes compile at once.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    stamp = stamped(args.device, args.out)
    left = []
    for name in args.stage:
        left += run_stage(name, sizes, args, stamp)
    text = table(args.out)
    (args.out / "table.md").write_text(text)
    print(f"\n{text}")
    if left:
        print(f"no time was left for: {', '.join(left)}; --resume goes on")
    return 0


def run_stage(
    name: str, sizes: Sizes, args: argparse.Namespace, stamp: dict[str, str]
) -> list[str]:
    """Measure a stage; the names of what there was no time for."""
    runner = Runner(
        Records(args.out / f"{name}.jsonl", stamp, args.resume),
        args.device,
        args.out / "logs",
        time.monotonic() + args.limit,
        args.only,
    )
    runner.run(stage(name, sizes, args.out))
    return runner.left


def stamped(device: str, out: Path) -> dict[str, str]:
    """The code, torch and device that this run measures with.

    Another process asks the device, so that this one takes no memory of it.
    """
    worker = Worker(device, out / "start.log")
    reply = worker.ask("harness.machine.facts", {}, 180)
    worker.close()
    if not reply.ok:
        raise SystemExit(
            f"no {device} device ({reply.result}); --device cpu --small runs the same functions"
        )
    return {
        "code": code_hash(),
        "torch": reply.result["torch"],
        "device": reply.result["device"],
    }


if __name__ == "__main__":
    sys.exit(main())
