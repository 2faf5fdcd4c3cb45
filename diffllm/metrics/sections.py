"""Sections of metrics in the report, wandb dashboards, TensorBoard and docs/metrics.md."""

from diffllm.metrics.metric import Section

LOSS = Section("Loss", "Loss", "Losses in nats per token, over training tokens.{incomparable}")
SPIKES = Section("Spikes", "Stability")
NORMS = Section("Gradient norm", "Stability", "Gradient norms are taken before clipping.")
CONTEXT = Section(
    "Context RMS",
    "Attention",
    "The context is the vector per token and head that enters attention's output projection; its "
    "RMS is taken over channels (for DIFF V1 before the head norm).",
)
TASKS = Section(
    "Tasks",
    "Tasks",
    "Generated tasks, evaluated during training (eval.suites): the share of right answers among "
    "candidates, by likelihood.",
)
OUTLIERS = Section(
    "Outliers",
    "Outliers",
    "Outliers in the outputs of blocks and in attention logits. Large outliers reduce precision in "
    "bf16 and quantisation.",
)
RESIDUAL = Section(
    "Residual stream",
    "Outliers",
    "RMS over tokens and channels: of the residual stream that a block reads, and of the "
    "contributions of the block's attention and feed-forward layer to the stream.",
)
ATTENTION = Section(
    "Attention",
    "Attention",
    "Entropies and weights come from explicit attention maps at a few random query positions; they "
    "are means over positions, heads and sequences unless stated otherwise.",
)
LAMBDA = Section(
    "Lambda and gate",
    "Attention",
    "Lambda weighs the second attention map, which differential attention subtracts.",
)
GATE = Section(
    "Lambda and gate",
    "Attention",
    "The gate multiplies attention's output, before its projection.",
)
GAPS = Section("Gaps", "Gaps")
PERFORMANCE = Section("Performance", "Speed")
DATA = Section(
    "Data", "Data", "Sources of a mixture, and visible keys per query with masked documents."
)
EXPERTS = Section(
    "Experts",
    "Experts",
    "Load is the number of tokens that an expert received, divided by the number under uniform "
    "routing: 1 if balanced.",
)
COST = Section("Cost")
SECTIONS = [
    COST, LOSS, NORMS, SPIKES, OUTLIERS, RESIDUAL, CONTEXT, LAMBDA, GATE, ATTENTION, GAPS,
    PERFORMANCE, TASKS, DATA, EXPERTS,
]  # fmt: skip
"""Sections in the order of the report, wandb dashboards, TensorBoard and docs/metrics.md."""
