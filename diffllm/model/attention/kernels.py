"""Choose the attention kernel for training, build its masks, and load flash-attn."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.attention import restore_flash_attention_impl
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from diffllm.core.errors import ConfigError
from diffllm.core.torch_versions import NEEDS_TORCH, VARLEN_TAKES_FLASH_4
from diffllm.model.attention.masks import Documents, Packed, WholeMask
from diffllm.model.attention.ops import (
    FLASH_4,
    HALF_PRECISION,
    NARROW,
    WIDEST,
    Backend,
    flash,
    flash_takes,
    in_float32,
    sdpa_is_flash_4,
    varlen,
)
from diffllm.model.auto_setting import ASKED, AutoSetting, dtype_name

if TYPE_CHECKING:
    from diffllm.model.attention.base import AttentionConfig


class Kernel(StrEnum):
    """Attention kernels for training; the values are the names that a run prints at its start."""

    cpu = "torch's fused CPU kernel"
    cpu_float32 = "torch's fused CPU kernel, in float32"
    cpu_documents = "torch's fused CPU kernel for each document"
    sdpa = "torch's cuDNN, FlashAttention or memory-efficient kernel"
    efficient = "torch's memory-efficient kernel"
    masked = "torch's SDPA with a boolean mask"
    flash_2 = "flash-attn 2"
    flash_4 = "flash-attn-4"
    varlen = "torch's FlashAttention-2 for variable lengths"
    varlen_2 = "flash-attn 2 for variable lengths"
    varlen_4 = "flash-attn-4 for variable lengths"
    flex = "FlexAttention"
    explicit = "explicit maps"


HOPPER_OR_BLACKWELL = (9, 10)
"""Major compute capabilities of the data-centre GPUs on which flash-attn-4 runs under torch."""
PACKED = (Kernel.cpu_documents, Kernel.varlen, Kernel.varlen_2, Kernel.varlen_4)
FLEX_WIDTHS = range(64, 129)
"""Head widths with tuned FlexAttention tiles for Hopper in torch, forward and backward
(torch/_inductor/template_heuristics/triton.py)."""
DOCUMENTS_ON_HOPPER = AutoSetting(
    Kernel.flex, "torch's FlashAttention-2 was written for older GPUs; not measured"
)
"""Kernel for masked documents on Hopper and Blackwell without flash-attn-4. Benchmarks replace this
value by `Kernel.varlen`."""


@dataclass(frozen=True)
class Resolved:
    """An attention config on one device: everything that depends on the device is decided."""

    config: AttentionConfig
    device: torch.device
    width: int
    """Largest head width of queries, keys and values in kernel calls."""
    explicit_mask: bool = False
    """Whether this variant supports document masking only with a boolean mask tensor."""
    only_kernel: AutoSetting | None = None
    """The `Kernel` of a variant that supports no other kernel, with the reason."""
    settings: dict[str, AutoSetting] = field(default_factory=dict)
    """Value of each device-dependent config key, with the reason."""

    @property
    def device_config(self) -> AttentionConfig:
        """The config with the chosen value of each device-dependent key, such as `auto`."""
        values = {name: setting.value for name, setting in self.settings.items()}
        return replace(self.config, **values)

    def kernel(self, dtype: torch.dtype, documents: bool) -> AutoSetting:
        """Return the `Kernel` for training, and the reason for the choice.

        `dtype` is the dtype of queries and keys. If `documents` is true, queries see only keys of
        the same document.
        """
        if self.only_kernel is not None:
            return self.only_kernel
        backend = self.config.backend
        return training_kernel(
            backend, self.device, dtype, self.width, documents, self.explicit_mask
        )

    def choices(self, dtype: torch.dtype, documents: bool) -> dict[str, AutoSetting]:
        """Return `settings` and, as "attention", the kernel; for the arguments, see `kernel`."""
        return {"attention": self.kernel(dtype, documents), **self.settings}

    def prepare(self, dtype: torch.dtype | None = None, documents: bool = False) -> None:
        """Raise ConfigError if the attention kernel cannot run on the device.

        For backend=flash, load the flash-attn package and run its kernel on small tensors. For the
        arguments, see `kernel`; if `dtype` is None, the dtype is not checked.
        """
        # With an explicit mask, the kernel itself need not support documents.
        kernel_masks_documents = documents and not self.explicit_mask
        prepare_backend(self.config.backend, self.device, self.width, dtype, kernel_masks_documents)


def training_kernel(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    documents: bool,
    explicit_mask: bool = False,
) -> AutoSetting:
    """Return the `Kernel` to use for training, and the reason for the choice.

    Args:
        dtype: dtype of queries and keys.
        width: largest head width of queries, keys and values.
        documents: whether queries see only keys of the same document.
        explicit_mask: whether the attention variant supports document masking only with a boolean
            mask tensor.
    """
    if backend is Backend.reference:
        return AutoSetting(Kernel.explicit, ASKED)
    if backend is Backend.flex:
        return AutoSetting(Kernel.flex, ASKED)
    if documents and explicit_mask:
        return AutoSetting(Kernel.masked, "no other kernel masks documents in this map")
    if device.type == "cuda" and not flash_takes(dtype, width):
        reason = f"head width {width}" if dtype in HALF_PRECISION else f"in {dtype_name(dtype)}"
        return AutoSetting(Kernel.masked if documents else Kernel.efficient, reason)
    if device.type != "cuda" and documents:
        kernel = Kernel.cpu_documents if device.type == "cpu" else Kernel.masked
        return AutoSetting(kernel, f"documents on the {device.type}")
    if backend is Backend.flash:  # `prepare_backend` has activated the package
        version = "4" if sdpa_is_flash_4() else "2"
        return AutoSetting(Kernel[("varlen_" if documents else "flash_") + version], ASKED)
    if documents:
        return document_kernel(device, width)
    if device.type == "cuda":
        return AutoSetting(Kernel.sdpa, "torch uses the first kernel that supports these heads")
    if in_float32(dtype, width):
        condition = "on this CPU" if width > NARROW else f"at head width {width}"
        return AutoSetting(Kernel.cpu_float32, f"faster than bf16 {condition}")
    return AutoSetting(Kernel.cpu, f"on the {device.type}")


def document_kernel(device: torch.device, width: int) -> AutoSetting:
    if capability(device)[0] not in HOPPER_OR_BLACKWELL:
        return AutoSetting(Kernel.varlen, "documents")
    fault = flash_4_fault(device, width)
    if not fault:
        return AutoSetting(Kernel.varlen_4, "flash-attn-4 is written for these GPUs; not measured")
    if width not in FLEX_WIDTHS:
        return AutoSetting(Kernel.varlen, f"head width {width}; {fault}")
    if not installed("triton"):
        return AutoSetting(Kernel.varlen, f"triton is not installed; {fault}")
    return AutoSetting(DOCUMENTS_ON_HOPPER.value, f"{DOCUMENTS_ON_HOPPER.reason}; {fault}")


def prepare_backend(
    backend: Backend,
    device: torch.device,
    width: int,
    dtype: torch.dtype | None = None,
    documents: bool = False,
) -> None:
    """Raise ConfigError if `backend` cannot run on `device`.

    For `Backend.flash`, load flash-attn and run it on small tensors.

    Args:
        width: largest head width of queries, keys and values.
        dtype: dtype of queries and keys; None means that the dtype is not checked.
        documents: whether queries see only keys of the same document.
    """
    name = f"model.attention.backend={backend.name}"
    if backend in (Backend.flash, Backend.flex) and device.type != "cuda":
        raise ConfigError(f"{name} needs a GPU; on device {device.type}, choose sdpa or reference")
    if backend is not Backend.flash:
        return
    if dtype is not None and dtype not in HALF_PRECISION:
        raise ConfigError(
            f"{name} needs precision=bf16; for float32, choose sdpa, flex or reference"
        )
    if width > WIDEST:
        raise ConfigError(f"{name} supports head widths up to {WIDEST}, not {width}; choose sdpa")
    try:
        version = flash_version(device)
        if not version:
            raise ConfigError(
                f"{name} needs a flash-attn package: install flash-attn 2, or flash-attn-4 on "
                "Hopper or Blackwell; or set model.attention.backend to sdpa or flex"
            )
        if version == 4 and documents and not VARLEN_TAKES_FLASH_4:
            raise ConfigError(
                f"{name} does not support data.mask_documents=true: {NEEDS_TORCH}; upgrade "
                "torch or set model.attention.backend=sdpa"
            )
        if version == 4:  # torch's dispatcher calls version 4; version 2 is called directly
            activate_flash_4()
        try_flash(device, width, documents)
    except ConfigError:
        raise
    except Exception as error:  # a package built for another torch or GPU may raise any exception
        raise ConfigError(
            f"{name}: flash-attn fails with torch {torch.__version__} at head width "
            f"{width}; choose sdpa or flex. The error was: {error}"
        ) from error


def training_mask(kernel: Kernel, documents: Documents | None, tokens: Tensor) -> WholeMask:
    """Build the causal attention mask for tokens (B, T), as the `Mask` type that `kernel` needs.

    If `documents` is given, queries see only keys of the same document. Only the shape and device
    of `tokens` are used.
    """
    length = tokens.shape[1]
    if documents is None:
        return causal_blocks(length, tokens.device) if kernel is Kernel.flex else None
    if kernel is Kernel.flex:
        return document_blocks(documents.ids)
    if kernel not in PACKED:
        return documents.mask()
    # Compile one graph for any number of documents: the number is dynamic, and the bound on the
    # length is constant.
    torch._dynamo.maybe_mark_dynamic(documents.boundaries, 0)
    return Packed(documents.boundaries, length)


# Cached, because all batches of one length have the same mask.
@functools.lru_cache(maxsize=8)
def causal_blocks(length: int, device: torch.device) -> BlockMask:

    def causal(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return block_mask_maker(device)(causal, None, None, length, length, device=device)


def document_blocks(ids: Tensor) -> BlockMask:
    """Build a causal FlexAttention mask in which queries see only keys of the same document.

    `ids` (B, T) int64 is the document number of each token, counted from 0 in each sequence.
    """
    batch, length = ids.shape

    def within(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[b, query] == ids[b, key])

    return block_mask_maker(ids.device)(within, batch, None, length, length, device=ids.device)


@functools.lru_cache(maxsize=8)
def block_mask_maker(device: torch.device) -> Callable[..., BlockMask]:
    """Return `create_block_mask`, compiled on GPUs; if compiled, it allocates no T x T mask."""
    return torch.compile(create_block_mask) if device.type == "cuda" else create_block_mask


def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def capability(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or not torch.cuda.is_available():
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def flash_version(device: torch.device) -> int:
    """Return the flash-attn version to use on `device`: 4, 2, or 0 if no version is usable."""
    if not installed("flash_attn"):
        return 0
    if capability(device)[0] in HOPPER_OR_BLACKWELL and installed("flash_attn.cute"):
        return 4
    return 2 if installed("flash_attn.flash_attn_interface") else 0


def activate_flash_4() -> None:
    """Make torch's SDPA and `varlen_attn` run flash-attn-4, without torch.compile graph breaks."""
    from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
    from torch.nn.attention._fa4 import register_flash_attention_fa4

    register = functools.partial(register_flash_attention_fa4, FLASH_4)
    register_flash_attention_impl(FLASH_4, register_fn=register)
    activate_flash_attention_impl(FLASH_4)


