"""What differs between the versions and builds of torch that we run on, 2.11 and newer.

Everything else is written once, for all of them: no other module asks which torch it runs on.
"""

import inspect
from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.nn.attention.varlen import varlen_attn

HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
VARLEN_GQA: dict[str, Any] = {"enable_gqa": True} if HAS_GQA else {}
"""Arguments by which `varlen_attn` takes fewer kv heads than query heads: it must be told since
2.12, and could not be told in 2.11, where the kernel took heads as they came."""

VARLEN_TAKES_FLASH_4 = HAS_GQA
"""Whether flash-attn-4 masks documents: 2.11 gave it a window of -1 as one, and refused any window
in the backward pass."""
NEEDS_TORCH = f"flash-attn-4 masks documents from torch 2.12 on, this is {torch.__version__}"

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
FLIGHT_RECORDERS = [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]
"""Functions that dump the last collectives as JSON: gloo's, and NCCL's in builds that have it."""

IS_ROCM = bool(torch.version.hip)
"""Whether "cuda" means AMD's GPUs, whose kernels differ from CUDA's in what they promise."""


class Stager(DefaultStager):
    """DCP's stager, whose copies go to the same memory each time.

    torch 2.11 closes what copies behind every copy, and the next one fails.
    """

    def __init__(self, options: StagingOptions):
        super().__init__(options)
        self._end = self._state_dict_stager.close
        self._state_dict_stager.close = lambda: None  # type: ignore[method-assign]

    def close(self) -> None:
        super().close()
        self._end()
