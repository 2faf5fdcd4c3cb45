"""DiffLLM models for transformers, with standard, gated, DIFF V1 or DIFF V2 attention.

Exported models contain this file; `import diffllm.interop` also registers the classes. The file
needs torch and transformers 5.4 or later. Parameter names follow Llama. In the config, `attention`
contains the attention variant and its settings. `moe` contains the settings of the mixture of
experts.

Shapes: B batch, T query tokens, S key tokens, D hidden size, H query heads, d head width.
"""

import copy
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

# Before the imports below, some of which fail in older versions.
if [int(part) for part in transformers.__version__.split(".")[:2]] < [5, 4]:
    raise ImportError(
        f"transformers {transformers.__version__} is too old for modeling_diffllm.py: "
        "pip install 'transformers>=5.4'"
    )

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, initialization
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

VLLM = "vllm"
"""vLLM's attention implementation, which has its own cache and supports sinks."""
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
"""Name of the cache in arguments and outputs of transformers: `cache` since version 5.24."""

WITH_MASKS = ("eager", "sdpa", "paged|eager", "paged|sdpa")
"""Attention implementations with masks that explicit maps support."""
LAMBDA_PARAMETERS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")

SETTINGS: dict[str, dict[str, Any]] = {
    "standard": {
        "query_heads": 1.0,
        "sink": ("none", "learned", "one"),
    },
    "gated": {
        "gate": ("elementwise", "headwise"),
        "init": ("half", "one"),
    },
    "diff_v1": {
        "head_norm": True,
        "head_norm_eps": 1e-5,
        "lambda_init": None,
        "clamp": False,
    },
    "diff_v2": {
        "pairing": ("adjacent", "halves"),
        "lambda_form": ("sigmoid", "raw", "scalar", "fixed", "none"),
        "lambda_value": 0.5,
        "head_norm": False,
    },
}
"""Settings by variant: the default, or a tuple of choices that begins with the default."""
MOE_SETTINGS = {
    "n_experts": 0,
    "top_k": 2,
    "expert_dim": 0,
    "n_shared": 0,
    "n_dense_layers": 0,
    "score": ("sigmoid", "softmax"),
    "renormalise": True,
    "routed_scaling": 1.0,
    "bias_update_rate": 1e-3,
    "balance_loss": 0.0,
    "balance_over": ("global_batch", "sequence"),
    "router_z_loss": 0.0,
}
"""Settings of a mixture of experts, in the same form; only training uses the last four."""
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
"""Required settings by type of RoPE, in addition to rope_theta."""
ROPE_KEYS = (
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast", "attention_factor",
    "partial_rotary_factor", "truncate",
)  # fmt: skip


