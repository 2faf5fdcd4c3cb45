"""Invalid configs derived from the config tree: every error is a ConfigError of one line.

Accepted configs must be usable: `assert_meaningful` builds the model, schedule and other parts.
The slow tier draws more cases than the fast tier.
"""

import copy
import functools
import itertools
import math
import random
import re
import struct
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from runs.command import changes, snapshot
from tiers import slow_but

from diffllm.config import TrainConfig, load_config
from diffllm.config.compose import variant_config
from diffllm.config.overrides import CONFIG_GROUPS
from diffllm.config.values import check_values, leaves
from diffllm.core.bounds import RULES, check_bounds
from diffllm.core.errors import LONGEST, ConfigError
from diffllm.metrics.diagnostics import probe_positions
from diffllm.model import ModelConfig, build_model
from diffllm.model.rope import RopeScaling, frequencies
from diffllm.optim import learning_rate

pytestmark = pytest.mark.timeout(600)

BASE = ["model=tiny", "seq_len=16", "steps=50", "optim.warmup_steps=2"]
MOE = ["model=moe_tiny", *BASE[1:]]
DENSE, MIXTURE = load_config(BASE), load_config(MOE)
KEYS = {key: (declared, value) for key, declared, value in leaves(DENSE)}

NOT_A_SECTION = ["[1]", "{a: 1}"]
WRONG: dict[object, list[str]] = {
    int: ["many", "1.5", "nan", "1e400", "''", "true", f"{10**30}", f"-{10**30}", *NOT_A_SECTION],
    float: ["fast", "nan", "-inf", "1e400", "1e39", "1e-50", "''", "true", *NOT_A_SECTION],
    bool: ["maybe", "2", "-1", "1.5", "''", *NOT_A_SECTION],
    str: ["''", "'  '", "'a\tb'", "'\x1b[31m'", "x" * 5000, *NOT_A_SECTION],
    list[str]: ["''", "[[a]]", "[null]", "['']", "{a: b}", "${steps}", "${precision}"],
    list[int]: ["3", "a", "''", "[a, b]", "[[1], [2]]", "[null]", "[1.5, 2]", "${precision}"],
    Enum: ["nothing", "0.5", "''", "'two words'", *NOT_A_SECTION],
}
ANY_TEXT = ("data.sample_prompt",)
PARTS_OF_A_RUN = ("resolved.",)


