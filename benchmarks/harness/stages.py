"""The measurements of the three stages, at sizes for a GPU and for a CPU.

Both sizes go through the same functions; only shapes and repeats differ.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.corpus import WORDS as CORPUS
from harness.records import ROOT
from harness.running import Group, Measurement

STAGES = ("A", "B", "C")
ARMS = {
    "standard": ["attention=standard"],
    "gated": ["attention=gated"],
    "diff_v1 wide": ["attention=diff_v1", "model.attention.values=wide"],
    "diff_v1 split": ["attention=diff_v1", "model.attention.values=split"],
    "diff_v2": ["attention=diff_v2"],
}
"""The contestants by name. V1's values are as wide as the paper's, or split for kernels."""
PEER_OF = {"Llama": "standard", "DiffLlama": "diff_v1", "Qwen3Moe": "standard"}
AS_QWEN = ["model.qk_norm=true", "model.moe.score=softmax"]


@dataclass(frozen=True)
class Sizes:
    """Shapes and repeats of all that is measured."""

    dense: list[str]
    """The model of stage B, of which five fit into a GPU's memory side by side."""
    whole: list[str] | None
    """The model at its full depth; None leaves it out."""
    mixture: list[str]
    large_mixture: list[str]
    lengths: tuple[int, int]
    """Tokens of a sequence in stage B."""
    batch: int
    """Sequences a forward pass at the first length; half as many at the second."""
    common: list[str] = field(default_factory=list)
    compiled: bool = True
    rounds: int = 4
    repeats: int = 4
    at_once: int = 3
    product: int = 8192
    copy_mib: int = 4096
    kernel_widths: tuple[int, ...] = (64, 128)
    kernel_tokens: int = 4096
    loss_chunks: tuple[int, ...] = (512, 4096, 8192)
    decoding: list[str] = field(default_factory=list)
    contexts: tuple[int, ...] = (1024, 4096, 16384, 65536)
    decoded: int = 64
    test_limit: float = 130
    run: list[str] = field(default_factory=list)
    diagnosed: list[str] = field(default_factory=list)
    diagnostics_rounds: int = 12
    remembered: list[str] = field(default_factory=list)
    document: int = 600
    """Tokens of a document on average."""


GPU = Sizes(
    # Half as deep as it is meant, so that contestants fit into the memory side by side.
    dense=["model=dense_1p3b", "model.n_layers=12"],
    whole=["model=dense_1p3b"],
    mixture=["model=moe_1b"],
    large_mixture=["model=moe_30a3", "model.n_layers=6"],
    lengths=(4096, 8192),
    batch=4,
    decoding=["model=dense_1p3b", "model.n_layers=12"],
    run=["model=base_350m", "seq_len=4096", "global_batch_size=8", "micro_batch_size=4"],
    diagnosed=["model=dense_1p3b", "model.n_layers=12", "seq_len=4096", "global_batch_size=4"],
    remembered=["model=dense_1p3b", "model.n_layers=4", "seq_len=4096", "global_batch_size=4"],
)
SMALL = Sizes(
    dense=["model=tiny"],
    whole=None,
    mixture=["model=moe_tiny"],
    large_mixture=["model=moe_tiny", "model.moe.n_experts=16"],
    lengths=(64, 128),
    batch=4,
    compiled=False,
    common=["compile=false"],
    rounds=2,
    repeats=1,
    at_once=2,
    product=256,
    copy_mib=16,
    kernel_widths=(32,),
    kernel_tokens=64,
    loss_chunks=(64, 512),
    decoding=["model=tiny"],
    contexts=(32, 128),
    decoded=16,
    test_limit=60,
    run=["model=tiny", "seq_len=64", "global_batch_size=2", "compile=false"],
    diagnosed=["model=tiny", "seq_len=64", "global_batch_size=2", "compile=false"],
    diagnostics_rounds=3,
    remembered=["model=tiny", "seq_len=64", "global_batch_size=2"],
    document=16,
)


