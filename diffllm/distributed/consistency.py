"""Check that all ranks have the same code, config and corpus, and equal tensor values."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from diffllm.core.errors import AgreedError, LaunchError, listed
from diffllm.distributed.gradients import is_dtensor, local
from diffllm.distributed.world import World

CHUNK = 2**26
MIXER = 0x9E3779B97F4A7C15 - 2**64
"""Factor of the hash weights: odd, so that products with odd numbers stay odd, and large, so that
products use all 64 bits."""


def check_same(world: World, what: str, values: Mapping[str, object]) -> None:
    """Check that the dict `values` is equal on all ranks; no process group is needed.

    If a value differs, raise LaunchError on rank 0 and AgreedError on the other ranks. Every rank
    must call this function. `what` describes `values` in the error message, for example "config".
    Each call needs a different `what`.
    """
    key = f"same/{what}"
    mine = {name: str(value) for name, value in values.items()}
    world.store.set(f"{key}/{world.rank}", json.dumps(mine))

    def judge() -> None:
        keys = [f"{key}/{rank}" for rank in range(world.size)]
        world.wait(keys)
        of_ranks = [json.loads(text) for text in world.store.multi_get(keys)]
        if different := differences_of(of_ranks):
            raise LaunchError(
                f"the ranks differ in their {what}: {listed(different)}; "
                f"start all ranks with the same {what}"
            )

    if world.size > 1:
        world.broadcast_from_rank0(f"{key}/judged", judge)


def differences_of(of_ranks: list[dict[str, str]]) -> list[str]:
    """Return one message for each key whose value is not the same on all ranks.

    `of_ranks` contains one dict per rank. Each message begins with the value that the fewest ranks
    have, for example "seed is 2 on rank 3, 1 on ranks 0, 1, 2".
    """
    different = []
    for name in sorted({name for values in of_ranks for name in values}):
        ranks_of: dict[str | None, list[int]] = {}
        for rank, values in enumerate(of_ranks):
            ranks_of.setdefault(values.get(name), []).append(rank)
        rare_first = sorted(ranks_of.items(), key=lambda item: len(item[1]), reverse=True)[::-1]
        parts = [f"{value} on {ranks_text(ranks)}" for value, ranks in rare_first]
        different += [f"{name} is {', '.join(parts)}"] * (len(parts) > 1)
    return different


def ranks_text(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:4])) + f" and {len(ranks) - 4} more" * (len(ranks) > 4)
    return f"rank{'s'[: len(ranks) > 1]} {shown}"


def code_version() -> dict[str, str]:
    root = Path(__file__).parents[1]
    return {"diffllm": hash_sources(root, root.rglob("*.py")), "torch": torch.__version__}


def hash_sources(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def check_tensors(tensors: Mapping[str, Tensor], replica_size: int) -> None:
    """Check that the copies of each tensor on different ranks are equal.

    Each shard of a DTensor has one copy per replica of the model. Any other tensor has a copy on
    every rank. Every rank must call this function. Raises AgreedError on every rank if copies
    differ.

    Args:
        replica_size: number of consecutive ranks that share one replica of the model.
    """
    own = torch.stack([tensor_hash(local(t)) for t in tensors.values()])
    size = dist.get_world_size()
    gathered = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(gathered, own)
    rows = [row.tolist() for row in gathered]
    different = []
    for i, (name, tensor) in enumerate(tensors.items()):
        stride = replica_size if is_dtensor(tensor) else 1
        for first in range(stride):
            ranks = range(first, size, stride)
            common, _ = Counter(rows[r][i] for r in ranks).most_common(1)[0]
            if others := [r for r in ranks if rows[r][i] != common]:
                different.append(f"{name} on {ranks_text(others)}")
    if different:
        raise AgreedError(
            f"these tensors differ between replicas of the model: {listed(different)}; "
            "to make the replicas equal, resume from the last checkpoint"
        )


def tensor_hash(tensor: Tensor) -> Tensor:
    """Hash the bits of a tensor; return a scalar int64 tensor.

    The bits are read as 32-bit integers. Each integer is multiplied by an odd factor that depends
    on its position. The hash is the sum of the products, modulo 2^64.
    """
    flat = tensor.detach().flatten().view(torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % 4))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(flat), CHUNK):
        words = flat[start : start + CHUNK].view(torch.int32).long()
        first = start // 2 + 1
        weights = torch.arange(first, first + 2 * len(words), 2, device=flat.device)
        total += (words * (weights * MIXER)).sum()
    return total
