"""Training speed of diffllm against other frameworks on the CPU.

    python benchmarks/peers.py --install                                   # once
    python benchmarks/peers.py --out benchmarks/results/peers_cpu.json     # about 40 minutes
    python benchmarks/peers.py --contestants diffllm LitGPT --segments A:bf16:eager --rounds 1

Every measurement is a process of its own. A round measures all contestants of a segment one after
the other; the order rotates. Ratios compare measurements of the same round and segment. `--install`
creates `.peers/NAME` for each framework: an environment that contains the framework without its
dependencies and reads torch and other shared packages from this project's environment. nanochat
needs no installation: `--nanochat DIR` names a checkout. `peer_worker.py` contains the contestants.

All contestants train on the same random tokens with float32 parameters, clip gradients at norm 1
and use AdamW. bf16 is autocast. These differences remain:

- diffllm: a guard that skips bad steps, gradient norms per tensor in float64, a schedule.
- diffllm trainer: all of train.py with its defaults: a loader process, diagnostics and log lines.
- Both also set MKL_CBWR=AVX2,STRICT, as every run does. Results repeat, but products are slower.
- torchtitan: a chunked loss and one product for q, k and v. Its attention is set to SDPA (its
  default needs a GPU), and a module with Triton kernels is replaced.
- OLMo-core: its trainer compiles only with CUDA. `apply_compile()` is called here instead.
- LitGPT: its trainer uses fused AdamW only with CUDA, so its AdamW is not fused.
- transformers: a plain loop with Llama, or with DiffLlama for `--attention diff_v1`.
- nanochat: a model with more parameters, squared ReLU and norms of queries and keys; AdamW and
  clipping replace its Muon optimizer.

`--attention` changes diffllm and, for diff_v1, transformers. The others always train standard
attention.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from measuring import markdown, ratios, write
from shapes import positive

from diffllm.run.provenance import git_state

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".peers"
WORKER = ROOT / "benchmarks" / "peer_worker.py"
REQUIREMENTS = {
    "torchtitan": "torchtitan==0.3.0 spmd_types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0",
    "OLMo-core": (
        "ai2-olmo-core==3.0.0 bettermap==1.3.1 boto3==1.44.8 botocore==1.44.8 cached_path==1.8.10 "
        "cffi==2.1.1 cryptography==50.0.2 dataclass-extensions==0.5.0 google-api-core==2.44.0 "
        "google-auth==2.63.0 google-cloud-core==2.8.0 google-cloud-storage==3.17.1 "
        "google-crc32c==1.9.0 google-resumable-media==2.11.0 jmespath==1.1.0 pycparser==3.12 "
        "s3transfer==0.19.3"
    ),
    "LitGPT": "litgpt==0.5.13 lightning==2.6.6 lightning-utilities==0.15.3 torchmetrics==1.9.0",
}
"""Each framework with the packages that it imports and that this project does not install."""
OURS, TRAINER = "diffllm", "diffllm trainer"
CONTESTANTS = (OURS, TRAINER, *REQUIREMENTS, "transformers", "nanochat")
SHAPES = {
    "A": {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 4, "ffn": 688, "vocab": 4096,
          "batch": 16, "seq": 256},
    "B": {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "ffn": 1376, "vocab": 16384,
          "batch": 4, "seq": 1024},
}  # fmt: skip
SEGMENTS = ("A:fp32:eager", "A:fp32:compiled", "A:bf16:eager", "A:bf16:compiled",
            "B:bf16:eager", "B:bf16:compiled")  # fmt: skip
LIMIT_S = 900
"""Seconds after which a measurement is stopped."""
Row = dict[str, Any]


def segment(text: str) -> str:
    """Read a segment, SHAPE:PRECISION:MODE, from a command line."""
    shape, precision, mode = text.split(":")
    if (
        shape not in SHAPES
        or precision not in ("fp32", "bf16")
        or mode not in ("eager", "compiled")
    ):
        raise ValueError
    return text


def python_of(contestant: str) -> Path:
    """Return the Python interpreter of a contestant."""
    folder = PEERS / contestant / "bin" / "python"
    return folder if contestant in REQUIREMENTS else Path(sys.executable)


def install(names: Iterable[str]) -> None:
    """Create the environments of the named frameworks; keep those with the same versions."""
    shared = [path for path in sys.path if path.endswith("-packages")]
    for name in names:
        folder, packages = PEERS / name, REQUIREMENTS[name].split()
        if missing(name, None) is None:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "project.pth").write_text("\n".join(shared))
        pip = [sys.executable, "-m", "pip", "--python", str(python_of(name)), "install", "-q"]
        # A resolver would install a second torch; the versions above need no resolver.
        subprocess.run([*pip, "--no-deps", *packages], check=True)
        (folder / "ready").write_text(REQUIREMENTS[name])
        print(f"{name}: installed in {folder}", flush=True)


def missing(contestant: str, nanochat: Path | None) -> str | None:
    """Return what to do before a contestant can run; None if it can run now."""
    if contestant in REQUIREMENTS:
        ready = PEERS / contestant / "ready"
        if not ready.exists() or ready.read_text() != REQUIREMENTS[contestant]:
            return f"not installed; run: python benchmarks/peers.py --install {contestant}"
    elif contestant == "transformers" and importlib.util.find_spec("transformers") is None:
        return "not installed; run: pip install -c constraints.txt transformers"
    elif contestant == "nanochat" and not (nanochat and (nanochat / "nanochat/gpt.py").exists()):
        return (
            "no checkout; run: git clone https://github.com/karpathy/nanochat DIR, "
            "and use --nanochat DIR"
        )
    return None


def measure(contestant: str, where: str, args: argparse.Namespace) -> Row:
    """Measure a contestant in a process of its own; an "error" replaces the result on failure."""
    shape, precision, mode = where.split(":")
    job = {
        "contestant": contestant,
        "shape": SHAPES[shape],
        "bf16": precision == "bf16",
        "compiled": mode == "compiled",
        "seconds": args.seconds,
        "threads": args.threads,
        "attention": args.attention,
        "corpus": str(PEERS / "corpus"),
        "nanochat": str(args.nanochat) if args.nanochat else None,
    }
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(args.threads)}
    env.pop("MKL_CBWR", None)  # peers run without it; the worker sets it for diffllm
    worker = [str(python_of(contestant)), str(WORKER), json.dumps(job)]
    process = subprocess.Popen(
        worker, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    row: Row = {"contestant": contestant, "segment": where}
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return row | {"error": f"no result within {LIMIT_S} s"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # compilers and loaders that are left
    if process.returncode:
        return row | {"error": (err.strip().splitlines() or ["no message"])[-1]}
    return row | json.loads(out.strip().splitlines()[-1])


def rounds(contestants: list[str], args: argparse.Namespace) -> Iterator[Row]:
    """Measure all contestants in all segments and rounds; report progress on stderr."""
    for number in range(args.rounds):
        for i, where in enumerate(args.segments):
            first = (number + i) % len(contestants)
            for name in contestants[first:] + contestants[:first]:
                row = {"round": number, **measure(name, where, args)}
                said = row.get("error") or f"{row['tokens_per_s']:,.0f} tokens/s"
                print(f"round {number + 1}, {where}, {name}: {said}", file=sys.stderr, flush=True)
                yield row


def summary(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Summarize rounds by segment and contestant.

    "tokens_per_s" and "ratio" contain median, min and max. The ratio is the speed of diffllm over
    the speed of the contestant in the same round; it is missing without a common round.
    """
    found: dict[str, dict[str, Row]] = {}
    for where in dict.fromkeys(row["segment"] for row in rows):
        speeds: dict[str, dict[int, Row]] = {name: {} for name in CONTESTANTS}
        for row in rows:
            if row["segment"] == where and "error" not in row:
                speeds[row["contestant"]][row["round"]] = row
        found[where] = {name: result(name, speeds) for name in CONTESTANTS if speeds[name]}
    return found


