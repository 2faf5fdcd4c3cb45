"""Constants for differences between supported versions and builds of torch (2.11 or newer)."""

from typing import Any

import torch
import torch._C._distributed_c10d as c10d
from torch.torch_version import TorchVersion

HAS_GQA = TorchVersion(torch.__version__) >= "2.12"
VARLEN_GQA: dict[str, Any] = {"enable_gqa": True} if HAS_GQA else {}
"""Arguments that let `varlen_attn` take fewer kv heads than query heads; none for 2.11."""

VARLEN_TAKES_FLASH_4 = HAS_GQA
"""Whether `varlen_attn` can run flash-attn-4 with document masks. torch 2.11 passes the value -1,
which means no window, as a window; its backward pass does not support windows."""
NEEDS_TORCH = f"flash-attn-4 with document masks needs torch >= 2.12, this is {torch.__version__}"

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")
FLIGHT_RECORDERS = [getattr(c10d, name) for name in RECORDERS if hasattr(c10d, name)]

IS_ROCM = bool(torch.version.hip)
"""Whether "cuda" means AMD GPUs, whose kernels give fewer guarantees than CUDA kernels."""


CPU_CAPABILITIES: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
"""Name and instruction sets of this CPU; empty if torch does not report this information."""
