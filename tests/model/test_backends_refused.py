"""Which backend is refused where, before anything is built."""

import pytest
import torch
from stand_ins import CUDA, V2, V4
from variants import small_config

from diffllm import build_model, load_config
from diffllm.core.errors import ConfigError
from diffllm.model.attention import kernels
from diffllm.model.attention.kernels import prepare_backend
from diffllm.model.attention.ops import Backend


def on(backend):
    return (f"model.attention.backend={backend}",)


@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_backends_of_gpus_are_refused_on_the_cpu_when_building(backend):
    cfg = load_config(["model=tiny", "attention=diff_v2", *on(backend)])
    expected = (
        rf"^model\.attention\.backend={backend} needs a GPU; on the cpu choose sdpa or reference$"
    )
    with pytest.raises(ConfigError, match=expected):
        build_model(cfg.model)
    with torch.device("meta"):  # to be counted, not run
        build_model(cfg.model)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_the_others_are_not(backend):
    prepare_backend(Backend[backend], torch.device("cpu"), 32, torch.float32)
    build_model(small_config("diff_v2", extra=on(backend)).model)


def test_an_unknown_backend_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match=r"model\.attention\.backend=fast") as caught:
        load_config(["model=tiny", *on("fast")])
    assert all(backend.name in str(caught.value) for backend in Backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", ["flash", "flex"])
def test_a_clamped_map_is_refused_where_maps_are_not_explicit(backend):
    with pytest.raises(ConfigError, match=rf"backend={backend} has no clamped map; choose sdpa"):
        small_config("diff_v1_clamped", extra=on(backend))
    small_config("diff_v1", extra=on(backend))


@pytest.mark.parametrize(
    ("variant", "sink"), [("standard_sink", "learned"), ("standard_off_by_one", "one")]
)
def test_a_sink_is_refused_by_flex_alone(variant, sink):
    with pytest.raises(ConfigError, match=rf"backend=flex has no sink={sink}; choose sdpa, flash"):
        small_config(variant, extra=on("flex"))
    for backend in ("sdpa", "flash", "reference"):
        small_config(variant, extra=on(backend))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU and these packages, as far as `prepare_backend` looks."""

    def make(*packages, capability=(9, 0)):
        monkeypatch.setattr(kernels, "capability", lambda device: capability)
        monkeypatch.setattr(kernels, "installed", lambda name: name in packages)
        activated = []
        monkeypatch.setattr(kernels, "activate_flash_4", lambda: activated.append("FA4"))
        monkeypatch.setattr(
            kernels,
            "try_flash",
            lambda device, width, documents: activated.append(
                "documents" if documents else "tried"
            ),
        )
        return activated

    return make


@pytest.mark.parametrize(
    ("packages", "capability", "activated"),
    [
        (V2, (8, 0), []),
        (V2, (9, 0), []),
        (V4, (9, 0), ["FA4"]),
        (V4, (10, 0), ["FA4"]),
        ((*V2, *V4), (9, 0), ["FA4"]),
        ((*V2, *V4), (8, 0), []),
    ],
)
def test_flash_takes_the_newest_version_that_the_gpu_runs(gpu, packages, capability, activated):
    calls = gpu(*packages, capability=capability)
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)
    assert calls == [*activated, "tried"]


@pytest.mark.parametrize(("packages", "capability"), [(V2, (9, 0)), (V4, (9, 0))])
def test_flash_is_tried_as_it_will_be_used(gpu, monkeypatch, packages, capability):
    monkeypatch.setattr(kernels, "VARLEN_TAKES_FLASH_4", True)
    calls = gpu(*packages, capability=capability)
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16, documents=True)
    assert calls[-1] == "documents"


def test_flash_4_is_refused_for_documents_where_torch_has_no_backward_pass_for_it(gpu, monkeypatch):
    """torch 2.11 raises there for any window, and being causal is one."""
    monkeypatch.setattr(kernels, "VARLEN_TAKES_FLASH_4", False)
    calls = gpu(*V4)
    expected = r"backend=flash with data.mask_documents=true: flash-attn-4 masks documents from"
    with pytest.raises(ConfigError, match=expected) as caught:
        prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16, documents=True)
    assert "\n" not in str(caught.value)
    assert calls == []
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)
    calls = gpu(*V2)  # version 2 has its own functions
    prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16, documents=True)
    assert calls == ["documents"]


@pytest.mark.parametrize(("variant", "documents"), [("standard", True), ("standard_sink", False)])
def test_a_variant_that_masks_documents_by_a_tensor_needs_no_kernel_for_them(
    gpu, variant, documents
):
    """backend=flash attends where nothing is masked, and nothing else is tried."""
    calls = gpu(*V2)
    cfg = small_config(variant, extra=on("flash")).model
    cfg.attention.prepare(cfg, CUDA, torch.bfloat16, documents=True)
    assert calls == ["documents" if documents else "tried"]


def test_a_flash_package_that_fails_is_refused_with_its_reason(gpu, monkeypatch):
    def fail(device, width, documents):
        raise ValueError("too many values to unpack")

    gpu(*V2)
    monkeypatch.setattr(kernels, "try_flash", fail)
    with pytest.raises(ConfigError, match=r"flash-attn fails with torch .*too many values"):
        prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)


def test_a_flash_package_that_cannot_be_imported_is_refused_with_its_reason(monkeypatch, tmp_path):
    """As one built for another torch."""
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    for capability in ((8, 0), (9, 0)):
        monkeypatch.setattr(kernels, "capability", lambda device, c=capability: c)
        with pytest.raises(ConfigError, match=r"flash-attn fails with torch .* undefined symbol"):
            prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)


def test_heads_wider_than_flash_takes_are_refused(gpu):
    gpu(*V2)
    with pytest.raises(ConfigError, match="heads up to 256 wide, this variant needs 288"):
        prepare_backend(Backend.flash, CUDA, 288, torch.bfloat16)


@pytest.mark.parametrize(("packages", "capability"), [((), (9, 0)), (V4, (8, 0))])
def test_flash_without_its_package_is_refused(gpu, packages, capability):
    gpu(*packages, capability=capability)
    with pytest.raises(ConfigError, match="needs the flash-attn package, which is not installed"):
        prepare_backend(Backend.flash, CUDA, 64, torch.bfloat16)


def test_flash_in_float32_is_refused(gpu):
    gpu(*V2)
    with pytest.raises(ConfigError, match="backend=flash needs precision=bf16"):
        prepare_backend(Backend.flash, CUDA, 64, torch.float32)
    prepare_backend(Backend.flash, CUDA, 64, torch.float16)
    for backend in (Backend.sdpa, Backend.flex, Backend.reference):
        prepare_backend(backend, CUDA, 512, torch.float32)
