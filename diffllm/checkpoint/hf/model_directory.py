"""Read a decoder from a Hugging Face model directory.

Supported model classes: Llama, Qwen3, Qwen3Moe and DiffLlama of transformers, and the DiffLLM class
in modeling_diffllm.py. Code and pickles in the directory are never executed. The functions that
read config.json raise ValueError for unsupported settings. The error message does not contain the
file name; the caller of the function adds it.
"""

import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diffllm.checkpoint.hf.layout import ARCHITECTURE, VARIANTS, Mapped, kernel_settings, layout_of
from diffllm.core.errors import CheckpointError, ConfigError, DataError, listed
from diffllm.core.files import open_regular, read_json, readable
from diffllm.data.tokenizer import FAST, MODEL, Tokenizer
from diffllm.model import without_storage
from diffllm.model.attention.base import AttentionConfig
from diffllm.model.attention.diff_v1 import DiffV1Config
from diffllm.model.attention.diff_v2 import DiffV2Config
from diffllm.model.attention.standard import StandardConfig
from diffllm.model.config import ModelConfig
from diffllm.model.ffn.router import MoEConfig, Score
from diffllm.model.rope import RopeConfig, RopeScaling, YarnRamp, attention_factor

T = TypeVar("T")
COMPUTED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "partial_rotary_factor": 1.0, "quantization_config": None, "decoder_sparse_step": 1,
}  # fmt: skip
"""Settings that our decoders support with a single value."""
ROPES = {"default": RopeScaling.none, **{s.name: s for s in RopeScaling if s.name != "none"}}
ROPE_KEYS = (
    "rope_theta", "rope_type", "type", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_slow", "beta_fast", "attention_factor",
    "partial_rotary_factor", "truncate", "mscale", "mscale_all_dim",
)  # fmt: skip
KINDS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    "a whole number above 0": (lambda value: type(value) is int and value > 0, (
        "head_dim", "hidden_size", "intermediate_size", "max_position_embeddings",
        "moe_intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
        "original_max_position_embeddings", "vocab_size")),
    "a whole number": (lambda value: type(value) is int, (
        "num_experts", "num_experts_per_tok", "num_local_experts")),
    "a finite number": (lambda value: type(value) in (int, float) and math.isfinite(value), (
        "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor",
        "initializer_range", "low_freq_factor", "rms_norm_eps", "rope_theta")),
    "a number above 0": (
        lambda value: type(value) in (int, float) and math.isfinite(value) and value > 0,
        ("mscale", "mscale_all_dim")),
    "true or false": (lambda value: type(value) is bool, (
        "norm_topk_prob", "qk_norm", "tie_word_embeddings", "truncate")),
    "text": (lambda value: type(value) is str, ("rope_type", "type", "variant")),
    "an object": (lambda value: type(value) is dict, (
        "attention", "moe", "rope_parameters", "rope_scaling")),
    "a list of text": (lambda value: is_list_of(str, value), ("architectures", "layer_types")),
    "a list of whole numbers": (lambda value: is_list_of(int, value), ("mlp_only_layers",)),
}  # fmt: skip
"""Types of all settings that are read: name of the type to its test and its keys."""


def is_list_of(kind: type, value: Any) -> bool:
    return type(value) is list and all(type(item) is kind for item in value)


class Config(dict[str, Any]):
    """Settings of a config.json file, except settings with the value null.

    The constructor raises ValueError if a value has the wrong type. `config[key]` raises ValueError
    if `key` is missing.
    """

    def __init__(self, content: dict[str, Any]):
        super().__init__({key: value for key, value in content.items() if value is not None})
        for kind, (is_kind, keys) in KINDS.items():
            for key in self.keys() & keys:
                if not is_kind(self[key]):
                    raise ValueError(f"has {key}={self[key]!r}, which must be {kind}")
                if kind == "a finite number":
                    self[key] = float(self[key])

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"has no {key}")


