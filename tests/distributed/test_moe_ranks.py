"""A mixture of experts on one and several ranks: one training, one routing, a float32 router."""

import pytest
import torch
from runs.ranks import run_ranks
from test_training_ranks import BASE, STEPS, assert_same_training, micro_batches
from tiers import slow_but

from diffllm.config import load_config
from diffllm.distributed.gradients import local
from diffllm.training.build import build
from diffllm.training.step import Due, train_step

MIXTURE = [
    *BASE,
    "attention=diff_v2",
    "model.moe.n_experts=6",
    "model.moe.top_k=2",
    "model.moe.expert_dim=32",
    "model.moe.n_shared=1",
    "model.moe.score=sigmoid",
    "model.moe.bias_update_rate=0.01",
    "model.moe.balance_loss=0.01",
    "model.moe.router_z_loss=0.001",
]


def train(overrides):
    """As `train_losses`, with the losses and the state of routers."""
    cfg = load_config([*MIXTURE, *overrides])
    t = build(cfg, torch.device("cpu"))
    losses, norms, others = [], [], []
    for step in range(STEPS):
        last = step == STEPS - 1
        out = train_step(t, micro_batches(cfg, step), step, Due(last, False, last))
        losses.append(out.nll.item())
        norms.append(out.grad_norms.total.item())
        others.append([value.item() for value in out.losses.values()])
    stats = {name: value.tolist() for name, value in out.stats.items()}
    full = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().numpy()
        for name, p in t.params.items()
    }
    state = {name: value.tolist() for name, value in t.model.router_state().items()}
    return (losses, norms, full, stats), others, state


@pytest.mark.parametrize("over", slow_but(["global_batch"], ["sequence", "global_batch"]))
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ["micro_batch_size=2", "activation_checkpointing=true"]),
        pytest.param(4, ["parallel.replicate=2", "micro_batch_size=1"], marks=pytest.mark.slow),
    ],
)
def test_ranks_and_meshes_train_alike(ranks, layout, over, tmp_path):
    """Routers too: they learn from the counts of all ranks, once a step."""
    words = [f"model.moe.balance_over={over}"]
    ((one, losses, state),) = run_ranks(train, 1, tmp_path, words)
    several = run_ranks(train, ranks, tmp_path, [*words, *layout])
    assert one[0][-1] < one[0][0] - 0.3, "nothing was learnt"
    for other, other_losses, other_state in several:
        assert other_state == several[0][2], "ranks' routers differ"
        assert state.keys() == other_state.keys()
        for name, values in state.items():
            assert any(values), name
            torch.testing.assert_close(torch.tensor(values), torch.tensor(other_state[name]))
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(other_losses), rtol=1e-4, atol=1e-6
        )
        assert_same_training(one, other)


def logits_under_bf16():
    """(computed in a bf16 forward pass, by the float32 formula) of each layer's router."""
    cfg = load_config([*MIXTURE, "precision=bf16", "optim.lr=1e-2"])
    t = build(cfg, torch.device("cpu"))
    for step in range(3):
        train_step(t, micro_batches(cfg, step), step)
    seen = []

    def see(module, args, out):
        assert args[0].dtype == torch.bfloat16
        seen.append((args[0].float(), out.logits))

    for layer in t.model.layers:
        layer.ffn.router.register_forward_hook(see)
    t.model(*next(iter(micro_batches(cfg, 0))))
    weights = [local(t.params[f"layers.{i}.ffn.router.weight"]) for i in range(len(seen))]
    assert {weight.dtype for weight in weights} == {torch.float32}
    pairs = zip(seen, weights, strict=True)
    return [
        (logits.tolist(), torch.nn.functional.linear(x, weight).tolist())
        for (x, logits), weight in pairs
    ]


def test_the_router_is_float32_to_the_bit_under_bf16(tmp_path):
    for layers in run_ranks(logits_under_bf16, 2, tmp_path):
        assert len(layers) == 2
        for found, expected in layers:
            assert found == expected