def completed(settings: dict[str, Any], declared: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return `settings`, with defaults from `declared` for missing settings.

    A value in `declared` is the default of a setting, or a tuple of all allowed values with the
    default first. Raises ValueError for an unknown setting or an invalid value. The message names
    the setting as "<prefix>.<setting>".
    """
    for key, value in settings.items():
        name = f"{prefix}.{key}"
        if key not in declared:
            raise ValueError(f"{name}={value!r} is unknown; known: {', '.join(declared)}")
        default = declared[key]
        is_choice = isinstance(default, tuple)
        if is_choice and value not in default:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(default)}")
        types: tuple[type, ...] = (int, float)
        if is_choice:
            types = (str,)
        elif isinstance(default, int):
            types = (type(default),)
        # `type`, not `isinstance`: a bool is an int in Python. A default of None is allowed, too.
        if type(value) not in (*types, type(default)):
            raise ValueError(f"{name}={value!r} must be of type {types[-1].__name__}")
    defaults = {}
    for key, default in declared.items():
        defaults[key] = default[0] if isinstance(default, tuple) else default
    return defaults | settings


def completed_moe(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a mixture of experts with defaults; {} without experts."""
    moe = completed(settings, MOE_SETTINGS, "moe")
    if not moe["n_experts"]:
        return {}
    has_valid_top_k = 1 <= moe["top_k"] <= moe["n_experts"]
    if not (has_valid_top_k and moe["expert_dim"] >= 1):
        raise ValueError(
            f"moe.top_k={moe['top_k']} must be between 1 and moe.n_experts="
            f"{moe['n_experts']}, and moe.expert_dim={moe['expert_dim']} at least 1"
        )
    return moe


def check_rope(rope: dict[str, Any]) -> None:
    """Raise ValueError for missing, unknown or unsupported RoPE settings."""
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type={kind!r} must be one of {', '.join(ROPE_TYPES)}")
    required = ("rope_theta", *ROPE_TYPES[kind])
    missing = [key for key in required if rope.get(key) is None]
    if missing:
        raise ValueError(f"rope_type={kind!r} needs {', '.join(missing)}")
    for key, value in rope.items():
        if key not in ROPE_KEYS:
            raise ValueError(f"rope_parameters.{key}={value!r} is unknown")
        if key == "truncate" and type(value) is not bool:
            raise ValueError(f"rope_parameters.truncate={value!r} must be true or false")
        needs_number = key not in ("rope_type", "type", "truncate")
        # `not value > 0` is also true for NaN.
        if needs_number and (type(value) not in (int, float) or not value > 0):
            raise ValueError(f"rope_parameters.{key}={value!r} must be a number above 0")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"partial_rotary_factor={rope['partial_rotary_factor']} must be 1.0")


class DiffLLMConfig(PreTrainedConfig):
    """Config of a DiffLLM model; arguments that are not described here are as in LlamaConfig.

    Args:
        num_attention_heads: number of query heads; in DIFF V1 and DIFF V2, two heads form a pair.
        num_key_value_heads: number of key and value heads; in DIFF V1, number of pairs of heads.
        head_dim: width of a key or value head; in DIFF V1, width of a pair of heads.
        qk_norm: whether RMSNorm is applied to queries and keys.
        attention: the variant and its settings; the entry "variant" is "standard" (default),
            "gated", "diff_v1" or "diff_v2".
        moe: settings of the mixture of experts; None for a dense model.
    """

    model_type = "diffllm"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    vocab_size: int = 32000
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict[str, Any] = None  # type: ignore[assignment]
    qk_norm: bool = False
    attention: dict[str, Any] = None  # type: ignore[assignment]
    moe: dict[str, Any] = None  # type: ignore[assignment]

    def __post_init__(self, **kwargs: Any) -> None:
        settings = dict(self.attention or {})
        variant = settings.pop("variant", "standard")
        if variant not in SETTINGS:
            raise ValueError(f"attention.variant={variant!r} must be one of {', '.join(SETTINGS)}")
        declared = {"context_scale": 1.0, **SETTINGS[variant]}
        self.attention = {"variant": variant, **completed(settings, declared, "attention")}
        if self.moe:
            self.moe = completed_moe(self.moe)
        heads = self.num_attention_heads
        key_heads = self.num_key_value_heads
        has_pairs = variant in ("diff_v1", "diff_v2")
        if heads % (key_heads * (2 if has_pairs else 1)):
            half = " / 2" if has_pairs else ""
            raise ValueError(
                f"num_key_value_heads={key_heads} must divide num_attention_heads={heads}{half}"
            )
        # Caches of transformers read these settings: with a window, they would drop tokens.
        full_attention = ["full_attention"] * self.num_hidden_layers
        for key in ("sliding_window", "attention_chunk_size", "layer_types"):
            if kwargs.get(key) not in (None, full_attention):
                raise ValueError(
                    f"{key}={kwargs[key]!r} is not supported: all layers attend to all tokens"
                )
        # transformers before version 5 calls these settings rope_scaling.
        rope = kwargs.pop("rope_scaling", None) or self.rope_parameters or {}
        # A setting that is null is missing: transformers would use None in place of its default.
        self.rope_parameters = {key: value for key, value in rope.items() if value is not None}
        if kwargs.get("rope_theta") is None:
            kwargs.pop("rope_theta", None)
        super().__post_init__(**kwargs)
        check_rope(self.rope_parameters)