@pytest.fixture(autouse=True)
def untouched(tmp_path, monkeypatch, capfd):
    """Assert that a test writes no file and prints nothing."""
    for name in ("cwd", "home", "cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "cwd" / "mine").write_text("mine", encoding="utf-8")
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DIFFLLM_CACHE", str(tmp_path / "cache"))
    before = snapshot(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not changes(before, snapshot(tmp_path))
    assert capfd.readouterr() == ("", "")


def few_or(many: int, few: int) -> Any:
    """Parametrize a test by the number of cases: `few`, and `many` in the slow tier."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def line_of(check: Callable[[], object]) -> str | None:
    """Return the message of a ConfigError that `check` raises, or None without an error."""
    try:
        check()
        return None
    except ConfigError as error:
        line = str(error)
    assert line.isprintable(), line
    assert len(line) <= LONGEST + 10
    assert "Error:" not in line, f"the message names an exception class: {line}"
    return line


def overrides_error(words: list[str]) -> str | None:
    """Return the error for these overrides on one rank, or None for valid overrides."""
    return line_of(lambda: load_config(words).check_world(1))


def checked(cfg: TrainConfig, world_size: int = 1) -> None:
    check_values(cfg)
    cfg.validate()
    cfg.check_world(world_size)


def assert_overrides_refused(words: list[str], *named: str) -> None:
    line = overrides_error(words)
    assert line is not None, f"{words} was accepted"
    missing = [name for name in named if name not in line]
    assert not missing, f"{words} gave: {line}"


def base_type(declared: Any) -> tuple[Any, bool]:
    """Return (type, allows None), such as (int, True) for `int | None`; all enums are Enum."""
    parts = typing.get_args(declared) if isinstance(declared, types.UnionType) else (declared,)
    kind = next(part for part in parts if part is not type(None))
    optional = type(None) in parts
    return Enum if isinstance(kind, type) and issubclass(kind, Enum) else kind, optional


def wrong_values(key: str) -> list[str]:
    kind, optional = base_type(KEYS[key][0])
    values = [] if key in ANY_TEXT else list(WRONG.get(kind, ["[1]"]))
    return [*values, *([] if optional else ["null"])]


@few_or(many=60, few=5)
def test_override_with_value_of_wrong_type_is_refused(rng, count):
    keys = sorted(KEYS)
    rng.shuffle(keys)
    for key in itertools.islice(itertools.cycle(keys), count):
        value = rng.choice(NOT_A_SECTION if key in ANY_TEXT else wrong_values(key))
        named = "cannot set" if key.startswith(PARTS_OF_A_RUN) else key.split(".")[-1]
        assert_overrides_refused([*BASE, f"{key}={value}"], named)


KINDS = {key: base_type(declared)[0] for key, (declared, _) in KEYS.items()}
NUMBERS = {key: kind for key, kind in KINDS.items() if kind in (int, float)}
EDGES = {
    int: [0, -1, 1, 2, 3, 7, -2, 10**5, 2**31, 2**63 - 1, 2**63],
    float: [0, -1, 1, 0.5, 1.5, 1e-30, 1e-38, 1e-50, 1e30, 3e38, 1e39, -0.0],
}


EDGE_CASES = [(key, kind(value)) for key, kind in NUMBERS.items() for value in EDGES[kind]]


@few_or(many=len(EDGE_CASES), few=40)
def test_config_with_extreme_number_is_refused_or_valid(rng, count):
    """Set single numbers in a typed config; the slow tier tries every case."""
    for key, value in rng.sample(EDGE_CASES, count):
        cfg = config_with(MIXTURE if key.startswith("model.moe.") else DENSE, key, value)
        line = line_of(functools.partial(checked, cfg))
        if line is None:
            assert_meaningful(cfg)
        else:
            assert key.split(".")[-1] in line, f"{key}={value} gave: {line}"


def config_with(cfg: TrainConfig, key: str, value: float) -> TrainConfig:
    """Return a copy with one changed value; also change values derived from this value."""
    cfg = copy.deepcopy(cfg)
    follows = {"seq_len": "model.seq_len", "seed": "model.init_seed"}
    follows["model.vocab_size"] = "data.vocab_size"
    for name in filter(None, [key, follows.get(key)]):
        *sections, last = name.split(".")
        setattr(functools.reduce(getattr, sections, cfg), last, value)
    return cfg


def assert_meaningful(cfg: TrainConfig) -> None:
    """Assert that the parts of a run can be built from this config."""
    assert_schedule(cfg)
    assert_rope(cfg)
    if cfg.model.n_layers <= 16 and cfg.model.seq_len <= 2**20:
        assert_builds(cfg)
    micro, count = cfg.micro_batches(1)
    assert micro * count == cfg.global_batch_size
    assert cfg.parallel.sizes(1) == (1, 1, 1)
    assert timedelta(seconds=cfg.distributed.timeout) > timedelta(0)
    torch.Generator().manual_seed(cfg.seed)
    if cfg.seq_len <= 2**20:
        positions = probe_positions(cfg.diagnostics, cfg.seq_len, cfg.seed, 1)
        assert positions is None or 0 <= positions.min() <= positions.max() < cfg.seq_len
    for key, declared, value in leaves(cfg):
        if base_type(declared)[0] is float and value is not None:
            as_float32 = struct.unpack("f", struct.pack("f", value))[0]
            assert math.isfinite(as_float32), key
            assert bool(as_float32) == bool(value), f"{key}={value} is 0 in float32"
    text = OmegaConf.to_yaml(OmegaConf.structured(cfg))
    assert OmegaConf.to_yaml(OmegaConf.create(text)) == text


def assert_schedule(cfg: TrainConfig) -> None:
    steps = {0, 1, cfg.optim.warmup_steps, cfg.steps // 2, cfg.steps - 1}
    for step in (step for step in steps if step < cfg.steps):
        rate = learning_rate(cfg.optim, step, cfg.steps)
        assert 0 <= rate <= cfg.optim.lr * (1 + 1e-9)
    if cfg.optim.warmup_steps < cfg.steps:
        last = learning_rate(cfg.optim, cfg.steps - 1, cfg.steps)
        assert last == pytest.approx(cfg.optim.lr * cfg.optim.min_lr_ratio, rel=1e-6, abs=1e-30)


def assert_rope(cfg: TrainConfig) -> None:
    radians = frequencies(cfg.model.rope, min(cfg.model.head_dim, 2**12))
    assert radians.isfinite().all()
    assert (radians >= 0).all()
    assert (radians <= 1 + 1e-9).all()


def assert_builds(cfg: TrainConfig) -> None:
    """Assert that the model builds and computes logits on meta tensors."""
    with torch.device("meta"):
        model = build_model(cfg.model)
        tokens = torch.zeros(1, min(cfg.seq_len, 64), dtype=torch.int64)
        logits = model(tokens)
    assert logits.shape == (1, tokens.shape[1], cfg.model.vocab_size)
    sizes = [param.numel() for param in model.parameters()]
    assert min(sizes) >= 1
    assert 4 * sum(sizes) < 2**63
    assert 0 < model.flops_per_token() < math.inf


def misspelt(rng: random.Random, name: str) -> str:
    """Return a name with one letter added or removed, or with two letters swapped."""
    letters, i = "abcdefghijklmnopqrstuvwxyz", rng.randrange(len(name))
    letter = rng.choice(letters)
    swapped = name[: i - 1] + name[i] + name[i - 1] + name[i + 1 :] if i else name
    return rng.choice([name[:i] + letter + name[i:], name[:i] + name[i + 1 :], swapped])


@few_or(many=60, few=5)
def test_override_with_misspelt_key_is_refused(rng, count):
    for key in rng.sample(sorted(KEYS), count):
        section, _, name = key.rpartition(".")
        wrong = ".".join(filter(None, [section, misspelt(rng, name)]))
        if wrong in KEYS or wrong.startswith(PARTS_OF_A_RUN) or wrong in CONFIG_GROUPS:
            continue
        prefix = rng.choice(["", "", "+", "++"])
        named = wrong.rpartition(".")[2] or "key=value"
        assert_overrides_refused([*BASE, f"{prefix}{wrong}=1"], named)


# Overrides that Hydra accepts and runs must refuse.
ODD = [
    (["~run"], "~run"),
    (["+steps=5"], "+steps=5"),
    (["hydra/launcher=basic"], "hydra/launcher"),
    (["hydra=null"], "hydra=null"),
    (["resolved.choices={attention: gated}"], "resolved.choices"),
    (["run={matched: null}"], "run={matched"),
    (["model.seq_len=32"], "model.seq_len=32"),
    (["wandb={mode: offline, colour: red}"], "colour"),
    (["optim.lr.x=1"], "optim.lr.x=1"),
    (["steps=${steps}"], "steps"),
    (["steps=${oc.env:NO_SUCH_VARIABLE}"], "interpolation is not allowed"),
    (["steps=range(1,9)"], "steps=range(1,9)"),
    (["steps=" + "9" * 5000], "4300 digits"),
    (["+_target_=os.system"], "_target_"),
    (["--steps"], "'--steps'"),
    ([""], "''"),
    (["steps =5"], "'steps =5'"),
    (["data.split=\udcff"], "data.split"),
    (["data.split='\x00'"], "data.split"),
    (["x" * 100_000], "key=value"),
    (["steps=" + "[" * 500 + "]" * 500], "steps=[[[["),
]


@pytest.mark.parametrize(
    ("words", "named"), slow_but(ODD[::3], ODD), ids=lambda value: str(value)[:40]
)
def test_unsupported_hydra_override_is_refused(words, named):
    assert_overrides_refused([*BASE, *words], named)


def test_load_config_uses_last_override_of_a_repeated_key():
    """Launch scripts put default overrides before the overrides of the user."""
    assert load_config([*BASE, "seed=1", "seed=2", "model=mini", "model=tiny"]).seed == 2


SIZES = st.sampled_from([-2, -1, 0, 1, 2, 3, 4, 5, 6, 8, 10**9])


@settings(max_examples=500)
@given(
    world=st.integers(1, 12),
    replicate=SIZES,
    shard=SIZES,
    expert=SIZES,
    batch=st.integers(0, 24),
    micro=st.one_of(st.none(), st.integers(0, 8)),
    cfg=st.sampled_from([DENSE, MIXTURE]),
)
def test_config_is_accepted_only_if_mesh_and_batch_sizes_fit_world_size(
    world, replicate, shard, expert, batch, micro, cfg
):
    parallel = replace(cfg.parallel, replicate=replicate, shard=shard, expert=expert)
    cfg = replace(cfg, parallel=parallel, global_batch_size=batch, micro_batch_size=micro)
    natural = range(1, world + 1)
    meshes = [
        mesh
        for mesh in itertools.product(natural, natural, natural)
        if math.prod(mesh) == world
        and replicate in (mesh[0], -1)
        and shard in (mesh[1], -1)
        and expert == mesh[2]
        and not replicate == shard == -1
    ]
    n_experts, widths = cfg.model.moe.n_experts, (cfg.model.moe.expert_dim, cfg.model.dim)
    meshes = [
        (r, s, e)
        for r, s, e in meshes
        if e == 1
        or (n_experts and not n_experts % e and any(n % s == 0 for n in (n_experts // e, *widths)))
    ]
    even = batch > 0 and not batch % world
    even = even and (micro is None or (micro > 0 and not batch // world % micro))
    line = line_of(lambda: (cfg.validate(), cfg.check_world(world)))
    assert (line is None) == bool(even and meshes), line
    if line is None:
        assert meshes == [cfg.parallel.sizes(world)]


VARIANTS = [
    variant_config(name)
    for name in ("standard", "standard_1p5x_heads", "gated", "diff_v1", "diff_v2", "standard_sink")
]


SHAPES = {
    "n_heads": st.integers(0, 6),
    "n_kv_heads": st.integers(-1, 6),
    "head_dim": st.sampled_from([-2, 0, 1, 2, 3, 8, 9]),
    "n_layers": st.integers(-1, 3),
    "vocab_size": st.sampled_from([0, 1, 2, 50]),
    "seq_len": st.sampled_from([1, 2, 16]),
    "tie_embeddings": st.booleans(),
    "attention": st.sampled_from(VARIANTS),
}


@settings(max_examples=150)
@given(st.fixed_dictionaries(SHAPES))
def test_random_model_config_is_refused_or_builds_a_model(shape):
    refused_or_built(replace(DENSE.model, **shape))


MIXTURES = {
    "n_experts": st.integers(-1, 4),
    "top_k": st.integers(-1, 5),
    "expert_dim": st.sampled_from([-8, 0, 1, 8]),
    "n_shared": st.integers(-1, 2),
    "n_dense_layers": st.integers(-1, 3),
}


@settings(max_examples=150)
@given(st.fixed_dictionaries(MIXTURES))
def test_random_mixture_of_experts_config_is_refused_or_builds_a_model(mixture):
    refused_or_built(replace(MIXTURE.model, moe=replace(MIXTURE.model.moe, **mixture)))


def refused_or_built(model: ModelConfig) -> None:
    line = line_of(model.validate)
    if line is None:
        assert_builds(replace(DENSE, model=model, seq_len=model.seq_len))
        moe = model.moe
        assert moe.top_k <= moe.n_experts or not moe.n_experts
    else:
        assert line.startswith(("model.", "attention="))


ROPE_VALUES = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 32.0, 1e4, 1e30])


ORIGINAL = st.sampled_from([None, -1, 0, 1, 64, 10**12])
LLAMA = {"low_freq_factor": ROPE_VALUES, "high_freq_factor": ROPE_VALUES}
YARN = {
    "beta_slow": ROPE_VALUES,
    "beta_fast": ROPE_VALUES,
    "attention_factor": st.none() | ROPE_VALUES,
}
FIELDS = {
    RopeScaling.none: {},
    RopeScaling.linear: {"factor": ROPE_VALUES},
    RopeScaling.llama3: {"factor": ROPE_VALUES, "original_seq_len": ORIGINAL, **LLAMA},
    RopeScaling.yarn: {"factor": ROPE_VALUES, "original_seq_len": ORIGINAL, **YARN},
}


@settings(max_examples=500)
@given(
    st.one_of(
        st.fixed_dictionaries({"scaling": st.just(scaling), "theta": ROPE_VALUES, **own})
        for scaling, own in FIELDS.items()
    )
)
def test_rope_scaling_config_is_refused_or_gives_finite_frequencies(changes):
    rope = replace(DENSE.model.rope, **changes)
    line = line_of(lambda: (check_bounds("model.rope.", rope), rope.validate()))
    if line is None:
        assert_rope(replace(DENSE, model=replace(DENSE.model, rope=rope)))
    else:
        assert line.startswith("model.rope.")


def bounds_below(node: Any, prefix: str = "") -> Iterator[tuple[str, str, float]]:
    """Yield (dotted key, rule, bound) for every bound of a field below a config dataclass."""
    for f in fields(node):
        value = getattr(node, f.name)
        if is_dataclass(value):
            yield from bounds_below(value, f"{prefix}{f.name}.")
        for rule in RULES:
            if rule in f.metadata:
                yield f"{prefix}{f.name}", rule, f.metadata[rule]


BOUNDS = [bound for bound in bounds_below(DENSE) if not bound[0].startswith(PARTS_OF_A_RUN)]


@pytest.mark.parametrize(("key", "rule", "bound"), BOUNDS)
def test_error_for_config_value_beyond_bound_mentions_the_bound(key, rule, bound):
    kind = base_type(KEYS[key][0])[0]
    step = {"least": -1, "above": 0, "most": 1, "below": 0}[rule]
    value = bound + step if kind is int or not step else math.nextafter(bound, math.inf * step)
    cfg = config_with(DENSE, key, kind(value))
    for check in (cfg.validate, functools.partial(checked, cfg)):
        line = line_of(check)
        assert line is not None
        assert key.split(".")[-1] in line
        assert re.search(rf"positive|negative|{re.escape(str(bound))}", line), "no bound"
