"""Whatever a user gets wrong ends in one line, exit code 2, and files as they were."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    metrics,
    snapshot,
    tool_command,
    train_command,
    train_module,
    write_jsonl,
)

from diffllm import cli as tools

VARIANTS = ["diff_v1", "diff_v2", "gated", "standard"]


@dataclass
class Workspace:
    """A working directory, the commands in this process, and what they must leave alone."""

    path: Path
    cache: Path
    tiny: list[str]
    capfd: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def train(self, *words: str) -> Result:
        """`python train.py`; `tiny` comes first unless a sweep flag does."""
        self.monkeypatch.setattr(sys, "argv", ["train.py", *words])
        return call(train_module().main, self.capfd)

    def rejects(self, words: Sequence[str], *named: str, watched: Sequence[Path] = ()) -> str:
        """The error line of `train.py tiny words`; nothing may have changed anywhere."""
        return self.rejected(lambda: self.train(*self.tiny, *words), named, watched)

    def rejects_sweep(self, words: Sequence[str], *named: str) -> str:
        return self.rejected(lambda: self.train("-m", *self.tiny, *words), named)

    def rejects_tool(self, words: Sequence[str], *named: str, watched: Sequence[Path] = ()) -> str:
        return self.rejected(
            lambda: call(lambda: tools.main(list(words)), self.capfd), named, watched
        )

    def rejects_data(self, words: Sequence[str], *named: str) -> str:
        """As `rejects`, for corpora that have to be read: the cache may grow, not change."""

        def run() -> Result:
            return self.train(*self.tiny, *words)

        before = snapshot(self.cache)
        line = self.rejected(run, named, caches=False)
        after = snapshot(self.cache)
        index = str(self.cache / "file_index.json")
        kept = {name: after.get(name, "absent") for name in before if name != index}
        before.pop(index, None)
        assert not changes(before, kept)
        made = {p.name for p in (self.cache / "tokens").glob("*") if p.is_dir()}
        known = {Path(p).name for p in before if Path(p).parent.name == "tokens"}
        assert made <= known, "a corpus that cannot be used was prepared all the same"
        return line

    def rejected(
        self,
        run: Callable[[], Result],
        named: Sequence[str],
        watched: Sequence[Path] = (),
        caches: bool = True,
    ) -> str:
        roots = [self.path, *watched, *([self.cache] if caches else [])]
        before = snapshot(*roots)
        result = run()
        changed = changes(before, snapshot(*roots))
        line = error_line(result)
        missing = [word for word in named if word not in line]
        assert not missing, f"{missing} not in: {line}"
        assert not changed, changed
        return line


def error_line(result: Result) -> str:
    """The one line that a failed command says; preparing may have been announced before it."""
    assert result.code == 2, result
    assert "Traceback" not in result.out + result.err, result.err
    lines = result.err.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, result.err
    others = [
        line
        for line in lines
        if not line.startswith(("error: ", "preparing tokens: ", "prepared "))
    ]
    assert not others, result.err
    assert lines[-1] == errors[0], result.err
    assert not result.out.strip(), result.out
    return errors[0]


@pytest.fixture
def workspace(
    tmp_path: Path,
    cache_dir: Path,
    tiny: list[str],
    finished_run: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Workspace:
    """An empty working directory; the corpus of `tiny` is prepared already."""
    path = tmp_path / "cwd"
    path.mkdir()
    monkeypatch.chdir(path)
    monkeypatch.setenv("DIFFLLM_CACHE", str(cache_dir))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return Workspace(path, cache_dir, tiny, capfd, monkeypatch)


def test_snapshot_sees_every_kind_of_change(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("a")
    link.symlink_to("file")
    before = snapshot(tmp_path)
    assert not changes(before, snapshot(tmp_path))

    def change(what: Callable[[], object]) -> int:
        earlier = snapshot(tmp_path)
        what()
        return len(changes(earlier, snapshot(tmp_path)))

    assert change(lambda: file.write_text("b")) == 1
    assert change(lambda: (tmp_path / "new").mkdir()) == 1
    assert change(lambda: (tmp_path / "new" / "empty").touch()) == 1
    assert change(lambda: os.utime(file, (0, 0))) == 1
    assert change(file.unlink) == 1
    assert change(lambda: shutil.rmtree(tmp_path / "new")) == 2


KEYS = [
    (["stepz=5"], ["stepz", "steps"]),
    (["model.rope.thet=1"], ["model.rope.thet", "model.rope.theta"]),
    (["+optim.lrr=1"], ["optim.lrr", "lr"]),
    (["+model.foo=1"], ["model.foo", "n_heads"]),
    (["+model.attention.foo=1"], ["model.attention.foo"]),
    (["+foo.bar=1"], ["foo"]),
    (["attenton=standard"], ["attenton", "attention"]),
    (["optimiser.lr=1"], ["optimiser", "optim"]),
    (["run.matched.target=gated"], ["run.matched.target"]),
    (["run.allow_changes=[sed]"], ["run.allow_changes", "sed", "seed"]),
    (["~stepz"], ["stepz"]),
    (["~model"], ["model"]),
]
CHOICES = [
    (["attention=diff_v3"], ["attention=diff_v3", *VARIANTS]),
    (["data=web"], ["data=web", "stdlib", "files", "hub"]),
    (["experiment=nope"], ["experiment=nope", "quickstart"]),
    (["attention=Diff_v1"], ["attention=Diff_v1", *VARIANTS]),
    (["model=null"], ["model", "tiny", "mini"]),
    (["model=[tiny,mini]"], ["model", "tiny", "mini"]),
    (["model.match_params_to=diff_v3"], ["model.match_params_to=diff_v3", "mean", *VARIANTS]),
]
TYPES = [
    (["steps=1.5"], ["steps", "1.5", "nteger"]),
    (["steps=[1,2]"], ["steps=[1,2]", "nteger"]),
    (["optim.lr=fast"], ["optim.lr", "fast", "number"]),
    (["compile=maybe"], ["compile", "maybe", "ool"]),
    (["data.paths=null"], ["data.paths=null"]),
    (["optim=3"], ["optim=3", "adamw"]),
    (["model.rope=3"], ["model.rope", "3"]),
    (["precision=fp16"], ["precision", "fp16", "auto", "bf16", "fp32"]),
    (["wandb.tags=['']"], ["wandb.tags", "''", "empty"]),
    (["data.source=web"], ["data.source", "web", "stdlib", "files", "hub"]),
]
RANGES = [
    (["optim.lr=nan"], ["optim.lr=nan"]),
    (["optim.beta1=1"], ["optim.beta1=1", "less than 1"]),
    (["optim.warmup_steps=5"], ["optim.warmup_steps=5", "steps=4"]),
    (["checkpoint.interval=soon"], ["checkpoint.interval=soon", "100", "30min"]),
    (["checkpoint.interval=0min"], ["checkpoint.interval=0min", "above 0"]),
    (["model.head_dim=33"], ["model.head_dim=33", "even"]),
    (["model.n_heads=3"], ["model.n_heads=3", "model.n_kv_heads=2", "multiple"]),
    (
        ["attention=diff_v1", "model.n_heads=4", "model.n_kv_heads=1"],
        ["model.n_kv_heads=1", "diff_v1", "even"],
    ),
    (
        ["attention=gated", "model.match_params_to=diff_v1", "model.n_kv_heads=1"],
        ["model.match_params_to=diff_v1: model.n_kv_heads=1", "even"],
    ),
    (
        ["model.match_params_to=standard", "attention=diff_v2", "model.ffn_dim=8"],
        ["model.match_params_to=standard", "closest", "model.ffn_dim"],
    ),
    (["data.vocab_size=1024"], ["data.vocab_size=1024", "model.vocab_size=512"]),
    (["micro_batch_size=3"], ["micro_batch_size=3", "4", "divide"]),
    (["parallel=hsdp"], ["parallel.shard=8", "1 rank"]),
    (["parallel.replicate=-1"], ["parallel.replicate", "parallel.shard", "-1"]),
    (["parallel.expert=2"], ["parallel.expert=2", "dense"]),
    (["data=stdlib"], ["data.paths", "data=files"]),
    (["data=hub", "data.paths=[]"], ["data.dataset"]),
    (["run.name=a/b"], ["run.name", "a/b"]),
    (["run.name=.."], ["run.name", ".."]),
    (["run.name='a b'"], ["run.name", "a b"]),
]
MIXTURES = [
    (["model.moe.experts=8"], ["model.moe.experts", "model.moe.n_experts"]),
    (["model.moe.n_experts=8"], ["model.moe.expert_dim=0", "at least 1"]),
    (["model=moe_tiny", "model.moe.top_k=9"], ["model.moe.top_k=9", "model.moe.n_experts=8"]),
    (
        ["model=moe_tiny", "model.moe.n_dense_layers=2"],
        ["model.moe.n_dense_layers=2", "model.n_layers=2"],
    ),
    (["model=moe_tiny", "model.moe.score=tanh"], ["model.moe.score", "tanh", "softmax", "sigmoid"]),
    (
        ["model=moe_tiny", "attention=diff_v2", "model.match_params_to=standard"],
        ["model.match_params_to=standard", "closest", "model.moe.expert_dim"],
    ),
]
SYNTAX = [
    (["steps=[1"], ["steps=[1"]),
    (["steps"], ["steps"]),
    (["=3"], ["=3"]),
    (["optim.lr=1,2"], ["optim.lr=1,2", "-m"]),
    (["optim.lr={"], ["optim.lr={"]),
    (["data.text_column=${nothing.here}"], ["data.text_column", "nothing.here"]),
]


def cases(*lists: list[tuple[list[str], list[str]]]) -> list[Any]:
    return [
        pytest.param(words, named, id=" ".join(words)) for case in lists for words, named in case
    ]


def every_sixth(*lists: list[tuple[list[str], list[str]]]) -> list[object]:
    """Cases differ in their keys more than in what is done; the slow tier has the others."""
    slow = pytest.mark.slow
    return [
        pytest.param(*case.values, id=case.id, marks=slow if i % 6 else ())
        for i, case in enumerate(cases(*lists))
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    every_sixth(KEYS, SYNTAX, CHOICES, TYPES, RANGES, MIXTURES),
)
def test_override_that_cannot_run(workspace: Workspace, words: list[str], named: list[str]) -> None:
    workspace.rejects(words, *named)


@pytest.mark.parametrize(
    ("size", "words", "named"),
    [
        ("3", [], ["global_batch_size=4", "3 ranks"]),
        ("2", ["micro_batch_size=4"], ["micro_batch_size=4", "2 sequences", "2 ranks"]),
        ("2", ["micro_batch_size=3"], ["micro_batch_size=3", "2 ranks", "global_batch_size=4"]),
        ("2", ["parallel.shard=3"], ["parallel.shard=3", "2 ranks"]),
        ("4", ["parallel.replicate=3"], ["parallel.replicate=3", "4 ranks"]),
        ("4", ["parallel=hsdp"], ["parallel.shard=8", "4 ranks"]),
    ],
)
def test_ranks_that_do_not_fit_are_refused_before_they_meet(
    workspace: Workspace, size: str, words: list[str], named: list[str]
) -> None:
    workspace.monkeypatch.setenv("WORLD_SIZE", size)
    workspace.monkeypatch.setenv("RANK", "0")
    workspace.rejects(words, *named)


def test_only_rank_0_speaks(workspace: Workspace) -> None:
    workspace.monkeypatch.setenv("WORLD_SIZE", "3")
    workspace.monkeypatch.setenv("RANK", "1")
    assert workspace.train(*workspace.tiny) == Result(2, "", "")


# Attention backends

BACKEND = "model.attention.backend"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_backend_without_its_gpu_is_refused_before_a_corpus_is_read(
    workspace: Workspace, backend: str
) -> None:
    """The corpus is not in the cache, and afterwards it still is not."""
    other = write_jsonl(workspace.path / "other.jsonl", documents(20, seed=2))
    workspace.rejects(
        [f"data.paths=[{other}]", f"{BACKEND}={backend}"],
        f"error: {BACKEND}={backend} needs a GPU; on the cpu choose sdpa or reference",
    )


@pytest.mark.parametrize(
    ("words", "named"),
    cases(
        [
            ([f"{BACKEND}=fast"], [f"{BACKEND}=fast", "sdpa", "flash", "flex", "reference"]),
            (
                ["attention=diff_v1_clamped", f"{BACKEND}=flex"],
                [f"{BACKEND}=flex", "clamped", "sdpa or reference"],
            ),
            (
                ["attention=standard_sink", f"{BACKEND}=flex"],
                [f"{BACKEND}=flex", "sink=learned", "sdpa, flash or reference"],
            ),
        ]
    ),
)
def test_backend_that_cannot(workspace: Workspace, words: list[str], named: list[str]) -> None:
    workspace.rejects(words, *named)


# Corpora and tokenizers


def make_corpus(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("empty.jsonl", b"", ["empty"]),
        ("blank.txt", b" \n\t\n", ["empty"]),
        ("latin.txt", "caf\xe9 au lait\n".encode("latin-1"), ["UTF-8"]),
        ("latin.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1"), ["UTF-8"]),
        ("table.csv", b"text\nhello\n", ["unsupported", ".parquet", ".jsonl", ".json", ".txt"]),
        ("noextension", b"hello\n", ["unsupported", ".jsonl"]),
        ("packed.parquet.gz", b"PAR1", ["unsupported", ".jsonl"]),
        ("column.jsonl", b'{"body": "a"}\n{"body": "b"}\n', ["'text'", "body"]),
        ("number.jsonl", b'{"text": 1}\n{"text": 2}\n', ["'text'", "int,", "not text"]),
        ("broken.jsonl", b'{"text": "a"\n{"text": \n', []),
        ("broken.parquet", b"PAR1 this is none", []),
        ("broken.jsonl.gz", b"not gzip at all", []),
        ("twice.txt", b"one\none\n", ["fewer than two", "sample_by"]),
    ],
)
def test_corpus_that_cannot_be_used(
    workspace: Workspace, name: str, content: bytes, named: list[str]
) -> None:
    path = make_corpus(workspace.path, name, content)
    where = [] if name == "twice.txt" else [name]
    by_line = ["data.sample_by=line"] * (".txt" in name)
    workspace.rejects_data([f"data.paths={path}", *by_line], *where, *named)


def test_corpus_that_is_not_there(workspace: Workspace) -> None:
    workspace.rejects_data(["data.paths=[missing.jsonl]"], "data.paths", "missing.jsonl")
    workspace.rejects_data(["data.paths=missing.txt"], "data.paths", "missing.txt")
    workspace.rejects_data(["data.paths=['*.parquet']"], "data.paths", "*.parquet")
    workspace.rejects_data([f"data.paths=[{workspace.path}]"], "data.paths", "directory")


def test_text_column_that_is_not_there(workspace: Workspace) -> None:
    workspace.rejects_data(["data.text_column=txet"], "corpus.jsonl", "'txet'", "text")


def test_corpus_shorter_than_a_sequence(workspace: Workspace, finished_run: Path) -> None:
    short = write_jsonl(workspace.path / "short.jsonl", ["a b", "c d", "e f"])
    words = [f"data.paths=[{short}]", f"data.tokenizer={finished_run / 'tokenizer.model'}"]
    workspace.rejected(
        lambda: workspace.train(*workspace.tiny, *words),
        ["split", "tokens", "seq_len", "33"],
        caches=False,
    )


def test_vocabulary_that_the_corpus_cannot_fill(workspace: Workspace) -> None:
    short = write_jsonl(workspace.path / "short.jsonl", ["a b", "c d", "e f"])
    workspace.rejects_data([f"data.paths=[{short}]"], "data.vocab_size=512", "largest that works")


def test_tokenizer_with_more_pieces_than_the_model(
    workspace: Workspace, finished_run: Path
) -> None:
    """Found out before the corpus is tokenised, which can take hours."""
    other = write_jsonl(workspace.path / "other.jsonl", documents(20, seed=1))
    words = [
        f"data.paths=[{other}]",
        f"data.tokenizer={finished_run / 'tokenizer.model'}",
        "model.vocab_size=300",
    ]
    workspace.rejects_data(words, "512", "model.vocab_size=300")


def test_tokenizer_file_that_is_none(workspace: Workspace, corpus: Path) -> None:
    workspace.rejects_data([f"data.tokenizer={corpus}"], str(corpus), "sentencepiece")
    workspace.rejects_data(["data.tokenizer=gone.model"], "gone.model", "no such")
    empty = make_corpus(workspace.path, "empty.model", b"")
    workspace.rejects_data([f"data.tokenizer={empty}"], "empty.model", "sentencepiece")


def test_cache_directory_that_cannot_be_written(workspace: Workspace) -> None:
    (workspace.path / "file").write_text("")
    workspace.rejects(["data.cache_dir=file/cache"], "data.cache_dir=file/cache")


# Run directories and checkpoints


def test_checkpoint_of_another_model(workspace: Workspace, finished_run: Path) -> None:
    """The newest one there, named, with the first parameter that differs."""
    for words, named in (
        (["attention=diff_v2"], ["attention.w_lambda.weight", "absent"]),
        (["attention=standard", "model.ffn_dim=256"], ["ffn.w1.weight", "384", "256"]),
        (["attention=standard", "model.tie_embeddings=true"], ["output.weight", "absent"]),
    ):
        line = workspace.rejects(
            [*words, f"resume={finished_run}", "run.name=new"], *named, watched=[finished_run]
        )
        assert "step-00000004" in line
        assert "another model" in line


def test_resume_path_that_is_no_checkpoint(workspace: Workspace, finished_run: Path) -> None:
    workspace.rejects(["resume=gone"], "gone", "not a checkpoint")
    (workspace.path / "folder").mkdir()
    workspace.rejects(["resume=folder"], "folder", "not a checkpoint")
    workspace.rejects(["resume=Never"], "Never", "not a checkpoint")
    file = finished_run / "config.yaml"
    workspace.rejects([f"resume={file}"], "config.yaml", "not a checkpoint", watched=[finished_run])


@pytest.mark.parametrize("state", ["{", "[]", "null", '{"format": 99}', '{"format": 1}'])
def test_checkpoint_with_a_foreign_state(
    workspace: Workspace, finished_run: Path, state: str
) -> None:
    checkpoint = workspace.path / "step-00000004"
    shutil.copytree(finished_run / "checkpoints" / "step-00000004", checkpoint)
    (checkpoint / "state.json").write_text(state)
    workspace.rejects(["attention=standard", "resume=step-00000004"], "step-00000004")


def test_checkpoint_with_damaged_tensors(workspace: Workspace, finished_run: Path) -> None:
    checkpoint = workspace.path / "step-00000004"
    shutil.copytree(finished_run / "checkpoints" / "step-00000004", checkpoint)
    for file in checkpoint.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    workspace.rejects(["attention=standard", "resume=step-00000004"], "step-00000004")


@pytest.fixture
def own_run(workspace: Workspace, finished_run: Path) -> Path:
    """The finished run under this working directory's outputs/."""
    return shutil.copytree(finished_run, workspace.path / "outputs" / "mine")


