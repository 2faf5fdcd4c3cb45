"""Read checkpoints without running code from their files.

torch.distributed.checkpoint (DCP) stores its index as a pickle. The index is opened only if its
checksum is in the manifest. The index may contain only classes that DCP writes, and every entry
must be a tensor.
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


def enum_member(kind: Any, name: Any) -> Enum:
    """Return member `name` of the enum class `kind`; raises UnpicklingError for other arguments.

    Replaces the built-in getattr, which Python 3.11.0 to 3.11.3 uses in pickles of enum members.
    """
    if isinstance(kind, EnumType) and isinstance(name, str) and name in kind.__members__:
        member: Enum = kind.__members__[name]
        return member
    raise pickle.UnpicklingError("builtins.getattr is not allowed in a checkpoint's index")


class RecordUnpickler(pickle.Unpickler):
    """An unpickler for the index of torch.distributed.checkpoint.

    Classes and functions that such an index does not need raise UnpicklingError.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return enum_member
        if name in RECORDS.get(module, ()):
            return super().find_class(module, name)
        name = f"{shown(module)}.{shown(name)}"
        raise pickle.UnpicklingError(f"{name} is not allowed in a checkpoint's index")


class TensorReader(FileSystemReader):
    """A torch.distributed.checkpoint reader for checkpoints that contain only tensors.

    Raises CheckpointError or UnpicklingError for other checkpoints.
    """

    refused: Exception | None = None
    """The error from reading the index; `dcp.load` drops (torch 2.11) or wraps the error."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = read_index(Path(self.path))
        except Exception as error:
            self.refused = error
            raise
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def read_index(path: Path) -> Metadata:
    """Read the index of a checkpoint, which torch.distributed.checkpoint stores as a pickle.

    Raises CheckpointError if the checkpoint is damaged, and UnpicklingError if the index contains
    anything except tensors.
    """
    if problems := verify(path, checksums=False):
        raise CheckpointError("; ".join(problems))
    manifest = read_manifest(path)
    data = read_bytes(path / ".metadata", LARGEST_INDEX)
    if hashlib.sha256(data).hexdigest() != manifest[".metadata"].sha256:
        raise CheckpointError(".metadata has a wrong checksum")
    metadata = RecordUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError("the index is not a DCP Metadata object")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"entry {shown(name)} is not a tensor")
    for place in metadata.storage_data.values():
        named = isinstance(place, _StorageInfo) and place.relative_path in manifest
        if not named or place.transform_descriptors:
            raise pickle.UnpicklingError("an entry of the index is not stored in the checkpoint")
    return metadata


def load_tensors(path: Path, tensors: dict[str, Tensor], **kwargs: Any) -> None:
    """Read tensors from a checkpoint into the existing tensors in `tensors`, by name.

    The checkpoint may come from a different number of ranks. File sizes and the index are checked,
    but not the checksums of tensor files.

    Args:
        kwargs: more arguments of `torch.distributed.checkpoint.load`.

    Raises CheckpointError if the tensors cannot be read.
    """
    reader = TensorReader(path)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(tensors, storage_reader=reader, **kwargs)
    except (Exception, CheckpointException) as error:
        why = failure_reason(reader.refused or error)
        raise CheckpointError(f"cannot read {path}: {why}") from error


def failure_reason(error: BaseException) -> str:
    """Describe an error in one line.

    A CheckpointException of torch contains the errors of several ranks; describe the first error.
    """
    if isinstance(error, CheckpointException):
        rank, (error, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {failure_reason(error)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
