"""metrics.jsonl, and wandb for real: offline runs are read back from their `.wandb` files."""

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto.wandb_internal_pb2 import Record

from diffllm.metrics import MetricsFile, WandbConfig, WandbMode, WandbRun, resolve_mode


def strict(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [strict(line) for line in text.splitlines()]


def write(path: Path, steps: Iterator[int] | range, last_step: int = 0) -> None:
    file = MetricsFile(path, last_step)
    for step in steps:
        file.write({"step": step, "train/loss": 1.0 / step})
    file.close()


def test_every_line_is_there_as_soon_as_it_is_written(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        file.write({"step": step, "train/loss": 0.5, "note": "ünïcode\n"})
        assert lines(tmp_path / "metrics.jsonl")[-1] == {
            "step": step,
            "train/loss": 0.5,
            "note": "ünïcode\n",
        }
    file.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


def test_values_that_json_cannot_hold_become_null(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    values = {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 1e308, "e": None}
    file.write(values)
    file.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": None, "b": None, "c": None, "d": 1e308, "e": None}
    ]
    assert math.isnan(values["a"])


def test_floats_survive_exactly(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "x": 0.1 + 0.2, "y": 5e-324})
    file.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "x": 0.1 + 0.2, "y": 5e-324}]


def test_a_start_from_nothing_begins_the_file_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 5))
    write(path, range(1, 3))
    assert [line["step"] for line in lines(path)] == [1, 2]


@pytest.mark.parametrize("last", [1, 3, 9])
def test_a_resume_drops_lines_past_its_step_and_appends(tmp_path, last):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    before = lines(path)
    write(path, range(last + 1, last + 3), last)
    kept = [line for line in before if line["step"] <= last]
    assert lines(path)[: len(kept)] == kept
    assert [line["step"] for line in lines(path)[len(kept) :]] == [last + 1, last + 2]


@pytest.mark.parametrize("keep", [1, 9, 20, 36])
def test_a_last_line_cut_short_is_dropped(tmp_path, keep):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    whole = path.read_bytes()
    third = whole.splitlines(keepends=True)[2]
    assert keep < len(third)
    path.write_bytes(whole[: -len(third)] + third[:keep])
    write(path, range(3, 5), last_step=5)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "junk", [b"\0" * 40, b"\xff\xfe\n", b"17\n", b"null\n", b'{"step": "x"}\n']
)
def test_junk_at_the_end_of_the_file_does_not_stop_a_resume(tmp_path, junk):
    """What a machine that lost power can leave behind."""
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    path.write_bytes(path.read_bytes() + junk)
    write(path, range(4, 5), last_step=3)
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4]


