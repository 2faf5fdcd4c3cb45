"""Atomic writes, scratch directories and locks."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import Timeout
from processes import PATIENCE_S, call_together, wait_until
from runs.ranks import forked

from diffllm.core.atomic_directories import new_directory, publish, scratch_directory
from diffllm.core.errors import ConfigError, InUseError
from diffllm.core.files import acquire, open_regular, open_to_append, replace_file, why_no_file
from diffllm.core.held_directories import hold, reserve, take_back

ME = f"process {os.getpid()} on {socket.gethostname()}"


@pytest.fixture
def call_order(monkeypatch):
    """Record file names at each fsync, and "renamed" at each rename, in the order of the calls."""
    events, sync = [], os.fsync

    def synced(descriptor: int) -> None:
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    for owner, name in ((Path, "replace"), (os, "rename")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *paths, real=real: events.append("renamed") or real(*paths)
        )
    return events


def test_replace_file_syncs_file_before_rename(tmp_path, call_order):
    """Without these syncs, a power failure may leave an empty file under the new name."""
    replace_file(tmp_path / "summary.json", "{}")
    assert call_order == [f".summary.json.{os.getpid()}", "renamed", tmp_path.name]
    assert (tmp_path / "summary.json").read_text(encoding="utf-8") == "{}"


@pytest.mark.parametrize("name", ["file", ".file.{pid}"])
def test_replace_file_does_not_change_target_of_existing_link(tmp_path, name):
    name = name.format(pid=os.getpid())
    outside = tmp_path / "outside"
    outside.write_text("another's", encoding="utf-8")
    (tmp_path / name).symlink_to(outside)
    replace_file(tmp_path / "file", "mine")
    assert outside.read_text(encoding="utf-8") == "another's"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "outside"]


def test_replace_file_and_open_to_append_refuse_pipes_and_directories(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    for name in ("pipe", "directory"):
        with pytest.raises(OSError, match=r"Not a regular file|Is a directory"):
            replace_file(tmp_path / name, "")
    for name in ("pipe", "directory", "link"):
        with pytest.raises(OSError):  # noqa: PT011
            open_to_append(tmp_path / name)
    assert not (tmp_path / "elsewhere").exists()


def test_open_regular_refuses_pipes_and_devices_without_waiting(tmp_path):
    """A read would wait for the writer of a pipe, and would never reach the end of the device."""
    for name in ("pipe", "pipe with writer"):
        os.mkfifo(tmp_path / name)
    writer = os.open(tmp_path / "pipe with writer", os.O_RDWR)
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "pipe with writer", "device"):
        with pytest.raises(ValueError, match="is not a regular file"):
            open_regular(tmp_path / name, 9, follow=True)
    os.close(writer)


def sorted_names(directory):
    return sorted(path.name for path in directory.iterdir())


def die_in_scratch_directory(final):
    """Exit inside a scratch directory, like a killed process."""
    with scratch_directory(final) as scratch:
        (scratch / "half").write_text("", encoding="utf-8")
        os._exit(9)


@pytest.mark.parametrize("name", ["out", "x" * 255, "\u00e9" * 127])
def test_scratch_directory_of_killed_process_is_removed_by_next_process(tmp_path, name):
    final, other = tmp_path / name, tmp_path / ".out.other"
    other.mkdir()
    process = forked(die_in_scratch_directory, (final,))
    process.start()
    process.join()
    assert len(sorted_names(tmp_path)) == 3, "scratch directory, lock, and a user's directory"
    with scratch_directory(final) as scratch:
        assert sorted_names(scratch) == []
        (scratch / "whole").write_text("", encoding="utf-8")
        publish(scratch, final)
    assert sorted_names(tmp_path) == sorted([name, other.name])
    assert sorted_names(final) == ["whole"]


def test_scratch_directory_raises_in_use_error_if_path_is_in_use(tmp_path):
    with scratch_directory(tmp_path / "out") as scratch:
        with pytest.raises(InUseError, match=f"out is being written by {ME}"):
            scratch_directory(tmp_path / "out").__enter__()
        assert scratch.is_dir()
    assert sorted_names(tmp_path) == []


def test_scratch_directory_does_not_change_target_of_existing_link(tmp_path):
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / ".out.partial").symlink_to(tmp_path / "mine")
    with scratch_directory(tmp_path / "out") as scratch:
        assert sorted_names(scratch) == []
    assert sorted_names(tmp_path) == ["mine"]
    assert sorted_names(tmp_path / "mine") == ["data"]


@pytest.mark.parametrize("files_synced", [False, True])
def test_publish_calls_sync_and_rename_in_crash_safe_order(tmp_path, call_order, files_synced):
    (tmp_path / "hidden" / "inner").mkdir(parents=True)
    (tmp_path / "hidden" / "inner" / "file").write_text("", encoding="utf-8")
    publish(tmp_path / "hidden", tmp_path / "final", files_synced)
    content = [] if files_synced else ["inner", "file"]
    assert call_order == [*content, "hidden", "renamed", tmp_path.name]
    assert sorted_names(tmp_path) == ["final"]


def test_publish_or_new_directory_raises_error_if_path_exists(tmp_path):
    (tmp_path / "final").symlink_to("elsewhere")
    (tmp_path / "hidden").mkdir()
    with pytest.raises(FileExistsError):
        publish(tmp_path / "hidden", tmp_path / "final")
    with pytest.raises(FileExistsError), new_directory(tmp_path / "final"):
        pass
    assert sorted_names(tmp_path) == ["final", "hidden"]
    assert (tmp_path / "final").is_symlink()


def test_new_directory_creates_final_path_only_after_success(tmp_path):
    final = tmp_path / "parent" / "final"
    with pytest.raises(FileNotFoundError), new_directory(final) as scratch:
        (scratch / "half").rename(scratch / "missing" / "half")
    assert sorted_names(final.parent) == []
    with new_directory(final) as scratch:
        (scratch / "whole").write_text("", encoding="utf-8")
        assert not final.exists()
    assert sorted_names(final.parent) == ["final"]
    assert sorted_names(final) == ["whole"]


def write_new(final: Path) -> str:
    try:
        with new_directory(final) as scratch:
            (scratch / "writer").write_text(str(os.getpid()), encoding="utf-8")
    except (InUseError, FileExistsError) as error:
        return type(error).__name__
    return str(os.getpid())


def test_one_of_eight_concurrent_processes_creates_new_directory(tmp_path):
    results = call_together(write_new, 8, tmp_path / "out")
    (writer,) = (text for text in results if text.isdecimal())
    assert (tmp_path / "out" / "writer").read_text(encoding="utf-8") == writer
    assert sorted_names(tmp_path) == ["out"]


WORDS = ("run directory", "run.dir=...")


def test_eight_concurrent_processes_reserve_different_directories(tmp_path):
    path = tmp_path / "outputs" / "run"
    found = call_together(reserve, 8, path, *WORDS)
    expected = ["run", *(f"run-{number}" for number in range(2, 9))]
    assert sorted(directory.name for directory, _ in found) == expected
    assert sorted_names(path.parent) == expected


def reserve_and_take_back(path: Path) -> None:
    for _ in range(200):
        directory, created = reserve(path, *WORDS)
        take_back(directory, created)


def test_reserve_survives_processes_that_take_back_common_parent(tmp_path):
    call_together(reserve_and_take_back, 4, tmp_path / "outputs" / "run")
    assert list((tmp_path / "outputs").glob("*")) == []


def test_reserve_raises_config_error_if_parent_is_a_file(tmp_path):
    (tmp_path / "outputs").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^run directory .*outputs/run cannot be written"):
        reserve(tmp_path / "outputs" / "run", *WORDS)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_hold_raises_config_error_if_file_system_has_no_flock(tmp_path, monkeypatch, number):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=r"does not support flock\); choose run\.dir"):
        hold(tmp_path / "outputs" / "run", "run directory", "run.dir=...")
    assert list(tmp_path.iterdir()) == []


def test_why_no_file_returns_empty_text_if_file_appears_and_disappears(tmp_path):
    file, end = tmp_path / "lock", threading.Event()

    def create_and_delete() -> None:
        while not end.is_set():
            file.touch()
            file.unlink()

    other = threading.Thread(target=create_and_delete)
    other.start()
    reasons = {why_no_file(file) for _ in range(20_000)}
    end.set()
    other.join()
    assert reasons == {""}


def test_waiting_thread_acquires_lock_after_lock_file_is_deleted(tmp_path):
    file, acquired, end = tmp_path / "lock", threading.Event(), threading.Event()

    def wait() -> None:
        lock = acquire(file)
        acquired.set()
        end.wait()
        lock.release()

    first = acquire(file)
    waiting = threading.Thread(target=wait)
    waiting.start()
    file.unlink()
    first.release()
    wait_until(acquired.is_set, "lock for the waiting thread")
    with pytest.raises(Timeout):
        acquire(file, wait=False)
    end.set()
    waiting.join()


def pause(path: str) -> None:
    # The fork has closed inherited locks.
    Path(path, "holds").write_text(str(os.getpid()), encoding="utf-8")
    signal.pause()


def hold_until_killed(path: str) -> None:
    """Hold a run directory and start a child process, such as a data loader, that survives."""
    held = hold(Path(path), "run directory", "run.dir=...")
    multiprocessing.get_context("fork").Process(target=pause, args=(path,)).start()
    signal.pause()
    held.release()


def test_child_process_does_not_keep_lock_of_killed_parent_process(tmp_path):
    process = forked(hold_until_killed, (str(tmp_path),))
    process.start()
    holds = tmp_path / "holds"
    while not holds.exists() or not holds.read_text(encoding="utf-8"):
        assert process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        hold(tmp_path, "run directory", "run.dir=...").release()
    finally:
        os.kill(int(holds.read_text(encoding="utf-8")), signal.SIGKILL)


def test_hold_refuses_directory_that_is_already_locked(tmp_path):
    held = hold(tmp_path, "run directory", "run.dir=...")
    with pytest.raises(ConfigError, match=f"is in use by {ME}"):
        hold(tmp_path, "run directory", "run.dir=...")
    held.release()


def test_hold_can_wait_until_locked_directory_is_released(tmp_path, capsys):
    held, said = hold(tmp_path, "run directory", "run.dir=..."), []
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(hold, tmp_path, "run directory", "run.dir=...", wait=True)
        wait_until(lambda: said.append(capsys.readouterr().err) or "".join(said), "message")
        held.release()
        found.result(PATIENCE_S).release()
    assert re.fullmatch(f"waiting until {ME} releases {tmp_path}\n", "".join(said))
