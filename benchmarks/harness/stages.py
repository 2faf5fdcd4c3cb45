"""The measurements of the three stages, with sizes for a GPU and small ones for a CPU."""

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
"""Overrides by contestant. V1's values are as wide as the paper's, or split for kernels."""
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
    "rounds": (4, 2),
    "repeats": (4, 1),
    "ceilings": ({"size": 8192, "mib": 4096}, {"size": 256, "mib": 16}),
    "kernel_widths": ([64, 128], [32]),
    "kernel_tokens": (4096, 64),
    "loss_chunks": ([512, 4096, 8192], [64, 512]),
    "contexts": ([1024, 4096, 16384, 65536], [32, 128]),
    "decoded": (64, 16),
    "test_limit": (130, 60),
    "diagnostics_rounds": (12, 3),
    "document": (600, 16),  # mean tokens
}  # fmt: skip
"""Shapes and repeats on a GPU, and on a CPU."""
BATCH = 4
"""Sequences per micro-batch."""
Contestants = dict[str, dict[str, Any]]
"""Arguments of `build_step` by name."""


def stage(name: str, small: bool, out: Path) -> list[Measurement]:
    """Return the measurements of a stage, the most important first."""
    s = Sizes(**{key: pair[small] for key, pair in SIZES.items()})
    return {"A": stage_a, "B": stage_b, "C": stage_c}[name](s, out)


def stage_a(s: Sizes, out: Path) -> list[Measurement]:
    """The machine, the chosen kernels, and the tests that need a GPU."""

    def kernels(name: str, arm: str, widths: list[int], backends: list[str]) -> Measurement:
        case = {"words": [*s.dense, *ARMS[arm]], "tokens": s.kernel_tokens, "widths": widths}
        return Measurement(
            f"{name} of {arm}", "harness.kernels.kernels", {**case, "backends": backends}
        )

    return [
        Measurement("facts", "harness.machine.facts"),
        Measurement("ceilings", "harness.machine.ceilings", s.ceilings),
        *(kernels("kernels", arm, s.kernel_widths, ["sdpa"]) for arm in ARMS),
        *(kernels("other kernels", arm, s.kernel_widths[-1:], ["flex", "flash"]) for arm in TWO),
        *(
            tests_of(file, s.test_limit)
            for file in sorted(ROOT.glob("tests/*/test_*.py"))
            if "pytest.mark.gpu" in file.read_text()
        ),
    ]


def tests_of(file: Path, limit: float) -> Measurement:
    """Run a file's tests, as many at the same time as fit into the memory."""
    name, large = str(file.relative_to(ROOT)), "plan" in file.name  # models of 1.3B parameters
    limit = 1.6 * limit if large else limit
    arguments = {"file": name, "limit": limit, "at_once": 2 if large else 4}
    return Measurement(f"tests of {name}", "harness.commands.tests", arguments, limit + 60)


