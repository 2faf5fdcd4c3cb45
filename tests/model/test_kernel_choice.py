"""Choice of the attention kernel, and the resulting masks and layouts.

Tests fake the device, its compute capability and the installed packages; no GPU kernel runs.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from stand_ins import CUDA, END, V2, V4, mask_for, tokens_with_documents
from variants import small_config

from diffllm import build_model
from diffllm.core.errors import ConfigError
from diffllm.model import without_storage
from diffllm.model.attention import kernels, ops
from diffllm.model.attention.diff_v1 import Values
from diffllm.model.attention.kernels import Kernel, prepare_backend, training_kernel
from diffllm.model.attention.masks import Documents, Packed
from diffllm.model.attention.ops import Backend

CPU = torch.device("cpu")
AMPERE, HOPPER, BLACKWELL = (8, 0), (9, 0), (10, 0)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that fakes a GPU and packages, and returns a log of flash-attn actions."""

    def make(capability=HOPPER, packages=("triton",), fails=None, torch_takes_it=True):
        def try_flash(device, width, documents):
            done.append(("tried", width, documents))
            if fails:
                raise RuntimeError(fails)

        done = []
        monkeypatch.setattr(kernels, "capability", lambda device: capability)
        monkeypatch.setattr(kernels, "installed", lambda name: name in packages)
        monkeypatch.setattr(kernels, "VARLEN_TAKES_FLASH_4", torch_takes_it)
        monkeypatch.setattr(kernels, "activate_flash_4", lambda: done.append("activated"))
        restored = "restore_flash_attention_impl"
        monkeypatch.setattr(kernels, restored, lambda **_: done.append("restored"))
        monkeypatch.setattr(kernels, "try_flash", try_flash)
        kernels.flash_4_fault.cache_clear()
        return done

    yield make
    kernels.flash_4_fault.cache_clear()


BF16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "width", "documents", "expected"),
    [
        ("sdpa", CPU, BF16, 32, False, Kernel.cpu_float32),
        ("sdpa", CPU, BF16, 64, False, Kernel.cpu),
        ("sdpa", CPU, FLOAT32, 32, False, Kernel.cpu),
        ("sdpa", CPU, BF16, 64, True, Kernel.cpu_documents),
        ("sdpa", CUDA, BF16, 128, False, Kernel.sdpa),
        ("sdpa", CUDA, FLOAT32, 64, False, Kernel.efficient),
        ("sdpa", CUDA, BF16, 264, False, Kernel.efficient),
        ("sdpa", CUDA, FLOAT32, 64, True, Kernel.masked),
        ("sdpa", CUDA, BF16, 264, True, Kernel.masked),
        ("flash", CUDA, BF16, 128, False, Kernel.flash_2),
        ("flash", CUDA, BF16, 128, True, Kernel.varlen_2),
        ("flex", CUDA, FLOAT32, 512, True, Kernel.flex),
        ("reference", CUDA, BF16, 128, True, Kernel.explicit),
    ],
)
def test_training_kernel_depends_on_backend_device_dtype_and_head_width(
    machine, monkeypatch, backend, device, dtype, width, documents, expected
):
    machine()
    monkeypatch.setattr(ops, "SLOW_BF16", False)
    found = training_kernel(Backend[backend], device, dtype, width, documents)
    assert found.value is expected
    assert found.reason
    assert "\n" not in found.reason


def test_training_kernel_uses_float32_if_bf16_is_slow_on_cpu(monkeypatch):
    monkeypatch.setattr(ops, "SLOW_BF16", True)
    found = training_kernel(Backend.sdpa, CPU, BF16, 128, documents=False)
    assert found == (Kernel.cpu_float32, "faster than bf16 on this CPU")
    assert training_kernel(Backend.sdpa, CPU, FLOAT32, 128, False).value is Kernel.cpu


@pytest.mark.parametrize(
    ("capability", "packages", "width", "expected", "reason"),
    [
        (AMPERE, ("triton", *V4), 128, Kernel.varlen, "documents"),
        ((12, 0), ("triton", *V4), 128, Kernel.varlen, "documents"),
        (BLACKWELL, ("triton",), 64, Kernel.flex, "not measured"),
        (HOPPER, ("triton", *V2), 128, Kernel.flex, "flash-attn-4 is not installed"),
        (HOPPER, ("triton",), 256, Kernel.varlen, "head width 256"),
        (HOPPER, ("triton",), 16, Kernel.varlen, "head width 16"),
        (HOPPER, (), 128, Kernel.varlen, "triton is not installed"),
        (HOPPER, ("triton", *V4), 128, Kernel.varlen_4, "not measured"),
        (BLACKWELL, V4, 256, Kernel.varlen_4, "not measured"),
    ],
)
def test_kernel_for_masked_documents_depends_on_gpu_and_installed_packages(
    machine, capability, packages, width, expected, reason
):
    done = machine(capability, packages)
    found = training_kernel(Backend.sdpa, CUDA, BF16, width, documents=True)
    assert found.value is expected
    assert reason in found.reason
    tried = expected is Kernel.varlen_4
    assert done == (["activated", ("tried", width, True)] if tried else [])


