"""Reading DCP's files without running what is in them.

DCP keeps its index as a pickle and unpickles every entry that is no tensor. Here the index may name
only the plain records that DCP itself writes, and entries must be tensors, which DCP reads with
`weights_only`.
"""

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

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


class RecordUnpickler(pickle.Unpickler):
    """Refuses every global but DCP's own records."""

    def find_class(self, module: str, name: str) -> Any:
        if name in RECORDS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a checkpoint's index")


class TensorReader(FileSystemReader):
    """DCP's reader of a directory that holds tensors and nothing else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index; raises UnpicklingError if it holds anything but records of tensors."""
        data = (self.path / ".metadata").read_bytes()  # type: ignore[operator]
        metadata = RecordUnpickler(io.BytesIO(data)).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError("the index is not one of DCP's")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):
                raise pickle.UnpicklingError(f"entry {name} is not a tensor")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