def stage_b(s: Sizes, out: Path) -> list[Measurement]:
    """Training steps of dense models, single settings, and breakdowns of a step."""
    at_short, at_long = step_words(s, s.dense, s.short), step_words(s, s.dense, s.long, BATCH // 2)
    peers = {
        "plain torch": peer(s, "plain", at_short),
        "Llama, autocast": peer(s, "Llama", at_short),
        "Llama, bf16 weights": peer(s, "Llama", at_short, precision="bf16 weights"),
        "DiffLlama, autocast": peer(s, "DiffLlama", at_short),
    }
    settings = {
        "4 micro-batches": f"global_batch_size={4 * BATCH}",
        "activation checkpointing": "activation_checkpointing=true",
        **{f"loss_chunk {n}": f"model.loss_chunk={n}" for n in s.loss_chunks},
    }
    standard = [*at_short, *ARMS["standard"]]
    changed = {name: {"words": [*standard, word]} for name, word in settings.items()}
    longer = ours(at_long, "standard", "diff_v1 split", "diff_v2")
    longer["Llama, autocast"] = peer(s, "Llama", at_long)
    return [
        *steps(s, f"step at {s.short}", ours(at_short, *ARMS)),
        *breakdowns("dense", ours(at_short, *TWO)),
        *steps(s, f"step at {s.short}", peers),
        *steps(s, f"step at {s.long}", longer),
        *steps(s, f"step at {s.short}", changed),
    ]


def stage_c(s: Sizes, out: Path) -> list[Measurement]:
    """Mixtures, documents, diagnostics, decoding, memory, a run of train.py."""
    mixture = [*step_words(s, s.mixture, s.short), *AS_QWEN]
    experts = {**ours(mixture, *TWO), "Qwen3Moe, autocast": peer(s, "Qwen3Moe", mixture)}
    large = [*step_words(s, s.large_mixture, s.short, BATCH // 2), *AS_QWEN]
    larger = ours(large, "standard")
    larger["Qwen3Moe, bf16 weights"] = peer(s, "Qwen3Moe", large, precision="bf16 weights")
    dense, v2 = ([*step_words(s, s.dense, s.short), *ARMS[arm]] for arm in TWO)
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
    checkpointed = [*v2, "activation_checkpointing=true"]
    memory = {"standard": dense, "diff_v2": v2, "diff_v2, checkpointing": checkpointed}
    return [
        *steps(s, "mixture", experts),
        *breakdowns("mixture", ours(mixture, "standard")),
        *decoding(s, 1, s.contexts),
        *steps(s, "documents", documents),
        Measurement("training run", "harness.commands.training_run", training, 260),
        Measurement("diagnostics", "harness.steps.diagnostics", diagnosed, 200),
        *(
            Measurement(f"memory: {name}", "harness.steps.memory", {"words": words}, 200)
            for name, words in memory.items()
        ),
        *steps(s, "large mixture", larger),
        *decoding(s, 8, s.contexts[:-1]),
    ]


def steps(s: Sizes, group: str, contestants: Contestants) -> list[Measurement]:
    """Measure training steps; the first contestant of a group is the baseline of its ratios."""
    repeated = {"rounds": s.rounds, "repeats": s.repeats}
    return [
        Measurement(f"{group}: {name}", "harness.steps.measure", {**arguments, **repeated}, 240)
        for name, arguments in contestants.items()
    ]


def breakdowns(kind: str, contestants: Contestants) -> list[Measurement]:
    """Break one step of each contestant down by kernel."""
    return [
        Measurement(f"breakdown, ms: {kind}, {name}", "harness.kernels.step_breakdown", words, 240)
        for name, words in contestants.items()
    ]


def decoding(s: Sizes, batch: int, contexts: list[int]) -> list[Measurement]:
    """Measure the decoding of four variants over a growing context."""
    sizes = {"lengths": contexts, "tokens": s.decoded, "batch": batch}
    words = [*s.dense, f"seq_len={contexts[-1] + s.decoded}"]
    return [
        Measurement(
            f"decoding, batch {batch}: {attention}",
            "harness.decoding.decoding",
            {"words": [*words, f"attention={attention}"], **sizes},
            150,
        )
        for attention in ("standard", "gated", "diff_v1", "diff_v2")
    ]


def step_words(s: Sizes, model: list[str], seq: int, batch: int = BATCH) -> list[str]:
    """Return overrides of a training step with one micro-batch."""
    sizes = [f"seq_len={seq}", f"micro_batch_size={batch}", f"global_batch_size={batch}"]
    return [*model, *([] if s.compiled else ["compile=false"]), *sizes]


def ours(words: list[str], *arms: str) -> Contestants:
    """Return arguments of `build_step` for variants of ours."""
    return {arm: {"words": [*words, *ARMS[arm]]} for arm in arms}


def peer(s: Sizes, kind: str, words: list[str], precision: str = "bf16 autocast") -> dict[str, Any]:
    """Return arguments of `build_step` for a peer."""
    attention = f"attention={'diff_v1' if kind == 'DiffLlama' else 'standard'}"
    shape = {"kind": kind, "words": [*words, attention]}
    return {**shape, "precision": precision, "compiled": s.compiled}
