"""Every call of a flash-attn package fits the signatures of its releases.

Signatures are copied from the sources of the oldest and newest tested release. If a package is
installed, its own signatures are tested too.
"""

import importlib
import inspect
import sys
from inspect import Parameter, Signature
from types import ModuleType

import pytest
import torch
from stand_ins import END, heads, tokens_with_documents
from torch.nn.attention import _fa4, varlen

from diffllm.core.torch_versions import VARLEN_TAKES_FLASH_4
from diffllm.model.attention import ops
from diffllm.model.attention.masks import Documents, Packed
from diffllm.model.attention.ops import FLASH_4, Backend, attend

DENSE_2 = """q k v | dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic
return_attn_probs"""
VARLEN_2 = """q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k | dropout_p softmax_scale
causal window_size softcap alibi_slopes deterministic return_attn_probs block_table"""
FORWARD_4 = """q k v | qv cu_seqlens_q cu_seqlens_k seqused_q seqused_k max_seqlen_q max_seqlen_k
min_seqlen_k page_table softmax_scale causal softcap window_size_left window_size_right
learnable_sink tile_mn mma_pv_is_rs intra_wg_overlap num_threads num_splits pack_gqa _arch score_mod
mask_mod block_sparse_tensors return_lse out lse aux_tensors aux_scalars q_descale k_descale
v_descale gather_kv_indices"""
BACKWARD_4 = """q k v out dout lse | softmax_scale causal softcap window_size_left window_size_right
m_block_size n_block_size num_threads pack_gqa num_stages_Q num_stages_dO SdP_swapAB dKV_swapAB
dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ V_in_regs cu_seqlens_q cu_seqlens_k seqused_q
seqused_k max_seqlen_q max_seqlen_k deterministic dq dk dv score_mod score_mod_bwd mask_mod
aux_tensors aux_scalars block_sparse_tensors dlse"""
NEWER_4 = " scheduler_metadata seqlen_k_per_split disable_scheduler_metadata gather_bwd_recompute_p"
VERSION_2 = {"flash_attn_func": DENSE_2, "flash_attn_varlen_func": VARLEN_2}
RELEASES = {
    "flash-attn 2.7.0 and 2.8.3": VERSION_2,
    "flash-attn-4 4.0.0b19": {"_flash_attn_fwd": FORWARD_4, "_flash_attn_bwd": BACKWARD_4},
    "flash-attn-4 4.0.0b36": {
        "_flash_attn_fwd": FORWARD_4 + NEWER_4, "_flash_attn_bwd": BACKWARD_4 + " learnable_sink",
    },
}  # fmt: skip
"""Positional parameters by function: required ones, then optional ones after "|"."""
SHAPES = [((8, 8, 16), 1), ((8, 2, 16), 1), ((8, 4, 16), 2)]
"""All heads with their own keys; shared keys; shared keys and values of twice the width."""


def signature(parameters):
    required, _, optional = parameters.partition("|")
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Signature(
        [
            *(Parameter(name, kind) for name in required.split()),
            *(Parameter(name, kind, default=None) for name in optional.split()),
        ]
    )


def signatures(release):
    """Return signatures by function, of a release or of the installed package."""
    if release in RELEASES:
        return {name: signature(text) for name, text in RELEASES[release].items()}
    module, version = release
    pytest.importorskip(module)
    functions = RELEASES[version]
    return {
        name: inspect.signature(getattr(importlib.import_module(module), name))
        for name in functions
    }


def fake_package(module, functions, monkeypatch):
    """Replace a package; return the calls of its functions, as (name, args, kwargs)."""
    calls = []

    def recorded(name):
        def function(q, *args, **kwargs):
            calls.append((name, (q, *args), kwargs))
            zeros = torch.zeros_like(q)
            several = {"_flash_attn_fwd": (zeros, zeros[..., 0]), "_flash_attn_bwd": (zeros,) * 3}
            return several.get(name, zeros)

        return function

    names = module.split(".")
    modules = [ModuleType(".".join(names[: i + 1])) for i in range(len(names))]
    for parent, child, name in zip(modules, modules[1:], names[1:], strict=False):
        setattr(parent, name, child)
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
    for name in functions:
        setattr(modules[-1], name, recorded(name))
    return calls


