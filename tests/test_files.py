"""Atomic files, and locks."""

import errno
import fcntl
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
from gloo import forked

from diffllm.errors import ConfigError, InUseError
from diffllm.files import (
    Lock,
    build_once,
    hold,
    open_to_append,
    publish,
    replace_file,
    scratch_directory,
)
from diffllm.files.locks import Held


def test_a_file_and_its_name_are_synced_before_and_after_it_is_renamed(tmp_path, monkeypatch):
    """Without, a power cut may leave an empty file under the new name."""
    order: list[str] = []
    sync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        order.append("renamed")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    replace_file(tmp_path / "summary.json", "{}")
    assert order == [f".summary.json.{os.getpid()}", "renamed", tmp_path.name]
    assert (tmp_path / "summary.json").read_text() == "{}"


@pytest.mark.parametrize("name", ["file", ".file.{pid}"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    name = name.format(pid=os.getpid())
    outside = tmp_path / "outside"
    outside.write_text("another's")
    (tmp_path / name).symlink_to(outside)
    replace_file(tmp_path / "file", "mine")
    assert outside.read_text() == "another's"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "outside"]


def test_what_is_no_file_is_not_replaced_nor_appended_to(tmp_path):
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


# Directories


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def die_in_scratch_directory(final):
    """Leave a scratch directory as a killed process does."""
    with scratch_directory(final) as scratch:
        (scratch / "half").write_text("")
        os._exit(9)


@pytest.mark.parametrize("name", ["out", "x" * 255, "\u00e9" * 127])
def test_scratch_directory_of_killed_process_is_removed_by_the_next(tmp_path, name):
    final, other = tmp_path / name, tmp_path / ".out.other"
    other.mkdir()
    process = forked(die_in_scratch_directory, (final,))
    process.start()
    process.join()
    assert len(names(tmp_path)) == 3, "the scratch directory, its lock, and a directory of a user"
    with scratch_directory(final) as scratch:
        assert names(scratch) == []
        (scratch / "whole").write_text("")
        publish(scratch, final)
    assert names(tmp_path) == sorted([name, other.name])
    assert names(final) == ["whole"]


def test_scratch_directory_that_another_process_uses_is_refused_and_kept(tmp_path):
    with scratch_directory(tmp_path / "out") as scratch:
        with pytest.raises(InUseError, match="out is being written by another process"):
            scratch_directory(tmp_path / "out").__enter__()
        assert scratch.is_dir()
    assert names(tmp_path) == []


def test_link_in_place_of_scratch_directory_is_removed_and_its_target_kept(tmp_path):
    (tmp_path / "mine" / "data").mkdir(parents=True)
    (tmp_path / ".out.partial").symlink_to(tmp_path / "mine")
    with scratch_directory(tmp_path / "out") as scratch:
        assert names(scratch) == []
    assert names(tmp_path) == ["mine"]
    assert names(tmp_path / "mine") == ["data"]


def test_scratch_directories_of_two_long_names_differ(tmp_path):
    with (
        scratch_directory(tmp_path / f"{'x' * 240}a") as first,
        scratch_directory(tmp_path / f"{'x' * 240}b") as second,
    ):
        assert first != second


def test_failed_build_leaves_nothing_and_the_next_build_succeeds(tmp_path):
    def fail(scratch):
        (scratch / "half").write_text("")
        raise ValueError("failed")

    with pytest.raises(ValueError, match="failed"):
        build_once(tmp_path / "final", fail)
    assert names(tmp_path) == []
    build_once(tmp_path / "final", lambda scratch: (scratch / "whole").write_text(""))
    build_once(tmp_path / "final", fail)
    assert names(tmp_path / "final") == ["whole"]


# Locks


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_hold_on_a_file_system_without_flock_says_so_and_leaves_nothing(
    tmp_path, monkeypatch, number
):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(ConfigError, match=r"its file system has no flock\); choose run\.dir"):
        hold(tmp_path / "outputs" / "run", "run directory", "run.dir=...")
    assert list(tmp_path.iterdir()) == []


def test_one_holds_a_lock_at_a_time(tmp_path):
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    first.acquire()
    with pytest.raises(Held):
        second.acquire(wait=False)
    first.release()
    second.acquire(wait=False)
    second.release(remove=True)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"], "the first has made it"


def test_who_made_a_lock_can_take_it_along(tmp_path):
    lock = Lock(tmp_path / "lock")
    lock.acquire()
    lock.release(remove=True)
    assert list(tmp_path.iterdir()) == []


def test_one_that_waits_comes_next(tmp_path):
    first, second = Lock(tmp_path / "lock"), Lock(tmp_path / "lock")
    first.acquire()
    waiting = threading.Thread(target=second.acquire)
    waiting.start()
    first.release(remove=True)
    waiting.join()
    with pytest.raises(Held):
        Lock(tmp_path / "lock").acquire(wait=False)
    second.release()


def hold_until_killed(path: str) -> None:
    """Hold a run directory, with a child process that outlives this one, such as a data loader."""
    held = hold(Path(path), "run directory", "run.dir=...")
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    Path(path, "holds").write_text(str(child.pid))
    signal.pause()
    held.release()


def test_a_killed_process_releases_its_directory_though_its_child_is_alive(tmp_path):
    process = forked(hold_until_killed, (str(tmp_path),))
    process.start()
    holds = tmp_path / "holds"
    while not holds.exists() or not holds.read_text():
        assert process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    try:
        hold(tmp_path, "run directory", "run.dir=...").release()
    finally:
        os.kill(int(holds.read_text()), signal.SIGKILL)


def test_a_directory_whose_holder_is_alive_is_refused(tmp_path):
    held = hold(tmp_path, "run directory", "run.dir=...")
    with pytest.raises(ConfigError, match="is in use by another process"):
        hold(tmp_path, "run directory", "run.dir=...")
    held.release()


def test_a_lock_file_that_is_a_link_is_refused(tmp_path):
    (tmp_path / ".lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be written"):
        hold(tmp_path, "run directory", "run.dir=...")
    assert not (tmp_path / "elsewhere").exists()
