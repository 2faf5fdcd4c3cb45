"""Small models in which all weights matter, and questions for them."""

import torch

from diffllm import build_model, load_config
from diffllm.evaluation.scoring import Question
from diffllm.model import Transformer


def tiny_model(*overrides: str) -> Transformer:
    """Build a model of 64 tokens with large initial weights."""
    words = ("model=tiny", "model.init_std=0.2", "model.vocab_size=64", "data.vocab_size=64")
    return build_model(load_config([*words, *overrides]).model)


def float64_model(*overrides: str) -> Transformer:
    """Build a narrow float64 model without zeros and ones, which can hide a wrong formula."""
    shape = ("seq_len=16", "model.dim=24", "model.ffn_dim=32", "model.init_std=0.4")
    heads = ("model.n_heads=4", "model.n_kv_heads=2", "model.head_dim=8")
    model = tiny_model(*shape, *heads, *overrides).double()
    model.reset_parameters()  # computes constants in float64
    add_noise_to_vectors(model)
    return model


@torch.no_grad()
def add_noise_to_vectors(module: torch.nn.Module) -> None:
    """Add noise to all parameters with one dimension."""
    for param in module.parameters():
        if param.ndim == 1:
            param.add_(0.3 * torch.randn_like(param))


def random_questions(
    sizes: list[tuple[int, tuple[int, ...]]], vocab_size: int = 64
) -> list[Question]:
    """Return questions of random tokens.

    Args:
        sizes: length of each context, and lengths of its continuations.
    """
    rng = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(0, vocab_size, (length,), generator=rng).tolist()

    return [Question(ids(length), [ids(n) for n in lengths]) for length, lengths in sizes]
