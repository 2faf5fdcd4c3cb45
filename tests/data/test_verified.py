"""A checksum is compared once for all readers, and again after changes or a day."""

import hashlib
import multiprocessing
import os
import time
from pathlib import Path

import pytest
from processes import PATIENCE_S

from diffllm.core.errors import DataError
from diffllm.data import verified

CONTENT = bytes(range(256)) * 64
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "train-00000.bin"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Name of the hashed file, once per hash."""
    found: list[str] = []
    original = hashlib.file_digest

    def counted(file, name):  # type: ignore[no-untyped-def]
        found.append(file.name)
        return original(file, name)

    monkeypatch.setattr(verified.hashlib, "file_digest", counted)
    return found


def test_unchanged_file_is_hashed_once_in_repeated_verifications(shard, hashed):
    assert all(verified.matches(shard, SHA256) for _ in range(3))
    assert len(hashed) == 1


def test_file_with_wrong_checksum_is_never_marked_as_verified(shard, hashed):
    assert not any(verified.matches(shard, "0" * 64) for _ in range(2))
    assert len(hashed) == 2
    assert verified.matches(shard, SHA256)


@pytest.mark.parametrize("keep_mtime", [False, True])
def test_rewritten_file_fails_checksum_verification(shard, keep_mtime):
    """The file is hashed again even if a tool restores the modification time."""
    assert verified.matches(shard, SHA256)
    stat = shard.stat()
    shard.write_bytes(CONTENT[:-1] + b"x")
    if keep_mtime:
        os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert not verified.matches(shard, SHA256)


def test_unchanged_file_is_hashed_again_after_a_day(shard, hashed):
    assert verified.matches(shard, SHA256)
    mark = shard.with_name(f".{shard.name}.verified")
    old = time.time() - verified.VALID_SECONDS - 60
    os.utime(mark, (old, old))
    assert verified.matches(shard, SHA256)
    assert len(hashed) == 2
    assert verified.matches(shard, SHA256)
    assert len(hashed) == 2


@pytest.mark.parametrize("mark", [b"", b"\xff", b"x" * 1000])
def test_file_is_hashed_again_if_its_checksum_record_is_damaged(shard, hashed, mark):
    shard.with_name(f".{shard.name}.verified").write_bytes(mark)
    assert verified.matches(shard, SHA256)
    assert len(hashed) == 1


def verify_slowly(shard: Path, barrier, counts) -> None:  # type: ignore[no-untyped-def]
    original = hashlib.file_digest

    def counted(file, name):  # type: ignore[no-untyped-def]
        time.sleep(0.2)  # all processes must start before the first finishes
        with counts.get_lock():
            counts.value += 1
        return original(file, name)

    verified.hashlib.file_digest = counted
    barrier.wait()
    assert verified.matches(shard, SHA256)


def test_concurrent_processes_verify_checksum_of_a_file_once(shard):
    context = multiprocessing.get_context("fork")
    barrier, counts = context.Barrier(4), context.Value("i", 0)
    processes = [
        context.Process(target=verify_slowly, args=(shard, barrier, counts)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * 4
    assert counts.value == 1


def test_token_stream_verifies_only_shards_that_are_read(make_stream, hashed):
    stream = make_stream(list(range(300)))
    assert hashed == []
    stream.tokens(100, 120)
    stream.tokens(150, 160)
    assert [Path(name).name for name in hashed] == ["train-00001.bin"]


def test_token_stream_raises_error_for_shard_with_flipped_bit(make_stream, tmp_path):
    stream = make_stream(list(range(300)))
    path = tmp_path / "stream" / "train-00001.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 128
    path.write_bytes(content)
    assert stream.tokens(0, 97).tolist() == list(range(97))
    with pytest.raises(DataError, match=r"train-00001.bin: damaged: .* delete .*stream to prepare"):
        stream.tokens(90, 110)