def model_of(content: dict[str, Any]) -> tuple[str, ModelConfig]:
    """Return the name of the model class and the diffllm config for a parsed config.json.

    Raises ValueError or ConfigError for an unsupported class or setting.
    """
    config = Config(content)
    name = next(iter(config["architectures"]), None)
    if name not in READERS:
        raise ValueError(f"names the architecture {name}, which is not one of {', '.join(READERS)}")
    for key, computed in COMPUTED.items():
        if config.get(key, computed) != computed:
            raise ValueError(f"has {key}={config[key]}, but only {computed} is supported")
    others = set(config.get("layer_types", ())) - {"full_attention"}
    if others:
        raise ValueError(f"has layer_types {', '.join(others)}; only full_attention is supported")
    model = READERS[name](config)
    model.validate()
    return name, model


def shape_of(config: Config, attention: AttentionConfig, n_heads: int = 0) -> ModelConfig:
    """Build a diffllm model config from the config.json settings that all supported classes share.

    `n_heads` is the `n_heads` of the new config. If it is 0, use `num_attention_heads` of
    config.json.
    """
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    return ModelConfig(
        dim=dim,
        n_layers=config["num_hidden_layers"],
        n_heads=n_heads or heads,
        n_kv_heads=config.get("num_key_value_heads", heads),
        head_dim=config.get("head_dim", dim // heads),
        ffn_dim=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_len=config.get("max_position_embeddings", 2048),
        attention=attention,
        rope=rope_of(config),
        tie_embeddings=config.get("tie_word_embeddings", False),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        init_std=config.get("initializer_range", 0.02),
        init_seed=0,
    )


def llama(config: Config) -> ModelConfig:
    return shape_of(config, StandardConfig())


def qwen3(config: Config) -> ModelConfig:
    return replace(llama(Config({"head_dim": 128, **config})), qk_norm=True)


def qwen3_moe(config: Config) -> ModelConfig:
    dense = config.get("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise ValueError(f"has mlp_only_layers={dense}, but only the first layers may be dense")
    if "num_local_experts" in config:  # The key of transformers 5.
        config = Config({"num_experts": config["num_local_experts"], **config})
    moe = MoEConfig(
        n_experts=config["num_experts"],
        top_k=config.get("num_experts_per_tok", 8),
        expert_dim=config["moe_intermediate_size"],
        n_dense_layers=len(dense),
        score=Score.softmax,
        renormalise=config.get("norm_topk_prob", False),
        bias_update_rate=0.0,
    )
    return replace(qwen3(config), moe=moe)


def diffllama(config: Config) -> ModelConfig:
    config = Config({"rms_norm_eps": 1e-5, **config})  # The head norm has the same eps.
    return shape_of(config, DiffV1Config(head_norm_eps=config["rms_norm_eps"]))


def own(config: Config) -> ModelConfig:
    settings = dict(config["attention"])
    variant = Config(settings)["variant"]
    if variant not in VARIANTS:
        raise ValueError(f"has attention {variant}, which is not one of {', '.join(VARIANTS)}")
    # Older exports contain kernel settings.
    for key in ("variant", *kernel_settings(VARIANTS[variant])):
        settings.pop(key, None)
    attention = config_from_values(VARIANTS[variant], settings, "attention")
    heads = config["num_attention_heads"]
    n_heads: float = heads
    if isinstance(attention, DiffV1Config):  # The kernel reads two heads as one head.
        pairs, width = config["num_key_value_heads"], config["head_dim"]
        config = Config({**config, "num_key_value_heads": 2 * pairs, "head_dim": width // 2})
    elif isinstance(attention, StandardConfig):
        n_heads = heads / attention.query_heads
    elif isinstance(attention, DiffV2Config):
        n_heads = heads / 2
    if n_heads != round(n_heads):
        raise ValueError(f"has num_attention_heads={heads}, which {variant} cannot have")
    moe = config_from_values(MoEConfig, config.get("moe", {}), "moe")
    shape = shape_of(config, attention, round(n_heads))
    return replace(shape, moe=moe, qk_norm=config.get("qk_norm", False))


READERS: dict[str, Callable[[Config], ModelConfig]] = {
    "LlamaForCausalLM": llama,
    "Qwen3ForCausalLM": qwen3,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "DiffLlamaForCausalLM": diffllama,
    ARCHITECTURE: own,
}


def rope_of(config: Config) -> RopeConfig:
    """Return the RoPE config of diffllm for a config.json of transformers 4 or 5."""
    settings = Config(config.get("rope_parameters") or config.get("rope_scaling", {}))
    if any(isinstance(value, dict) for value in settings.values()):
        raise ValueError("has RoPE settings that differ by layer, which is not supported")
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ROPES:
        raise ValueError(f"has RoPE of type {kind}, which is not one of {', '.join(ROPES)}")
    others = [key for key in settings if key not in ROPE_KEYS]
    if others:
        raise ValueError(f"has unknown RoPE settings: {', '.join(others)}")
    older = {"rope_theta": config.get("rope_theta"), **Config(config.get("rope_scaling", {}))}
    # transformers 4 reads the older keys, transformers 5 the newer: both must agree.
    newer = {"type": kind, "rope_type": kind, **settings}
    for key, value in older.items():
        if value is not None and newer.get(key, value) != value:
            raise ValueError(f"has two values of {key}: {value} and {settings.get(key, kind)}")
    theta = config.get("rope_theta", 10_000.0)
    rope = RopeConfig(theta=settings.get("rope_theta", theta), scaling=ROPES[kind])
    if settings.get("partial_rotary_factor", 1.0) != 1.0:
        factor = settings["partial_rotary_factor"]
        raise ValueError(f"has partial_rotary_factor={factor}, but only 1 is supported")
    if kind != "default":
        rope.factor = settings["factor"]
    if kind in ("llama3", "yarn"):
        longest = config.get("max_position_embeddings", 2048)
        rope.original_seq_len = settings.get("original_max_position_embeddings", longest)
    if kind == "llama3":
        rope.low_freq_factor = settings["low_freq_factor"]
        rope.high_freq_factor = settings["high_freq_factor"]
    if kind == "yarn":
        rope.beta_slow = settings.get("beta_slow", 1.0)
        rope.beta_fast = settings.get("beta_fast", 32.0)
        if not settings.get("truncate", True):
            rope.yarn_ramp = YarnRamp.exact
        factor = settings.get("attention_factor")
        if factor is None and {"mscale", "mscale_all_dim"} <= settings.keys() and rope.factor > 1:
            numerator = 0.1 * settings["mscale"] * math.log(rope.factor) + 1
            denominator = 0.1 * settings["mscale_all_dim"] * math.log(rope.factor) + 1
            factor = numerator / denominator
        if factor != attention_factor(rope):
            rope.attention_factor = factor
    return rope


def config_from_values(cls: type[T], values: Any, section: str) -> T:
    if "${" in str(values):  # OmegaConf would resolve ${oc.env:...} and read the environment.
        raise ValueError(f"has an interpolation in its {section} settings")
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(cls), values))
    except (OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"has invalid {section} settings: {error}") from error
    assert isinstance(config, cls)
    return config


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "BF16", "F16")


class ModelDirectory:
    """Model config, parameters and tokenizer of a decoder in a Hugging Face model directory.

    The constructor raises CheckpointError for an unsupported model class, and for tensors that do
    not match config.json.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            with readable(path / CONFIG):
                # Follow links: files in the hub's cache are links.
                config = read_json(path / CONFIG, follow=True)
                self.architecture, self.model = model_of(config)
        except (ConfigError, ArithmeticError) as error:
            raise CheckpointError(f"{path / CONFIG} describes an invalid model: {error}") from error
        self._places = self._placed()
        moe = self.model.moe
        least = self.model.n_layers
        if self.architecture != ARCHITECTURE:  # Each expert has separate tensors.
            least = max(least, moe.n_experts * (least - moe.n_dense_layers))
        if len(self._places) < least:  # A forged config could describe billions of tensors.
            raise CheckpointError(
                f"{path} has {len(self._places)} tensors, but config.json needs at least {least}; "
                "use config.json and all weight files of the same model"
            )
        layout = layout_of(self.model, only_own=self.architecture == ARCHITECTURE)
        self._imported = {rule.name: rule for rule in layout.imported}
        self._check({rule.name: rule for rule in layout.exported})

    def tensor(self, name: str) -> Tensor:
        """Return the parameter with the diffllm name `name`, in float32."""
        rule = self._imported[name]
        try:
            sources = {key: self._places[key].get_tensor(key).float() for key in rule.sources}
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path} cannot be read: {error}") from error
        return rule.of(sources)

    @property
    def names(self) -> list[str]:
        return list(self._imported)

    @cached_property
    def tokenizer(self) -> Path:
        """Return the path of the tokenizer file: tokenizer.model, or tokenizer.json as a fallback.

        Raises CheckpointError if neither file can be read, or if the vocabulary of the tokenizer is
        larger than the vocabulary of the model.
        """
        refused = f"{self.path} has neither {MODEL} nor {FAST}"
        most = self.model.vocab_size
        for file in filter(Path.is_file, (self.path / MODEL, self.path / FAST)):
            try:
                pieces = Tokenizer.from_file(file).vocab_size
            except DataError as error:
                refused = str(error)
                continue
            if pieces > most:
                raise CheckpointError(
                    f"the tokenizer {file} has {pieces:,} tokens, but vocab_size in config.json is "
                    f"{most:,}; use a tokenizer with at most {most:,} tokens"
                )
            return file
        raise CheckpointError(refused)

    def _placed(self) -> dict[str, Any]:
        """Open the safetensors files; return a dict from tensor name to open file."""
        names = [WEIGHTS]
        if not (self.path / WEIGHTS).exists():
            if not (self.path / INDEX).exists():
                raise CheckpointError(
                    f"{self.path} has neither {WEIGHTS} nor {INDEX}; save the model as safetensors"
                )
            with readable(self.path / INDEX):
                files = read_json(self.path / INDEX, follow=True).get("weight_map")
                if not isinstance(files, dict) or not files:
                    raise ValueError("has no weight_map")
                for name in files.values():
                    if not isinstance(name, str) or name != os.path.basename(name):
                        raise ValueError(f"has {name!r} in its weight_map: not a file name")
            names = sorted(set(files.values()))
        places: dict[str, Any] = {}
        for name in names:
            with readable(self.path / name):  # Refuse a FIFO, at which safe_open would wait.
                open_regular(self.path / name, sys.maxsize, follow=True).close()
            try:
                file = safe_open(self.path / name, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{self.path / name} is damaged: {error}; download or copy the file again"
                ) from error
            places |= dict.fromkeys(file.keys(), file)
        return places

    def _check(self, exported: Mapping[str, Mapped]) -> None:
        """Raise CheckpointError if a tensor is missing, is unknown, or has a wrong shape or dtype.

        `exported` defines the name and the shape of each expected tensor. Allowed dtypes are
        float32, bfloat16 and float16.
        """
        model = without_storage(self.model)
        # Meta tensors: only their shapes are used.
        tensors = {**dict(model.named_parameters()), **model.router_state()}
        expected = {name: list(rule.of(tensors).shape) for name, rule in exported.items()}
        allowed = set(expected)
        if self.model.tie_embeddings:
            allowed.add("lm_head.weight")
        # Older versions of transformers saved the frequencies of RoPE.
        extra = [n for n in self._places if n not in allowed and not n.endswith(".inv_freq")]
        missing = [name for name in expected if name not in self._places]
        for verb, names in (("lacks", missing), ("has unknown", extra)):
            if names:
                raise CheckpointError(f"{self.path} {verb} tensors: {listed(names)}")
        for name, shape in expected.items():
            tensor = self._places[name].get_slice(name)
            if tensor.get_shape() != shape or tensor.get_dtype() not in FLOATS:
                dtype_and_shape = f"{tensor.get_dtype()} {tensor.get_shape()}"
                raise CheckpointError(
                    f"the tensor {name} in {self.path} is {dtype_and_shape}, but must be "
                    f"{' or '.join(FLOATS)} {shape}; "
                    "use weights that match config.json and are not quantized"
                )
