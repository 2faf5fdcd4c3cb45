"""The differences between the versions and builds of torch that we run on, 2.11 and newer."""

from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch.torch_version import TorchVersion

HAS_GQA = TorchVersion(torch.__version__) >= "2.12"
VARLEN_GQA: dict[str, Any] = {"enable_gqa": True} if HAS_GQA else {}
"""Arguments with which `varlen_attn` takes fewer kv heads than query heads; 2.11 needs none."""

VARLEN_TAKES_FLASH_4 = HAS_GQA
"""Whether `varlen_attn` can run flash-attn-4, and mask documents with it. 2.11 passes on the value
-1 for no window as a window, and its backward pass refuses windows."""
NEEDS_TORCH = f"flash-attn-4 masks documents from torch 2.12 on, this is {torch.__version__}"

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
FLIGHT_RECORDERS = [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]

IS_ROCM = bool(torch.version.hip)
"""Whether "cuda" means AMD's GPUs, whose kernels do not promise all that those of CUDA do."""


CPU: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
"""The name and the instruction sets of this CPU; empty if torch does not report them."""
