"""Golden runs: check that two commits give bit-identical training.

    git worktree add ../before HEAD~1
    python benchmarks/golden.py ../before ../golden/before     # run every case with that code
    python benchmarks/golden.py . ../golden/after
    python benchmarks/golden.py --compare ../golden/before ../golden/after

The script compares each checkpoint's parameters, optimizer moments, random states and loop state;
summary and metrics except timings and the wandb id; each rank's collectives and number of graphs.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

BASE = (
    "model=tiny", "model.vocab_size=512", "seq_len=64", "data.cache_dir=cache",
    "data.num_workers=0", "data.heldout_fraction=0.3", "global_batch_size=8", "micro_batch_size=2",
    "steps=6", "optim.warmup_steps=2", "log_interval=2", "diagnostics.interval=2",
    "diagnostics.probe_interval=3", "eval.interval=3", "eval.sequences=4", "eval.tokens=200",
    "checkpoint.interval=3", "checkpoint.keep_last=0", "distributed.check_interval=2",
    "wandb.mode=disabled", "run.report=false", "plugins=[golden_plugin]", "--config-dir", "plugin",
)  # fmt: skip
FILES = ("data=files", "data.paths=[a.jsonl]", "data.vocab_size=300")
MIXTURE = (
    "data=mixture", "data.vocab_size=300", "data.between=linear",
    "data.sources={a: {source: files, paths: [a.jsonl]}, b: {source: files, paths: [b.jsonl]}}",
    "data.curriculum=[{at: 0.1, weights: {a: 3, b: 1}}, {at: 0.9, weights: {b: 1}}]",
)  # fmt: skip
SUITES = ("eval.suites=[icl]", "eval.levels={icl: {shots: 2}}", "eval.suites_interval=3")
FAULTY = ("attention=faulty", "precision=fp32")
NAN = (*FAULTY, "model.attention.nan_at=9")
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "fp32": (1, ("attention=diff_v2", "precision=fp32")),
    "bf16": (1, ("attention=diff_v1", "precision=bf16")),
    "two_ranks": (2, ("attention=diff_v2", "precision=bf16")),
    "replicas": (2, ("attention=gated", "precision=fp32", "parallel.replicate=2")),
    "experts": (2, ("model=moe_tiny", "parallel.expert=2", "precision=fp32")),
    "ignored": (2, ("data=synthetic", "data.task=mqar", "precision=fp32",
                    "data.examples=400", "data.vocab_size=400")),
    "packed": (1, ("data.packing=best_fit", "data.mask_documents=true", "precision=fp32")),
    "compiled": (1, ("compile=true", "activation_checkpointing=full", *SUITES)),
    "nan": (2, NAN),
    "diverged": (2, (*NAN, "train.max_consecutive_skips=1")),
    "stopped": (2, (*FAULTY, "model.attention.stop_at=5")),
    "weights": (1, ("resume=weights:bf16", "precision=bf16", "attention=diff_v1")),
    "init_match": (1, ("attention=diff_v2", "model.init_match=write", "precision=fp32")),
    "mixture": (2, (*MIXTURE, *SUITES)),
}  # fmt: skip
"""Number of ranks and overrides by case."""

PLUGIN = '''
"""Attention that computes NaN or receives SIGTERM at a chosen forward pass; a trace per rank."""
import atexit, json, os, signal
from dataclasses import dataclass
import torch
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch._dynamo.utils import counters
from diffllm.model.attention.standard import StandardAttention, StandardConfig
from diffllm.core.registry import schema

def dump():
    trace = {"graphs": counters["stats"]["unique_graphs"], **json.loads(_dump_fr_trace_json())}
    with open(f"{os.environ['TRACE']}-{os.environ.get('RANK', '0')}.json", "w") as file:
        json.dump(trace, file)

atexit.register(dump)

@schema(group="attention", name="faulty", package="model.attention")
@dataclass
class FaultyConfig(StandardConfig):
    nan_at: int = 0
    stop_at: int = 0

    def build(self, model, layer_idx):
        return FaultyAttention(model, self)

class FaultyAttention(StandardAttention):
    def __init__(self, model, cfg):
        super().__init__(model, cfg)
        self.faults, self.passes = cfg, 0

    def context(self, *args, **words):
        context = super().context(*args, **words)
        self.passes += torch.is_grad_enabled()
        if torch.is_grad_enabled() and self.passes == self.faults.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        faulty = torch.is_grad_enabled() and self.passes == self.faults.nan_at
        return context * float("nan") if faulty else context
'''


def write_corpus(path: Path, word: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for i in range(300):
            words = " ".join(f"{i % 7} {word} {k} is {i % 7 * k}, so" for k in range(i % 13 + 4))
            file.write(json.dumps({"text": f"Document {i}: {words} the end.\n"}) + "\n")


def run_cases(code: Path, place: Path, cases: list[str]) -> None:
    """Run cases with the code of the checkout `code`; `place` is the new directory for results."""
    (place / "plugin/attention").mkdir(parents=True)
    (place / "plugin/golden_plugin.py").write_text(PLUGIN, encoding="utf-8")
    yaml = "# @package model.attention\ndefaults: [faulty_schema, _self_]\n"
    (place / "plugin/attention/faulty.yaml").write_text(yaml, encoding="utf-8")
    write_corpus(place / "a.jsonl", "times")
    write_corpus(place / "b.jsonl", "plus")
    env = os.environ | {"PYTHONPATH": f"{code.resolve()}:plugin", "OMP_NUM_THREADS": "1"}
    env |= {"TORCH_FR_BUFFER_SIZE": "20000"}  # enough entries to record all collectives of a case
    for name in cases:
        ranks, words = CASES[name]
        launcher = [sys.executable]
        if ranks > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        data = () if any(word.startswith("data=") for word in words) else FILES
        command = [*launcher, code.resolve() / "train.py", *BASE, *data, f"run.dir={name}", *words]
        for start in range(1 + (name == "stopped")):
            env["TRACE"] = f"trace-{name}-{start}"
            with open(place / f"{name}-{start}.out", "w", encoding="utf-8") as out:
                done = subprocess.run(command, cwd=place, env=env, stdout=out, stderr=out)
            if done.returncode:
                sys.exit(f"error: {name} has exit code {done.returncode}, see {out.name}")
            print(f"{name}, start {start}: done", flush=True)


def tensors(checkpoint: Path) -> dict[str, Any]:
    """Read all tensors of a checkpoint without using diffllm."""
    found: dict[str, Any] = {}
    reader, planner = FileSystemReader(checkpoint), _EmptyStateDictLoadPlanner()
    _load_state_dict(found, reader, planner=planner, no_dist=True)
    return found


def facts(place: Path, name: str) -> dict[str, Any]:
    """Return the tensors, loop states, metrics, collectives and graph counts of a run by name."""
    found: dict[str, Any] = {}
    for checkpoint in sorted((place / name).glob("checkpoints/step-*")):
        found |= {f"{checkpoint.name} {key}": t for key, t in tensors(checkpoint).items()}
        loop = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))["loop"]
        found |= {f"{checkpoint.name} loop {key}": value for key, value in loop.items()}
    for file in (place / name).glob("metrics.jsonl"):
        for values in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
            found |= {f"metrics {values['step']} {key}": value for key, value in values.items()}
    for file in (place / name).glob("summary.json"):
        found |= {
            f"summary {key}": v for key, v in json.loads(file.read_text(encoding="utf-8")).items()
        }
    for file in sorted(place.glob(f"trace-{name}-*.json")):
        trace = json.loads(file.read_text(encoding="utf-8"))
        found[f"{file.stem} graphs"] = trace["graphs"]
        for entry in trace["entries"]:  # the order is defined only within a process group
            group = found.setdefault(f"{file.stem} group {entry['process_group']}", [])
            group.append((entry["profiling_name"], entry["input_sizes"]))
    return {key: value for key, value in found.items() if not is_timed(key.split(" ")[-1])}


def is_timed(name: str) -> bool:
    """Return whether a metric is a time or a speed; also true for the wandb id, which is random."""
    # "seconds", "train_seconds" and "wall_seconds" are times.
    return name.endswith("seconds") or name.startswith(("perf/", "tokens_per_s", "wandb_id"))


def same(a: Any, b: Any) -> bool:
    """Return whether two values have equal bits."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
    return repr(a) == repr(b)  # NaN equals NaN


def compare(before: Path, after: Path, cases: list[str]) -> bool:
    """Print the differences of each case; return whether every case is equal."""
    equal = True
    for name in cases:
        a, b = facts(before, name), facts(after, name)
        differ = [k for k in {**a, **b} if k not in a or k not in b or not same(a[k], b[k])]
        print(f"{name}: {len(a)} and {len(b)} values, {len(differ)} differ {differ[:5]}")
        equal &= bool(a and b) and not differ
    return equal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", action="store_true", help="compare two directories")
    parser.add_argument("first", type=Path, help="a checkout, or the first directory to compare")
    parser.add_argument("second", type=Path, help="output or second directory to compare")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    if args.compare:
        sys.exit(not compare(args.first, args.second, args.cases))
    if not (args.first / "train.py").is_file() or args.second.exists():
        parser.error(f"{args.first} must contain train.py, and {args.second} must not exist")
    run_cases(args.first, args.second, args.cases)


if __name__ == "__main__":
    main()
