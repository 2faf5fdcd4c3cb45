"""Parquet files with a column of tokens.

Rows cannot be read one by one: they are copied into shards, once, without tokenising anything.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from diffllm.core.errors import DataError
from diffllm.core.files import build_once
from diffllm.core.printing import to_stderr
from diffllm.data.config import DataConfig
from diffllm.data.imported.files import check_pieces, fingerprint
from diffllm.data.path_names import names_of
from diffllm.data.shards import FORMAT_VERSION, Manifest, ShardWriter
from diffllm.data.text.file_index import combined_hash
from diffllm.data.token_data import TokenData
from diffllm.data.tokenizer import Tokenizer
from diffllm.data.tokenizer_files import located, write_tokenizer

ROWS = 128
"""Documents that are in memory, and counted, at a time."""


def prepare_parquet(cfg: DataConfig, cache_dir: Path, paths: list[Path]) -> TokenData:
    """Copy the tokens of the column data.text_column into shards; raises DataError."""
    tokenizer = Tokenizer.from_file(str(cfg.tokenizer))
    corpus = combined_hash(["parquet", cfg.text_column, [fingerprint(path) for path in paths]])
    key = combined_hash([FORMAT_VERSION, corpus, tokenizer.pieces_hash, cfg.heldout_fraction])

    def build(directory: Path) -> None:
        to_stderr(f"copying tokens of {len(paths)} files into {cache_dir}")
        write_tokenizer(located(str(cfg.tokenizer)), directory)
        write(cfg, paths, tokenizer, corpus, directory)

    directory = cache_dir / "tokens" / key[:32]
    build_once(directory, build)
    return TokenData(directory)


def write(
    cfg: DataConfig, paths: list[Path], tokenizer: Tokenizer, corpus: str, directory: Path
) -> None:
    """Write shards and manifest; a hash of its tokens decides whether a document is held out."""
    writers = {
        name: ShardWriter(directory, name, tokenizer.vocab_size) for name in ("train", "heldout")
    }
    limit, empty = int(cfg.heldout_fraction * 2**64), 0
    for path in paths:
        for rows in batches(path, cfg.text_column, tokenizer.vocab_size):
            parts: dict[str, list[np.ndarray]] = {name: [] for name in writers}
            for tokens in rows:
                if not len(tokens):
                    empty += 1
                    continue
                digest = hashlib.sha256(tokens.astype("<i8").tobytes()).digest()
                split = "heldout" if int.from_bytes(digest[:8]) < limit else "train"
                ending = [] if tokens[-1] == tokenizer.eos_id else [tokenizer.eos_id]
                parts[split].append(np.append(tokens, ending).astype(np.int64))
            for name, documents in parts.items():
                together = np.concatenate([np.zeros(0, np.int64), *documents])
                writers[name].add(together, text_bytes=0, documents=len(documents))
    for name, writer in writers.items():
        if not writer.documents:
            raise DataError(
                f"{paths[0]}: its documents are too few for a {name} split with "
                f"data.heldout_fraction={cfg.heldout_fraction:g}"
            )
    Manifest.of(
        tokenizer,
        writers["heldout"].counts,
        source=f"tokens of {names_of(paths)}",
        corpus=corpus,
        skipped_empty=empty,
        splits={name: writer.finish() for name, writer in writers.items()},
    ).save(directory)


def batches(path: Path, column: str, vocab_size: int) -> Iterator[list[np.ndarray]]:
    """Yield the tokens of each row, (n,) int64, many rows at a time; raises DataError."""
    try:
        file = pyarrow.parquet.ParquetFile(path)
        types = {field.name: field.type for field in file.schema_arrow}
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}") from error
    lists = [name for name, kind in types.items() if is_tokens(kind)]
    if column not in lists:
        hint = f": use data.text_column={' or '.join(lists)}" if lists else ", none of them tokens"
        raise DataError(f"{path}: no column {column!r} of tokens; it has {', '.join(types)}{hint}")
    try:
        for batch in file.iter_batches(ROWS, columns=[column]):
            rows = [
                np.asarray(row.values if row.is_valid else [], dtype=np.int64)
                for row in batch.column(0)
            ]
            for tokens in rows:
                check_pieces(path, tokens, vocab_size)
            yield rows
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: {str(error).splitlines()[0]}") from error


def is_tokens(kind: pyarrow.DataType) -> bool:
    """Whether a column holds a list of integers in each row."""
    lists = (pyarrow.types.is_list, pyarrow.types.is_large_list, pyarrow.types.is_fixed_size_list)
    return any(is_list(kind) for is_list in lists) and pyarrow.types.is_integer(kind.value_type)