def stage(name: str, sizes: Sizes, out: Path) -> list[Measurement | Group]:
    """The measurements of a stage, those that matter most first."""
    return {"A": stage_a, "B": stage_b, "C": stage_c}[name](sizes, out)


def stage_a(s: Sizes, out: Path) -> list[Measurement | Group]:
    """The machine, the kernels that are chosen, the tests that need a GPU."""

    def kernels(name: str, arm: str, widths: tuple[int, ...], backends: list[str]) -> Measurement:
        shape = {"words": [*s.dense, *ARMS[arm]], "widths": list(widths), "tokens": s.kernel_tokens}
        return Measurement(
            f"{name} of {arm}", "harness.kernels.kernels", {**shape, "backends": backends}
        )

    return [
        Measurement("facts", "harness.machine.facts", {}),
        Measurement("product", "harness.machine.product", {"size": s.product}),
        Measurement("copy", "harness.machine.copy", {"mib": s.copy_mib}),
        *(kernels("kernels", arm, s.kernel_widths, ["sdpa"]) for arm in ARMS),
        *(
            kernels("other kernels", arm, s.kernel_widths[-1:], ["flex", "flash"])
            for arm in ("standard", "diff_v2")
        ),
        *(tests_of(file, s.test_limit) for file in gpu_tests()),
    ]


def tests_of(file: str, limit: float) -> Measurement:
    """A file's tests, several at once where they leave each other memory."""
    large = "plan" in file  # models of 1.3B parameters that are trained
    limit = 1.6 * limit if large else limit
    arguments = {"file": file, "limit": limit, "at_once": 2 if large else 4}
    return Measurement(f"tests of {file}", "harness.machine.tests", arguments, limit + 60, 60)