def try_flash(device: torch.device, width: int, documents: bool = False) -> None:
    """Run flash-attn forward and backward on small bf16 tensors of head width `width`.

    If `documents` is true, also run flash-attn's kernel for variable lengths. An unsupported GPU
    can cause any type of exception.
    """
    q = torch.ones(1, 8, 2, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    out = flash(q, q, q, 1.0).sum()
    if documents:
        boundaries = torch.tensor([0, 3, 8], dtype=torch.int32, device=device)
        out = out + varlen(q, q, q, Packed(boundaries, 8), 1.0, Backend.flash).sum()
    out.backward()


@functools.cache
def flash_4_fault(device: torch.device, width: int) -> str:
    """Activate flash-attn-4 if it runs with document masking on `device` at head width `width`.

    Return "" on success. On failure, restore torch's own kernels and return an error text.
    """
    try:
        if flash_version(device) != 4:
            return "flash-attn-4 is not installed"
        if not VARLEN_TAKES_FLASH_4:
            return NEEDS_TORCH
        activate_flash_4()
        try_flash(device, width, documents=True)
    except Exception as error:
        # A package built for another torch or GPU may raise any exception.
        restore_flash_attention_impl(_raise_warn=False)
        return f"flash-attn-4 fails: {type(error).__name__}: {error}".splitlines()[0]
    return ""
