"""Generation: independence of batch and cache, and the distribution of samples."""

import math
from functools import cache

import pytest
import torch
from stand_ins import MAIN
from tiers import variant_cases
from variants import VARIANTS, small_model

from diffllm.model.generate import draw_tokens, generate

SEQ_LEN = 32
DRAWS = 40_000


shared_model = cache(small_model)
"""Float64, so that rounding in a batch cannot change the most likely token."""


@pytest.fixture(params=MAIN)
def model(request):
    return shared_model(request.param)


def random_prompts(rows=3, length=5):
    return torch.randint(0, 64, (rows, length)).tolist()


@torch.no_grad()
def greedily(model, prompt, count):
    tokens = torch.tensor([prompt])
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens[0].tolist()


def said(prompts, texts):
    """Return the generated tokens of all texts in one list."""
    pairs = zip(prompts, texts, strict=True)
    return [token for prompt, text in pairs for token in text[len(prompt) :]]


def test_greedy_generation_equals_repeated_full_forward_passes(model):
    prompt = random_prompts()
    out = generate(model, prompt, 27, temperature=0)
    assert out == [greedily(model, row, 27) for row in prompt]
    assert [len(text) for text in out] == [SEQ_LEN] * 3
    assert len(set(said(prompt, out))) > 3  # the continuation must not be constant


def test_generate_accepts_empty_prompt_list_and_zero_new_tokens():
    model, prompt = shared_model("diff_v2"), random_prompts(1, 1)
    assert generate(model, prompt, 0) == prompt
    assert generate(model, prompt, 1, temperature=0) == [greedily(model, prompt[0], 1)]
    assert generate(model, [], 5) == []


@pytest.mark.parametrize("length", [0, SEQ_LEN + 1])
def test_generate_raises_value_error_if_prompt_is_empty_or_too_long(length):
    unreadable = [1] * length
    with pytest.raises(ValueError, match=rf"prompt of {length} tokens: must have 1 to {SEQ_LEN}"):
        generate(shared_model("diff_v2"), [[1, 2], unreadable], 4)


def test_generated_tokens_do_not_depend_on_global_random_generator():
    model, prompt = shared_model("diff_v2"), random_prompts()
    first = generate(model, prompt, 20, seed=3)
    torch.manual_seed(999)
    before = torch.get_rng_state()
    assert generate(model, prompt, 20, seed=3) == first
    assert torch.equal(torch.get_rng_state(), before)  # sampling must not use the global generator
    assert generate(model, prompt, 20, seed=4) != first


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_draws_only_tokens_below_vocab_size(temperature):
    model, prompt = shared_model("diff_v2"), random_prompts(8)
    free = generate(model, prompt, 20, temperature)
    kept = said(prompt, generate(model, prompt, 20, temperature, vocab_size=10))
    assert max(kept) == 9
    assert max(said(prompt, free)) > 9
    assert generate(model, prompt, 20, temperature, vocab_size=64) == free


def unbatched_texts(model, prompts, *args, **kwargs):
    return [generate(model, [prompt], *args, **kwargs)[0] for prompt in prompts]


@pytest.mark.parametrize(("variant", "temperature"), variant_cases(VARIANTS, [0.0, 0.9]))
def test_batched_prompts_get_same_continuations_as_single_prompts(variant, temperature):
    """Some prompts have room for only two or zero tokens, and some continuations stop early."""
    model, count = shared_model(variant), 12
    lengths = [3, SEQ_LEN - 2, 1, 14, SEQ_LEN, 7, 3]
    texts = [random_prompts(1, length)[0] for length in lengths]
    settings = {"temperature": temperature, "top_p": 0.9, "seed": 11}
    free = unbatched_texts(model, texts, count, **settings)
    assert [len(text) for text in free] == [min(n + count, SEQ_LEN) for n in lengths]
    assert generate(model, texts, count, **settings) == free
    stop = free[3][14 + 4]
    stopped = unbatched_texts(model, texts, count, stop_token=stop, **settings)
    assert len(stopped[3]) <= 14 + 5
    assert len(stopped[3]) < len(free[3])
    assert generate(model, texts, count, stop_token=stop, **settings) == stopped


def test_generate_uses_different_seeds_for_identical_prompts_in_batch(model):
    one, other = random_prompts(2)
    batch = [one, other, one, one, other]
    seeds = [5, 5, 6, 7, 6]
    pairs = zip(batch, seeds, strict=True)
    expected = [generate(model, [row], 8, seed=seed)[0] for row, seed in pairs]
    assert generate(model, batch, 8, seed=5) == expected
    assert len({tuple(text) for text in expected}) == 5


def test_stop_token_in_prompt_does_not_stop_generation():
    model, prompt = shared_model("diff_v2"), random_prompts(2)
    free = generate(model, prompt, 8, temperature=0)
    unsaid = next(t for t in range(64) if t not in said(prompt, free))
    for row in prompt:
        row[0] = unsaid
    free = generate(model, prompt, 8, temperature=0)
    assert unsaid not in said(prompt, free)
    assert generate(model, prompt, 8, temperature=0, stop_token=unsaid) == free


def draws(logits, temperature=1.0, top_p=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return draw_tokens(logits.expand(DRAWS, -1), temperature, top_p, generator)


def assert_drawn_from(probs, drawn):
    """Check that frequencies are within 5 standard deviations of `probs`, and 0 for 0."""
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
def test_sampling_divides_logits_by_temperature(temperature):
    weights = [math.exp(x / temperature) for x in LOGITS.tolist()]
    probs = torch.tensor([w / sum(weights) for w in weights])
    assert_drawn_from(probs, draws(LOGITS, temperature))


PROBS = [0.15, 0.4, 0.05, 0.3, 0.1]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [1]), (0.41, [1, 3]), (0.71, [1, 3, 0]), (0.86, [1, 3, 0, 4]), (0.96, [0, 1, 2, 3, 4])],
)
def test_top_p_keeps_fewest_tokens_that_reach_probability_top_p(top_p, kept):
    expected = torch.tensor([p if i in kept else 0.0 for i, p in enumerate(PROBS)])
    drawn = draws(torch.tensor(PROBS).log() + 3.0, top_p=top_p)
    assert_drawn_from(expected / expected.sum(), drawn)


def test_sampling_applies_top_p_after_temperature():
    # At temperature 2, weights are sqrt: .387 .632 .224 .548 .316, shares .18 .30 .11 .26 .15.
    drawn = draws(torch.tensor(PROBS).log(), temperature=2.0, top_p=0.41)
    weights = torch.tensor([math.sqrt(p) if i in (1, 3) else 0.0 for i, p in enumerate(PROBS)])
    assert_drawn_from(weights / weights.sum(), drawn)
    drawn = draws(torch.tensor(PROBS).log(), temperature=2.0, top_p=0.6)
    assert set(drawn.tolist()) == {0, 1, 3}


def test_sampling_applies_top_p_to_every_row_separately():
    logits = torch.tensor([[5.0, 0.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([draw_tokens(logits, 1.0, 0.9, generator) for _ in range(200)])
    assert set(rows[:, 0].tolist()) == {0}
    assert set(rows[:, 1].tolist()) == {1}
    assert set(rows[:, 2].tolist()) == {0, 1, 2}
