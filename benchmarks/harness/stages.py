"""The measurements of the three stages, with large sizes for a GPU and small sizes for a CPU."""

from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

from harness.corpus import WORDS as CORPUS
from harness.process import ROOT
from harness.running import Measurement

STAGES = ("A", "B", "C")
ARMS = {
    "standard": ["attention=standard"],
    "gated": ["attention=gated"],
    "diff_v1 wide": ["attention=diff_v1", "model.attention.values=wide"],
    "diff_v1 split": ["attention=diff_v1", "model.attention.values=split"],
    "diff_v2": ["attention=diff_v2"],
}
"""Overrides by contestant. The values of V1 are wide as in the paper, or split for fast kernels."""
TWO = ("standard", "diff_v2")
AS_QWEN = ["model.qk_norm=true", "model.moe.score=softmax"]
SIZES: dict[str, tuple[Any, Any]] = {
    "dense": (["model=dense_1p3b"], ["model=tiny"]),
    "mixture": (["model=moe_1b"], ["model=moe_tiny"]),
    "large_mixture": (["model=moe_30a3", "model.n_layers=6"],
                      ["model=moe_tiny", "model.moe.n_experts=16"]),
    "run": (["model=base_350m", "seq_len=4096", "global_batch_size=8", "micro_batch_size=4"],
            ["model=tiny", "seq_len=64", "global_batch_size=2", "compile=false"]),
    "compiled": (True, False),
    "short": (4096, 64),  # tokens per sequence
    "long": (8192, 128),
    "repeats": ({"rounds": 4, "repeats": 4}, {"rounds": 2, "repeats": 1}),
    "ceilings": ({"size": 8192, "mib": 4096}, {"size": 256, "mib": 16}),
    "kernel_widths": ([64, 128], [32]),
    "kernel_tokens": (4096, 64),
    "loss_chunks": ([512, 4096, 8192], [64, 512]),
    "contexts": ([1024, 4096, 16384, 65536], [32, 128]),
    "decoded": (64, 16),
    "diagnostics_rounds": (12, 3),
    "document": (600, 16),  # mean tokens
}  # fmt: skip
"""Shapes and repeats: on a GPU, on a CPU."""
BATCH = 4  # sequences per micro-batch
Contestants = dict[str, dict[str, Any]]  # arguments of measurements by name


def stage(name: str, small: bool, out: Path) -> list[Measurement]:
    """Return the measurements of a stage, the most important first."""
    s = Sizes(**{key: pair[small] for key, pair in SIZES.items()})
    return {"A": stage_a, "B": stage_b, "C": stage_c}[name](s, out)


def stage_a(s: Sizes, out: Path) -> list[Measurement]:
    """Measure the machine, the chosen kernels, memory and single settings; run the GPU's tests."""
    cases = {
        f"{arm}, {backend}": {"words": [*s.dense, *ARMS[arm], f"model.attention.backend={backend}"]}
        for backend, arms in (("sdpa", ARMS), ("flex", TWO), ("flash", TWO))
        for arm in arms
    }
    shape = {"tokens": s.kernel_tokens, "widths": s.kernel_widths}
    at_short = step_words(s, s.dense, s.short)
    standard, v2 = ([*at_short, *ARMS[arm]] for arm in TWO)
    settings = {
        "4 micro-batches": f"global_batch_size={4 * BATCH}",
        "activation checkpointing": "activation_checkpointing=full",
        **{f"loss_chunk {n}": f"model.loss_chunk={n}" for n in s.loss_chunks},
    }
    changed = {name: {"words": [*standard, word]} for name, word in settings.items()}
    memory = ours(at_short, *TWO)
    memory["diff_v2, checkpointing"] = {"words": [*v2, "activation_checkpointing=full"]}
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    return [
        Measurement("facts", "harness.machine.facts"),
        Measurement("ceilings", "harness.machine.ceilings", s.ceilings),
        *each("kernels", "kernels.kernels", cases, 120, **shape),
        *(
            tests_of(str(x.relative_to(ROOT)))
            for x in files
            if "pytest.mark.gpu" in x.read_text(encoding="utf-8")
        ),
        *each("memory", "steps.memory", memory),
        *each(
            f"settings at {s.short}",
            "steps.measure",
            {"default": {"words": standard}, **changed},
            **s.repeats,
        ),
    ]


def tests_of(file: str) -> Measurement:
    """Run a file's tests, as many in parallel as fit into the memory."""
    at_once = 2 if "plan" in file else 4  # tests of plans compare peak memory
    arguments = {"file": file, "limit": 210, "at_once": at_once}
    return Measurement(f"tests of {file}", "harness.commands.tests", arguments, 240)


