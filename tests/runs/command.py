"""Forked command lines: run the real `train.py` and `diffllm` in forked processes.

    result = train([*tiny, "run.name=a"], tmp_path, environment)      # exit code and output
    run = start(corpus, directory, "steps=9", ranks=2)                # a run in the background
    run.signal(signal.SIGTERM); run.finish()

The processes are forked from a server that has imported all modules, so a start takes no seconds
for interpreter, torchrun and imports. Each process has separate signals, exit code and output.
`ForkedRun` accepts a planted `Fault`, `Gate` stops a run before a step, `with_faults` breaks
streams, and `forked_call` runs any function as a command. Tests that need a new interpreter use
`command` or `command_line`.
"""

import atexit
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PATIENCE_S, wait_until

from diffllm import load_config
from diffllm.checkpoint.manifest import read_state
from diffllm.checkpoint.reader import load_tensors
from diffllm.data.preparation.prepare import prepare
from runs import planted_train
from runs.json_files import read_jsonl, write_jsonl
from runs.planted_train import ROOT, Fault
from runs.ranks import forked

TRAIN = ROOT / "train.py"
NO_FAULT = Fault()
PERF = ("perf/", "train_seconds", "wall_seconds")


@dataclass(frozen=True)
class Result:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


class ForkedRun:
    """A run of train.py on `ranks` processes, with recorded samples and an optional fault.

    `words` must contain `run.dir=`. The output of a rank is written to said-<rank>.txt in
    `directory`, or to its file in `said`.
    """

    def __init__(
        self,
        words: list[str],
        ranks: int = 1,
        directory: Path | None = None,
        fault: Fault = NO_FAULT,
        main: Callable[..., int] = planted_train.main,
        said: list[str] | None = None,
    ):
        self.said = said or said_files(ranks, directory)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes: list[Any] = []
        for rank in range(ranks):
            environment = {
                **{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            }
            more = {**os.environ, **(environment if ranks > 1 else {})}
            args = (main, (fault, words), more, os.getcwd(), [self.said[rank]] * 2)
            self.processes.append(forked(_process, args))
        for process in self.processes:
            process.start()

    def pid(self, rank: int = 0) -> int:
        return self.processes[rank].pid

    def wait_for(
        self, condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S
    ) -> None:
        """Poll until `condition()`; fail if a rank ends first."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert all(p.is_alive() for p in self.processes), (
                f"a rank ended before {what}: {self.text()}"
            )
            assert time.monotonic() < deadline, f"{what} not in {seconds} s: {self.text()}"
            time.sleep(0.005)

    def stop_at(self, gate: "Gate", number: int = signal.SIGTERM, *ranks: int) -> str:
        """Signal ranks (default: all) while the run waits at a gate; return the output.

        Rank 0 must exit with 130 after SIGINT, all other processes with 0.
        """
        self.wait_for(gate.reached, "gate")
        self.signal(number, *ranks)
        gate.open()
        first, *others = self.codes()
        assert first == (130 if number == signal.SIGINT else 0), self.text()
        assert not any(others), f"{others}: {self.text()}"
        return self.text()

    def kill_at(self, gate: "Gate", saved: Path | None = None) -> None:
        """Kill the run at a gate, after the checkpoint `saved` exists."""
        self.wait_for(gate.reached, "gate")
        if saved:
            self.wait_for(saved.exists, "checkpoint")
        self.kill()
        gate.open()

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def codes(self, seconds: float = PATIENCE_S) -> list[int]:
        """Wait for all ranks; return their exit codes. Kill ranks under SIGSTOP before the call."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"still running after {seconds} s: {self.text()}"
        return [process.exitcode for process in self.processes]

    def finish(self, code: int = 0) -> str:
        """Wait until all ranks have ended with this exit code; return their output."""
        codes = self.codes()
        assert set(codes) == {code}, f"{codes}: {self.text()}"
        return self.text()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def text(self) -> str:
        """Return the output of all ranks, one after the other."""
        return "".join(Path(file).read_text(encoding="utf-8") for file in self.said)


class Gate:
    """A point at which all ranks of a run wait until `open`.

    The point is before step `place`, or before the first held-out batch if `place` is "heldout".
    """

    def __init__(self, run: Path, place: int | str):
        run.mkdir(parents=True, exist_ok=True)
        self.file = run / f"gate-{place}"
        self.file.touch()

    def reached(self) -> bool:
        return self.file.read_text(encoding="utf-8") == "reached"

    def open(self) -> None:
        self.file.unlink()


def said_files(ranks: int, directory: Path | None) -> list[str]:
    """Create an output file for each rank; without a directory, in a new temporary directory."""
    if directory is None:
        directory = Path(tempfile.mkdtemp(prefix="said-"))
    directory.mkdir(parents=True, exist_ok=True)
    files = [directory / f"said-{rank}.txt" for rank in range(ranks)]
    for file in files:
        file.touch()
    return [str(file) for file in files]


def start(corpus: Path, run: Path, *overrides: str, ranks: int = 1) -> ForkedRun:
    """Start a small run of train.py."""
    return ForkedRun(overrides_of(corpus, run, *overrides), ranks)


def finish(corpus: Path, run: Path, *overrides: str, ranks: int = 1) -> str:
    """Run train.py with small settings to exit code 0; return its output."""
    return start(corpus, run, *overrides, ranks=ranks).finish()


def train(words: list[str], cwd: Path, environment: Mapping[str, str]) -> Result:
    """Run `python train.py words` in `cwd`; return its exit code and output."""
    return forked_call(run_train, words, cwd, environment)


def tool(words: list[str], cwd: Path, environment: Mapping[str, str]) -> Result:
    """Run `diffllm words` in `cwd`; return its exit code and output."""
    return forked_call(run_tool, words, cwd, environment)


def forked_call(
    main: Callable[[list[str]], int], words: list[str], cwd: Path, environment: Mapping[str, str]
) -> Result:
    """Call the module-level function `main` as a command in `cwd`; return exit code and output."""
    with tempfile.TemporaryDirectory(prefix="said-") as folder:
        files = [f"{folder}/out", f"{folder}/err"]
        process = forked(_process, (main, (words,), dict(environment), str(cwd), files))
        process.start()
        process.join(PATIENCE_S)
        out, err = (Path(file).read_text(encoding="utf-8") for file in files)
        if process.exitcode is None:
            process.kill()
            raise AssertionError(f"still running after {PATIENCE_S} s: {out}{err}")
        return Result(process.exitcode, out, err)


def run_train(words: list[str]) -> int:
    sys.argv = [str(TRAIN), *words]
    return planted_train.entry_module().main()


def run_tool(words: list[str]) -> int:
    from diffllm import cli as tools

    return tools.main(words)


def _process(
    main: Callable[..., int],
    args: tuple[Any, ...],
    environment: dict[str, str],
    cwd: str,
    said: list[str],
) -> None:
    """Call `main` in the directory `cwd`, with stdout and stderr in the two files `said`."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # like a new interpreter
    sys.path[:0] = [path for path in given if path and path not in sys.path]
    for descriptor, file in zip((1, 2), said, strict=True):
        opened = os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
    torch.set_num_threads(1)
    # Start method of the data loader. Workers of a forkserver would survive this process.
    multiprocessing.set_start_method("fork", force=True)
    code = 1
    try:
        code = main(*args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    # Exit like an interpreter. multiprocessing would wait for the workers of the data loader.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# Failing streams

FAULTS = ("full", "closed", "no reader", "no terminal", "ascii")
"""Faults of a stream: full disk, closed before the start, pipe without a reader, closed terminal,
or an encoding without all characters."""
COMMANDS = {"train": run_train, "tool": run_tool, "planted": planted_train.main}


def break_stream(number: int, fault: str) -> None:
    """Plant a fault in this process's standard output (1) or standard error (2)."""
    name, encoding = ("stdout", "stderr")[number - 1], "ascii" if fault == "ascii" else "utf-8"
    stream: Any = None
    if fault == "closed":
        os.close(number)
    else:
        if fault != "ascii":
            descriptor = failing(fault)
            os.dup2(descriptor, number)
            os.close(descriptor)
        errors = "strict" if number == 1 else "backslashreplace"
        stream = open(number, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def failing(fault: str) -> int:
    """Open a file descriptor on which every write fails."""
    if fault == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.openpty() if fault == "no terminal" else os.pipe()
    os.close(reader)
    return writer


def faulty(command: str, stdout: str, stderr: str, *args: Any) -> int:
    """Run a command with faults in stdout and stderr; "" plants no fault."""
    for number, fault in ((1, stdout), (2, stderr)):
        if fault:
            break_stream(number, fault)
    return COMMANDS[command](*args)


def with_faults(command: str, stdout: str, stderr: str) -> partial[int]:
    """Return `faulty` as a function of the command's arguments."""
    return partial(faulty, command, stdout, stderr)


# Small runs: corpora, overrides, and results


def documents(count: int, seed: int = 0) -> list[str]:
    """Return documents of distinct small functions, enough for a vocabulary of 512 pieces."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(rng.choices(letters, k=rng.randint(3, 7))) for _ in range(120)]

    def function() -> str:
        name, a, b, c = rng.sample(words, 4)
        return f"def {name}({a}, {b}):\n    {c} = {a}[{rng.randrange(9)}] + {b}\n    return {c}\n"

    return ["\n".join(function() for _ in range(5)) for _ in range(count)]


def trained_on(directory: Path) -> dict[tuple[str, int], list[tuple[object, ...]]]:
    """Return {(samples file of a rank, step): [(*samples, loss) of each execution of the step]}."""
    seen: dict[tuple[str, int], list[tuple[object, ...]]] = {}
    for file in directory.glob("samples-*.jsonl"):
        for line in file.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # a kill cut the line, and the step is repeated
                entry = json.loads(line)
                found = (*entry["samples"], entry["loss"])
                seen.setdefault((file.name, entry["step"]), []).append(found)
    return seen


def rank_samples(run: Path, rank: int) -> dict[int, list[str]]:
    """Return the samples of a rank in the last execution of each step."""
    return {line["step"]: line["samples"] for line in read_jsonl(run / f"samples-{rank}.jsonl")}


def step_samples(run: Path) -> dict[int, list[str]]:
    """Return the sorted samples of all ranks in the last execution of each step."""
    samples: dict[int, list[str]] = {}
    for rank in range(len(list(run.glob("samples-*.jsonl")))):
        for step, names in rank_samples(run, rank).items():
            samples[step] = sorted([*samples.get(step, []), *names])
    return samples


def write_texts(path: Path, texts: Sequence[str], column: str = "text") -> Path:
    """Write {column: text, "n": index} for each text, as JSON lines."""
    return write_jsonl(path, [{column: text, "n": i} for i, text in enumerate(texts)])


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the complete lines of a run's metrics.jsonl; empty before the first step."""
    file = run / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_corpus(directory: Path) -> Path:
    """Write 400 documents of arithmetic prose as JSON lines."""
    path = directory / "corpus.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(400):
            words = " ".join(f"{i % 7} times {k} is {i % 7 * k}, so" for k in range(i % 13 + 4))
            file.write(json.dumps({"text": f"Document {i}: {words} the end.\n"}) + "\n")
    return path


def prepared_corpus(directory: Path) -> Path:
    """Write the corpus of `write_corpus`, with its tokens in the cache."""
    path = write_corpus(directory)
    prepare(load_config(overrides_of(path, directory / "none")).data)
    return path


def command_line(corpus: Path, run: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """Return the command line of a small run, for tests that cannot fork."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*launcher, str(TRAIN), *overrides_of(corpus, run, *overrides)]


def overrides_of(corpus: Path, run: Path, *more: str) -> list[str]:
    """Return overrides that make a run small, and more overrides."""
    return [
        *("data=files", f"data.paths=[{corpus}]", f"data.cache_dir={corpus.parent / 'cache'}"),
        *("model=tiny", "model.vocab_size=512", "data.vocab_size=300", "seq_len=64"),
        *("global_batch_size=8", "optim.warmup_steps=5", "eval.sequences=4", "eval.tokens=200"),
        *("wandb.mode=disabled", "run.report=false", f"run.dir={run}"),
        *more,
    ]


def descendants(parent: int, deep: bool = True) -> list[int]:
    """Return the process ids of children and, if `deep`, of all descendants."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ppid = int((path / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            children.setdefault(ppid, []).append(int(path.name))
    found = list(children.get(parent, []))
    for pid in found if deep else []:
        found += children.get(pid, [])
    return found


def wait_for(condition, process: subprocess.Popen, what: str) -> None:
    """Poll until `condition()`; fail if the process ends first."""

    def met() -> bool:
        found = bool(condition())
        assert found or process.poll() is None, f"the process ended before {what}"
        return found

    wait_until(met, what)


def metric_lines(run: Path) -> list[dict]:
    """Return the lines of metrics.jsonl without metrics of the machine's speed."""
    return [{k: v for k, v in line.items() if not k.startswith(PERF)} for line in metrics(run)]


def checkpoint_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return the unsharded tensor of every parameter of a checkpoint."""
    path = run / "checkpoints" / f"step-{step:08d}"
    shapes = read_state(path)["parameters"]
    tensors = {f"model.{name}": torch.empty(shape) for name, shape in shapes.items()}
    load_tensors(path, tensors, no_dist=True)
    return tensors


def assert_same_weights(one: Path, other: Path, step: int) -> None:
    mine, theirs = checkpoint_tensors(one, step), checkpoint_tensors(other, step)
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def the_error(text: str) -> str:
    """Return the only error line of an output, which has no traceback."""
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, text
    return lines[0]


def success_of(result: Result) -> Result:
    """Return the result of a command, which must have exited with code 0."""
    assert result.code == 0, result
    return result


def refusal_of(result: Result) -> str:
    """Return the stderr of a command that failed with exit code 2, which must be one error line."""
    assert result.code == 2, result
    (line,) = result.err.splitlines()
    assert line.startswith("error: "), result
    return line


def unfinish(run: Path, step: int) -> None:
    """Remove a finished run's last checkpoint, held-out losses and summary."""
    shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    shutil.rmtree(run / "heldout", ignore_errors=True)
    (run / "summary.json").unlink()


def steps_logged(run: Path) -> list[int]:
    return [line["step"] for line in metrics(run)]


def reached(run: Path, step: int) -> bool:
    """Return whether metrics.jsonl contains a step."""
    return step in steps_logged(run)


# Commands in this process and in new interpreters, and snapshots of files


def call(main: Callable[[], int], capfd: pytest.CaptureFixture[str]) -> Result:
    """Call `main` in this process; return its exit code (also of SystemExit) and output."""
    capfd.readouterr()
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    captured = capfd.readouterr()
    return Result(code, captured.out, captured.err)


def command(
    words: Sequence[str], cwd: Path, env: Mapping[str, str], timeout: int = PATIENCE_S
) -> Result:
    """Run a real command with piped output."""
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=dict(env),
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def train_command(words: Sequence[str]) -> list[str]:
    return [sys.executable, str(TRAIN), *words]


def tool_command(words: Sequence[str]) -> list[str]:
    """Return the command `diffllm ...`, with the console script next to this interpreter."""
    return [str(Path(sys.executable).with_name("diffllm")), *words]


def clean_environment(cache_dir: Path) -> dict[str, str]:
    """Return this environment without the variables of a launcher, with a separate cache."""
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in launcher}
    return {**kept, "DIFFLLM_CACHE": str(cache_dir), "OMP_NUM_THREADS": "1"}


def snapshot(*roots: Path) -> dict[str, str]:
    """Return a description of every file and directory under `roots`; any write changes it.

    Size and times of a lock file are ignored, because a lock file names its last holder.
    """
    entries: dict[str, str] = {}
    for root in roots:
        entries[str(root)] = describe(root)
        entries |= {str(path): describe(path) for path in root.rglob("*")}
    return entries


def describe(path: Path) -> str:
    """Describe a path; a write changes the description, because programs cannot restore ctime."""
    if path.is_symlink():
        return f"link to {os.readlink(path)}"
    if not path.exists():
        return "absent"
    if path.is_dir():
        return "directory"
    found = path.stat()
    if path.suffix == ".lock" or path.name == ".lock":
        return "lock"
    return f"{found.st_size} bytes, inode {found.st_ino}, {found.st_mtime_ns}, {found.st_ctime_ns}"


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """List entries that were added, removed or changed between two snapshots."""
    return [
        f"{name}: {before.get(name, 'absent')} -> {after.get(name, 'absent')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def loader_processes(trainer: int) -> list[int]:
    """Return the forked descendants of a trainer, which have its command line."""
    command, loaders = Path(f"/proc/{trainer}/cmdline").read_bytes(), []
    for pid in descendants(trainer):
        with contextlib.suppress(OSError):  # the process has ended
            if Path(f"/proc/{pid}/cmdline").read_bytes() == command:
                loaders.append(pid)
    return loaders