def test_name_of_a_run_with_another_config(workspace: Workspace, own_run: Path) -> None:
    workspace.rejects(
        ["attention=standard", "run.name=mine", "seed=7"], "outputs/mine", "seed", "0", "7"
    )
    workspace.rejects(
        ["attention=gated", "run.name=mine"], "outputs/mine", "another config", "run.name"
    )
    workspace.rejects(
        ["attention=standard", "run.dir=outputs/mine", "steps=5"], "outputs/mine", "steps"
    )


def test_never_resume_what_exists(workspace: Workspace, own_run: Path) -> None:
    workspace.rejects(
        ["attention=standard", "run.name=mine", "resume=never"], "outputs/mine", "resume=never"
    )


def test_directory_that_holds_something_else(workspace: Workspace, own_run: Path) -> None:
    (own_run / "config.yaml").unlink()
    workspace.rejects(["attention=standard", "run.name=mine"], "outputs/mine", "config.yaml")


@pytest.mark.parametrize(
    "text", ["", "{", "- 1\n", "run: 3\n", "run: {choices: {attention: gone}}\n"]
)
def test_directory_with_a_foreign_config(workspace: Workspace, own_run: Path, text: str) -> None:
    (own_run / "config.yaml").write_text(text)
    workspace.rejects(["attention=standard", "run.name=mine"], "outputs/mine/config.yaml")