def test_a_resume_replaces_the_file_in_one_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    before = path.read_text()
    with path.open() as reader:  # who is reading goes on reading the whole old file
        MetricsFile(path, last_step=3).close()
        assert reader.read() == before
    assert [line["step"] for line in lines(path)] == [1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_resume_that_cannot_write_leaves_the_old_file_whole(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    before = path.read_bytes()
    real = Path.write_text

    def half(self: Path, data: str, *args: Any, **kwargs: Any) -> int:
        real(self, data[: len(data) // 2], *args, **kwargs)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="No space left"):
        MetricsFile(path, last_step=3)
    assert path.read_bytes() == before


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home directory and no wandb variable in the environment."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    directory = tmp_path / "home"
    directory.mkdir()
    monkeypatch.setenv("HOME", str(directory))
    return directory


def netrc(home: Path, machine: str) -> None:
    file = home / ".netrc"
    file.write_text(f"machine {machine}\n  login user\n  password {'0' * 40}\n")
    file.chmod(0o600)


def test_auto_is_offline_without_a_key(home):
    assert resolve_mode(WandbConfig()) == "offline"


def test_auto_is_online_with_a_key_in_the_environment(home, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert resolve_mode(WandbConfig()) == "online"
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert resolve_mode(WandbConfig()) == "offline"


def test_auto_is_online_with_a_key_in_netrc(home):
    netrc(home, "api.wandb.ai")
    assert resolve_mode(WandbConfig()) == "online"


def test_a_netrc_for_another_machine_or_a_broken_one_is_no_key(home):
    netrc(home, "example.org")
    assert resolve_mode(WandbConfig()) == "offline"
    (home / ".netrc").write_text("nonsense at the top level\n")
    assert resolve_mode(WandbConfig()) == "offline"


def test_a_netrc_that_is_not_utf8_is_no_key(home):
    (home / ".netrc").write_bytes("machine example.org login user password größe".encode("latin-1"))
    assert resolve_mode(WandbConfig()) == "offline"


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_auto_follows_wandb_mode_before_any_key(home, monkeypatch, mode):
    netrc(home, "api.wandb.ai")
    monkeypatch.setenv("WANDB_MODE", mode)
    assert resolve_mode(WandbConfig()) == mode


@pytest.mark.parametrize("mode", [WandbMode.online, WandbMode.offline, WandbMode.disabled])
def test_an_explicit_mode_is_kept_whatever_the_environment(home, monkeypatch, mode):
    netrc(home, "api.wandb.ai")
    monkeypatch.setenv("WANDB_MODE", "shared")
    assert resolve_mode(WandbConfig(mode=mode)) == mode.value


def records(path: Path) -> list[Record]:
    """The protobuf records of a `.wandb` file: a 7-byte header, then LevelDB's log format."""
    data, at, buffer, found = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        buffer += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or last part
            found.append(Record.FromString(buffer))
            buffer = b""
    return found


def offline_run_records(directory: Path) -> list[Record]:
    """Of the one run below `directory`; wandb's service may still be writing after finish()."""
    (path,) = directory.glob("wandb/offline-run-*/*.wandb")
    for _ in range(300):
        found = records(path) if path.stat().st_size else []
        if found and found[-1].WhichOneof("record_type") == "exit":
            return found
        time.sleep(0.1)
    raise AssertionError(f"{path} has no exit record")


def of_kind(found: list[Record], kind: str) -> list[Any]:
    return [getattr(r, kind) for r in found if r.WhichOneof("record_type") == kind]


def items(record: Any) -> dict[str, Any]:
    return {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record}


@pytest.fixture
def quiet_wandb(home, monkeypatch):
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")


def offline_run(directory: Path, run_id: str | None = None, **changes: Any) -> WandbRun:
    cfg = WandbConfig(mode=WandbMode.offline, project="a-project", **changes)
    config = {"steps": 3, "model": {"dim": 8, "attention": {}}, "run": {"name": None}}
    return WandbRun(cfg, directory, "a-name", "diff_v2", config, run_id)


def test_an_offline_run_holds_config_history_group_and_id(tmp_path, quiet_wandb, capfd):
    run = offline_run(tmp_path, tags=["first", "second"])
    for step in (1, 2, 3):
        run.log({"step": step, "tokens": 100 * step, "train/loss": 3.0 - 0.5 * step})
    run.log({"step": 4, "tokens": 400, "train/loss": math.nan, "context_rms/layer_01": 0.25})
    run.finish({"heldout_loss": 1.25})
    found = offline_run_records(tmp_path)

    (header,) = of_kind(found, "run")
    assert header.run_id == run.id
    assert header.project == "a-project"
    assert header.display_name == "a-name"
    assert header.run_group == "diff_v2"
    assert list(header.tags) == ["first", "second"]
    config = {u.key: json.loads(u.value_json) for u in header.config.update}
    assert config["steps"] == 3
    assert config["model"]["dim"] == 8
    assert config["run"] == {"name": None}

    history = [items(h.item) for h in of_kind(found, "history")]
    assert [h["step"] for h in history] == [1, 2, 3, 4]
    assert [h["tokens"] for h in history] == [100, 200, 300, 400]
    assert [h["train/loss"] for h in history[:3]] == [2.5, 2.0, 1.5]
    assert "NaN" in str(history[3]["train/loss"]) or math.isnan(history[3]["train/loss"])
    assert history[3]["context_rms/layer_01"] == 0.25

    axes = {m.glob_name or m.name: m.step_metric for m in of_kind(found, "metric")}
    assert axes["*"] == "tokens"  # runs of unequal batch sizes compare by tokens
    summary = {}
    for record in of_kind(found, "summary"):
        summary |= items(record.update)
    assert summary["heldout_loss"] == 1.25
    assert "wandb stopped" not in capfd.readouterr().err


def test_the_same_id_continues_on_a_second_start(tmp_path, quiet_wandb):
    first = offline_run(tmp_path / "first", group="my-group")
    first.log({"step": 1, "tokens": 10, "train/loss": 2.0})
    first.finish()
    second = offline_run(tmp_path / "second", first.id, group="my-group")
    second.log({"step": 2, "tokens": 20, "train/loss": 1.0})
    second.finish()
    third = offline_run(tmp_path / "third")
    third.finish()
    assert second.id == first.id != third.id
    headers = []
    for name in ("first", "second", "third"):
        headers += of_kind(offline_run_records(tmp_path / name), "run")
    assert [h.run_id for h in headers] == [first.id, first.id, third.id]
    assert [h.run_group for h in headers] == ["my-group", "my-group", "diff_v2"]


def test_a_disabled_run_writes_nothing_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **_: pytest.fail("wandb.init was called"))
    cfg = WandbConfig(mode=WandbMode.disabled)
    run = WandbRun(cfg, tmp_path, "name", "group", {}, None)
    run.log({"step": 1})
    run.finish({"x": 1})
    assert list(tmp_path.iterdir()) == []
    assert run.id  # kept for a later start with wandb on
    assert WandbRun(cfg, tmp_path, "name", "group", {}, run.id).id == run.id


class Broken:
    """A wandb run whose service has died."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.calls = broken, []
        self.summary = self

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)
            if name in self.broken:
                raise ConnectionResetError("Connection lost")

        return call


@pytest.mark.parametrize("broken", ["log", "define_metric", "finish", "update"])
def test_a_wandb_that_breaks_says_so_once_and_never_raises(tmp_path, monkeypatch, capsys, broken):
    fake = Broken(broken)
    monkeypatch.setattr(wandb, "init", lambda **_: fake)
    run = offline_run(tmp_path)
    for step in range(1, 4):
        run.log({"step": step})
    run.finish({"x": 1})
    run.finish()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("wandb") == 1
    assert "Connection lost" in err
    assert len(err.splitlines()) == 1
    assert fake.calls.count(broken) == 1


@pytest.mark.parametrize("error", [wandb.Error("no"), OSError("full"), RuntimeError("x")])
def test_a_wandb_that_cannot_start_says_so_once_and_never_raises(
    tmp_path, monkeypatch, capsys, error
):
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(wandb, "init", fail)
    run = offline_run(tmp_path)
    run.log({"step": 1})
    run.finish()
    assert capsys.readouterr().err.count("wandb stopped working") == 1
    assert run.id


def test_a_real_run_whose_service_has_died_never_raises(tmp_path, quiet_wandb, capfd, monkeypatch):
    run = offline_run(tmp_path)
    run.log({"step": 1, "tokens": 1})
    real = run.run

    def lost(*_: Any, **__: Any) -> None:
        raise ConnectionResetError("Connection lost")

    monkeypatch.setattr(real, "log", lost)
    run.log({"step": 2, "tokens": 2})
    run.log({"step": 3, "tokens": 3})
    run.finish()
    real.finish()
    assert capfd.readouterr().err.count("training goes on") == 1