class RotaryEmbedding(nn.Module):
    """Computes cosines and sines for RoPE, bit-identical to the values in training."""

    inv_freq: Tensor

    def __init__(self, config: DiffLLMConfig):
        super().__init__()
        self.config = config
        self.head_dim = config.head_dim // ATTENTION_CLASSES[config.attention["variant"]].members
        self.register_buffer("inv_freq", torch.empty(0), persistent=False)
        self.fill()

    def fill(self) -> None:
        self.inv_freq, self.scaling = frequencies(self.config, self.head_dim, self.inv_freq.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        # Recompute, because model.half() has rounded the frequencies.
        super()._apply(fn, recurse)
        self.fill()
        return self

    @torch.no_grad()
    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines (B, T, d/2), float32, for positions (B, T)."""
        positions = position_ids[..., None].to(self.inv_freq.dtype)
        angles = positions * self.inv_freq  # (B, T, d/2)
        cos = (self.scaling * angles.cos()).float()
        sin = (self.scaling * angles.sin()).float()
        return cos, sin


def frequencies(config: DiffLLMConfig, head_dim: int, device: torch.device) -> tuple[Tensor, float]:
    """Return the RoPE frequencies (d/2,), and a factor that multiplies cosines and sines.

    Frequencies are in radians per position, in float64, or in float32 on MPS.
    """
    rope: dict[str, Any] = config.rope_parameters
    # Once more: the settings of a config may have changed since the config was created.
    check_rope(rope)
    rope_type = rope.get("rope_type", "default")
    # float64, because the rounding error of a float32 angle grows with the position.
    index = torch.arange(head_dim // 2, dtype=torch.float64, device="cpu")
    original = rope["rope_theta"] ** -(2 * index / head_dim)
    scaled = original
    scaling = 1.0
    if rope_type != "default":
        length = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        if rope_type == "linear":
            weights = torch.zeros_like(index)
        elif rope_type == "llama3":
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            turns = length * original / (2 * math.pi)
            weights = (turns - low) / (high - low)
        else:
            weights = yarn_weights(rope, index, head_dim, length)
            scaling = rope.get("attention_factor", 0.1 * math.log(rope["factor"]) + 1)
        # Weight 1 keeps a frequency, and weight 0 divides it by the factor.
        weights = weights.clamp(0, 1)
        slowed = original / rope["factor"]
        scaled = weights * original + (1 - weights) * slowed
    # MPS does not support float64.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return scaled.to(device, dtype), scaling


def yarn_weights(rope: dict[str, Any], index: Tensor, head_dim: int, length: int) -> Tensor:
    """Compute one weight per frequency for YaRN (d/2,), which the caller clamps to [0, 1].

    The weight falls linearly with `index`, the index of the channel pair. It is 1 at the pair that
    makes `beta_fast` turns over `length` positions, and 0 at the pair that makes `beta_slow` turns.
    Both indices are rounded outwards if `truncate` is true; the first is at least 0, and the last
    at most `head_dim` - 1.
    """
    log_theta = math.log(rope["rope_theta"])
    ends = []
    for turns in (rope.get("beta_fast", 32.0), rope.get("beta_slow", 1.0)):
        log_positions_per_radian = math.log(length / (turns * 2 * math.pi))
        ends.append(head_dim * log_positions_per_radian / (2 * log_theta))
    first, last = ends
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first = max(first, 0)
    # The bound is the number of channels, not of pairs, as in transformers.
    last = min(last, head_dim - 1)
    ramp = (index - first) / max(last - first, 1e-3)
    return 1 - ramp


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to queries or keys x (B, H, T, d); compute in float32, return the dtype of x."""
    low, high = x.chunk(2, dim=-1)
    cos = cos[:, None]
    sin = sin[:, None]
    rotated_low = low * cos - high * sin
    rotated_high = high * cos + low * sin
    return torch.cat((rotated_low, rotated_high), dim=-1).to(x.dtype)


def eager_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Compute attention with explicit attention maps.

    Return outputs (B, T, H, value width) and softmax maps (B, H, T, S). `attention_mask`
    (B, 1, T, S) is a bool mask, True for visible keys, or a float mask that is added to the logits.
    `s_aux` (H,) is a sink logit per head: exp(s_aux) is added to the softmax denominators.

    If the setting `clamp` of DIFF V1 is true, each pair of heads uses the map of head 1 minus
    lambda times the map of head 2. This difference is clamped at 0 and divided by its sum over the
    keys. The output of head 1 is then the output of the pair, and the output of head 2 is zero.
    """
    groups = module.num_key_value_groups
    # Without names for the repeated keys and values, so that their memory is freed at once.
    logits = query @ key.repeat_interleave(groups, dim=1).transpose(2, 3) * scaling
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        # Not -inf: the softmax of a row without visible keys would be NaN.
        logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    elif attention_mask is not None:
        logits = logits + attention_mask
    if s_aux is not None:
        sinks = s_aux.to(logits.dtype).view(1, -1, 1, 1)
        column = sinks.expand(*logits.shape[:3], 1)
        logits = torch.cat((logits, column), dim=-1)
    # Drop the column of the sink: it changes the denominators, but is not a key.
    maps = logits.softmax(-1, dtype=torch.float32).to(query.dtype)
    maps = maps[..., : key.shape[2]]
    if not module.settings.get("clamp"):
        context = maps @ value.repeat_interleave(groups, dim=1)
        return context.transpose(1, 2).contiguous(), maps
    first, second = maps.unflatten(1, (-1, 2)).unbind(2)  # (B, H/2, T, S) each
    positive = (first - module.lambda_value() * second).clamp_min(0)
    total = positive.sum(-1, keepdim=True)
    # A row that is 0 everywhere stays 0.
    divisor = torch.where(total > 0, total, 1)
    weights = (positive / divisor).to(query.dtype)
    # Keys and values have one head per pair, and a group counts single heads.
    context = weights @ value.repeat_interleave(groups // 2, dim=1)
    empty = torch.zeros_like(context)
    context = torch.stack((context, empty), dim=2).flatten(1, 2)
    return context.transpose(1, 2).contiguous(), maps


def norm(width: int, eps: float, is_used: bool) -> nn.Module:
    return nn.RMSNorm(width, eps) if is_used else nn.Identity()


def needs_maps(settings: dict[str, Any]) -> bool:
    return settings.get("sink", "none") != "none" or settings.get("clamp", False)


def stored(
    cache: Any, k: Tensor, v: Tensor, layer_idx: int, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Append keys and values to the cache of continuous batching; return all keys and values.

    Also supports versions of transformers before 5.24, whose `cache.update` has other arguments
    and results than that of later versions.
    """
    if "kwargs" in inspect.signature(cache.update).parameters:
        return cache.update(k, v, layer_idx, kwargs=kwargs)
    places = {name: kwargs[name] for name in ("read_index", "write_index")}
    k, v = cache.update(k, v, layer_idx, **places)  # (S, heads, width) each
    k = k.transpose(0, 1).unsqueeze(0)
    v = v.transpose(0, 1).unsqueeze(0)
    return k, v


class Attention(nn.Module):
    """Base class of attention variants: projections, RoPE, KV cache and call of the kernel."""

    is_causal = True
    members = 1
    """Number of key and value heads that are concatenated to one head for the kernel."""

    def __init__(self, config: DiffLLMConfig, layer_idx: int, contexts: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.settings: dict[str, Any] = config.attention
        self.head_dim = config.head_dim // self.members
        self.num_heads = config.num_attention_heads
        self.num_key_value_groups = self.num_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.context_scale = self.settings["context_scale"]
        self.sink: nn.Parameter | None = None
        if contexts is None:
            contexts = self.num_heads
        width = config.hidden_size
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, key_width, bias=False)
        self.o_proj = nn.Linear(contexts * self.head_dim, width, bias=False)
        self.q_norm = norm(self.head_dim, config.rms_norm_eps, config.qk_norm)
        self.k_norm = norm(self.head_dim, config.rms_norm_eps, config.qk_norm)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention output (B, T, D), and the attention maps (B, H, T, S) or None.

        `hidden_states` (B, T, D) is the normalised input. The second result is None if the
        attention kernel does not return maps.
        """
        heads = []
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            projected = projection(hidden_states)
            heads.append(projected.unflatten(-1, (-1, self.head_dim)))
        q, k, v = heads  # (B, T, heads, d) each
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(k).transpose(1, 2)
        v = v.transpose(1, 2)
        q = rotated(q, *position_embeddings)
        k = rotated(k, *position_embeddings)
        q, k, v = self.for_kernel(q, k, v)
        if CACHE == "cache":
            past_key_values = kwargs.pop(CACHE, None)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx, kwargs=kwargs)
        name = self.config._attn_implementation
        # vLLM searches this source for the next line, and for one call of `kernel`.
        kernel = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        has_kernel_with_sink = name == VLLM and self.sink is not None
        if needs_maps(self.settings) and not has_kernel_with_sink:
            if name not in WITH_MASKS:
                raise ValueError(
                    f"attn_implementation={name!r} cannot compute attention with a sink or a "
                    "clamped map: use 'sdpa' or 'eager'"
                )
            kernel = eager_attention_forward
            # In continuous batching, the replaced kernel would have updated the cache.
            if "cache" in kwargs:
                k, v = stored(kwargs.pop("cache"), k, v, self.layer_idx, kwargs)
        context, maps = kernel(
            self, q, k, v, attention_mask,
            dropout=0.0, scaling=self.scaling, s_aux=self.sink, **kwargs,
        )  # fmt: skip
        batch_and_tokens = hidden_states.shape[:2]
        context = context.reshape(*batch_and_tokens, self.num_heads, v.shape[-1])
        context = self.combined(hidden_states, context)
        if self.context_scale != 1:
            context = context * self.context_scale
        return self.o_proj(context.flatten(2)), maps

    def for_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values in the shapes that the kernel and the KV cache need."""
        return q, k, v

    def combined(self, x: Tensor, context: Tensor) -> Tensor:
        """Compute the input of o_proj from the kernel output `context` (B, T, H, width).

        `x` (B, T, D) is the normalised input of the layer. The result is (B, T, H, width), or
        (B, T, H/2, width) in differential attention, which combines two heads into one.
        """
        return context


class StandardAttention(Attention):
    """Softmax attention, optionally with one more term in the softmax denominator.

    If the setting `sink` is "one", this term is 1. If it is "learned", the term is the exponential
    of a learned logit per head.
    """

    def __init__(self, config: DiffLLMConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        kind = self.settings["sink"]
        if kind != "none":
            # exp(0) = 1: a sink of "one" is a logit that stays 0.
            logits = torch.zeros(self.num_heads)
            self.sink = nn.Parameter(logits, requires_grad=kind == "learned")


class GatedAttention(Attention):
    """Softmax attention times a gate (Qiu et al., arXiv 2505.06708).

    The gate is sigmoid(gate_proj(x)), or 2 sigmoid(gate_proj(x)) with init "one".
    """

    def __init__(self, config: DiffLLMConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        width = self.head_dim if self.settings["gate"] == "elementwise" else 1
        self.gate_proj = nn.Linear(config.hidden_size, self.num_heads * width, bias=False)

    def combined(self, x: Tensor, context: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate_proj(x))
        gate = gate.unflatten(-1, (self.num_heads, -1))  # (B, T, H, d), or (B, T, H, 1)
        # sigmoid(0) = 1/2, so with a factor of 2 the gate is about 1 at the start of training.
        factor = 2 if self.settings["init"] == "one" else 1
        return gate * context * factor


class DiffV1Attention(Attention):
    """Differential attention, first version (Ye et al., arXiv 2410.05258).

    Heads 2i and 2i + 1 form a pair. For the kernel, the keys and values of a pair are concatenated
    to width 2d, and each query is padded with zeros in the half that belongs to the other head.
    """

    members = 2

    def __init__(self, config: DiffLLMConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        for name in LAMBDA_PARAMETERS:
            self.register_parameter(name, nn.Parameter(torch.zeros(self.head_dim)))
        eps = self.settings["head_norm_eps"]
        self.head_norm = norm(2 * self.head_dim, eps, self.settings["head_norm"])
        self.lambda_init = self.settings["lambda_init"]
        if self.lambda_init is None:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)

    def for_kernel(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = q.unflatten(1, (-1, 2)).unbind(2)  # (B, H/2, T, d) each
        # The zeros leave only the key of the same head in the product with a pair of keys.
        first = F.pad(first, (0, self.head_dim))
        second = F.pad(second, (self.head_dim, 0))
        q = torch.stack((first, second), dim=2).flatten(1, 2)  # (B, H, T, 2d)
        # Concatenate adjacent heads: (B, 2n, S, d) -> (B, n, S, 2d).
        k = k.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)
        v = v.unflatten(1, (-1, 2)).transpose(2, 3).flatten(3)
        return q, k, v

    def combined(self, x: Tensor, context: Tensor) -> Tensor:
        first, second = context.unflatten(2, (-1, 2)).unbind(3)  # (B, T, H/2, 2d) each
        if self.settings["clamp"]:
            # `eager_attention_forward` has already subtracted the second map.
            context = first
        else:
            context = (first - self.lambda_value() * second).to(x.dtype)
        return (self.head_norm(context) * (1 - self.lambda_init)).to(x.dtype)

    def lambda_value(self) -> Tensor:
        """Return exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init, float32."""
        q1, k1, q2, k2 = [getattr(self, name).float() for name in LAMBDA_PARAMETERS]
        first = torch.exp((q1 * k1).sum())
        second = torch.exp((q2 * k2).sum())
        return first - second + self.lambda_init


class DiffV2Attention(Attention):
    """Differential attention, second version; by default with one lambda per token and pair.

    The output of a pair of query heads is the output of the first head minus lambda times the
    output of the second head. Query heads 2i and 2i + 1 form a pair and share a key head and a
    value head. If the setting `pairing` is "halves", query heads i and i + H/2 form a pair.
    """

    def __init__(self, config: DiffLLMConfig, layer_idx: int):
        pairs = config.num_attention_heads // 2
        super().__init__(config, layer_idx, contexts=pairs)
        self.form = self.settings["lambda_form"]
        if self.form in ("sigmoid", "raw"):
            self.lambda_proj = nn.Linear(config.hidden_size, pairs, bias=False)
        if self.form == "scalar":
            self.lambda_logit = nn.Parameter(torch.zeros(pairs))
        self.head_norm = norm(self.head_dim, config.rms_norm_eps, self.settings["head_norm"])

    def combined(self, x: Tensor, context: Tensor) -> Tensor:
        if self.settings["pairing"] == "adjacent":
            first, second = context.unflatten(2, (-1, 2)).unbind(3)
        else:
            first, second = context.chunk(2, dim=2)
        # A learned lambda is float32, so the difference is computed in float32.
        difference = first - self.lambda_values(x) * second  # (B, T, H/2, d)
        return self.head_norm(difference.to(x.dtype))

    def lambda_values(self, x: Tensor) -> Any:
        """Return lambda: a float32 tensor if lambda is learned, otherwise a float.

        The tensor has the shape (B, T, H/2, 1), or (1, 1, H/2, 1) if lambda is the same for all
        tokens.
        """
        if self.form == "none":
            return 1.0
        if self.form == "fixed":
            return self.settings["lambda_value"]
        if self.form == "scalar":
            values = torch.sigmoid(self.lambda_logit.float())
            return values.view(1, 1, -1, 1)
        logits = self.lambda_proj(x).float().unsqueeze(-1)
        return logits if self.form == "raw" else torch.sigmoid(logits)


ATTENTION_CLASSES: dict[str, Any] = {
    "standard": StandardAttention,
    "gated": GatedAttention,
    "diff_v1": DiffV1Attention,
    "diff_v2": DiffV2Attention,
}


class MLP(nn.Module):
    """A SwiGLU feed-forward layer: down_proj(silu(gate_proj(x)) * up_proj(x))."""

    def __init__(self, hidden_size: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x))
        hidden = hidden * self.up_proj(x)
        return self.down_proj(hidden)


class Router(nn.Module):
    """Selects the k experts with the largest score + `bias` for each token.

    The weights of the expert outputs depend on the scores only, not on `bias`.
    """

    bias: Tensor
    load: Tensor

    def __init__(self, hidden_size: int, moe: dict[str, Any]):
        super().__init__()
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe["n_experts"], hidden_size))
        self.register_buffer("bias", torch.zeros(moe["n_experts"]))
        # Relative load of each expert in the last batch; resumed training needs this buffer.
        self.register_buffer("load", torch.ones(moe["n_experts"]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Select k experts for each of N tokens x (N, D); return indices (N, k), weights (N, k)."""
        logits = F.linear(x.float(), self.weight.float())  # (N, experts)
        scores = logits.softmax(-1) if self.moe["score"] == "softmax" else logits.sigmoid()
        biased_scores = scores + self.bias.float()
        experts = biased_scores.topk(self.moe["top_k"], sorted=False).indices
        weights = scores.gather(1, experts)
        if self.moe["renormalise"]:
            # Scores can underflow to 0, so a small number prevents a division by 0.
            total = weights.sum(-1, keepdim=True) + 1e-20
            weights = weights / total
        return experts, weights * self.moe["routed_scaling"]


class Experts(nn.Module):
    def __init__(self, hidden_size: int, moe: dict[str, Any]):
        super().__init__()
        n = moe["n_experts"]
        width = moe["expert_dim"]
        self.gate_proj = nn.Parameter(torch.empty(n, width, hidden_size))
        self.up_proj = nn.Parameter(torch.empty(n, width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(n, hidden_size, width))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of k experts for each of N tokens x, (N, D).

        `experts` (indices) and `weights`, (N, k) each, are the results of `Router.forward`.
        """
        out = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, slots = torch.where(experts == expert)
            tokens = x[rows]
            hidden = F.silu(F.linear(tokens, self.gate_proj[expert]))
            hidden = hidden * F.linear(tokens, self.up_proj[expert])
            output = F.linear(hidden, self.down_proj[expert])
            # The weights are float32, so round only the product.
            output = output * weights[rows, slots].unsqueeze(1)
            out.index_add_(0, rows, output.to(x.dtype))
        return out


class MoE(nn.Module):
    """A mixture of experts: k selected experts per token, plus shared experts for all tokens."""

    def __init__(self, hidden_size: int, moe: dict[str, Any]):
        super().__init__()
        self.router = Router(hidden_size, moe)
        self.experts = Experts(hidden_size, moe)
        width = moe["n_shared"] * moe["expert_dim"]
        self.shared = MLP(hidden_size, width) if width else None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)  # (N, D)
        experts, weights = self.router(tokens)
        out = self.experts(tokens, experts, weights)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


class DiffLLMDecoderLayer(GradientCheckpointingLayer):
    """A pre-norm transformer block: attention, then a feed-forward layer or experts."""

    def __init__(self, config: DiffLLMConfig, layer_idx: int):
        super().__init__()
        width = config.hidden_size
        self.self_attn = ATTENTION_CLASSES[config.attention["variant"]](config, layer_idx)
        if config.moe and layer_idx >= config.moe["n_dense_layers"]:
            self.mlp: nn.Module = MoE(width, config.moe)
        else:
            self.mlp = MLP(width, config.intermediate_size)
        self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Return the output (B, T, D) of the block; `kwargs` go to `Attention.forward`."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = hidden_states + attended
        mlp_output = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + mlp_output


class DiffLLMPreTrainedModel(PreTrainedModel):
    config: DiffLLMConfig
    config_class = DiffLLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DiffLLMDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flex_attn = False
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": DiffLLMDecoderLayer, "attentions": Attention}  # noqa: RUF012

    @property
    def _supports_flash_attn(self) -> bool:  # type: ignore[override]
        return not needs_maps(self.config.attention)

    @property
    def _can_compile_fullgraph(self) -> bool:  # type: ignore[override]
        # The loop over experts depends on the tokens.
        return not self.config.moe

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Attention):
            # Without submodules: the base class initialises the projections and norms.
            for name, parameter in module.named_parameters(recurse=False):
                std = 0.1 if name in LAMBDA_PARAMETERS else 0.0
                initialization.normal_(parameter, 0.0, std)
        elif isinstance(module, Router | Experts):
            for weight in module.parameters():
                initialization.normal_(weight, 0.0, self.config.initializer_range)
            for name, buffer in module.named_buffers():
                initialization.constant_(buffer, float(name == "load"))
        elif isinstance(module, RotaryEmbedding):
            module.fill()


