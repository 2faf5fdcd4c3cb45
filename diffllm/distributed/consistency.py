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


def check_same(world: World, label: str, values: Mapping[str, object]) -> None:
    """Check that the dict `values` is equal on all ranks; no process group is needed.

    If a value differs, raise LaunchError on rank 0 and AgreedError on the other ranks. Every rank
    must call this function. `label` describes `values` in the error message, for example "config".
    Each call needs a different `label`.
    """
    key = f"same/{label}"
    texts = {name: str(value) for name, value in values.items()}
    world.store.set(f"{key}/{world.rank}", json.dumps(texts))

    def compare() -> None:
        keys = [f"{key}/{rank}" for rank in range(world.size)]
        # A rank may be late: reading a missing key would wait without handling signals.
        world.wait(keys)
        rank_texts = world.store.multi_get(keys)
        values_by_rank = [json.loads(text) for text in rank_texts]
        differences = differences_between(values_by_rank)
        if differences:
            raise LaunchError(
                f"the ranks differ in their {label}: {listed(differences)}; "
                f"start all ranks with the same {label}"
            )

    if world.size > 1:
        world.broadcast_from_rank0(f"{key}/judged", compare)


def differences_between(values_by_rank: list[dict[str, str]]) -> list[str]:
    """Return one message for each key whose value is not the same on all ranks.

    `values_by_rank` contains one dict per rank. Each message begins with the value that the fewest
    ranks have, for example "seed is 2 on rank 3, 1 on ranks 0, 1, 2".
    """
    names: set[str] = set()
    for values in values_by_rank:
        names.update(values)
    differences = []
    for name in sorted(names):
        ranks_by_value: dict[str | None, list[int]] = {}
        for rank, values in enumerate(values_by_rank):
            ranks_by_value.setdefault(values.get(name), []).append(rank)
        if len(ranks_by_value) == 1:
            continue
        # The reversed list has the value of rank 0 last if several values are equally rare.
        common_first = sorted(ranks_by_value.items(), key=lambda item: len(item[1]), reverse=True)
        parts = []
        for value, ranks in reversed(common_first):
            parts.append(f"{value} on {ranks_text(ranks)}")
        differences.append(f"{name} is {', '.join(parts)}")
    return differences


def ranks_text(ranks: list[int]) -> str:
    noun = "ranks" if len(ranks) > 1 else "rank"
    numbers = ", ".join(map(str, ranks[:4]))
    if len(ranks) > 4:
        numbers += f" and {len(ranks) - 4} more"
    return f"{noun} {numbers}"


def code_version() -> dict[str, str]:
    root = Path(__file__).parents[1]
    return {"diffllm": hash_sources(root, root.rglob("*.py")), "torch": torch.__version__}


def hash_sources(root: Path, files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    # Sorted, because the order of a directory's files differs between machines.
    for path in sorted(files):
        name = path.relative_to(root)
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def check_tensors(tensors: Mapping[str, Tensor], replica_size: int) -> None:
    """Check that the copies of each tensor on different ranks are equal.

    Each shard of a DTensor has one copy per replica of the model. Any other tensor has a copy on
    every rank. Every rank must call this function. Raises AgreedError on every rank if copies
    differ.

    Args:
        replica_size: number of consecutive ranks that share one replica of the model.
    """
    # Ranks exchange hashes, not tensors: 8 bytes per tensor.
    hashes = torch.stack([tensor_hash(local(tensor)) for tensor in tensors.values()])
    size = dist.get_world_size()
    gathered = [torch.empty_like(hashes) for _ in range(size)]
    # Every rank gets all hashes, so that all ranks raise the error, and none waits for another.
    dist.all_gather(gathered, hashes)
    hashes_by_rank = [row.tolist() for row in gathered]
    differences = []
    for i, (name, tensor) in enumerate(tensors.items()):
        # Ranks with the same index within their replica have the same shard of a DTensor.
        stride = replica_size if is_dtensor(tensor) else 1
        for first in range(stride):
            ranks = range(first, size, stride)
            hash_by_rank = {rank: hashes_by_rank[rank][i] for rank in ranks}
            counts = Counter(hash_by_rank.values())
            [(common_hash, _)] = counts.most_common(1)
            others = [rank for rank in ranks if hash_by_rank[rank] != common_hash]
            if others:
                differences.append(f"{name} on {ranks_text(others)}")
    if differences:
        raise AgreedError(
            f"these tensors differ between replicas of the model: {listed(differences)}; "
            "to make the replicas equal, resume from the last checkpoint"
        )


def tensor_hash(tensor: Tensor) -> Tensor:
    """Hash the bits of a tensor; return a scalar int64 tensor.

    The bits are read as 32-bit integers. Each integer is multiplied by an odd factor that depends
    on its position. The hash is the sum of the products, modulo 2^64.
    """
    flat = tensor.detach().flatten().view(torch.uint8)
    # Zeros at the end, because integers have 4 bytes.
    padding = -len(flat) % 4
    flat = torch.nn.functional.pad(flat, (0, padding))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    # In chunks: the int64 products need several times the memory of the tensor.
    for start in range(0, len(flat), CHUNK):
        chunk = flat[start : start + CHUNK]
        words = chunk.view(torch.int32).long()
        # Integer j of the tensor has the odd number 2j + 1; a chunk begins at j = start / 4.
        first = start // 2 + 1
        end = first + 2 * len(words)
        factors = torch.arange(first, end, 2, device=flat.device) * MIXER
        total += (words * factors).sum()
    return total