def test_flash_attn_4_is_not_tried_again_after_failure(machine):
    done = machine(packages=("triton", *V4), fails="no kernel\nfor this")
    for _ in range(3):
        found = training_kernel(Backend.sdpa, CUDA, BF16, 128, documents=True)
        assert found.value is Kernel.flex
        assert found.reason.endswith("flash-attn-4 fails: RuntimeError: no kernel")
    assert done == ["activated", ("tried", 128, True), "restored"]


def test_automatic_kernel_choice_skips_flash_attn_4_if_torch_is_too_old(machine):
    done = machine(packages=("triton", *V4), torch_takes_it=False)
    found = training_kernel(Backend.sdpa, CUDA, BF16, 128, documents=True)
    assert found.value is Kernel.flex
    assert "needs torch >= 2.12" in found.reason
    assert done == []


class Blocks:
    """Replacement of BlockMask."""


@pytest.mark.parametrize(
    ("backend", "device", "dtype", "explicit", "kind"),
    [
        ("sdpa", CPU, BF16, False, Packed),
        ("sdpa", CUDA, BF16, False, Packed),
        ("sdpa", CUDA, FLOAT32, False, torch.Tensor),
        ("sdpa", CUDA, BF16, True, torch.Tensor),
        ("flash", CUDA, BF16, False, Packed),
        ("flex", CUDA, BF16, False, Blocks),
        ("reference", CUDA, BF16, False, torch.Tensor),
    ],
)
def test_training_mask_type_matches_chosen_attention_kernel(
    machine, monkeypatch, backend, device, dtype, explicit, kind
):
    machine(AMPERE)
    for maker in ("causal_blocks", "document_blocks"):
        monkeypatch.setattr(kernels, maker, lambda *_: Blocks())
    tokens = tokens_with_documents()
    documents = Documents.of(tokens, END)
    # Of tokens, only these attributes are used.
    batch = SimpleNamespace(shape=tokens.shape, device=device)
    mask = mask_for(documents, batch, Backend[backend], dtype, 64, explicit)
    assert isinstance(mask, kind)
    if kind is Packed:
        assert torch.equal(mask.boundaries, documents.boundaries)
        assert mask.longest >= documents.boundaries.diff().max()
    elif kind is torch.Tensor:
        assert torch.equal(mask, documents.mask())
    unmasked = mask_for(None, batch, Backend[backend], dtype, 64, explicit)
    assert isinstance(unmasked, Blocks if kind is Blocks else type(None))


def test_kernel_head_width_depends_on_attention_variant_and_value_layout():
    def width(variant, *extra, head_dim=8, device=CPU):
        cfg = small_config(variant, head_dim=head_dim, extra=extra)
        return cfg.model.attention.resolve(cfg.model, device).width

    assert width("standard") == width("diff_v2") == width("gated") == 8
    assert width("diff_v1", "model.attention.values=split") == 8
    assert width("standard_sink") == 16
    assert width("diff_v1") == width("diff_v1", device=CUDA) == 16
    assert width("diff_v1", head_dim=64, device=CUDA) == 128
    assert width("diff_v1", head_dim=72, device=CUDA) == 72
    assert width("diff_v1", head_dim=128) == 256
    assert width("diff_v1", "model.attention.values=wide", head_dim=128, device=CUDA) == 256


def test_training_mask_fits_device_of_tokens_after_model_leaves_meta_device():
    cfg = small_config("diff_v1").model
    state = build_model(cfg).state_dict()
    moved, assigned = without_storage(cfg), without_storage(cfg)
    moved.to_empty(device="cpu")
    assigned.load_state_dict(state, assign=True)
    tokens = tokens_with_documents()
    documents = Documents.of(tokens, END)
    for model in (moved, assigned):
        mask = model.layers[0].attention.training_mask(documents, tokens, FLOAT32)
        assert isinstance(mask, Packed)


def test_device_config_has_chosen_layout_of_values_instead_of_auto():
    cfg = small_config("diff_v1", head_dim=128).model
    layouts = [cfg.attention.resolve(cfg, device).device_config.values for device in (CPU, CUDA)]
    assert layouts == [Values.wide, Values.split]


