"""Memory of compiled functions against counts by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode

from diffllm.config import load_config
from diffllm.model.rope import RotaryEmbedding
from diffllm.model.transformer import Block
from diffllm.plan.compiled import compiling
from diffllm.plan.memory import Observer

N, D, H = 512, 256, 1024
"""Rows, width and inner width; values have two bytes."""


def gated_product(x, w1, w3, w2):
    return x + (F.silu(x @ w1) * (x @ w3)) @ w2


def held(function, *shapes):
    """Compile a function without data, and measure its memory in bytes, without the inputs.

    Returns the peak of the forward pass, the bytes kept after it (result included), the peak of the
    backward pass (gradient of the result included), and the shapes of result and gradients.
    """
    observer = Observer()
    memory = observer.memory
    with compiling(), FakeTensorMode(), memory.patched(), observer:
        compiled = torch.compile(function, fullgraph=True)
        inputs = [torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        compiled(*inputs)  # compiles the graphs
        there, start = sum(block.size for block in memory.live.values()), memory.now()
        out = compiled(*inputs)
        forward = memory.peak(start).total - there
        kept = sum(block.size for block in memory.live.values()) - there
        grad, start = torch.empty_like(out), memory.now()
        out.backward(grad)
        backward = memory.peak(start).total - there
    return forward, kept, backward, (out.shape, [i.grad.shape for i in inputs])


def test_simulated_compiler_does_not_save_silu_output_for_backward():
    shapes = [(N, D), (D, H), (D, H), (H, D)]
    forward, kept, backward, found = held(gated_product, *shapes)
    assert found == ((N, D), [torch.Size(s) for s in shapes])
    product, out, weight = 2 * N * H, 2 * N * D, 2 * D * H
    assert kept == 3 * product + out  # x @ w1, x @ w3, silu(x @ w1) * (x @ w3); x is an input
    assert forward == kept  # the sum with x reuses the memory of the last product
    # The peak is after the gradient of x through w3. It contains the first two products, memory for
    # both of their gradients, the gradients of w2 and w3, the result, the result's gradient, and
    # the gradient of x.
    assert backward == 4 * product + 2 * weight + 3 * out


def test_simulated_compiler_fuses_chain_of_elementwise_operations():
    def chain(x, w):
        return (((x.float() * 2).sin() + 1).exp().bfloat16()) @ w

    forward, kept, _, _ = held(chain, (N, D), (D, D))
    assert forward == kept == 2 * N * D + 2 * N * D  # input and result of the product


def kept_by_a_block(cfg, x, rope):
    """Return the bytes that a compiled block keeps for backward, without parameters."""
    block = Block(cfg, 0)
    for module in block.modules():  # Module.to fails for tensors without data
        for name, param in list(module.named_parameters(recurse=False)):
            module._parameters[name] = torch.nn.Parameter(param.detach().bfloat16())
    there = {p.untyped_storage()._cdata for p in block.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = torch.compile(block.forward, fullgraph=True)(x, rope)
    assert result
    return sum(size for key, size in kept.items() if key not in there)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [["model=small_125m", "attention=diff_v2"], ["model=moe_tiny", "attention=standard"]],
)
def test_simulated_compiler_saves_as_many_bytes_as_real_compiler(overrides):
    cfg = load_config([*overrides, "seq_len=256", "data.vocab_size=512"]).model
    x = torch.randn(1, 256, cfg.dim, dtype=torch.bfloat16, requires_grad=True)
    rotary = RotaryEmbedding(cfg.head_dim, cfg.seq_len, cfg.rope)
    rotary.reset_parameters()
    rope = rotary(0, 256)
    real = kept_by_a_block(cfg, x, rope)
    with compiling(), FakeTensorMode() as mode:
        cos, sin = map(mode.from_tensor, rope)
        planned = kept_by_a_block(cfg, mode.from_tensor(x), (cos, sin))
    assert planned == pytest.approx(real, rel=5e-3)  # the kept scalars and rows may differ