def result(name: str, speeds: dict[str, dict[int, Row]]) -> Row:
    """Summarize one contestant of a segment."""
    own, ours = speeds[name], speeds[OURS]
    values = [row["tokens_per_s"] for row in own.values()]
    found: Row = {
        "parameters": next(iter(own.values()))["parameters"],
        "rounds": len(values),
        "tokens_per_s": spread(values),
    }
    both = sorted(own.keys() & ours.keys())
    if both and name != OURS:
        found["ratio"] = paired(ours, own, both)
    if both and name == TRAINER:
        found["trainer_over_step"] = paired(own, ours, both)
    return found


def paired(over: dict[int, Row], under: dict[int, Row], both: list[int]) -> dict[str, float]:
    """Return the ratios of two contestants' speeds, paired by round."""
    return ratios(*([of[number]["tokens_per_s"] for number in both] for of in (over, under)))


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def text_of(values: dict[str, float] | None, form: str) -> str:
    """Format as median (minimum to maximum); empty for None."""
    if values is None:
        return ""
    median, low, high = (format(values[key], form) for key in ("median", "min", "max"))
    return f"{median} ({low} to {high})"


def tables(results: dict[str, dict[str, Row]]) -> Iterator[str]:
    """Yield a Markdown table of each segment, then one table with the ratios of all segments."""
    for where, of in results.items():
        rows = [
            [
                name,
                f"{found['parameters'] / 1e6:.2f}M",
                text_of(found["tokens_per_s"], ",.0f"),
                text_of(found.get("ratio"), ".2f"),
            ]
            for name, found in of.items()
        ]
        columns = [where, "parameters", "tokens per s (min to max)", f"{OURS} over (min to max)"]
        yield markdown(columns, rows)
    for title, key in ((f"{OURS} over", "ratio"), ("over the step alone", "trainer_over_step")):
        ratio_rows = [
            [name, *(text_of(of.get(name, {}).get(key), ".2f") for of in results.values())]
            for name in CONTESTANTS
        ]
        if ratio_rows := [row for row in ratio_rows if any(row[1:])]:
            yield markdown([title, *results], ratio_rows)


