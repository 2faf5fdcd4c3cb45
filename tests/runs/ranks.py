"""Several ranks: call a function in several processes over gloo.

    losses = run_ranks(train, 2, tmp_path, overrides)  # one result per rank
    expected = run_single(train, tuple(overrides))  # one process

Processes are forked from a server that has imported `runs.preload`, so a start is fast.
"""

import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TESTS = str(Path(__file__).parents[1])
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["runs.preload"])


def forked(target: Callable[..., None], args: tuple[Any, ...]) -> Any:
    """Return an unstarted process for `target(*args)` with the imports of `runs.preload`."""
    found = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TESTS, found]))
    try:
        multiprocessing.forkserver.ensure_running()  # the server imports modules from this path
    finally:
        if found is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = found
    return CONTEXT.Process(target=target, args=args)


def run_ranks(function: Callable[..., Any], world_size: int, directory: Path, *args: Any) -> list:
    """Return the result of `function(*args)` on each rank, inside a gloo process group.

    The rendezvous uses a file in `directory`, so no port is needed. `function` must be importable;
    its arguments and result must be picklable.
    """
    store = directory / f"store-{len(list(directory.glob('store-*')))}"
    results: Any = CONTEXT.SimpleQueue()
    ranks = [
        forked(_rank, (function, r, world_size, str(store), results, args))
        for r in range(world_size)
    ]
    for process in ranks:
        process.start()
    returned = dict(results.get() for _ in ranks)
    for process in ranks:
        process.join(60)
    failures = [text for ok, text in returned.values() if not ok]
    assert not failures, "\n".join(failures)
    return [returned[r][1] for r in range(world_size)]


@cache
def run_single(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of `function(*args)` on a single rank, computed once per arguments."""
    with tempfile.TemporaryDirectory() as directory:
        return run_ranks(function, 1, Path(directory), *args)[0]


def _rank(
    function: Callable[..., Any], rank: int, size: int, store: str, results: Any, args: tuple
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size
        )
        results.put((rank, (True, function(*args))))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, (False, f"rank {rank}:\n{traceback.format_exc()}")))