def test_run_directory_in_use(workspace: Workspace) -> None:
    run = workspace.path / "outputs" / "busy"
    gate = Gate(run, 2)
    first = ForkedRun([*workspace.tiny, "run.dir=outputs/busy"])
    try:
        first.wait_for(gate.reached, "training")
        first.signal(signal.SIGSTOP)  # or its metrics.jsonl would grow
        workspace.rejects(["run.name=busy"], "outputs/busy", "in use")
        first.signal(signal.SIGCONT)
        first.signal(signal.SIGTERM)
        gate.open()
        assert "stopped by SIGTERM" in first.finish()
    finally:
        first.kill()


def test_run_directory_that_cannot_be_written(workspace: Workspace) -> None:
    (workspace.path / "file").write_text("mine")
    workspace.rejects(["run.dir=file/run"], "file/run", "run.dir")
    workspace.rejects(["run.dir=file"], "file", "run.dir")
    (workspace.path / "outputs").write_text("mine")
    workspace.rejects(["run.name=a"], "outputs/a", "run.dir")


# Sweeps


@pytest.mark.parametrize(
    ("words", "named"),
    every_sixth(
        [
            (["attention=standard,diff_v9"], ["attention=diff_v9", *VARIANTS]),
            (["optim.lr=1e-3,0"], ["optim.lr=0", "positive"]),
            (["seed=0,x"], ["seed", "x", "nteger"]),
            (["precision=auto,fp16"], ["precision", "fp16", "bf16"]),
            (["model.n_heads=4,3"], ["model.n_heads=3", "model.n_kv_heads=2"]),
            (["micro_batch_size=1,3"], ["micro_batch_size=3", "divide"]),
            (["parallel.replicate=1,2"], ["parallel.replicate=2"]),
            (["stepz=1,2"], ["stepz", "steps"]),
            (["seed=0,1", "run.name=mine"], ["run.name", "run.sweep"]),
            (["seed=0,1", "run.dir=here"], ["run.dir", "run.sweep"]),
            (["seed=0,1", "run.sweep=a/b"], ["run.sweep", "a/b"]),
            (["seed=0,1", "run.sweep=.."], ["run.sweep", ".."]),
            (["steps=[1", "seed=0,1"], ["steps=[1"]),
        ]
    ),
)
def test_sweep_with_one_bad_job_starts_none(
    workspace: Workspace, words: list[str], named: list[str]
) -> None:
    workspace.monkeypatch.setattr(
        "diffllm.compare.sweep.command.run_here", lambda *_: pytest.fail("the sweep was launched")
    )
    workspace.rejects_sweep(words, *named)


