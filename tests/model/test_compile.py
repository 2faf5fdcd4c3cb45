"""Every variant's block is one graph, which computes what the block does."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from variants import VARIANTS, small_config

from diffllm import build_model
from diffllm.model.documents import Documents

END = 0
CASES = [(variant, ()) for variant in VARIANTS]
CASES += [("diff_v1", ("model.attention.values=split",)), ("diff_v2", ("model.qk_norm=true",))]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def forward_and_backward(block, run, x, *arguments):
    """Output, statistics and every gradient."""
    x = x.clone().requires_grad_()
    out, stats, _ = run(x, *arguments)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return out, stats, torch.autograd.grad((out * weights).sum(), [x, *block.parameters()])


@pytest.mark.parametrize(("variant", "extra"), CASES)
def test_a_block_compiles_without_a_graph_break_and_computes_the_same(variant, extra):
    """With statistics and without, with documents masked and without."""
    model = build_model(small_config(variant, extra=extra).model)
    block, tokens = model.layers[1], torch.randint(0, 5, (2, 12))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 12, 24)
    for documents, diagnose in ((None, False), (Documents.of(tokens, END), True)):
        rope, mask = model.whole_sequences(tokens, documents, x.dtype)
        arguments = rope, mask, None, diagnose
        out, stats, grads = forward_and_backward(block, block, x, *arguments)
        found, found_stats, found_grads = forward_and_backward(block, compiled, x, *arguments)
        torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-5)
        assert bool(stats) == diagnose
        assert found_stats.keys() == stats.keys()
        for name, value in stats.items():
            torch.testing.assert_close(found_stats[name], value, rtol=1e-4, atol=1e-5)
        for mine, other in zip(found_grads, grads, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["standard", "gated", "diff_v1", "diff_v2", "standard_sink"])
def test_all_layers_share_one_graph(variant):
    """Also where layers have constants of their own; else compiling would take longer by layer."""
    model = build_model(small_config(variant, extra=("model.n_layers=4",)).model)
    counter = CompileCounterWithBackend("eager")
    rope, mask = model.whole_sequences(torch.zeros(2, 12, dtype=torch.int64), None, torch.float32)
    for layer in model.layers:
        run = torch.compile(layer.forward, fullgraph=True, backend=counter)
        run(torch.randn(2, 12, 24), rope, mask, None, True)
    assert counter.frame_count == 1
