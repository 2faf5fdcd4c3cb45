"""Convert a decoder from softmax attention to DIFF V2, or from DIFF V2 to softmax attention.

The converted model computes the same outputs. In DIFF V2, two query heads form a pair. The output
of a pair is the output of the first head minus lambda times the output of the second head.

To DIFF V2: repeat each query head to form a pair, set lambda to sigmoid(0) = 1/2, and double the
output projection; the result is exact in floating point. To softmax attention: use both heads of a
pair as independent heads, and multiply the output projection of the second head by -lambda. The
conversion to softmax attention requires a lambda that does not depend on the input.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from diffllm.checkpoint.hf.layout import Mapped, query_heads, same
from diffllm.core.errors import ConfigError
from diffllm.model import without_storage
from diffllm.model.attention.diff_v2 import DiffV2Config, Lambda, Pairing
from diffllm.model.attention.standard import Sink, StandardConfig
from diffllm.model.config import ModelConfig

TARGET_VARIANTS = ("diff_v2", "standard")


def converted(
    model: ModelConfig, target: str, perturb: float = 0.0, seed: int = 0
) -> tuple[ModelConfig, Sequence[Mapped]]:
    """Return the config of the converted model, and one `Mapped` for each converted parameter.

    A `Mapped` computes a parameter of the converted model from parameters of the original model.

    Args:
        model: config of the original model.
        target: attention of the converted model, "diff_v2" or "standard" (softmax).
        perturb: standard deviation of the noise that is added to the query weights of the second
            head of each pair, relative to the RMS of the original query weights. Only target
            "diff_v2" supports values other than 0.
        seed: seed of the noise.

    Raises ConfigError if the attention of `model` cannot be converted.
    """
    if target not in TARGET_VARIANTS:
        raise ConfigError(f"attention={target} must be one of {', '.join(TARGET_VARIANTS)}")
    if target == "diff_v2":
        return to_diff_v2(model, perturb, seed)
    if perturb:
        raise ConfigError(f"perturb={perturb} is only supported with attention=diff_v2")
    return to_standard(model)


def to_diff_v2(
    model: ModelConfig, perturb: float, seed: int
) -> tuple[ModelConfig, Sequence[Mapped]]:
    """Return the config and the tensors of a DIFF V2 model with the outputs of standard attention.

    Each query head becomes two equal heads, plus noise of the relative size `perturb`.
    """
    attention = model.attention
    if type(attention) is not StandardConfig or attention.sink is not Sink.none:
        raise ConfigError(
            f"the model has {attention}, which cannot be converted to attention=diff_v2; only "
            "attention=standard with sink=none can be converted"
        )
    heads = query_heads(model)
    diff_v2 = DiffV2Config(context_scale=attention.context_scale)
    converted_model = replace(model, n_heads=heads, attention=diff_v2)
    rules = []
    for name, parameter in without_storage(converted_model).named_parameters():
        if name.endswith(".attention.wq.weight"):
            # A seed per layer, independent of the order in which tensors are converted.
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            layer_seed = int.from_bytes(digest[:8]) >> 1
            make = partial(twice_each, heads=heads, noise=perturb, seed=layer_seed)
            rules.append(Mapped(name, (name,), make))
        elif name.endswith(".attention.wo.weight"):
            # Equal heads with lambda = 1/2 have half of the output of one head.
            rules.append(Mapped(name, (name,), lambda wo: 2 * wo))
        elif name.endswith(".attention.w_lambda.weight"):
            # Zeros give the logit 0 and lambda = 1/2 for every token.
            rules.append(Mapped(name, (), partial(torch.zeros, parameter.shape)))
        else:
            rules.append(Mapped(name, (name,), same))
    return converted_model, rules


def to_standard(model: ModelConfig) -> tuple[ModelConfig, Sequence[Mapped]]:
    attention = model.attention
    if type(attention) is not DiffV2Config or attention.head_norm:
        raise ConfigError(
            f"the model has {attention}, which cannot be converted to attention=standard; only "
            "attention=diff_v2 with head_norm=false can be converted"
        )
    # Both heads of a pair become independent query heads.
    softmax = StandardConfig(query_heads=2.0, context_scale=attention.context_scale)
    converted_model = replace(model, attention=softmax)
    lambda_parameters = {
        Lambda.sigmoid: "w_lambda.weight",
        Lambda.raw: "w_lambda.weight",
        Lambda.scalar: "lambda_logit",
    }
    lambda_parameter = lambda_parameters.get(attention.lambda_form)
    rules = []
    for name, _ in without_storage(converted_model).named_parameters():
        if name.endswith(".attention.wo.weight"):
            sources = [name]
            if lambda_parameter:
                sources.append(name.replace("wo.weight", lambda_parameter))
            make = partial(split_output, heads=model.n_heads, attention=attention)
            rules.append(Mapped(name, tuple(sources), make))
        else:
            rules.append(Mapped(name, (name,), same))
    return converted_model, rules


def twice_each(wq: Tensor, heads: int, noise: float, seed: int) -> Tensor:
    """Repeat each head of the query weights `wq`, and add noise to the second copy of each head.

    `wq` is (heads * head_dim, dim); the result is (2 * heads * head_dim, dim), with the two copies
    of a head next to each other. `noise` is the standard deviation of the noise, relative to the
    RMS of `wq`.
    """
    head_weights = wq.unflatten(0, (heads, -1))  # (H, d, D)
    pairs = torch.stack((head_weights, head_weights), dim=1)  # (H, 2, d, D)
    if noise:
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(wq.shape, generator=generator)
        rms = wq.square().mean().sqrt()
        scaled_noise = noise * rms * normal
        # `torch.stack` has copied the weights, so this changes only the second heads.
        pairs[:, 1] += scaled_noise.unflatten(0, (heads, -1))
    return pairs.flatten(0, 2)


def split_output(
    wo: Tensor, lambda_parameter: Tensor | None = None, *, heads: int, attention: DiffV2Config
) -> Tensor:
    """Convert the output projection of DIFF V2 to an output projection of softmax attention.

    `wo` is (dim, heads * head_dim), where `heads` is the number of head pairs. The result is (dim,
    2 * heads * head_dim): both heads of a pair get the columns of the pair in `wo`, and the columns
    for the second head are multiplied by -lambda. If `attention` sets lambda to a constant,
    `lambda_parameter` is not used. Otherwise, it is the model parameter w_lambda or lambda_logit.
    Raises ConfigError if w_lambda is not zero, because lambda then depends on the input.
    """
    form = attention.lambda_form
    if form is Lambda.none:
        lam = torch.full((heads,), 1.0)
    elif form is Lambda.fixed:
        lam = torch.full((heads,), attention.lambda_value)
    else:
        assert lambda_parameter is not None
        if form is not Lambda.scalar and lambda_parameter.any():
            raise ConfigError(
                "attention=standard needs a model with constant lambda, but with "
                f"lambda_form={form.value}, lambda depends on the input (w_lambda is not zero); "
                "use a model with lambda_form=scalar, fixed or none"
            )
        # With w_lambda = 0, the logits are 0 for every input.
        logits = lambda_parameter if form is Lambda.scalar else torch.zeros(heads)
        lam = logits if form is Lambda.raw else torch.sigmoid(logits)
    first = wo.unflatten(1, (heads, -1))  # (D, H, d)
    second = -lam[:, None] * first
    if attention.pairing is Pairing.halves:
        return torch.cat((first, second), dim=1).flatten(1)
    return torch.stack((first, second), dim=2).flatten(1)
