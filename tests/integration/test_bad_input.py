"""Invalid input prints one error line, exits with code 2 and changes no file."""

import re
import shutil
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from runs.command import (
    ForkedRun,
    Gate,
    Result,
    call,
    changes,
    command,
    documents,
    snapshot,
    tool_command,
    train_command,
    write_texts,
)
from tiers import slow_but

from diffllm import cli as tools

VARIANTS = ["diff_v1", "diff_v2", "gated", "standard"]


@dataclass
class Workspace:
    """A working directory, commands in this process, and files that must not change."""

    path: Path
    cache: Path
    finished: Path
    tiny: list[str]
    capfd: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def train(self, *words: str) -> Result:
        """Run `python train.py words` in this process."""
        return call(lambda: tools.main(["train", *words]), self.capfd)

    def rejects(self, words: Sequence[str], *named: str) -> str:
        """Return the error line of `train.py tiny words`, which must change no file."""
        return self.rejected(lambda: self.train(*self.tiny, *words), named)

    def rejects_sweep(self, words: Sequence[str], *named: str) -> str:
        return self.rejected(lambda: self.train("-m", *self.tiny, *words), named)

    def rejects_tool(self, words: Sequence[str], *named: str) -> str:
        return self.rejected(lambda: call(lambda: tools.main(list(words)), self.capfd), named)

    def rejects_data(self, words: Sequence[str], *named: str) -> str:
        """Like `rejects`, for corpora that must be read, which changes marks in the cache."""

        def run() -> Result:
            return self.train(*self.tiny, *words)

        before = set(self.cache.glob("tokens/*/manifest.json"))
        line = self.rejected(run, named, caches=False)
        assert set(self.cache.glob("tokens/*/manifest.json")) == before, "tokens were prepared"
        return line

    def rejected(self, run: Callable[[], Result], named: Sequence[str], caches: bool = True) -> str:
        roots = [self.path, self.finished, *([self.cache] if caches else [])]
        before = snapshot(*roots)
        result = run()
        changed = changes(before, snapshot(*roots))
        line = error_line(result)
        assert not (caches and result.out), result.out
        missing = [word for word in named if word not in line]
        assert not missing, f"{missing} not in: {line}"
        assert not changed, changed
        return line


def error_line(result: Result) -> str:
    """Return the only error line of a failed command; lines about preparation may come first."""
    assert result.code == 2, result
    assert "Traceback" not in result.out + result.err, result.err
    preparing = ("preparing tokens: ", "prepared ")
    lines = [line for line in result.err.splitlines() if not line.startswith(preparing)]
    assert len(lines) == 1, result.err
    assert lines[0].startswith("error: ")
    assert re.fullmatch(r"(run \S+: preparing data\n)?", result.out)
    return lines[0]


@pytest.fixture
def workspace(tmp_path, cache_dir, tiny, finished_run, capfd, monkeypatch):
    """Return an empty working directory, with the prepared corpus of `tiny` in the cache."""
    path = tmp_path / "cwd"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setenv("DIFFLLM_CACHE", str(cache_dir))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return Workspace(path, cache_dir, finished_run, tiny, capfd, monkeypatch)


BACKEND = "model.attention.backend"
MOE = "model=moe_tiny"
OVERRIDES = [
    (["stepz=5"], ["stepz", "steps"]),
    (["+model.foo=1"], ["model.foo"]),
    (["run.allow_changes=[sed]"], ["run.allow_changes", "sed", "seed"]),
    (["~model"], ["model"]),
    (["steps=[1"], ["steps=[1"]),
    (["optim.lr=1,2"], ["optim.lr=1,2", "-m"]),
    (["attention=diff_v3"], ["attention=diff_v3", *VARIANTS]),
    (["model=[tiny,mini]"], ["model", "tiny", "mini"]),
    (["steps=1.5"], ["steps", "1.5", "nteger"]),
    (["precision=fp16"], ["precision", "fp16", "auto", "bf16", "fp32"]),
    (["optim.warmup_steps=5"], ["optim.warmup_steps=5", "steps=4"]),
    (["checkpoint.interval=soon"], ["checkpoint.interval=soon", "100", "30min"]),
    (["model.head_dim=33"], ["model.head_dim=33", "even"]),
    (["model.n_heads=3"], ["model.n_heads=3", "model.n_kv_heads=2", "multiple"]),
    (
        ["attention=diff_v1", "model.n_heads=4", "model.n_kv_heads=1"],
        ["model.n_kv_heads=1", "diff_v1", "even"],
    ),
    (["data.vocab_size=1024"], ["data.vocab_size=1024", "model.vocab_size=512"]),
    (["micro_batch_size=3"], ["micro_batch_size=3", "4", "divide"]),
    (["parallel=hsdp"], ["parallel.shard=8", "8 processes, not 1"]),
    (["parallel.expert=2"], ["parallel.expert=2", "dense"]),
    (["data=stdlib"], ["data.paths", "data.source=stdlib"]),
    (["data=hub", "data.paths=[]"], ["data.dataset"]),
    (["run.name=a/b"], ["run.name", "a/b"]),
    ([MOE, "model.moe.top_k=9"], ["model.moe.top_k=9", "model.moe.n_experts=8"]),
    ([MOE, "model.moe.n_dense_layers=2"], ["model.moe.n_dense_layers=2", "model.n_layers=2"]),
    (
        [MOE, "attention=diff_v2", "model.match_params_to=standard"],
        ["model.match_params_to=standard", "closest", "model.moe.expert_dim"],
    ),
    (["attention=standard_sink", f"{BACKEND}=flex"], [f"{BACKEND}=flex", "sink=learned", "flash"]),
    (["data.cache_dir=file/cache"], ["data.cache_dir=file/cache"]),
    (["resume=Never"], ["resume=Never", "does not exist; choose auto, never"]),
]