@pytest.fixture
def version_4(monkeypatch):
    """Replace flash-attn-4; call it as torch's dispatcher does. Return the calls."""
    functions = RELEASES["flash-attn-4 4.0.0b19"]
    calls = fake_package("flash_attn.cute.interface", functions, monkeypatch)
    monkeypatch.delitem(sys.modules, FLASH_4, raising=False)
    monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", FLASH_4)
    monkeypatch.setattr(_fa4, "_get_device_major", lambda device: 9)
    _fa4._fa4_import_module.cache_clear()

    def dispatched(q, k, v, ends, longest, scale, causal, window):
        values = {
            "query": q, "key": k, "value": v, "out": None, "grad_out": q, "logsumexp": q[..., 0],
            "cu_seq_q": ends, "cu_seq_k": ends, "max_q": longest, "max_k": longest,
            "scale": scale, "is_causal": causal, "seqused_k": None,
            "window_size_left": window[0], "window_size_right": window[1],
        }  # fmt: skip
        for run in (_fa4._fa4_run_forward, _fa4._fa4_run_backward):
            names = inspect.signature(run).parameters
            run(**{name: value for name, value in values.items() if name in names})
        return torch.zeros_like(q)

    def sdpa(q, k, v, *, is_causal, scale, **_):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return dispatched(q, k, v, None, None, scale, is_causal, (None, None)).transpose(1, 2)

    def varlen_attn(q, k, v, ends, _, longest, __, *, scale, window_size, **___):
        return dispatched(q, k, v, ends, longest, scale, False, window_size)

    monkeypatch.setattr(ops.F, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    monkeypatch.setattr(ops, "sdpa_is_flash_4", lambda: True)
    yield calls
    _fa4._fa4_import_module.cache_clear()


@pytest.mark.parametrize(("shape", "wide"), SHAPES)
@pytest.mark.parametrize(
    "release",
    [
        *RELEASES,
        ("flash_attn.flash_attn_interface", "flash-attn 2.7.0 and 2.8.3"),
        ("flash_attn.cute.interface", "flash-attn-4 4.0.0b36"),
    ],
    ids=str,
)
def test_calls_of_flash_attn_fit_signatures_of_release(release, shape, wide, monkeypatch, request):
    allowed = signatures(release)
    if "_flash_attn_fwd" in allowed:
        calls = request.getfixturevalue("version_4")
    else:
        calls = fake_package("flash_attn", VERSION_2, monkeypatch)
    monkeypatch.setattr(ops, "varlen_on_cpu", ops.varlen)
    q, k, v = heads(shape, wide, dtype=torch.bfloat16)
    packed = Packed(Documents.of(tokens_with_documents(), END).boundaries, 40)
    dispatched = "_flash_attn_fwd" in allowed
    masks = (None, packed) if VARLEN_TAKES_FLASH_4 or not dispatched else (None,)
    for mask in masks:
        attend(q, k, v, mask, Backend.flash)
    assert [name for name, *_ in calls] == list(allowed) * (len(masks) if dispatched else 1)
    for name, args, kwargs in calls:
        bound = allowed[name].bind(*args, **kwargs).arguments
        given = [bound[part] for part in ("q", "k", "v")]
        assert len({x.shape[-1] for x in given}) == 1, "one width of queries, keys and values"
        assert given[1].shape == given[2].shape
        assert given[0].shape[-2] % given[1].shape[-2] == 0
        assert bound["causal"] or (bound["window_size_left"], bound["window_size_right"]) == (
            None,
            0,
        )