class DiffLLMModel(DiffLLMPreTrainedModel):
    """A decoder without the output projection to the vocabulary."""

    def __init__(self, config: DiffLLMConfig):
        super().__init__(config)
        self.mask_config = config
        # Explicit maps need an explicit mask. SDPA has none if the mask is only causal.
        if needs_maps(config.attention) and config._attn_implementation != VLLM:
            self.mask_config = copy.copy(config)
            self.mask_config._attn_implementation = "eager"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DiffLLMDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return hidden states (B, T, D) for token ids (B, T) or token embeddings (B, T, D)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if CACHE == "cache":
            past_key_values = kwargs.pop(CACHE, past_key_values)
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            n_past = past_key_values.get_seq_length() if past_key_values is not None else 0
            n_tokens = hidden_states.shape[1]
            position_ids = torch.arange(n_tokens, device=hidden_states.device) + n_past
            position_ids = position_ids.unsqueeze(0)
        cache: dict[str, Any] = {CACHE: past_key_values}
        mask = create_causal_mask(
            config=self.mask_config,
            inputs_embeds=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **cache,
        )
        position_embeddings = self.rotary_emb(position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                **cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **cache)


class DiffLLMForCausalLM(DiffLLMPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffLLMConfig):
        super().__init__(config)
        self.model = DiffLLMModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, T, vocabulary size) for token ids (B, T) or embeddings (B, T, D).

        If `logits_to_keep` is an integer above 0, return only the logits of that many last tokens.
        If it is a tensor, return only the logits of the tokens with these indices. With `labels`
        (B, T), also return the mean cross-entropy: the logits of token t predict label t + 1.
        """
        inputs = (input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
        outputs = self.model(*inputs, use_cache=use_cache, **kwargs)
        positions: slice | Tensor
        if isinstance(logits_to_keep, int):
            # 0 selects all tokens, because -0 is 0.
            positions = slice(-logits_to_keep, None)
        else:
            positions = logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions])
        cache: dict[str, Any] = {CACHE: outputs.get(CACHE)}
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )
