"""Wall time of the commands of the README, in a fresh clone on this machine.

    python benchmarks/readme.py --out benchmarks/results/readme_cpu.json

Clones the last commit, prepares the corpus anew, and runs the commands one after another. Commands
that need a cluster or hours are listed without a time. The table is printed as Markdown.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

from harness.machine import facts

ROOT = Path(__file__).parents[1]
UNTIMED = {
    "train on your data": "125M parameters, 2.5e9 tokens: needs a GPU",
    "scale out": "1.3B parameters: needs 8 GPUs",
    "test a claim": "108 runs, 3.8 hours of training in total",
}
"""Rows of the README's table that this script skips, with the reason."""
SET_UP = {
    "set-up of make train": "make .venv/.run-ready",
    "make train, after set-up": "make train",
    "set-up of make test": "make .venv/.ready",
}


def table_commands(readme: str) -> dict[str, str]:
    """Return the commands in the README's table by the first column."""
    rows = re.findall(r"^\| ([^|]+) \| `([^`]+)`", readme, re.MULTILINE)
    return dict(rows)


def write_variant(clone: Path) -> None:
    """Write the files of the variant in docs/variants.md to the directory `mine`."""
    text = (clone / "docs/variants.md").read_text(encoding="utf-8")
    for name in ("mine/tempered.py", "mine/attention/tempered.yaml"):
        block = text.partition(f"`{name}`")[2]
        content = re.search(r"```\w+\n(.*?)```", block, re.DOTALL)
        assert content, name
        path = clone / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content[1], encoding="utf-8")


def seconds(command: str, clone: Path, env: dict[str, str]) -> float:
    begin = time.monotonic()
    ended = subprocess.run(
        ["bash", "-c", command], cwd=clone, env=env, capture_output=True, encoding="utf-8"
    )
    if ended.returncode:
        raise SystemExit(f"{command} failed:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    times: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "diffllm")
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        write_variant(clone)
        path = f"{clone}/.venv/bin:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "DIFFLLM_CACHE": f"{folder}/cache"}
        env.pop("PYTHONPATH", None)
        commands = SET_UP | table_commands((clone / "README.md").read_text(encoding="utf-8"))
        for name, command in commands.items():
            if name in UNTIMED:
                times[name] = UNTIMED[name]
                continue
            if name == "use Python":
                command = f"python -c 'import diffllm; {command}'"
            times[name] = round(seconds(command, clone, env), 1)
            print(name, times[name], flush=True)
    args.out.write_text(
        json.dumps({"seconds": times, "machine": facts()}, indent=1) + "\n", encoding="utf-8"
    )
    print("\n| Command | Seconds |\n|---|---|")
    for name, time_or_reason in times.items():
        print(f"| {name} | {time_or_reason} |")


if __name__ == "__main__":
    main()
