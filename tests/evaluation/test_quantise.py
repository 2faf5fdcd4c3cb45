"""Simulated quantisation compared with rounding of single values, and the evaluation `quantise`."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from runs.written import data_words, made, subject_of
from torch import Tensor, nn

from diffllm import build_model, load_config
from diffllm.data.preparation.prepare import prepare
from diffllm.evaluation.evaluation import EvaluationOptions, Subject
from diffllm.evaluation.quantise import QUANTISE_ARMS, Rounding, quantised, rounded
from diffllm.evaluation.suite import EVALUATIONS
from diffllm.model import Transformer
from diffllm.model.ffn.experts import Experts

QUANTISE = EVALUATIONS["quantise"]
PLAIN = {"attention_norm", "ffn_norm", "tok_embeddings", "output", "norm", "w_lambda", "router"}


def of_group(values: list[np.float32], bits: int) -> list[np.float32]:
    """Round values that share a scale, one by one."""
    most = 2 ** (bits - 1) - 1
    scale = np.float32(max(abs(value) for value in values)) / np.float32(most)
    found = []
    for value in values:
        if scale == 0:
            found.append(np.float32(0))
            continue
        number = float(value / scale)
        low = int(np.floor(number))
        above = number - low
        level = low + 1 if above > 0.5 or (above == 0.5 and low % 2 == 1) else low
        found.append(np.float32(max(-most, min(most, level))) * scale)
    return found


def rounded_by_reference(x: Tensor, bits: int, by_row: bool, groups: int = 1) -> Tensor:
    """Round x, with rows along the last dimension; `groups` equal parts have separate scales."""
    flat = x.detach().numpy().reshape(-1, x.shape[-1] if by_row else x.numel() // groups)
    rows = [of_group(list(row), bits) for row in flat]
    return torch.from_numpy(np.array(rows, np.float32).reshape(x.shape))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two float32 tensors are equal, including the signs of zeros."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("by_row", [True, False], ids=["rows", "tensor"])
@pytest.mark.parametrize("bits", [8, 6, 4])
def test_quantised_tensor_matches_reference(bits, by_row):
    x = torch.randn(7, 40) * 10.0 ** torch.arange(-3, 4).unsqueeze(1)
    x[0] = 0
    x[1, ::3] = 0
    x[2, 5] = -50  # The largest magnitude belongs to a negative value.
    most = 2 ** (bits - 1) - 1
    x[3, :6] = torch.tensor([most, 0.5, -0.5, 1.5, -1.5, most - 0.5])  # a scale of 1, and ties
    x[3, 6:] = 0.25
    x[4] = 1e-45  # The scale is 0 in float32.
    dims: Any = -1 if by_row else (-2, -1)
    found = rounded(x, bits, dims)
    assert same_bits(found, rounded_by_reference(x, bits, by_row))
    if by_row:
        assert found[3, :6].tolist() == [most, 0, 0, 2, -2, most - 1]
        assert not found[0].any()
        assert found[2, 5] == -50
        assert max(len(set(row.tolist())) for row in found) <= 2**bits - 1
    assert not found.isnan().any()


def test_quantisation_uses_separate_scale_for_each_expert():
    x = torch.randn(3, 5, 16) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    assert same_bits(rounded(x, 4, (-2, -1)), rounded_by_reference(x, 4, by_row=False, groups=3))
    assert same_bits(rounded(x, 4, -1), rounded_by_reference(x, 4, by_row=True))


def built(*words: str) -> Transformer:
    sizes = ("model=tiny", "model.init_std=0.2", "model.vocab_size=64", "data.vocab_size=64")
    return build_model(load_config([*sizes, "seq_len=24", *words]).model).eval()


MOE = ("model.moe.n_experts=4", "model.moe.expert_dim=16", "model.moe.n_shared=1")
BOTH = Rounding(4, by_row=True)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "words",
    [("attention=diff_v2",), ("attention=gated",), ("attention=diff_v1", *MOE)],
    ids=["diff_v2", "gated", "diff_v1 with experts"],
)
@pytest.mark.parametrize("by_row", [True, False], ids=["channel", "tensor"])
def test_temporary_quantisation_rounds_only_block_weight_matrices(words, by_row):
    model = built(*words)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    memory = {name: value.data_ptr() for name, value in model.state_dict().items()}
    modules = [(name, id(vars(module).get("activation"))) for name, module in model.named_modules()]
    with quantised(model, Rounding(4, by_row), BOTH):
        for name, value in model.state_dict().items():
            matrix = value.ndim > 1 and not PLAIN & set(name.split("."))
            groups = len(value) if value.ndim == 3 else 1
            expected = before[name]
            if matrix:
                expected = rounded_by_reference(expected, 4, by_row, groups)
            assert same_bits(value, expected), name
    with pytest.raises(ValueError, match="positions"), quantised(model, BOTH, BOTH):
        model(torch.zeros(1, 25, dtype=torch.int64))  # longer than seq_len
    for name, value in model.state_dict().items():
        assert same_bits(value, before[name]), name
        assert value.data_ptr() == memory[name]
    assert modules == [(name, id(vars(m).get("activation"))) for name, m in model.named_modules()]
    assert not any(module._forward_pre_hooks for module in model.modules())


class Rounded(nn.Module):
    """A linear layer that rounds its input value by value."""

    def __init__(self, layer: nn.Linear, by_row: bool):
        super().__init__()
        self.layer, self.by_row = layer, by_row

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(rounded_by_reference(x, 4, self.by_row))


@torch.no_grad()
@pytest.mark.parametrize("by_row", [True, False], ids=["token", "tensor"])
def test_activation_quantisation_rounds_inputs_of_block_matrices(by_row):
    model = built("attention=diff_v2")
    other = copy.deepcopy(model)
    for block in other.layers:
        for part, names in ((block.attention, "wq wk wv wo"), (block.ffn, "w1 w2 w3")):
            for name in names.split():
                setattr(part, name, Rounded(getattr(part, name), by_row))
    tokens = torch.randint(0, 64, (1, 24))
    plain = model(tokens)
    with quantised(model, activations=Rounding(4, by_row)):
        found = model(tokens)
    assert torch.equal(found, other(tokens))
    assert not torch.allclose(found, plain, atol=1e-3)
    assert torch.equal(model(tokens), plain)


@torch.no_grad()
def test_activation_quantisation_rounds_expert_inputs_per_token():
    model = built("attention=standard", *MOE)
    experts: Experts = model.layers[0].ffn.experts
    x, weights, counts = torch.randn(6, model.cfg.dim), torch.rand(6), torch.tensor([2, 0, 3, 1])
    with quantised(model, activations=BOTH):
        found = experts(x, weights, counts)
    owner = [0, 0, 2, 2, 2, 3]
    near = rounded_by_reference(x, 4, by_row=True)
    for row, weight, expert, own in zip(near, weights, owner, found, strict=True):
        gate = experts.w1[expert] @ row
        up = experts.w3[expert] @ row
        hidden = gate / (1 + torch.exp(-gate)) * up * weight
        expected = experts.w2[expert] @ rounded_by_reference(hidden[None], 4, True)[0]
        assert torch.allclose(own, expected, atol=1e-5)


@pytest.fixture(scope="module")
def quantised_subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    directory = tmp_path_factory.mktemp("quantise")
    made(directory / "run", *data_words(directory), "seq_len=128", "attention=diff_v2")
    return subject_of(directory / "run")


@pytest.mark.fast_cases(1)
@torch.no_grad()
def test_losses_of_quantise_evaluation_match_reference(quantised_subject):
    before = {name: value.clone() for name, value in quantised_subject.model.state_dict().items()}
    settings = QUANTISE.settings(quantised_subject, EvaluationOptions(limit=9))
    assert settings["sequences"] == 9
    lines = QUANTISE.lines(quantised_subject, settings)
    for name, value in quantised_subject.model.state_dict().items():
        assert same_bits(value, before[name]), name
    stream = prepare(quantised_subject.cfg.data).split("heldout")
    tokens = stream.tokens(0, 9 * 128 + 1).astype("int64")
    losses = {}
    for arm, bits, by_row in (
        ("unquantised", 0, False),
        ("weights 6 per channel", 6, True),
        ("weights 4 per tensor", 4, False),
    ):
        exact = copy.deepcopy(quantised_subject.model)
        for name, param in exact.named_parameters():
            if bits and param.ndim == 2 and not PLAIN & set(name.split(".")):
                param.copy_(rounded_by_reference(param, bits, by_row))
        exact.double()
        own = [line for line in lines if line["arm"] == arm]
        assert [line["sequence"] for line in own] == list(range(9))
        for i, line in enumerate(own):
            part = torch.tensor(tokens[i * 128 : (i + 1) * 128 + 1])
            logs = exact(part[None, :-1])[0].log_softmax(-1)
            nats = -logs.gather(1, part[1:, None]).sum().item()
            assert line["tokens"] == 128
            assert line["nats"] == pytest.approx(nats, rel=1e-5)
            losses.setdefault(arm, []).append(nats)
    scores = {score.of: score for score in QUANTISE.scores(settings, lines)}
    assert list(scores) == [arm.name for arm in QUANTISE_ARMS[1:]]
    assert len(scores) == 15
    plain = sum(losses["unquantised"]) / (9 * 128)
    for arm in ("weights 6 per channel", "weights 4 per tensor"):
        score = scores[arm]
        change = sum(losses[arm]) / (9 * 128) - plain
        assert score.value == pytest.approx(change, abs=1e-4)
        assert score.interval is not None
        assert score.interval[0] <= score.value <= score.interval[1]
        assert score.examples == 9
        assert score.more["loss"] == pytest.approx(plain, rel=1e-5)
    assert scores["weights 4 per channel"].value != scores["both 4 per channel and token"].value
