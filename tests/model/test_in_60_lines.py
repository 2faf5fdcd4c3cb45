"""The numpy functions of docs/in_60_lines.md against the model's attention, in float64."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from diffllm import load_config
from diffllm.model import build_model

PAGE = (Path(__file__).parents[2] / "docs" / "in_60_lines.md").read_text(encoding="utf-8")
CODE, PRINTED = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE, re.DOTALL)[0]
BEST_LAMBDA = re.findall(r"```python\n(def best_lambda.*?)```", PAGE, re.DOTALL)[0]
T, D, H, d = 5, 16, 4, 4


def page_standard(page, attention, x, head):
    return page["standard"](x, *(part(attention, n, head) for n in ("wq", "wk", "wv")))


def page_diff_v1(page, attention, x, pair):
    maps = [part(attention, n, 2 * pair + i) for i in (0, 1) for n in ("wq", "wk")]
    lam, lambda_init = attention.lambda_value().item(), attention.lambda_init.item()
    return page["diff_v1"](x, *maps, part(attention, "wv", pair, 2 * d), lam, lambda_init)


def page_diff_v2(page, attention, x, head):
    queries = [part(attention, "wq", 2 * head + i) for i in (0, 1)]
    shared = [part(attention, n, head) for n in ("wk", "wv")]
    return page["diff_v2"](x, *queries, *shared, part(attention, "w_lambda", head, 1))


def part(attention, name, head, width=d):
    """Return the columns of a projection that belong to a head, (D, width)."""
    weight = getattr(attention, name).weight.detach().numpy()
    return weight[head * width : (head + 1) * width].T


@pytest.mark.parametrize(
    ("variant", "reference", "heads"),
    [
        ("standard", page_standard, H),
        ("diff_v1", page_diff_v1, H // 2),
        ("diff_v2", page_diff_v2, H),
    ],
)
def test_numpy_code_on_documentation_page_matches_model_attention(variant, reference, heads):
    page = {}
    exec(CODE, page)
    shape = [f"model.dim={D}", f"model.n_heads={H}", f"model.n_kv_heads={H}", f"seq_len={T}"]
    words = [*shape, f"model.head_dim={d}", f"attention={variant}"]
    attention = build_model(load_config(["model=tiny", *words])).layers[1].attention.double()
    # Large inputs make maps that are far from uniform.
    x = np.random.default_rng(0).normal(0, 40, (T, D))
    expected = [reference(page, attention, x, head) for head in range(heads)]
    unrotated = torch.ones(T, 1, d).double(), torch.zeros(T, 1, d).double()
    with torch.no_grad():
        attention.wo.weight.copy_(torch.eye(D))
        found = attention(torch.from_numpy(x)[None], unrotated)[0].numpy()
    np.testing.assert_allclose(found, np.concatenate(expected, -1), rtol=1e-6, atol=1e-9)
    assert np.abs(np.diff(found, axis=0)).max() > 0.1


def test_documentation_page_shows_actual_output_of_its_code(capsys):
    exec(CODE, {})
    assert capsys.readouterr().out == PRINTED
    assert len(CODE.splitlines()) <= 60


def snr(p, q, s, lam):
    weights = p - lam * q
    return weights[s] / np.linalg.norm(np.delete(weights, s))


@pytest.mark.parametrize("seed", range(5))
def test_closed_form_of_best_lambda_equals_grid_search(seed):
    page = {}
    exec(CODE + BEST_LAMBDA, page)
    generator = np.random.default_rng(seed)
    common, other = generator.normal(size=(2, 40))
    logits1, logits2 = common, 0.8 * common + 0.6 * other
    logits1[3], logits2[3] = 5.0, 0.0
    p, q = (np.exp(logits) / np.exp(logits).sum() for logits in (logits1, logits2))
    best = page["best_lambda"](p, q, 3)
    assert 0.05 < best < 0.95  # not at an end of the grid, which could match by chance
    grid = np.linspace(0, 1, 20_001)
    assert grid[np.argmax([snr(p, q, 3, lam) for lam in grid])] == pytest.approx(best, abs=1e-4)


def test_documentation_page_states_best_lambda_and_its_snr():
    page = {}
    exec(CODE + BEST_LAMBDA, page)
    p, q = page["map1"][-1], page["map2"][-1]
    best = page["best_lambda"](p, q, 0)
    values = [f"{value:.1f}" for value in (snr(p, q, 0, best), snr(p, q, 0, 0.8), snr(p, q, 0, 0))]
    sentence = 'the SNR of "Paris" is {} there, {} at lambda 0.8, and {} in standard attention'
    assert f'For the row of "city" it is {best:.2f}: {sentence.format(*values)}' in PAGE