@pytest.mark.parametrize(
    ("words", "named"), slow_but(OVERRIDES[::6], OVERRIDES), ids=lambda words: " ".join(words)
)
def test_train_refuses_unusable_override(workspace, words, named):
    (workspace.path / "file").write_text("", encoding="utf-8")
    workspace.rejects(words, *named)


@pytest.mark.parametrize(
    ("size", "words", "named"),
    [
        ("3", [], ["global_batch_size=4", "a multiple of 3, the number of ranks"]),
        ("4", ["parallel=hsdp"], ["parallel.shard=8", "not 4"]),
    ],
)
def test_train_refuses_wrong_world_size_before_process_group_starts(workspace, size, words, named):
    workspace.monkeypatch.setenv("WORLD_SIZE", size)
    workspace.monkeypatch.setenv("RANK", "0")
    workspace.rejects(words, *named)
    workspace.monkeypatch.setenv("RANK", "1")
    assert workspace.train(*workspace.tiny, *words) == Result(2, "", ""), "only rank 0 prints"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_train_refuses_gpu_attention_backend_on_cpu(workspace):
    other = write_texts(workspace.path / "other.jsonl", documents(20, seed=2))
    workspace.rejects(
        [f"data.paths=[{other}]", f"{BACKEND}=flash"],
        f"error: {BACKEND}=flash needs a GPU; on device cpu, choose sdpa or reference",
    )


# Corpora and tokenizers


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("empty.jsonl", b"", ["empty"]),
        ("latin.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1"), ["UTF-8"]),
        ("column.jsonl", b'{"body": "a"}\n{"body": "b"}\n', ["'text'", "body"]),
        ("gone.jsonl", None, ["data.paths"]),
    ],
)
def test_train_refuses_unusable_corpus(workspace, name, content, named):
    path = workspace.path / name
    if content is not None:
        path.write_bytes(content)
    workspace.rejects_data([f"data.paths={path}"], name, *named)


def test_train_refuses_corpus_shorter_than_a_sequence(workspace, finished_run):
    short = write_texts(workspace.path / "short.jsonl", ["a b", "c d", "e f"])
    words = [f"data.paths=[{short}]", f"data.tokenizer={finished_run / 'tokenizer.model'}"]
    workspace.rejected(
        lambda: workspace.train(*workspace.tiny, *words),
        ["split", "tokens", "seq_len", "33"],
        caches=False,
    )


def test_train_refuses_unusable_tokenizer_before_preparation(workspace, code_corpus, finished_run):
    other = write_texts(workspace.path / "other.jsonl", documents(20, seed=1))
    words = [f"data.paths=[{other}]", f"data.tokenizer={finished_run / 'tokenizer.model'}"]
    workspace.rejects_data([*words, "model.vocab_size=300"], "512", "model.vocab_size=300")
    workspace.rejects_data([f"data.tokenizer={code_corpus}"], str(code_corpus), "sentencepiece")


# Run directories and checkpoints


def test_resume_refuses_checkpoint_of_different_model(workspace, finished_run):
    words = ["attention=diff_v2", f"resume={finished_run}", "run.name=new"]
    named = ["step-00000004", "different model", "attention.w_lambda.weight", "absent"]
    workspace.rejects_data(words, *named)


@pytest.fixture
def own_run(workspace, finished_run):
    return shutil.copytree(finished_run, workspace.path / "outputs" / "mine")