def gpu_tests() -> list[str]:
    """The files with tests that need a GPU."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    marked = (file for file in files if "pytest.mark.gpu" in file.read_text())
    return [str(file.relative_to(ROOT)) for file in marked]


def stage_b(s: Sizes, out: Path) -> list[Measurement | Group]:
    """Training steps of dense models, and sweeps of what can be set."""
    short, long = s.lengths
    at_short = words_of(s, s.dense, short, s.batch)
    at_long = words_of(s, s.dense, long, max(1, s.batch // 2))
    ours = {arm: {"words": [*at_short, *words]} for arm, words in ARMS.items()}
    standard = {"standard": ours["standard"]}
    peers = {
        **standard,
        "plain torch": peer(s, "plain", at_short),
        "Llama, autocast": peer(s, "Llama", at_short),
        "Llama, bf16 weights": peer(s, "Llama", at_short, precision="bf16 weights"),
        "DiffLlama, autocast": peer(s, "DiffLlama", at_short),
    }
    longer = {arm: {"words": [*at_long, *words]} for arm, words in ARMS.items()}
    longer["Llama, autocast"] = peer(s, "Llama", at_long)
    groups = [
        Group(f"step at {short}", ours, s.rounds, s.repeats, s.at_once, ("standard", "diff_v2")),
        Group(f"peers at {short}", peers, s.rounds, s.repeats, 2),  # larger than ours
        Group(f"step at {long}", longer, s.rounds, s.repeats, s.at_once),
        Group(f"sweep at {short}", sweep(s, at_short), s.rounds, s.repeats, s.at_once),
    ]
    if s.whole:
        words = words_of(s, s.whole, short, s.batch)
        whole = {arm: {"words": [*words, *ARMS[arm]]} for arm in ("standard", "diff_v2")}
        whole["Llama, autocast"] = peer(s, "Llama", words)
        name = f"full depth at {short}"
        groups.insert(1, Group(name, whole, s.rounds, s.repeats, 1, ("standard", "diff_v2")))
    return groups


def sweep(s: Sizes, words: list[str]) -> dict[str, dict[str, Any]]:
    """Standard attention with one setting changed; accumulation over four micro-batches."""
    base = [*words, *ARMS["standard"]]
    four = [*base, f"global_batch_size={4 * s.batch}"]
    return {
        "as it comes": {"words": base},
        **{f"loss_chunk {n}": {"words": [*base, f"model.loss_chunk={n}"]} for n in s.loss_chunks},
        "activation checkpointing": {"words": [*base, "activation_checkpointing=true"]},
        "4 micro-batches": {"words": four},
    }


def stage_c(s: Sizes, out: Path) -> list[Measurement | Group]:
    """Mixtures, documents, diagnostics, decoding, memory, a whole run."""
    short = s.lengths[0]
    mixture = [*words_of(s, s.mixture, short, s.batch), *AS_QWEN]
    experts = {arm: {"words": [*mixture, *ARMS[arm]]} for arm in ("standard", "diff_v2")}
    experts["Qwen3Moe, autocast"] = peer(s, "Qwen3Moe", mixture)
    dense = [*words_of(s, s.dense, short, s.batch), *ARMS["standard"]]
    masked = {"document_length": s.document}
    documents = {
        "not masked": {"words": dense},
        "masked, varlen": {"words": dense, "document_kernel": "varlen", **masked},
        **{
            f"masked, {backend}": {
                "words": [*dense, f"model.attention.backend={backend}"],
                **masked,
            }
            for backend in ("sdpa", "flex", "flash")
        },
    }
    run = [*CORPUS, *s.run, "wandb.mode=disabled", "steps=30", "checkpoint.interval=10"]
    run += ["optim.warmup_steps=5", "log_interval=5", "run.report=false"]
    training = {"words": run, "folder": str(out / "run"), "limit": 230}
    large = [*words_of(s, s.large_mixture, short, max(1, s.batch // 2)), *AS_QWEN]
    alone = {"standard": {"words": [*large, *ARMS["standard"]]}}
    alone["Qwen3Moe, bf16 weights"] = peer(s, "Qwen3Moe", large, precision="bf16 weights")
    return [
        Group("mixture", experts, s.rounds, s.repeats, s.at_once, ("standard",)),
        Measurement("decoding", "harness.decoding.decoding", decoding(s, 1), 150),
        Group("documents", documents, s.rounds, s.repeats, s.at_once),
        Measurement("training run", "harness.training.training_run", training, 260, 150),
        Measurement(
            "diagnostics",
            "harness.training.diagnostics",
            {"words": [*s.diagnosed, *ARMS["diff_v2"]], "rounds": s.diagnostics_rounds},
        ),
        *(
            Measurement(
                f"memory of {arm}{', checkpointing' * checkpointing}",
                "harness.training.memory",
                {"attention": arm, "checkpointing": checkpointing, "words": s.remembered},
                200,
            )
            for arm, checkpointing in (("standard", False), ("diff_v2", False), ("diff_v2", True))
        ),
        Measurement("decoding, 8 sequences", "harness.decoding.decoding", decoding(s, 8), 150),
        # Too large to be side by side: groups of one, without turns.
        *(
            Group(f"large mixture, {name}", {name: config}, s.rounds, s.repeats)
            for name, config in alone.items()
        ),
    ]


def decoding(s: Sizes, batch: int) -> dict[str, Any]:
    """Arguments for a growing context; half as long where there are several sequences."""
    contexts = s.contexts if batch == 1 else s.contexts[:-1]
    words = [*s.decoding, f"seq_len={contexts[-1] + s.decoded}"]
    return {"words": words, "lengths": list(contexts), "tokens": s.decoded, "batch": batch}


def words_of(s: Sizes, model: list[str], seq: int, batch: int) -> list[str]:
    """Overrides of a training step."""
    sizes = [f"seq_len={seq}", f"micro_batch_size={batch}", f"global_batch_size={batch}"]
    return [*model, *s.common, *sizes]


def peer(s: Sizes, kind: str, words: list[str], precision: str = "bf16 autocast") -> dict[str, Any]:
    """Arguments of `build_step` for a contestant that is not ours."""
    attention = f"attention={PEER_OF.get(kind, 'standard')}"
    return {
        "kind": kind,
        "words": [*words, attention],
        "precision": precision,
        "compiled": s.compiled,
    }