def stage_b(s: Sizes, out: Path) -> list[Measurement]:
    """Measure training steps of dense models and peers, and rooflines of a step."""
    at_short, at_long = step_words(s, s.dense, s.short), step_words(s, s.dense, s.long, BATCH // 2)
    group = f"step at {s.short}"
    compiled = [*(word for word in at_short if word != "compile=false"), "compile=true"]
    peers = {
        "plain torch": peer(s, "plain", at_short),
        "Llama, autocast": peer(s, "Llama", at_short),
        "Llama, bf16 weights": peer(s, "Llama", at_short, precision="bf16 weights"),
        "DiffLlama, autocast": peer(s, "DiffLlama", at_short),
    }
    longer = ours(at_long, "standard", "diff_v1 split", "diff_v2")
    return [
        *each(group, "steps.measure", ours(at_short, *ARMS), **s.repeats),
        *each("roofline in ms", "roofline.roofline", ours(compiled, *ARMS)),
        *each(group, "steps.measure", peers, **s.repeats),
        *each(f"step at {s.long}", "steps.measure", longer, **s.repeats),
    ]


def stage_c(s: Sizes, out: Path) -> list[Measurement]:
    """Measure mixtures, masked documents, diagnostics, decoding, and a run of train.py."""
    mixture = [*step_words(s, s.mixture, s.short), *AS_QWEN]
    experts = {**ours(mixture, *TWO), "Qwen3Moe, autocast": peer(s, "Qwen3Moe", mixture)}
    large = [*step_words(s, s.large_mixture, s.short, BATCH // 2), *AS_QWEN]
    larger = ours(large, "standard")
    larger["Qwen3Moe, bf16 weights"] = peer(s, "Qwen3Moe", large, precision="bf16 weights")
    at_short = step_words(s, s.dense, s.short)
    dense, v2 = ([*at_short, *ARMS[arm]] for arm in TWO)
    masked = {"document_length": s.document}
    documents: Contestants = {
        "not masked": {"words": dense},
        "masked, varlen": {"words": dense, "document_kernel": "varlen", **masked},
    }
    for name in ("sdpa", "flex", "flash"):
        words = [*dense, f"model.attention.backend={name}"]
        documents[f"masked, {name}"] = {"words": words, **masked}
    run = [*CORPUS, *s.run, "wandb.mode=disabled", "steps=30", "checkpoint.interval=10"]
    run += ["optim.warmup_steps=5", "log_interval=5", "run.report=false"]
    training = {"words": run, "folder": str(out / "run"), "limit": 230}
    diagnosed = {"words": v2, "rounds": s.diagnostics_rounds}
    return [
        *each("mixture", "steps.measure", experts, **s.repeats),
        *each("breakdown of a mixture in ms", "kernels.step_breakdown", ours(mixture, "standard")),
        *decoding(s, 1, s.contexts),
        *each("documents", "steps.measure", documents, **s.repeats),
        Measurement("training run", "harness.commands.training_run", training, 260),
        Measurement("diagnostics", "harness.steps.diagnostics", diagnosed, 200),
        *each("large mixture", "steps.measure", larger, **s.repeats),
        *decoding(s, 8, s.contexts[:-1]),
    ]


def decoding(s: Sizes, batch: int, contexts: list[int]) -> list[Measurement]:
    """Measure the decoding of four variants over a growing context."""
    models = ours([*s.dense, f"seq_len={contexts[-1] + s.decoded}"], *ARMS)
    models.pop("diff_v1 split")
    sizes = {"lengths": contexts, "tokens": s.decoded, "batch": batch}
    return each(f"decoding, batch {batch}", "decoding.decoding", models, 150, **sizes)


def each(
    group: str, function: str, contestants: Contestants, limit: float = 240, **more: Any
) -> list[Measurement]:
    """Return one measurement per contestant; tables show ratios to the first contestant."""
    return [
        Measurement(f"{group}: {name}", f"harness.{function}", {**arguments, **more}, limit)
        for name, arguments in contestants.items()
    ]


def step_words(s: Sizes, model: list[str], seq: int, batch: int = BATCH) -> list[str]:
    """Return overrides of a training step with one micro-batch."""
    sizes = [f"seq_len={seq}", f"micro_batch_size={batch}", f"global_batch_size={batch}"]
    return [*model, *([] if s.compiled else ["compile=false"]), *sizes]


def ours(words: list[str], *arms: str) -> Contestants:
    """Return arguments of `build_step` for variants of diffllm."""
    return {arm: {"words": [*words, *ARMS[arm]]} for arm in arms}


def peer(s: Sizes, kind: str, words: list[str], precision: str = "bf16 autocast") -> dict[str, Any]:
    """Return arguments of `build_step` for a peer."""
    attention = f"attention={'diff_v1' if kind == 'DiffLlama' else 'standard'}"
    shape = {"kind": kind, "words": [*words, attention]}
    return {**shape, "precision": precision, "compiled": s.compiled}
