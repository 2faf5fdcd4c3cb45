"""Alerts, the table of events and the tag `cancel`, on a stand-in for wandb's server."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from runs import planted_train
from runs.command import ForkedRun, Gate, loader_processes, overrides_of, start, success_of, tool
from runs.planted_train import Fault
from wandb_server import StoredRun, WandbServer

from diffllm.core.run_files import list_checkpoints
from diffllm.metrics.events import Event, read_events

pytestmark = pytest.mark.slow
SMALL = ("seq_len=32", "global_batch_size=2", "data.num_workers=0", "eval.sequences=1")
ONLINE = (*SMALL, "wandb.mode=online", "log_interval=1")
DIVERGES = ("optim.lr=100", "optim.clip_norm=0", "optim.warmup_steps=1")
"""Overrides whose first update is so large that all later updates are skipped."""


def only_run(server: WandbServer) -> StoredRun:
    (run,) = server.runs.values()
    return run


def table_rows(run: StoredRun) -> list[list[object]]:
    table = run.summary["events"]
    return json.loads(run.uploads[table["path"]])["data"]


def without_batch(event: Event) -> list[object]:
    line = json.loads(event.line())
    del line["batch"]
    return [*line.values()]


def test_divergence_sends_one_alert_per_kind_and_event_table(server, corpus, tmp_path, environment):
    run = tmp_path / "run"
    output = start(corpus, run, *ONLINE, *DIVERGES, "steps=40").finish()
    assert "diverged: 20 updates in a row were skipped" in output
    stored = only_run(server)
    titles = Counter(alert["title"] for alert in stored.alerts)
    assert titles == {"Updates skipped": 1, "Training diverged": 1}
    (diverged,) = [alert for alert in stored.alerts if alert["title"] == "Training diverged"]
    assert diverged["severity"] == "ERROR"
    assert "20 updates in a row were skipped" in diverged["text"]
    expected = [without_batch(event) for event in read_events(run)]
    assert [[*row[:7], row[8]] for row in table_rows(stored)] == expected
    assert [line["_step"] for line in stored.history] == [line["step"] for line in stored.history]

    variables = {**environment, **clients(server)}
    success_of(tool(["wandb", f"run={run}", "mode=online"], tmp_path, variables))
    _, repaired = server.runs.values()
    assert table_rows(repaired) == table_rows(stored)
    assert repaired.alerts == []


def clients(server: WandbServer) -> dict[str, str]:
    return server.variables(Path.home())


def requesting(fault: Fault, words: list[str]) -> int:
    """Train with a request for the tags of the run every second."""
    from diffllm.metrics import wandb_events

    wandb_events.REQUEST_S = 1
    return planted_train.main(fault, words)


@pytest.mark.parametrize("ranks", [1, 2])
def test_cancel_tag_stops_all_ranks_after_checkpoint_without_requeue(
    server, corpus, tmp_path, ranks
):
    run = tmp_path / "run"
    words = overrides_of(corpus, run, *ONLINE, "steps=30", "wandb.cancel_tag=true")
    gate = Gate(run, 4)
    process = ForkedRun(words, ranks, run, main=requesting)
    process.wait_for(gate.reached, "gate")
    stored = only_run(server)
    stored.added_tags.append("cancel")
    line = "stopping after this step: the tag 'cancel' in wandb\n"
    process.wait_for(lambda: line in process.text(), "stop")
    gate.open()
    output = process.finish()
    (checkpoint,) = (run / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    assert 4 <= step <= 6
    assert f"stopped by the tag 'cancel' in wandb after step {step}, saved; after you" in output
    assert not (run / "requeue").exists()
    reason = f"the tag 'cancel' in wandb stopped the run after step {step}"
    assert (stored.summary["state"], stored.summary["reason"]) == ("cancelled", reason)

    stored.added_tags.clear()
    output = ForkedRun(words, ranks, run, main=requesting).finish()
    assert f"resumes from step {step}" in output
    assert stored.summary["state"] == "finished"
    assert stored.summary.get("reason") is None


def test_stall_of_other_rank_sends_one_alert(server, corpus, tmp_path):
    run = tmp_path / "run"
    words = overrides_of(corpus, run, *ONLINE, "steps=30", "distributed.timeout=12")
    process = ForkedRun(words, 2, run, Fault("hang", 1, 8))
    assert process.codes() == [1, 1]
    (alert,) = only_run(server).alerts
    assert (alert["title"], alert["severity"]) == ("Training stalled", "ERROR")
    assert alert["text"].startswith("after step 7: rank 1 is missing: it hangs at step 8")


def test_stall_of_only_rank_sends_one_alert_before_exit(server, corpus, tmp_path):
    run = tmp_path / "run"
    words = (*ONLINE, "steps=1000000", "checkpoint.interval=2", "data.num_workers=1")
    process = start(corpus, run, *words, "distributed.timeout=12", "wandb.alerts=[stall]")
    process.wait_for(lambda: list_checkpoints(run / "checkpoints"), "checkpoint")
    (loader,) = loader_processes(process.pid())
    os.kill(loader, signal.SIGSTOP)
    output = process.finish(1)
    assert "warning: this process hangs" not in output, "the run ends before the warning"
    (alert,) = only_run(server).alerts
    assert f"waiting for a batch of the data loader (stopped: process {loader})" in alert["text"]


def test_cancel_tag_offline_is_refused(corpus, tmp_path):
    run = tmp_path / "run"
    process = start(corpus, run, *SMALL, "wandb.mode=offline", "wandb.cancel_tag=true")
    output = process.finish(2)
    (line,) = output.splitlines()
    error = "error: wandb.cancel_tag=true needs wandb online, but its mode is offline"
    assert line.startswith(error)
    assert not run.exists()