# Tools


@pytest.mark.parametrize(
    ("words", "named"),
    cases(
        [
            (["generate", "run=gone", "prompt=a"], ["gone", "does not exist"]),
            (["generate", "run=.", "prompt=a"], ["config.yaml"]),
            (["generate"], ["run=...", "prompt=..."]),
            (["generate", "run=.", "promt=a"], ["promt=a", "prompt"]),
            (["generate", "run=.", "def "], ["'def '", "prompt"]),
            (["generate", "run=.", "prompt=a", "seed=x"], ["seed='x'", "int"]),
            (["generate", "run=.", "prompt=a", "top_p=0"], ["top_p"]),
            (["generate", "--run", "x"], ["--run", "run"]),
            (["checkpoints", "run=gone"], ["gone", "not a run directory"]),
            (["checkpoints", "run=.", "verify=no"], ["verify='no'", "true or false"]),
            (["consolidate", "run=gone"], ["gone", "does not exist"]),
            (["consolidate", "run=.", "dtype=int8"], ["dtype=int8", "float32 or bf16"]),
            (["prepare", "data=files", "data.paths=[gone.txt]"], ["gone.txt"]),
            (["count", "model=huge"], ["model=huge", "tiny"]),
            (["count", "--jsn"], ["--jsn"]),
            (["generat"], ["generat", "prepare", "count", "generate"]),
            (["prepare", "data.cache_dir="], ["data.cache_dir", "empty"]),
            (["prepare", "--x"], ["--x"]),
            (["count", "model.dim=99999999999"], ["model.dim=99999999999", "1048576"]),
            (["count", "hydra.verbose=true"], ["hydra.verbose=true"]),
            (["plan", "gpu=nope"], ["gpu=nope", "H200"]),
            (["plan", "--gpu"], ["--gpu", "key=value"]),
            (["generate", "run=.", "prompt=a", "temperature=nan"], ["temperature"]),
            (["generate", "run=.", "prompt=\udcff"], ["prompt", "UTF-8"]),
            (["report"], ["no run"]),
            (["report", "gone"], ["gone", "not exist"]),
            (["report", "file"], ["file", "directory"]),
            (["report", "gone*"], ["gone*", "matches no"]),
            (["report", ".", "foo=1"], ["foo=1", "baseline"]),
            (["noise-floor", "keys=1000000000000000"], ["keys=1000000000000000", "131072"]),
            (["attention-map", "run=.", "prompt=a"], ["config.yaml"]),
            (["dashboard"], ["entity=...", "project=..."]),
        ]
    ),
)
def test_tool_used_wrongly(workspace: Workspace, words: list[str], named: list[str]) -> None:
    (workspace.path / "file").write_text("")
    workspace.rejects_tool(words, *named)


