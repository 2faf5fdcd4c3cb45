"""Parameters and FLOPs from the equations of the variants, without building a model.

D model width, H heads, K kv heads, d head_dim, E experts, k experts per token.
"""

from dataclasses import dataclass, field

from diffllm.config.plugins import config_directory

SIZES = sorted(path.stem for path in (config_directory() / "model").glob("*.yaml"))
VARIANTS = sorted(path.stem for path in (config_directory() / "attention").glob("*.yaml"))


@dataclass
class Layer:
    """One attention layer."""

    matrices: dict[str, tuple[int, int]]
    """Input and output size of every matrix."""
    vectors: dict[str, int] = field(default_factory=dict)
    """Length of every vector."""
    qk_width: int = 0
    """Multiplications per pair of query and key in q k, over all heads."""
    av_width: int = 0
    """Multiplications per pair of query and key in weights times v, over all heads."""


def has_shape(m, variant):
    """Return whether a variant supports the numbers of heads of a model."""
    if variant == "standard_1p5x_heads":
        return 3 * m.n_heads % (2 * m.n_kv_heads) == 0
    if variant.startswith("diff_v1"):
        return m.n_heads % 2 == m.n_kv_heads % 2 == 0
    return True


def attention(m, variant):
    """Return softmax(q k) v with H heads over K kv heads, with the changes of a variant."""
    width, kv = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    layer = Layer(
        {"wq": (m.dim, width), "wk": (m.dim, kv), "wv": (m.dim, kv), "wo": (width, m.dim)},
        qk_width=width,
        av_width=width,
    )
    match variant:
        case (
            "standard"
            | "standard_off_by_one"
            | "standard_half_context"
            | "standard_quarter_context"
        ):
            pass
        case "standard_sink":
            layer.vectors["sink"] = m.n_heads
        case "standard_1p5x_heads":
            layer.qk_width = layer.av_width = 3 * width // 2
            layer.matrices["wq"] = (m.dim, 3 * width // 2)
            layer.matrices["wo"] = (3 * width // 2, m.dim)
        case "standard_2x_heads":
            layer.qk_width = layer.av_width = 2 * width
            layer.matrices["wq"] = (m.dim, 2 * width)
            layer.matrices["wo"] = (2 * width, m.dim)
        case "gated" | "gated_init_one":
            layer.matrices["w_gate"] = (m.dim, width)
        case "gated_headwise":
            layer.matrices["w_gate"] = (m.dim, m.n_heads)
        case "diff_v1" | "diff_v1_clamped" | "diff_v1_lambda_const" | "diff_v1_no_head_norm":
            layer.vectors |= {f"lambda_{name}": m.head_dim for name in ("q1", "k1", "q2", "k2")}
            if variant != "diff_v1_no_head_norm":
                layer.vectors["head_norm"] = 2 * m.head_dim
            layer.av_width = 2 * width  # H maps over values of width 2d
        case _:
            layer.matrices["wq"] = (m.dim, 2 * width)
            layer.qk_width = layer.av_width = 2 * width
            match variant:
                case (
                    "diff_v2" | "diff_v2_no_sigmoid" | "diff_v2_unshared_kv" | "diff_v2_2x_context"
                ):
                    layer.matrices["w_lambda"] = (m.dim, m.n_heads)
                case "diff_v2_head_norm":
                    layer.matrices["w_lambda"] = (m.dim, m.n_heads)
                    layer.vectors["head_norm"] = m.head_dim
                case "diff_v2_lambda_scalar":
                    layer.vectors["lambda_logit"] = m.n_heads
                case "diff_v2_lambda_fixed" | "diff_v2_no_lambda":
                    pass
                case _:
                    raise AssertionError(f"no equations for {variant}")
    if m.qk_norm:
        layer.vectors |= {"q_norm": m.head_dim, "k_norm": m.head_dim}
    return layer


def sizes(layer):
    """Map names of parameters to sizes."""
    return {name: a * b for name, (a, b) in layer.matrices.items()} | layer.vectors


def width_of(m):
    """Return the width of the feed-forward layers, or of the experts."""
    return m.moe.expert_dim if m.moe.n_experts else m.ffn_dim


@dataclass
class FeedForward:
    """Parameters of the feed-forward layers of a model."""

    ffn: int
    """Three matrices per dense layer, expert and shared expert."""
    router: int
    """D parameters per expert."""
    idle: int
    """Parameters of the experts that a token does not use."""


def feed_forward(m, width):
    """Return the parameters with `width` instead of the model's width of layers or experts."""
    moe = m.moe
    if not moe.n_experts:
        return FeedForward(m.n_layers * 3 * m.dim * width, 0, 0)
    routed, expert = m.n_layers - moe.n_dense_layers, 3 * m.dim * width
    return FeedForward(
        moe.n_dense_layers * 3 * m.dim * m.ffn_dim
        + routed * (moe.n_experts + moe.n_shared) * expert,
        routed * moe.n_experts * m.dim,
        routed * (moe.n_experts - moe.top_k) * expert,
    )


def components(m, variant):
    """Return the parameters of the whole model by component."""
    parts = sizes(attention(m, variant))
    lambdas = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2", "lambda_logit", "w_lambda")
    inside = {name: parts[name] for name in ("wq", "wk", "wv", "wo")}
    inside["lambda/gate"] = sum(parts.get(name, 0) for name in (*lambdas, "w_gate"))
    inside["head norms"] = sum(parts.get(name, 0) for name in ("head_norm", "q_norm", "k_norm"))
    if "sink" in parts:
        inside["sink"] = parts["sink"]
    layers, tables = feed_forward(m, width_of(m)), 1 if m.tie_embeddings else 2
    routers = {"router": layers.router} if layers.router else {}
    return {name: m.n_layers * params for name, params in inside.items()} | {
        "ffn": layers.ffn,
        **routers,
        "norms": (2 * m.n_layers + 1) * m.dim,
        "embeddings/output": tables * m.vocab_size * m.dim,
    }


def total_params(m, variant, width):
    """Return the parameters of the whole model with feed-forward layers or experts of `width`."""
    layers, tables = feed_forward(m, width), 1 if m.tie_embeddings else 2
    outside = m.dim + tables * m.vocab_size * m.dim + layers.ffn + layers.router
    return m.n_layers * (sum(sizes(attention(m, variant)).values()) + 2 * m.dim) + outside


def active_params(m, variant):
    """Return the parameters that one token uses."""
    return total_params(m, variant, width_of(m)) - feed_forward(m, width_of(m)).idle


def flops_per_token(m, variant, seq_len, keys=None):
    """Count training FLOPs per token.

    Every matrix takes 1 forward and 2 backward products of 2 operations, except unused experts and
    the embedding. A query sees (T + 1) / 2 keys on average, or `keys` with masked documents.
    """
    layer, layers = attention(m, variant), feed_forward(m, width_of(m))
    matrices = m.n_layers * sum(a * b for a, b in layer.matrices.values())
    matrices += layers.ffn + layers.router - layers.idle
    keys = keys or sum(range(1, seq_len + 1)) / seq_len
    maps = keys * (layer.qk_width + layer.av_width)
    return 3 * 2 * (matrices + m.n_layers * maps + m.vocab_size * m.dim)
