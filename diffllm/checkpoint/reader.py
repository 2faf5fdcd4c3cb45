"""Read the tensors of checkpoints, without executing code from checkpoint files.

torch.distributed.checkpoint (DCP) stores the index of a checkpoint as a pickle in the file
.metadata. The file is unpickled only if its checksum matches manifest.json. The pickle may contain
only classes that DCP needs, and every entry of the index must be a tensor.
"""

import hashlib
import io
import pickle
import warnings
from enum import Enum, EnumType
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from diffllm.checkpoint.manifest import read_manifest, shown, verify
from diffllm.core.errors import CheckpointError
from diffllm.core.files import read_bytes

LARGEST_INDEX = 2**32  # bytes

RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", *(name for name, v in vars(torch).items() if isinstance(v, torch.dtype))},
}


def index_error(problem: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(f"the index file .metadata {problem}; use another checkpoint")


def enum_member(kind: Any, name: Any) -> Enum:
    """Return the member `name` of the enum class `kind`.

    `RecordUnpickler` calls this function instead of getattr: Python 3.11.0 to 3.11.3 pickles an
    enum member as a call of getattr. Raises UnpicklingError if `kind` is not an enum class, or has
    no member `name`.
    """
    if isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__:
        member: Enum = kind.__members__[name]
        return member
    raise index_error("uses builtins.getattr")


class RecordUnpickler(pickle.Unpickler):
    """Unpickler that raises UnpicklingError for classes and functions that DCP does not need."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if name in RECORDS.get(module, ()):
            return super().find_class(module, name)
        name = f"{shown(module)}.{shown(name)}"
        raise index_error(f"uses {name}")


class TensorReader(FileSystemReader):
    """Storage reader of torch.distributed.checkpoint that reads the index with `read_index`.

    `refused` is the error that `read_index` raised, or None if it raised no error. The error is
    stored because `dcp.load` of some torch versions does not include the error in its exception.
    """

    refused: Exception | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = read_index(Path(self.path))
        except Exception as error:
            self.refused = error
            raise
        # The overridden method sets the id of the load, too.
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_index(path: Path) -> Metadata:
    """Read the index of a checkpoint, which torch.distributed.checkpoint pickles in .metadata.

    Raises CheckpointError if a file is damaged, and UnpicklingError if the index contains anything
    except tensors.
    """
    # Sizes only: hashing every file would read a large checkpoint twice.
    problems = verify(path, checksums=False)
    if problems:
        raise CheckpointError("; ".join(problems))
    manifest = read_manifest(path)
    # Read once, so that the checked bytes are the unpickled bytes.
    data = read_bytes(path / ".metadata", LARGEST_INDEX)
    if hashlib.sha256(data).hexdigest() != manifest[".metadata"].sha256:
        raise CheckpointError(
            "the checksum of the index file .metadata differs from manifest.json; use another "
            "checkpoint"
        )
    metadata = RecordUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise index_error("is not a Metadata object of torch.distributed.checkpoint")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise index_error(f"contains {shown(name)}, which is not a tensor")
    # A forged index could name a file outside of the checkpoint, or a transformation of its bytes.
    for place in metadata.storage_data.values():
        is_listed = isinstance(place, _StorageInfo) and place.relative_path in manifest
        if not is_listed or place.transform_descriptors:
            raise index_error("names a file that manifest.json does not list")
    return metadata


def load_tensors(path: Path, tensors: dict[str, Tensor], **kwargs: Any) -> None:
    """Load tensors from the checkpoint directory `path` into `tensors`, by name and in place.

    The checkpoint may come from a run with another world size. The size of every file and the
    checksum of the index are checked, but not the checksums of tensor files. `kwargs` are passed to
    `torch.distributed.checkpoint.load`. Raises CheckpointError if the tensors cannot be loaded.
    """
    reader = TensorReader(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, **kwargs)
    # CheckpointException is a BaseException, but not an Exception.
    except (Exception, CheckpointException) as error:
        reason = failure_reason(reader.refused or error)
        raise CheckpointError(f"cannot read the checkpoint {path}: {reason}") from error


def failure_reason(error: BaseException) -> str:
    """Convert `error` to an error message without line breaks.

    A CheckpointException of torch contains one error per failed rank. Use only the first error.
    """
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {failure_reason(error)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())[:300]
    if isinstance(error, CheckpointError):
        return text
    return f"{type(error).__name__}: {text}"