def instruction_sets() -> list[str]:
    """Return the AVX and AMX flags of the processor."""
    cpu = Path("/proc/cpuinfo")
    words = set(cpu.read_text().split()) if cpu.is_file() else set()
    return sorted(word for word in words if word.startswith(("avx", "amx")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", nargs="*", choices=REQUIREMENTS, help="default: all")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument(
        "--segments", nargs="+", type=segment, default=SEGMENTS, metavar="SHAPE:PRECISION:MODE",
        help="shape A or B; fp32 or bf16; eager or compiled",
    )  # fmt: skip
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="least time of a measurement")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--attention", default="standard", help="variant of diffllm")
    parser.add_argument("--nanochat", type=Path, metavar="DIR", help="a checkout of nanochat")
    parser.add_argument("--out", type=Path, help="a JSON file for results and all rounds")
    args = parser.parse_args()
    if args.install is not None:
        install(args.install or REQUIREMENTS)
        return
    contestants = []
    for name in args.contestants:
        if (reason := missing(name, args.nanochat)) is None:
            contestants.append(name)
        else:
            print(f"{name}: skipped, {reason}", file=sys.stderr)
    if not contestants:
        sys.exit("error: none of --contestants can run")
    torch.set_num_threads(args.threads)  # `write` records the number
    facts = {
        "cores": os.cpu_count(), "instruction_sets": instruction_sets(), "git": git_state(ROOT),
        "nanochat": git_state(args.nanochat) if args.nanochat else None,
        "attention": args.attention, "seconds": args.seconds,
    }  # fmt: skip
    rows = []
    for row in rounds(contestants, args):
        rows.append(row)
        if args.out:
            write(args.out, torch.device("cpu"), summary(rows), **facts, rounds=rows)
    print("\n\n".join(tables(summary(rows))))
    if any("error" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