def test_generate_from_a_run_that_cannot(workspace: Workspace, own_run: Path) -> None:
    def rejects(*named: str, words: Sequence[str] = ("prompt=a",)) -> None:
        workspace.rejects_tool(["generate", f"run={own_run}", *words], *named)

    rejects("3", "[2, 4]", words=["prompt=a", "step=3"])
    rejects("seed=", words=["prompt=a", "seed=99999999999999999999999"])
    rejects("tokens", "32", words=[f"prompt={'a b ' * 100}"])
    (own_run / "tokenizer.model").write_text("none")
    rejects("tokenizer.model", "sentencepiece")
    (own_run / "tokenizer.model").unlink()
    rejects("tokenizer.model", "has no")
    config = (own_run / "config.yaml").read_text()
    (own_run / "config.yaml").write_text(config.replace("ffn_dim: 384", "ffn_dim: 256"))
    rejects("ffn.w1.weight", "384", "256")
    shutil.rmtree(own_run / "checkpoints")
    rejects(str(own_run), "no complete checkpoint")


def test_tools_without_a_command_say_which_there_are(
    workspace: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    result = call(lambda: tools.main([]), capfd)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert all(name in result.out + result.err for name in ("prepare", "count", "generate"))


# The same through the real commands


REAL = [
    (train_command(["-m", "attention=standard,diff_v9"]), ["attention=diff_v9", *VARIANTS]),
    (train_command(["run.dir=file/run"]), ["run.dir=file/run", "is a file, not a directory"]),
    (tool_command(["generate", "run=.", "prompt=a"]), ["config.yaml"]),
    (tool_command(["generat"]), ["generat", "prepare", "count", "generate"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    REAL,
    ids=lambda words: " ".join(Path(word).name for word in words),
)
def test_real_command(
    tmp_path: Path,
    cache_dir: Path,
    environment: dict[str, str],
    finished_run: Path,
    words: list[str],
    named: list[str],
) -> None:
    (tmp_path / "file").write_text("mine")
    before = snapshot(tmp_path, cache_dir)
    line = error_line(command(words, tmp_path, environment))
    assert all(word in line for word in named), line
    assert not changes(before, snapshot(tmp_path, cache_dir))


def test_a_finished_run_is_what_these_tests_start_from(finished_run: Path) -> None:
    """Or the tests above could pass for the wrong reason."""
    assert json.loads((finished_run / "summary.json").read_text())["steps"] == 4
    assert {p.name for p in finished_run.iterdir()} >= {"config.yaml", "tokenizer.model"}
    assert metrics(finished_run)[-1]["step"] == 4
