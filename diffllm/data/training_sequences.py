"""The sequences that training reads of a source, packed as data.packing says."""

from functools import partial, reduce
from operator import add
from pathlib import Path

from diffllm.core.errors import DataError
from diffllm.core.files import build_once
from diffllm.data.config import DataConfig, Packing
from diffllm.data.mixture.naming import of_source
from diffllm.data.mixture.prepared import MixtureData, Prepared
from diffllm.data.packing.plan import VERSION, WINDOW, PackingCounts, Plan, write_plan
from diffllm.data.packing.sequences import PackedSequences
from diffllm.data.sequences import Sequences, StreamSequences, sequences_in
from diffllm.data.shards import Manifest
from diffllm.data.text.file_index import combined_hash
from diffllm.data.token_data import TokenData


def training_sequences(data: TokenData, cfg: DataConfig, seq_len: int) -> Sequences:
    """Return the sequences of one source's training split; raises as `sequences_in` and
    `packed_sequences`."""
    if cfg.packing is Packing.best_fit:
        return packed_sequences(data, cfg, seq_len)
    return StreamSequences(data.split("train"), seq_len)


def packed_sequences(data: TokenData, cfg: DataConfig, seq_len: int) -> PackedSequences:
    """Return one source's training split packed by best fit, planned if the cache does not hold the
    plan yet. Safe to call in any number of processes at once, and before process groups exist.

    Raises DataError for tokens that cannot be read, or a cache that cannot be used.
    """
    stream, eos_id = data.split("train"), data.manifest.eos_id
    cache_dir = Path(cfg.cache_dir).expanduser()
    directory = cache_dir / "packing" / plan_key(data.manifest, seq_len)
    try:
        build_once(directory, partial(write_plan, stream, eos_id, seq_len))
    except OSError as error:
        raise DataError(f"data.cache_dir={cache_dir}: {error.strerror or error}") from error
    return PackedSequences(stream, eos_id, seq_len, Plan(directory))


def plan_key(manifest: Manifest, seq_len: int) -> str:
    """Return the name of a plan: a hash of the tokens of the training split and of seq_len."""
    shards = [[shard.sha256, shard.tokens] for shard in manifest.splits["train"].shards]
    tokens = [manifest.corpus, manifest.pieces_hash, manifest.eos_id, shards]
    return combined_hash([VERSION, WINDOW, *tokens, seq_len])[:32]


def sequences_of_epoch(data: Prepared, cfg: DataConfig, seq_len: int) -> int:
    """Count the sequences of a pass over the training split, of all sources together; raises as
    `training_sequences`."""
    counts = packing_counts(data, cfg, seq_len)
    return counts.sequences if counts else sequences_in(data.split("train"), seq_len)


def packing_counts(data: Prepared, cfg: DataConfig, seq_len: int) -> PackingCounts | None:
    """Count what packing made of the training split, of all sources together; None where nothing is
    packed. Raises as `packed_sequences`."""
    if cfg.packing is Packing.stream:
        return None
    if not isinstance(data, MixtureData):
        return packed_sequences(data, cfg, seq_len).plan.counts
    packed = [
        of_source(name)(packed_sequences)(source, cfg, seq_len)
        for name, source in data.sources.items()
    ]
    return reduce(add, (each.plan.counts for each in packed))


def ignores_targets(data: Prepared, cfg: DataConfig) -> bool:
    """Whether targets of training may be ignored: padding, or tokens that are only context."""
    return cfg.whole_documents or data.manifest.splits["train"].masked
