"""events.jsonl of real runs: spikes at unlogged steps and their text, kills and changed batches."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from runs.command import (
    ForkedRun,
    Gate,
    overrides_of,
    refusal_of,
    start,
    success_of,
    the_error,
    tool,
    trained_on,
    write_texts,
)
from runs.json_files import read_jsonl
from runs.planted_train import Fault
from runs.written import edit_text

from diffllm import load_config
from diffllm.config.saved import load_run_config
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import Prepared
from diffllm.data.samples import Place, training_samples
from diffllm.evaluation.load import own_data
from diffllm.metrics.events import read_events

SPIKES = (27, 37, 47, 57)
"""Steps with planted spikes; only multiples of 10 are logged."""
SEQ_LEN = 32


@pytest.fixture(scope="module")
def spiky(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with planted spikes that was killed at step 41 and resumed from step 30.

    Before the kill, the event of step 37 is on disk. The resumed process repeats this step with
    another batch size.
    """
    run = tmp_path_factory.mktemp("events") / "run"
    words = overrides_of(corpus, run, "steps=60", "log_interval=10", "checkpoint.interval=30")
    words += [f"seq_len={SEQ_LEN}", "data.num_workers=0", "model.dim=32", "model.ffn_dim=64"]
    fault, gate = Fault("scramble", 0, SPIKES[0]), Gate(run, 42)
    first = ForkedRun(words, directory=run, fault=fault)
    first.kill_at(gate, run / "checkpoints" / "step-00000030")
    assert event_steps(run, "loss_spike") == [27, 37]
    words += ["global_batch_size=4", "run.allow_changes=[global_batch_size]"]
    ForkedRun(words, directory=run, fault=fault).finish()
    return run


def event_steps(run: Path, kind: str) -> list[int]:
    """Return the steps of the events of a kind, of the detrended definition if they are spikes."""
    definitions = (None, "spikes_detrended")
    return [e.step for e in read_events(run) if e.kind == kind and e.definition in definitions]


def test_planted_spikes_at_unlogged_steps_are_events_once_after_kill_and_resume(spiky):
    assert event_steps(spiky, "loss_spike") == [*SPIKES]
    (restart,) = (event for event in read_events(spiky) if event.kind == "restart")
    assert (restart.step, restart.tokens) == (30, 30 * 8 * SEQ_LEN)
    rows = np.load(spiky / "steps.npy")
    for name in ("tokens", "training_flops"):
        assert (np.diff(rows[name]) > 0).all(), name
    assert restart.detail.startswith("1 rank; changed: global_batch_size: 8 in the run, 4 in")
    losses = {step: runs[-1][-1] for (_, step), runs in trained_on(spiky).items()}
    for event in read_events(spiky):
        if event.kind == "loss_spike":
            assert event.value == pytest.approx(losses[event.step])
            assert event.height > 4
            assert event.lr > 0
            samples = 8 * min(event.step, 30) + 4 * max(event.step - 30, 0)
            assert event.tokens == samples * SEQ_LEN


def texts_of(corpus: Path) -> list[str]:
    return [line["text"] for line in read_jsonl(corpus)]


def text_by_hash(corpus: Path) -> dict[str, str]:
    """Return the text of each training sequence, by the hash of its tokens in samples-0.jsonl."""
    data = prepare(load_config(overrides_of(corpus, corpus.parent / "none")).data)
    stream, tokenizer, texts = data.split("train"), data.tokenizer(), {}
    tokens = stream.tokens(0, len(stream))
    for begin in range(0, len(tokens) - SEQ_LEN, SEQ_LEN):
        row = tokens[begin : begin + SEQ_LEN + 1]
        texts[hashlib.sha256(row.tobytes()).hexdigest()[:12]] = tokenizer.decode(row.tolist())
    return texts


@pytest.fixture(scope="module")
def listed_events(spiky: Path, environment: dict[str, str]) -> list[dict]:
    """Return the value that the command prints with the text of all events."""
    done = tool(["events", f"run={spiky}", "show=text", "json=true"], spiky, environment)
    assert done.code == 0, done
    return json.loads(done.out)


def test_text_of_each_event_is_text_of_the_trained_samples(corpus, spiky, listed_events):
    """The recorded samples of a step are those of its last execution."""
    texts, trained = text_by_hash(corpus), trained_on(spiky)
    documents = texts_of(corpus)
    assert {event["step"] for event in listed_events if event["batch"]} == {*SPIKES}
    for event in listed_events:
        if not event["batch"]:
            assert event["text"] == []
            continue
        *samples, _ = trained["samples-0.jsonl", event["step"]][-1]
        assert len(event["text"]) == len(samples) == (8 if event["step"] <= 30 else 4)
        for sample, digest in zip(event["text"], samples, strict=True):
            assert "".join(sample["documents"]) == texts[digest]
            for part in sample["documents"]:
                assert any(part in document for document in documents), part


