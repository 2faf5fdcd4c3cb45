"""Draw hostile cases, run them, and count what held and what broke.

    python benchmarks/hostile.py [--cases 2000] [--seed 0] [--whole 100] [--families files paths]
        [--code DIRECTORY] [--json benchmarks/results/NAME.json]

A case does something to a finished run, a sweep or a corpus, or gives a command what hardly anybody
means; then the command comes, and `tests/hostile/judging.py` says which rules it broke. Cases are
drawn from a seed and a number: `--only 17` runs that one again, with all that it says. Most
commands are processes forked from one that has imported everything; `--whole` of them are new
interpreters.
`--code` judges another checkout of the project by the same cases.
"""

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WEIGHTS = {
    "files": 6, "paths": 4, "sources": 5, "outputs": 1.0, "ends": 0.25, "values": 1.4,
    "arguments": 2.5, "storage": 0.6,
}  # fmt: skip
"""Shares of the families among the cases."""


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--whole", type=int, default=100, help="cases that are new interpreters")
    parser.add_argument("--families", nargs="+", choices=list(WEIGHTS), default=list(WEIGHTS))
    parser.add_argument("--only", type=int, nargs="+", help="numbers of cases")
    parser.add_argument("--code", type=Path, default=ROOT, help="the checkout that is judged")
    parser.add_argument("--minutes", type=float, default=1e9, help="no case begins later")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--directory", type=Path, help="where to work")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Run all cases; exit code 1 where one broke a rule."""
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(args.code.absolute())
    sys.path[:0] = [str(args.code.absolute()), str(ROOT / "tests")]
    imports()
    directory = Path(tempfile.mkdtemp(prefix="hostile-", dir=args.directory))
    try:
        results = run_all(args, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    said = summary(results)
    print(text_of(said))
    if args.json:
        import torch

        facts = {
            "device": "cpu", "torch": torch.__version__, "date": f"{date.today()}",
            "seed": args.seed, "cases": args.cases,
        }  # fmt: skip
        args.json.write_text(json.dumps({**facts, **said}, indent=2) + "\n")
    return 1 if said["broke"] else 0


def imports() -> None:
    """Import what commands need, so that forked ones have it."""
    import hydra.main  # noqa: F401
    import jinja2  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import torch
    import torch._dynamo

    import diffllm.cli.run
    import diffllm.cli.train
    import diffllm.compare.report.page

    with contextlib.suppress(ImportError):  # of an older checkout
        import diffllm.interop.export
        import diffllm.interop.imports  # noqa: F401
    from diffllm.config import load_config

    torch.set_num_threads(1)
    load_config(["model=tiny"])


def run_all(args: argparse.Namespace, directory: Path) -> list[dict[str, Any]]:
    """Run the cases in processes that take one after the other; return what became of each."""
    from hostile import place

    made = place.make(directory)
    numbers = args.only or list(range(args.cases))
    context = multiprocessing.get_context("fork")
    counter, results = context.Value("q", 0), context.SimpleQueue()
    started = time.monotonic()

    def lane() -> None:
        while True:
            with counter.get_lock():
                at = counter.value
                counter.value += 1
            if at >= len(numbers) or time.monotonic() - started > 60 * args.minutes:
                results.put(None)
                return
            results.put(run_case(numbers[at], args, made, directory))

    lanes = [context.Process(target=lane) for _ in range(args.processes)]
    for process in lanes:
        process.start()
    found: list[dict[str, Any]] = []
    left = len(lanes)
    while left:
        result = results.get()
        if result is None:
            left -= 1
            continue
        found.append(result)
        for rule in result["broken"]:
            print(f"{result['number']:>5} {result['family']}: {result['what']}: {rule}", flush=True)
        if len(found) % 100 == 0:
            broke = sum(bool(each["broken"]) for each in found)
            passed = time.monotonic() - started
            print(f"tried {len(found)}, broke {broke}, {passed:.0f} s", file=sys.stderr, flush=True)
    return sorted(found, key=lambda each: each["number"])


def run_case(number: int, args: argparse.Namespace, made: Any, directory: Path) -> dict[str, Any]:
    """Run one case in a copy of the place that was made."""
    from hostile import cases, commands, judging

    rng = random.Random(f"{args.seed} {number}")
    family = rng.choices(args.families, [WEIGHTS[name] for name in args.families])[0]
    whole = rng.random() < args.whole / args.cases
    place = made.copied(directory / f"case-{number}")
    try:
        case = cases.FAMILIES[family](rng, place)
        environment = {**place.environment, **case.environment}
        before = {root: judging.contents(root) for root in (place.outside,)}
        runs = {path.name for path in (place.path / "outputs").glob("*")}
        metrics = content(place.run / "metrics.jsonl")

        def start(words: Sequence[str]) -> commands.Ended:
            for name in ("said-out", "said-err"):
                (place.path / name).unlink(missing_ok=True)
            return started(words, place, environment, case.streams, whole, args.code)

        ended = start(case.words)
        heard = case.streams.err is None
        broken = judging.broken_rules(ended, case.expected, heard, case.codes)
        for root, content_before in before.items():
            broken += judging.differences(content_before, judging.contents(root))
        if ended.code == 2 and case.words[0] == "train" and not case.trains_first:
            if content(place.run / "metrics.jsonl") != metrics:
                broken.append("a refusal changed metrics.jsonl")
            left = {path.name for path in (place.path / "outputs").glob("*")} - runs
            if left:
                broken.append(f"a refusal left {', '.join(sorted(left))} in outputs")
        broken += case.after(ended, start)
        if args.only:
            print(case.words, ended, sep="\n", flush=True)
        return {
            "number": number, "family": family, "what": case.what, "whole": whole,
            "command": case.words[0], "broken": broken,
        }  # fmt: skip
    except Exception as error:
        import traceback

        traceback.print_exc()
        return {
            "number": number, "family": family, "what": f"the harness: {error!r}", "whole": whole,
            "command": "", "broken": ["the harness failed"],
        }  # fmt: skip
    finally:
        cases.unmounted(place)
        remove(place.path)


def started(
    words: Sequence[str], place: Any, environment: Any, streams: Any, whole: bool, code: Path
) -> Any:
    """Start a case's command, forked or in a new interpreter."""
    from hostile import commands
    from hostile import place as places

    if words[0] == "texts":
        return commands.forked(places.texts, words[1:], place.path, environment)
    trains = words[0] == "train"
    if whole:
        line = [str(code.absolute() / "train.py")] if trains else ["-m", "diffllm", words[0]]
        return commands.real([sys.executable, *line, *words[1:]], place.path, environment, streams)
    main = places.train if trains else places.tool
    return commands.forked(main, words[1:] if trains else words, place.path, environment, streams)


def content(file: Path) -> bytes | None:
    """Return what a plain file holds; None for anything else."""
    return file.read_bytes() if file.is_file() and not file.is_symlink() else None


def remove(path: Path) -> None:
    """Remove a case's directory, whatever its permissions are."""
    for directory, names, _ in os.walk(path):
        for name in [directory, *(os.path.join(directory, name) for name in names)]:
            if not os.path.islink(name):
                os.chmod(name, 0o700)
    shutil.rmtree(path, ignore_errors=True)


def summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Count cases, and list those that broke."""
    by_family: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in results:
        by_family[each["family"]]["broke" if each["broken"] else "held"] += 1
    broke = [each for each in results if each["broken"]]
    return {
        "tried": len(results),
        "held": len(results) - len(broke),
        "broke": len(broke),
        "whole_processes": sum(each["whole"] for each in results),
        "families": {name: dict(counts) for name, counts in sorted(by_family.items())},
        "broken_cases": [
            {name: each[name] for name in ("number", "family", "what", "command", "broken")}
            for each in broke
        ],
    }


def text_of(said: dict[str, Any]) -> str:
    """Return the counts as a table."""
    lines = ["| family | tried | held | broke |", "|---|---|---|---|"]
    for name, counts in said["families"].items():
        held, broke = counts.get("held", 0), counts.get("broke", 0)
        lines.append(f"| {name} | {held + broke:,} | {held:,} | {broke:,} |")
    lines.append(f"| all | {said['tried']:,} | {said['held']:,} | {said['broke']:,} |")
    return "\n".join([*lines, f"{said['whole_processes']} of them were new interpreters"])


if __name__ == "__main__":
    sys.exit(main())
