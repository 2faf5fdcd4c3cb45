"""Drawn cases of standard streams that fail, for any command.

Only public command lines are used, so the cases mean the same on any commit. `draw` draws a case,
`started` starts it as a shell would, `problems` says what does not hold.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TINY = (
    "model=tiny", "model.vocab_size=512", "data=files", "data.num_workers=0", "seq_len=32",
    "global_batch_size=4", "optim.warmup_steps=1", "eval.sequences=4", "eval.tokens=200",
    "data.heldout_fraction=0.1", "wandb.mode=disabled",
)  # fmt: skip
"""The beginning of a run that takes a moment; a corpus, data.paths=[...], is the caller's."""
FAULTS = ("whole", "full", "closed", "no reader", "no terminal", "file")
"""Kinds of stream: a pipe that is read, /dev/full, closed, a pipe or a terminal that nobody reads,
a file."""
LOSES = ("full", "closed", "no terminal")
"""Faults with which what is said is lost."""
ENCODINGS: tuple[dict[str, str], ...] = (
    {}, {}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C"}, {"PYTHONIOENCODING": "latin-1"},
    {"PYTHONUNBUFFERED": "1"}, {"PYTHONIOENCODING": "ascii:strict", "PYTHONUNBUFFERED": "1"},
)  # fmt: skip
NAMES = ("a", "größe", "雪-1", "ελ.2", "x" * 200)
PROMPTS = ("", "naïve", "∑ 雪", "\\\\ 'quoted'", "plain")


@dataclass(frozen=True)
class Drawn:
    """A command, its streams and environment, and its end."""

    words: tuple[str, ...]
    """The arguments of `diffllm`."""
    stdout: str = "whole"
    stderr: str = "whole"
    environment: Mapping[str, str] = field(default_factory=dict)
    expected: str = "finished"
    """One of finished (exit code 0, and of a run its summary), diverged (the same, and the summary
    says so), refused (exit code 2 and one line)."""
    runs: tuple[str, ...] = ()
    """The run directories of it, below the working directory; each ends as `expected`."""


def quoted(text: str) -> str:
    """Return a text as Hydra's grammar takes it for a value."""
    return "'" + text.replace("'", "\\'") + "'"


def draw(rng: random.Random) -> Drawn:
    """Draw a training, a sweep, a preparation or a tool, with streams that fail."""
    streams = {"stdout": rng.choice(FAULTS), "stderr": rng.choice(FAULTS)}
    environment = rng.choice(ENCODINGS)
    kind = rng.choice(("train", "train", "sweep", "prepare", "tool", "tool", "mistake"))
    name = rng.choice(NAMES)
    prompt = rng.choice(PROMPTS)
    words = [*TINY, f"steps={rng.randint(1, 6)}", f"log_interval={rng.randint(1, 3)}"]
    words += [f"data.sample_prompt={quoted(prompt)}"] * bool(prompt)
    words.append(f"run.report={rng.choice(('true', 'false'))}")
    if kind == "train":
        run = f"outputs/{name}"
        return Drawn(("train", *words, f"run.dir={quoted(run)}"), **streams,
                     environment=environment, runs=(run,))  # fmt: skip
    if kind == "sweep":
        found = ("outputs/s/seed0", "outputs/s/seed1")
        return Drawn(("train", "-m", *words, "seed=0,1", "run.sweep=s"), **streams,
                     environment=environment, runs=found)  # fmt: skip
    if kind == "prepare":
        return Drawn(("prepare", *TINY), **streams, environment=environment)
    if kind == "mistake":
        wrong = rng.choice(("steps=0", "nonsense=1", "optim.lr=nan", f"seq_len={quoted(name)}"))
        return Drawn(("train", *words, wrong), **streams, environment=environment,
                     expected="refused")  # fmt: skip
    tool = rng.choice(
        (("count", "model=tiny"), ("count", "model=tiny", "--json"), ("--help",),
         ("train", "--help"), ("train", "--cfg", "job", "model=tiny"), ("generate", "--help"))
    )  # fmt: skip
    lost = streams["stdout"] in LOSES
    return Drawn(tool, **streams, environment=environment,
                 expected="refused" if lost else "finished")  # fmt: skip


def stream(fault: str, folder: Path, name: str) -> int:
    """Open what a stream is; for "closed" nothing, -1."""
    if fault == "full":
        return os.open("/dev/full", os.O_WRONLY)
    if fault == "closed":
        return -1
    if fault in ("whole", "file"):
        return os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    reader, writer = os.openpty() if fault == "no terminal" else os.pipe()
    os.close(reader)
    return writer


@dataclass(frozen=True)
class Ended:
    """How a command has ended, and what could be read of what it said."""

    code: int
    out: str
    err: str


def started(
    drawn: Drawn,
    cwd: Path,
    more: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    timeout: float = 300,
) -> Ended:
    """Run a drawn case in `cwd`; one that takes longer is killed.

    Args:
        more: words for a run or a preparation, such as data.paths=[...].
        environment: this process's by default; the case's own is added.
    """
    with tempfile.TemporaryDirectory(prefix="said-") as name:
        folder = Path(name)
        streams = [stream(drawn.stdout, folder, "out"), stream(drawn.stderr, folder, "err")]
        takes = drawn.words[0] in ("train", "prepare") and not {"--help", "--cfg"} & {*drawn.words}

        def set_up() -> None:
            for number, descriptor in enumerate(streams, start=1):
                if descriptor < 0:
                    os.close(number)

        process = subprocess.Popen(
            [sys.executable, "-m", "diffllm", *drawn.words, *(more if takes else ())],
            cwd=cwd,
            env={**(os.environ if environment is None else environment), **drawn.environment},
            stdin=subprocess.DEVNULL,
            stdout=streams[0] if streams[0] >= 0 else subprocess.DEVNULL,
            stderr=streams[1] if streams[1] >= 0 else subprocess.DEVNULL,
            preexec_fn=set_up,
            start_new_session=True,
        )
        for descriptor in streams:
            if descriptor >= 0:
                os.close(descriptor)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = -1000
        said = [read(folder / name) for name in ("out", "err")]
        return Ended(code, *said)


def read(file: Path) -> str:
    """Return what a file has, nothing where there is none."""
    return file.read_text(errors="replace") if file.exists() else ""


def problems(drawn: Drawn, ended: Ended, cwd: Path) -> list[str]:
    """List what does not hold of the end of a case."""
    found = []
    if ended.code == -1000:
        found.append("it hangs")
    if "Traceback" in ended.out + ended.err:
        found.append("a traceback")
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    wanted = 2 if drawn.expected == "refused" else 0
    if ended.code != wanted:
        found.append(f"exit code {ended.code}, not {wanted}: {ended.err[-300:]}")
    if drawn.stderr in ("whole", "file") and len(errors) != (wanted == 2):
        found.append(f"{len(errors)} lines of errors")
    for run in drawn.runs:
        found += [f"{run}: {what}" for what in problems_of_run(drawn, cwd / run)]
    if drawn.expected == "refused" and (cwd / "outputs").exists():
        found.append("outputs/ is left behind")
    return found


def problems_of_run(drawn: Drawn, run: Path) -> list[str]:
    """List what does not hold of a run's directory."""
    if drawn.expected == "refused":
        return ["it is there"] if run.exists() else []
    try:
        summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        return [f"it is not whole: {error}"]
    loss = summary.get("heldout_loss")
    diverged = loss is None or loss != loss
    found = [] if lines and lines[-1]["step"] == summary["steps"] else ["its last line is missing"]
    if diverged != (drawn.expected == "diverged"):
        found.append(f"held-out loss {loss}")
    return found