def test_printed_text_is_cut_without_show_full(spiky, environment, listed_events, tmp_path):
    words = ["events", f"run={spiky}", "step=27", "kind=loss_spike"]
    done = success_of(tool([*words, "show=full"], tmp_path, environment))
    (text, *_) = (event["text"] for event in listed_events if event["step"] == 27)
    for sample in text:
        assert f"corpus, sequence {sample['sequence']} ---" in done.out
        assert all(part.strip() in done.out for part in sample["documents"])
    plain = tool(words, tmp_path, environment).out.splitlines()
    assert plain == done.out.splitlines()[: len(plain)]
    assert [line.split()[0] for line in plain] == ["step", "27"]
    assert "corpus 208-215" in plain[1]


def test_text_of_moved_data_is_refused_in_one_line(corpus, spiky, environment, tmp_path):
    run, moved = shutil.copytree(spiky, tmp_path / "run"), tmp_path / "corpus.jsonl"
    edit_text(run / "config.yaml", str(corpus), str(moved))
    words = ["events", f"run={run}"]
    said = refusal_of(tool([*words, "show=text"], tmp_path, environment))
    assert f"{moved} matches no file or directory; move or link the data to the path in" in said
    assert tool(words, tmp_path, environment).code == 0
    shutil.copy(corpus, moved)
    assert tool([*words, "show=text"], tmp_path, environment).code == 0
    with open(moved, "a", encoding="utf-8") as file:
        file.write('{"text": "another document"}\n')
    changed = tool([*words, "show=text"], tmp_path, environment)
    assert "the corpus has changed since training" in the_error(changed.err)


def test_text_of_changed_tokens_is_refused_with_step(spiky, environment, tmp_path):
    run = shutil.copytree(spiky, tmp_path / "run")
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    other = json.loads(lines[0])
    other["batch"]["tokens_hash"] = "0123456789abcdef"
    lines[0] = json.dumps(other) + "\n"
    (run / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    words = ["events", f"run={run}", "show=text"]
    said = refusal_of(tool(words, tmp_path, environment))
    assert "step 27 read other tokens (hash 0123456789abcdef...) than the current data" in said
    assert tool([*words, "step=47"], tmp_path, environment).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show=all"], "show=all must be one of nothing, text, full"),
        (["kind=spike"], "kind=spike must be one of loss_spike, grad_spike, skipped, diverged, "),
        (["step=-1"], "step=-1 must not be negative"),
        (["run=missing"], "missing is not a run directory"),
    ],
)
def test_wrong_argument_of_events_is_refused(spiky, environment, tmp_path, words, message):
    refused = tool(["events", f"run={spiky}", *words], tmp_path, environment)
    assert message in refusal_of(refused)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), [("packed", 2), ("mixture", 1), ("stage", 1)])
def test_text_of_skipped_update_is_text_of_its_samples(corpus, environment, tmp_path, kind, ranks):
    run, other = tmp_path / "run", tmp_path / "other.jsonl"
    texts = {"corpus": texts_of(corpus), "other": [f"Other {i} and {i + 1}.\n" for i in range(400)]}
    write_texts(other, texts["other"])
    words = ["steps=6", "optim.lr=1e20", "optim.warmup_steps=0", "data.num_workers=0"]
    if kind == "packed":
        words.append("data.packing=best_fit")
    elif kind == "mixture":
        form = "{{corpus: {{source: files, paths: [{}]}}, other: {{source: files, paths: [{}]}}}}"
        words += ["data=mixture", "data.paths=[]", f"data.sources={form.format(corpus, other)}"]
    elif kind == "stage":
        start(corpus, tmp_path / "first", "steps=1", "optim.warmup_steps=0").finish()
        words.append(f"resume=stage:{tmp_path / 'first'}")
    start(corpus, run, *words, ranks=ranks).finish()
    done = success_of(tool(["events", f"run={run}", "show=text", "--json"], tmp_path, environment))
    events = [event for event in json.loads(done.out) if event["kind"] == "skipped"]
    assert [event["step"] for event in events] == [2, 3, 4, 5, 6]
    data, trained = own_data(run, load_run_config(run)), trained_on(run)
    for event in events:
        batch = event["batch"]
        assert batch["stage"] == int(kind == "stage")
        expected = []
        for rank in range(ranks):
            expected += trained[f"samples-{rank}.jsonl", event["step"]][-1][:-1]
        assert sorted(samples_of_event(run, data, batch)) == sorted(expected)
        assert {sample["source"] for sample in event["text"]} == {*batch["samples"]}
        for sample in event["text"]:
            for part in sample["documents"]:
                assert any(part in text for text in texts[sample["source"]]), part


def samples_of_event(run: Path, data: Prepared, batch: dict) -> list[str]:
    """Return a hash of each sample of a batch, as in samples-0.jsonl."""
    cfg = load_run_config(run)
    order = training_samples(data, cfg.data, 64, batch["seed"], 48, batch["stage"])
    digests = []
    for source, bounds in batch["samples"].items():
        inputs, targets = order.read(Place(source, *bounds)).batch
        rows = torch.cat((inputs, targets[:, -1:].clamp_min(-1)), dim=1).numpy()
        digests += [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in rows]
    return digests
