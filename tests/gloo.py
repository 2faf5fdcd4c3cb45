"""Real processes over gloo: run a function on N ranks of this machine."""

import multiprocessing
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["diffllm.run.start"])


def run_ranks(function: Callable[..., Any], world_size: int, directory: Path, *args: Any) -> list:
    """What `function(*args)` returns on each rank, inside a gloo process group.

    The ranks meet through a file in `directory`, so no port can be taken. `function` must be
    importable and its arguments and result picklable.
    """
    store = directory / f"store-{len(list(directory.glob('store-*')))}"
    results: Any = CONTEXT.SimpleQueue()
    ranks = [
        CONTEXT.Process(target=_rank, args=(function, r, world_size, str(store), results, args))
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