def test_train_refuses_existing_run_that_cannot_resume(workspace, own_run):
    mine = ["attention=standard", "run.name=mine"]
    workspace.rejects([*mine, "seed=7"], "outputs/mine", "seed", "0", "7")
    workspace.rejects([*mine, "resume=never"], "outputs/mine", "resume=never")
    (own_run / "config.yaml").unlink()
    workspace.rejects(mine, "outputs/mine", "config.yaml")


def test_train_refuses_run_directory_used_by_another_process(workspace):
    run = workspace.path / "outputs" / "busy"
    gate = Gate(run, 2)
    first = ForkedRun([*workspace.tiny, "run.dir=outputs/busy"])
    try:
        first.wait_for(gate.reached, "training")
        first.signal(signal.SIGSTOP)  # otherwise metrics.jsonl grows between the snapshots
        workspace.rejects(["run.name=busy"], "outputs/busy", f"in use by process {first.pid()} on")
        first.signal(signal.SIGCONT)
        first.signal(signal.SIGTERM)
        gate.open()
        assert "stopped by SIGTERM" in first.finish()
    finally:
        first.kill()


# Sweeps


SWEEPS = [
    (["attention=standard,diff_v9"], ["attention=diff_v9", *VARIANTS]),
    (["optim.lr=1e-3,0"], ["optim.lr=0", "positive"]),
    (["parallel.replicate=1,2"], ["parallel.replicate=2"]),
    (["seed=0,1", "run.sweep=a/b"], ["run.sweep", "a/b"]),
    (["steps=[1", "seed=0,1"], ["steps=[1"]),
]


@pytest.mark.parametrize(("words", "named"), slow_but(SWEEPS[:2], SWEEPS))
def test_sweep_with_invalid_job_starts_no_run(workspace, words, named):
    workspace.monkeypatch.setattr(
        "diffllm.compare.sweep.command.run_here", lambda *_: pytest.fail("the sweep was launched")
    )
    workspace.rejects_sweep(words, *named)


# Tools


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["generate", "run=gone", "prompt=a"], ["gone", "does not exist"]),
        (["generate", "run=.", "prompt=a"], ["config.yaml"]),
        (["generate"], ["run=...", "prompt=..."]),
        (["generate", "run=.", "def "], ["'def '", "prompt"]),
        (["generate", "run=.", "prompt=\udcff"], ["prompt", "UTF-8"]),
        (["checkpoints", "run=gone"], ["gone", "not a run directory"]),
        (["consolidate", "run=.", "dtype=int8"], ["dtype=int8", "float32 or bf16"]),
        (["prepare", "data=files", "data.paths=[gone.txt]"], ["gone.txt"]),
        (["count", "model=huge"], ["model=huge", "tiny"]),
        (["count", "model.dim=99999999999"], ["model.dim=99999999999", "1048576"]),
        (["plan", "gpu=nope"], ["gpu=nope", "H200"]),
        (["report"], ["no run"]),
        (["report", "file"], ["file", "directory"]),
        (["report", "gone*"], ["gone*", "no such directory"]),
        (["attention-map", "run=.", "prompt=a"], ["config.yaml"]),
    ],
)
def test_commands_refuse_invalid_arguments(workspace, words, named):
    (workspace.path / "file").write_text("", encoding="utf-8")
    workspace.rejects_tool(words, *named)


def test_generate_refuses_unusable_run_or_prompt_or_step(workspace, own_run):
    def rejects(*named: str, words: Sequence[str] = ("prompt=a",)) -> None:
        workspace.rejects_tool(["generate", f"run={own_run}", *words], *named)

    rejects("3", "[2, 4]", words=["prompt=a", "step=3"])
    rejects("tokens", "32", words=[f"prompt={'a b ' * 100}"])
    (own_run / "tokenizer.model").write_text("none", encoding="utf-8")
    rejects("tokenizer.model", "sentencepiece")
    (own_run / "tokenizer.model").unlink()
    rejects("tokenizer.model", "contains no")
    shutil.rmtree(own_run / "checkpoints")
    rejects(str(own_run), "no complete checkpoint")


REAL = [
    (train_command(["--cfg", "jobb"]), ["--cfg", "jobb", "job"]),
    (train_command(["--multirun", "--cfg", "job"]), ["--multirun", "--cfg"]),
    (train_command(["data.split=\udcff"]), ["data.split"]),
    (tool_command(["generat"]), ["generat", "prepare", "count", "generate"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("words", "named"), REAL)
def test_invalid_command_in_new_process_changes_no_file(tmp_path, environment, words, named):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    before = snapshot(tmp_path)
    line = error_line(command(words, tmp_path, environment))
    assert all(word in line for word in named), line
    assert not changes(before, snapshot(tmp_path))
