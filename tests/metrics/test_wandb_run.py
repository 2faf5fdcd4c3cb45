"""Tests with the real wandb: read offline runs, and kill, stop or refuse its service."""

import contextlib
import http.server
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import wandb
from processes import PATIENCE_S
from wandb_file import OfflineRun

from diffllm.core.errors import ConfigError
from diffllm.metrics import wandb_run
from diffllm.metrics.wandb_config import (
    WandbConfig,
    WandbMode,
    check_wandb,
    resolve_mode,
    with_defaults,
    with_variables,
)
from diffllm.metrics.wandb_directories import has_online, set_aside
from diffllm.metrics.wandb_run import WandbRun
from diffllm.metrics.wandb_start import open_run

KEY = "0123456789" * 4
VARIABLES = {
    "WANDB_PROJECT": "its-project",
    "WANDB_ENTITY": "its-team",
    "WANDB_RUN_GROUP": "its-group",
    "WANDB_TAGS": "a, b, ,",
    "WANDB_JOB_TYPE": "its-type",
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Set an empty home directory and an environment without wandb variables and reports."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "NETRC", *VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    directory = tmp_path / "home"
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    return directory


@pytest.fixture(scope="module", autouse=True)
def _no_service_left():
    yield
    wandb.teardown()


OWN = {"WANDB_BASE_URL": "https://wandb.example.org:8080"}


@pytest.mark.parametrize(
    ("machine", "variables", "mode"),
    [
        (None, {}, "offline"),
        (None, {"WANDB_API_KEY": KEY}, "online"),
        (None, {"WANDB_API_KEY": ""}, "offline"),
        ("api.wandb.ai", {}, "online"),
        ("api.forge.coreweave.com", {}, "online"),
        ("example.org", {}, "offline"),
        ("api.wandb.ai", OWN, "offline"),
        ("wandb.example.org:8080", OWN, "online"),
        ("gr\u00f6\u00dfe", {}, "offline"),
        ("api.wandb.ai", {"WANDB_MODE": "disabled"}, "disabled"),
        ("api.wandb.ai", {"WANDB_MODE": "dryrun"}, "offline"),
    ],
)
def test_wandb_auto_mode_is_online_only_if_api_key_for_server_exists(
    home, monkeypatch, machine, variables, mode
):
    """The API key is in the environment or in netrc; WANDB_MODE overrides both."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if machine:
        content = f"machine {machine}\n  login user\n  password {KEY}\n"
        (home / ".netrc").write_bytes(content.encode("latin-1"))
        (home / ".netrc").chmod(0o600)
    assert resolve_mode(WandbConfig()) == mode
    assert resolve_mode(WandbConfig(mode=WandbMode.online)) == "online"


EMPTY = dict.fromkeys(VARIABLES, "")
OWN_KEYS = {"project": "own", "entity": "me", "group": "mine", "tags": []}


@pytest.mark.parametrize(
    ("keys", "variables", "expected"),
    [
        ({}, {}, ["diffllm", "", "diff_v2", "tiny", []]),
        ({}, EMPTY, ["diffllm", "", "diff_v2", "tiny", []]),
        ({}, VARIABLES, ["its-project", "its-team", "its-group", "its-type", ["a", "b"]]),
        (OWN_KEYS, VARIABLES, ["own", "me", "mine", "its-type", []]),
    ],
)
def test_wandb_keys_override_variables_and_variables_override_defaults(
    tmp_path, monkeypatch, keys, variables, expected
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    cfg = with_defaults(with_variables(WandbConfig(WandbMode.offline, **keys)), "diff_v2")
    WandbRun(cfg, tmp_path, "tiny", {}, None).finish()
    header, names = OfflineRun(tmp_path).header, ("project", "entity", "run_group", "job_type")
    assert [*(getattr(header, name) for name in names), list(header.tags)] == expected


def test_wandb_dir_variable_selects_directory_of_wandb_files(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "scratch"))
    a_run(tmp_path / "run").finish()
    assert list((tmp_path / "run").iterdir()) == []
    assert OfflineRun(tmp_path / "scratch").header.display_name == "run"


def test_directories_of_id_exclude_longer_id_with_same_end(tmp_path):
    replaced = tmp_path / "wandb" / "replaced" / "offline-run-20260101_000000-seed-1"
    (replaced / "files").mkdir(parents=True)
    (replaced / "run-seed-1.wandb.synced").touch()
    (replaced / "files" / "wandb-summary.json").write_text('{"_step": 7}', encoding="utf-8")
    online = tmp_path / "wandb" / "run-20260101_000000-seed-1"
    offline = tmp_path / "wandb" / "offline-run-20260101_000001-seed-1"
    for directory in (online, offline):
        directory.mkdir()
    assert [has_online(tmp_path, run_id) for run_id in ("1", "seed-1")] == [False, True]
    assert set_aside(tmp_path, "1") == -1
    assert offline.exists()
    assert set_aside(tmp_path, "seed-1") == 7
    assert not offline.exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_MODE", "onlin"),
        ("WANDB_PROJECT", "team/project"),
        ("WANDB_TAGS", f"a,{'b' * 65}"),
        ("WANDB_RUN_ID", "a/b"),
    ],
)
def test_invalid_wandb_variable_is_refused_before_the_run(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"^{name}[=:]"):
        check_wandb(WandbConfig())
    check_wandb(WandbConfig(mode=WandbMode.disabled))


def test_invalid_wandb_project_is_refused_at_start_but_accepted_in_saved_config():
    cfg = WandbConfig(WandbMode.offline, project="team/project")
    cfg.validate()
    with pytest.raises(ConfigError, match=r"^wandb\.project=team/project must have"):
        check_wandb(cfg)


def a_run(
    directory: Path,
    mode: WandbMode = WandbMode.offline,
    run_id: str | None = None,
    added_tags: Sequence[str] = (),
    history: Iterable[dict[str, Any]] = (),
    **changes: Any,
) -> WandbRun:
    cfg = WandbConfig(mode=mode, project="a-project", **changes)
    cfg = with_defaults(cfg, "diff_v2", added_tags)
    config = {"steps": 3, "model": {"dim": 8, "attention": {}}, "run": {"name": None}}
    directory.mkdir(exist_ok=True)
    return WandbRun(cfg, directory, "tiny", config, run_id, history=history)


def test_wandb_run_omits_nan_and_infinite_losses(tmp_path, capfd):
    run = a_run(tmp_path / "run", tags=["first", "second"], added_tags=["third"])
    for step, loss in enumerate((2.5, 1.5, math.nan, -math.inf), start=1):
        run.log({"step": step, "tokens": 100 * step, "train/loss": loss})
    run.finish()
    found = OfflineRun(tmp_path / "run")
    assert found.header.project == "a-project"
    assert list(found.header.tags) == ["first", "second", "third"]
    assert [row["tokens"] for row in found.history] == [100, 200, 300, 400]
    assert [row.get("train/loss") for row in found.history] == [2.5, 1.5, None, None]
    assert found.summary["train/loss"] == {"min": 1.5}
    assert "wandb" not in capfd.readouterr().err


def test_wandb_resumes_earlier_run_if_run_id_is_reused(tmp_path):
    first = a_run(tmp_path / "first", group="my-group")
    first.log({"step": 1, "tokens": 10, "train/loss": 2.0})
    first.finish()
    second = a_run(tmp_path / "second", run_id=first.id, group="my-group")
    second.finish()
    third = a_run(tmp_path / "third")
    third.finish()
    assert second.id == first.id != third.id
    headers = [OfflineRun(tmp_path / name).header for name in ("first", "second", "third")]
    assert [h.run_id for h in headers] == [first.id, first.id, third.id]
    assert [h.run_group for h in headers] == ["my-group", "my-group", "diff_v2"]


def test_long_names_and_groups_in_wandb_are_shortened_and_stay_different(tmp_path):
    names = [f"{'n' * 130}{end}" for end in "ab"]
    for name in names:
        a_run(tmp_path / name, group=name, added_tags=[name]).finish()
    headers = [OfflineRun(tmp_path / name).header for name in names]
    for header in headers:
        assert [len(header.display_name), len(header.run_group)] == [128, 128]
        assert [*header.tags] == ["n" * 64]
    assert headers[0].display_name != headers[1].display_name
    assert headers[0].run_group != headers[1].run_group


def test_disabled_wandb_run_writes_no_file_and_starts_no_service(tmp_path, home, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("wandb.init was called"))
    run = a_run(tmp_path, WandbMode.disabled)
    run.log({"step": 1})
    run.finish({"x": 1})
    assert list(tmp_path.iterdir()) == [home]
    assert run.id  # for a later start with wandb enabled
    assert a_run(tmp_path, WandbMode.disabled, run_id=run.id).id == run.id


class Broken:
    """A new wandb run in which the named calls raise."""

    resumed = False

    def __init__(self, *broken: str) -> None:
        self.broken, self.calls = broken, []
        self.summary = self

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)
            if name in self.broken:
                raise ConnectionResetError("Connection\nlost")

        return call


def only_line(capfd: pytest.CaptureFixture[str]) -> str:
    """Return the only line on stderr; stdout must be empty."""
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


@pytest.mark.parametrize("broken", ["log", "define_metric", "finish", "update"])
def test_failing_wandb_call_prints_single_warning(tmp_path, monkeypatch, capfd, broken):
    fake = Broken(broken)
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    run = a_run(tmp_path)
    for step in range(1, 4):
        run.log({"step": step})
    if broken == "log":
        run.thread.join(PATIENCE_S)
    run.finish({"x": 1})
    run.finish()
    time = "after training" if broken in ("finish", "update") else "working, training continues"
    assert f"{time}: ConnectionResetError" in only_line(capfd)
    assert fake.calls.count(broken) == 1


def test_failing_wandb_import_prints_single_warning(tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = a_run(tmp_path)
    run.log({"step": 1})
    run.finish()
    assert "wandb stopped working" in (line := only_line(capfd))
    assert "ModuleNotFoundError" in line
    assert run.id


def test_full_wandb_queue_does_not_block_training(tmp_path, monkeypatch, capfd):
    released = threading.Event()
    fake = Broken()
    fake.log = lambda values, step: released.wait()
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    monkeypatch.setattr(wandb_run, "BACKLOG", 3)
    monkeypatch.setattr(wandb_run, "STALL_SECONDS", -1)
    run = a_run(tmp_path)
    for step in range(1, 9):  # a call that waited for wandb would wait forever
        run.log({"step": step})
    run.finish()
    assert "3 lines are still queued" in only_line(capfd)
    released.set()


SERVICE = """
import os, signal, sys, time
from pathlib import Path
from diffllm.metrics import wandb_run
from diffllm.metrics.wandb_config import WandbConfig, WandbMode
from diffllm.metrics.wandb_run import WandbRun
import wandb

wandb_run.FINISH_SECONDS = 2 if sys.argv[2] == "SIGSTOP" else 200
run = WandbRun(WandbConfig(mode=WandbMode.offline), Path(sys.argv[1]), "tiny", {}, None)
run.log({"step": 1, "tokens": 10})
os.kill(wandb.setup()._connection._proc._process.pid, getattr(signal, sys.argv[2]))
for step in range(2, 400):
    run.log({"step": step, "tokens": 10, **{f"context_rms/layer_{i:02d}": 0.5 for i in range(99)}})
run.finish({"x": 1})
print("finished")
"""


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "line"),
    [("SIGKILL", "Connection (lost|reset)"), ("SIGSTOP", "did not finish within 2 s")],
)
def test_killed_or_stopped_wandb_service_does_not_block_run(tmp_path, name, line):
    """A stopped service accepts values until the socket is full, then blocks the sender forever."""
    command = [sys.executable, "-c", SERVICE, str(tmp_path), name]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "finished\n"
    (said,) = done.stderr.splitlines()
    assert re.search(line, said)


@contextlib.contextmanager
def refusing_server() -> Iterator[str]:
    """Run a server that refuses every API key; yield its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(401)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()


@pytest.mark.parametrize("mode", [WandbMode.auto, WandbMode.online])
def test_wandb_run_with_wrong_api_key_is_recorded_offline(tmp_path, monkeypatch, capfd, mode):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with refusing_server() as address:
        monkeypatch.setenv("WANDB_BASE_URL", address)
        wandb.teardown()  # restart the service with the changed environment
        capfd.readouterr()
        run = a_run(tmp_path / "run", mode)
        assert run.mode == "online"
        run.log({"step": 1, "tokens": 5})
        run.finish({"x": 1})
    found = OfflineRun(tmp_path / "run")
    assert found.header.run_id == run.id
    assert found.history == [{"step": 1, "tokens": 5}]
    line = only_line(capfd)
    assert line.startswith("wandb cannot go online, the run is recorded offline: ")
    assert "401" in line
    assert "; run `wandb login`, or set WANDB_API_KEY; `wandb sync " in line
    assert f"/wandb/offline-run-*-{run.id}` uploads the run" in line
    assert KEY not in line


@pytest.fixture
def server(wandb_server, home, monkeypatch, capfd):
    """Return a stand-in for wandb's server that runs of this process use."""
    for name, value in wandb_server.variables(home).items():
        monkeypatch.setenv(name, value)
    wandb.teardown()  # restart the service with the changed environment
    capfd.readouterr()
    return wandb_server


@pytest.mark.slow
def test_refused_lines_of_online_run_are_reported_at_its_end(tmp_path, server, capfd):
    server.refusals["file_stream"] = 403, "read-only project"
    run = a_run(tmp_path / "run", WandbMode.online)
    run.log({"step": 1, "tokens": 5})
    run.finish({"x": 1})
    assert server.runs[run.id].history == []
    line = only_line(capfd)
    assert "stopped working after training: the server has not stored all steps: " in line
    assert "403" in line
    assert line.endswith("; `diffllm wandb` writes all steps")


@pytest.mark.slow
def test_resumed_online_run_clears_state_and_reason_of_its_last_end(tmp_path, server):
    first = a_run(tmp_path / "run", WandbMode.online)
    first.log({"step": 1, "tokens": 5})
    first.finish({"state": "cancelled", "reason": "the tag", "x": 1})
    stored = server.runs[first.id]
    assert stored.summary["state"] == "cancelled"
    a_run(tmp_path / "run", WandbMode.online, run_id=first.id).finish()
    values = [stored.summary.get(name) for name in ("state", "reason", "x")]
    assert values == [None, None, 1]


def test_wandb_resume_variable_is_ignored(tmp_path, monkeypatch):
    """`wandb sync` would upload nothing of an offline run that must resume."""
    monkeypatch.setenv("WANDB_RESUME", "must")
    run = open_run("offline", {"dir": str(tmp_path), "id": "new", "resume": None})
    assert run.settings.resume is None
    run.finish()
    assert os.environ["WANDB_RESUME"] == "must"


@pytest.mark.slow
def test_earlier_steps_may_take_longer_than_last_call_of_wandb(tmp_path, monkeypatch, capfd):
    """Each line counts as progress, so that the replay of a long run is not cut."""
    fake, lines = Broken(), []

    def log(values, step):
        lines.append(step)
        threading.Event().wait(0.1)

    fake.log = log
    fake.step, fake.offline, fake.id, fake.dir = 0, False, "id", str(tmp_path / "x" / "files")
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    monkeypatch.setattr(wandb_run, "FINISH_SECONDS", 1)
    history = ({"step": step} for step in range(1, 31))
    run = a_run(tmp_path, history=history)
    run.finish()
    assert lines == [*range(1, 31)]
    assert capfd.readouterr().err == ""


ASK = """
import sys
from pathlib import Path
from diffllm.metrics.wandb_config import WandbConfig, WandbMode
from diffllm.metrics.wandb_run import WandbRun
run = WandbRun(WandbConfig(mode=WandbMode.online), Path(sys.argv[1]), "tiny", {}, None)
run.finish()
"""


def test_missing_wandb_api_key_causes_no_prompt_on_terminal(tmp_path):
    terminal, side = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", ASK, str(tmp_path)], stdin=side, stdout=side, stderr=side
    ) as process:
        os.close(side)
        shown = b""
        with contextlib.suppress(OSError):  # the process has closed the terminal
            while part := os.read(terminal, 4096):
                shown += part
                if b"Enter" in part:
                    process.send_signal(signal.SIGKILL)
    os.close(terminal)
    assert process.returncode == 0
    assert "No API key configured" in shown.decode()
    assert len(shown.splitlines()) == 1
