"""Decoding: the cache changes nothing, and sampling draws from the distribution it says."""

import math

import pytest
import torch

from diffllm import build_model, load_config
from diffllm.generate import generate, sample

VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
DRAWS = 40_000


@pytest.fixture(autouse=True)
def _one_thread():
    """Steps this small only wait for a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=VARIANTS)
def model(request):
    return tiny(request.param)


def tiny(variant="diff_v2"):
    cfg = load_config(
        [
            *("model=tiny", f"attention={variant}", "seq_len=32", "model.dim=32"),
            *("model.ffn_dim=32", "model.vocab_size=64", "model.init_std=0.3"),
        ]
    )
    return build_model(cfg.model)


def prompts(rows=3, length=5):
    return torch.randint(0, 64, (rows, length))


@torch.no_grad()
def greedily(model, tokens, count):
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


def test_greedy_equals_repeated_full_forward_passes(model):
    prompt = prompts()
    out = generate(model, prompt, 27, temperature=0)
    assert torch.equal(out, greedily(model, prompt, 27))
    assert out.shape == (3, 32)
    assert len(out[:, 5:].unique()) > 3  # not a constant


def test_a_prompt_of_one_token_and_no_new_tokens():
    model, prompt = tiny(), prompts(1, 1)
    assert torch.equal(generate(model, prompt, 0), prompt)
    assert torch.equal(generate(model, prompt, 1, temperature=0), greedily(model, prompt, 1))


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match=r"model\.seq_len is 32"):
        generate(tiny(), prompts(1, 30), 4)


def test_rows_are_independent(model):
    prompt = prompts(4)
    together = generate(model, prompt, 10, temperature=0)
    for row in range(4):
        alone = generate(model, prompt[row : row + 1], 10, temperature=0)
        assert torch.equal(together[row : row + 1], alone)


def test_the_prompt_is_left_as_it_was_and_comes_first():
    prompt = prompts()
    before = prompt.clone()
    out = generate(tiny(), prompt, 4)
    assert torch.equal(prompt, before)
    assert torch.equal(out[:, :5], prompt)


def test_the_seed_decides_and_nothing_else_does():
    model, prompt = tiny(), prompts()
    first = generate(model, prompt, 20, seed=3)
    torch.manual_seed(999)
    before = torch.get_rng_state()
    assert torch.equal(generate(model, prompt, 20, seed=3), first)
    assert torch.equal(torch.get_rng_state(), before)  # sampling does not disturb training
    assert not torch.equal(generate(model, prompt, 20, seed=4), first)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_from_vocab_size_on_are_never_drawn(temperature):
    model, prompt = tiny(), prompts(8)
    kept = generate(model, prompt, 20, temperature, vocab_size=10)[:, 5:]
    assert kept.max() == 9
    assert generate(model, prompt, 20, temperature)[:, 5:].max() > 9
    assert torch.equal(
        generate(model, prompt, 20, temperature, vocab_size=64),
        generate(model, prompt, 20, temperature),
    )


def test_no_graph_is_kept():
    assert not generate(tiny(), prompts(), 2).requires_grad
    assert torch.is_grad_enabled()


def test_the_top_token_alone_is_left_by_a_small_top_p_and_a_low_temperature():
    model, prompt = tiny(), prompts()
    greedy = generate(model, prompt, 20, temperature=0)
    assert torch.equal(generate(model, prompt, 20, top_p=1e-6, seed=5), greedy)
    assert torch.equal(generate(model, prompt, 20, temperature=1e-5, seed=5), greedy)


def test_generation_draws_the_first_token_from_the_models_distribution():
    model = tiny()
    prompt = prompts(1)
    with torch.no_grad():
        probs = torch.softmax(model(prompt)[0, -1], -1)
    drawn = generate(model, prompt.expand(8000, -1), 1)[:, -1]
    assert_drawn_from(probs, drawn)


# Stopping


def test_rows_are_padded_with_the_stop_token_after_they_have_it():
    model, prompt = tiny(), prompts(6)
    free = generate(model, prompt, 20, temperature=0)
    stop = int(free[0, 5 + 6])  # what row 0 says as its seventh token, or earlier
    out = generate(model, prompt, 20, temperature=0, stop_token=stop)
    for row in range(6):
        said = free[row, 5:].tolist()
        end = said.index(stop) + 1 if stop in said else 20
        expected = (said[:end] + [stop] * 20)[: out.shape[1] - 5]
        assert out[row, 5:].tolist() == expected
    assert any(stop not in free[row, 5:] for row in range(6))


def test_generation_ends_once_every_row_has_stopped():
    model, prompt = tiny(), prompts(1)
    said = generate(model, prompt, 20, temperature=0)[0, 5:].tolist()
    stop = said[4]
    out = generate(model, prompt, 20, temperature=0, stop_token=stop)
    assert out[0, 5:].tolist() == said[: said.index(stop) + 1]


def test_a_stop_token_in_the_prompt_does_not_stop():
    model, prompt = tiny(), prompts(2)
    free = generate(model, prompt, 8, temperature=0)
    unsaid = next(t for t in range(64) if t not in free[:, 5:])
    prompt[:, 0] = unsaid
    free = generate(model, prompt, 8, temperature=0)
    assert unsaid not in free[:, 5:]
    assert torch.equal(generate(model, prompt, 8, temperature=0, stop_token=unsaid), free)


# Sampling


def draws(logits, temperature=1.0, top_p=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return sample(logits.expand(DRAWS, -1), temperature, top_p, generator)


def assert_drawn_from(probs, drawn):
    """Every frequency within 5 standard deviations of its expectation; never one of weight 0."""
    counts = torch.bincount(drawn, minlength=len(probs))
    assert len(counts) == len(probs)
    total = len(drawn)
    for count, p in zip(counts.tolist(), probs.tolist(), strict=True):
        if p == 0:
            assert count == 0
        else:
            assert abs(count - total * p) <= 5 * math.sqrt(total * p * (1 - p)) + 1


LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.5, -1.0, -30.0])


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    weights = [math.exp(x / temperature) for x in LOGITS.tolist()]
    probs = torch.tensor([w / sum(weights) for w in weights])
    assert_drawn_from(probs, draws(LOGITS, temperature))


def test_temperature_zero_takes_the_most_likely():
    assert (draws(LOGITS, 0.0) == 1).all()


PROBS = [0.15, 0.4, 0.05, 0.3, 0.1]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (0.01, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [1, 3, 0]),
        (0.86, [1, 3, 0, 4]),
        (0.94, [1, 3, 0, 4]),
        (0.96, [0, 1, 2, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    expected = torch.tensor([p if i in kept else 0.0 for i, p in enumerate(PROBS)])
    drawn = draws(torch.tensor(PROBS).log() + 3.0, top_p=top_p)
    assert_drawn_from(expected / expected.sum(), drawn)


def test_a_sum_that_just_reaches_top_p_is_enough():
    assert set(draws(torch.tensor([0.5, 0.25, 0.25]).log(), top_p=0.5).tolist()) == {0}


def test_top_p_is_taken_after_the_temperature():
    # at temperature 2 the weights are sqrt: .387 .632 .224 .548 .316, shares .18 .30 .11 .26 .15
    drawn = draws(torch.tensor(PROBS).log(), temperature=2.0, top_p=0.41)
    weights = torch.tensor([math.sqrt(p) if i in (1, 3) else 0.0 for i, p in enumerate(PROBS)])
    assert_drawn_from(weights / weights.sum(), drawn)
    drawn = draws(torch.tensor(PROBS).log(), temperature=2.0, top_p=0.6)
    assert set(drawn.tolist()) == {0, 1, 3}


def test_top_p_is_taken_in_every_row_apart():
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([sample(logits, 1.0, 0.9, generator) for _ in range(200)])
    assert set(rows[:, 0].tolist()) == {0}
    assert set(rows[:, 1].tolist()) == {1}
    assert set(rows[:, 2].tolist()) == {0, 1, 2}


def test_sampling_depends_on_its_generator_only():
    assert torch.equal(draws(LOGITS, seed=1), draws(LOGITS, seed=1))
    assert not torch.equal(draws(LOGITS, seed=1), draws(LOGITS, seed=2))
