"""Datatrove's token files, which Nanotron reads.

NAME.ds has the tokens, NAME.ds.index the ends of documents (uint64), and NAME.ds.metadata a first
line that ends with the bytes of a token.
"""

from pathlib import Path

from diffllm.core.errors import DataError
from diffllm.core.files import read_text
from diffllm.data.imported.files import TokenFile, array_in, check_last_end
from diffllm.data.verified import usable

TYPES = {2: "<u2", 4: "<u4"}


def open_datatrove(path: Path, vocab_size: int) -> TokenFile:
    """Open NAME.ds; raises DataError.

    Args:
        vocab_size: of the tokenizer, which says how large tokens are where there is no metadata.
    """
    content = array_in(path, TYPES[token_size(path, vocab_size)])
    index = path.with_name(f"{path.name}.index")
    if not index.is_file():
        raise DataError(f"{index}: no such file; {path.name} needs its index")
    ends = array_in(index, "<u8")
    if not len(ends):
        raise DataError(f"{index}: it has no documents")
    check_last_end(index, int(ends[-1]), len(content))
    return TokenFile(path, content, lambda i: ends[i].astype("int64"), len(ends), vocab_size)


def token_size(path: Path, vocab_size: int) -> int:
    """The bytes of a token."""
    metadata = path.with_name(f"{path.name}.metadata")
    if not metadata.is_file():
        return 2 if vocab_size <= 2**16 else 4
    with usable(metadata):
        said = read_text(metadata, follow=True).partition("\n")[0].rpartition("|")[2]
    if said not in map(str, TYPES):
        raise DataError(f"{metadata}: tokens of {said!r} bytes are not known; 2 or 4")
    return int(said)