@pytest.fixture
def enabled(monkeypatch):
    """Return a function that fakes a device and records if cuDNN is enabled in SDPA calls."""

    def watch(device):
        real, entered = ops.sdpa_for_any_length, []

        def enter(_):
            entered.append(device)
            return real(device)

        monkeypatch.setattr("diffllm.model.transformer.sdpa_for_any_length", enter)
        seen = []

        def record(*args, **kwargs):
            seen.append(torch.backends.cuda.cudnn_sdp_enabled())
            return F.scaled_dot_product_attention(*args, **kwargs)

        functions = SimpleNamespace(scaled_dot_product_attention=record, pad=F.pad)
        monkeypatch.setattr(ops, "F", functions)
        return seen, entered

    return watch


@pytest.mark.parametrize("variant", ["standard", "diff_v1", "diff_v2", "standard_sink"])
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_cudnn_attention_is_disabled_on_gpu_if_kv_cache_is_used(enabled, variant, device):
    """Prompts and single tokens disable cuDNN on a GPU; training and the CPU do not."""
    seen, entered = enabled(device)
    model = build_model(small_config(variant).model)
    tokens = torch.randint(0, 64, (2, 12))
    model.loss(tokens, tokens).objective.backward()
    assert seen
    assert all(seen), "training"
    assert entered == []
    with torch.no_grad():
        caches = model.new_caches(2, 32)
        for part in (tokens, tokens[:, :1], tokens[:, :3]):
            seen.clear()
            model(part, caches=caches)
            assert seen
            assert not any(seen) if device is CUDA else all(seen)
    assert len(entered) == 3, "once per forward pass, not per layer"
    assert torch.backends.cuda.cudnn_sdp_enabled(), "cuDNN must be enabled again"


def on(backend):
    return (f"model.attention.backend={backend}",)


@pytest.mark.parametrize(
    ("variant", "refused", "reason"),
    [
        ("diff_v1_clamped", ("flash", "flex"), "model.attention.clamp=true; choose backend sdpa"),
        ("standard_sink", ("flex",), "model.attention.sink=learned; choose backend sdpa, flash"),
        ("standard_off_by_one", ("flex",), "model.attention.sink=one; choose backend sdpa, flash"),
    ],
)
def test_unsupported_attention_backend_raises_config_error(variant, refused, reason):
    for backend in Backend:
        if backend.name not in refused:
            small_config(variant, extra=on(backend.name))
            continue
        with pytest.raises(ConfigError, match=rf"backend={backend.name} does not support {reason}"):
            small_config(variant, extra=on(backend.name))


@pytest.mark.parametrize(
    ("packages", "capability", "activated"),
    [
        (V2, (8, 0), []),
        (V2, (9, 0), []),
        (V4, (9, 0), ["activated"]),
        (V4, (10, 0), ["activated"]),
        ((*V2, *V4), (9, 0), ["activated"]),
        ((*V2, *V4), (8, 0), []),
    ],
)
def test_flash_backend_uses_newest_version_for_the_gpu(machine, packages, capability, activated):
    calls = machine(capability, packages)
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)
    assert calls == [*activated, ("tried", 64, False)]


def test_flash_attn_4_refuses_masked_documents_if_torch_is_too_old(machine):
    """Torch 2.11 raises for any window in this backward pass, and causal attention is a window."""
    calls = machine(packages=V4, torch_takes_it=False)
    expected = r"does not support data.mask_documents=true: flash-attn-4 with document masks"
    with pytest.raises(ConfigError, match=expected) as caught:
        prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16, documents=True)
    assert "\n" not in str(caught.value)
    assert calls == []
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)
    calls = machine(packages=V2)  # version 2 does not use torch's dispatcher
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16, documents=True)
    assert calls == [("tried", 64, True)]


NOT_INSTALLED = "needs a flash-attn package: install flash-attn 2"


@pytest.mark.parametrize(
    ("packages", "capability", "dtype", "said"),
    [
        ((), HOPPER, BF16, NOT_INSTALLED),
        (V4, AMPERE, BF16, NOT_INSTALLED),
        (V2, HOPPER, FLOAT32, "backend=flash needs precision=bf16"),
    ],
)
def test_flash_backend_raises_config_error_for_float32_or_missing_package(
    machine, packages, capability, dtype, said
):
    machine(capability, packages)
    with pytest.raises(ConfigError, match=said):
        prepare_backend(Backend.flash, CUDA, 64, dtype)
    for backend in (Backend.sdpa, Backend.flex, Backend.reference):
        prepare_backend(backend, CUDA, 512, FLOAT32)


def test_flash_attn_import_error_raises_config_error_with_reason(monkeypatch, tmp_path):
    """For example, a package built for another version of torch."""
    package = tmp_path / "flash_attn" / "__init__.py"
    package.parent.mkdir()
    package.write_text("raise ImportError('undefined symbol')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(kernels, "capability", lambda device, c=capability: c)
        with pytest.raises(ConfigError, match=r"flash-attn fails with torch .* undefined symbol"):
            prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)
