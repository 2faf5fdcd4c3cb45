"""The table of metrics: metrics.jsonl, wandb, the report and docs/metrics.md follow its rows."""

from functools import cache
from typing import Literal

from diffllm.core.errors import ConfigError
from diffllm.metrics.metric import Column, Curve, Layers, Metric, Section

LOSS = Section("Loss", "Learning", "Losses in nats per token, over training tokens.{incomparable}")
SPIKES = Section("Spikes", "Stability")
NORMS = Section("Gradient norm", "Stability", "Gradient norms are taken before clipping.")
CONTEXT = Section(
    "Context RMS",
    "Context RMS",
    "The context is the vector per token and head that enters attention's output projection; its "
    "RMS is taken over channels (for DIFF V1 before the head norm).",
)
TASKS = Section(
    "Tasks",
    "Tasks",
    "Generated tasks that the model is asked while it is trained (eval.suites): the share of "
    "right answers among candidates, by likelihood.",
)
OUTLIERS = Section(
    "Outliers",
    "Outliers",
    "Of the outputs of blocks; large ones cost precision in bf16 and in quantisation.",
)
RESIDUAL = Section(
    "Residual stream",
    "Residual stream",
    "RMS over tokens and channels of the residual stream that a block reads, and of what its "
    "attention and its feed-forward layer add to the stream.",
)
ATTENTION = Section(
    "Attention",
    "Attention maps",
    "Taken from explicit maps at a few query positions, drawn anew each time: means over them, "
    "over heads and sequences, unless said otherwise.",
)
LAMBDA = Section(
    "Lambda and gate",
    "Lambda",
    "Lambda weighs the second attention map, which differential attention subtracts.",
)
GATE = Section(
    "Lambda and gate",
    "Gate",
    "The gate multiplies attention's output, before its projection.",
)
PERFORMANCE = Section("Performance")
DATA = Section(
    "Data", "Data", "Sources of a mixture, and visible keys per query with masked documents."
)
EXPERTS = Section(
    "Experts",
    "Experts",
    "Load is the tokens of the global batch that an expert got over the uniform number: 1 when "
    "balanced.",
)
SECTIONS = [
    LOSS, TASKS, SPIKES, NORMS, CONTEXT, OUTLIERS, RESIDUAL, ATTENTION, LAMBDA, GATE, PERFORMANCE,
    DATA, EXPERTS,
]  # fmt: skip
"""In the order of the report and docs/metrics.md."""

DEFINITIONS = {
    "spikes": "over mean + 6 sigma of the 128 before",
    "spikes_olmo2": "7 sigma or more from the mean of the 1,000 before",
    "spikes_detrended": "4 sigma over the line through the 32 before",
}
"""Definitions of a spike, by the first part of a metric's name."""
EVENTS = "spikes_detrended"
"""The definition that counts events, spikes without 8 quiet steps between them being one."""


def spikes(definition: str, series: str, what: str) -> Metric:
    """The row of a count of spikes in `series`, "loss" or "grad"."""
    rule = DEFINITIONS[definition]
    value = "loss" if series == "loss" else "gradient norm"
    since = "of the definition's window" if what.startswith("rolling") else "of the run so far"
    number = "Share" if what.endswith("score") else "Number"
    meaning = f"{number} of steps {since} with a {value} {rule}"
    if what == "judged":
        meaning = f"Number of steps {since} with enough before them to judge the {value} by it"
    elif definition == EVENTS:
        of = ", over the steps that could be judged" if what == "score" else ""
        meaning = f"Events {since}: steps with a {'log ' * (series == 'grad')}{value} {rule}"
        meaning += f", those without 8 quiet steps between them as one{of}"
    column = None if what.startswith("rolling") else Column("last", "max", "mean")
    return Metric(f"{definition}/{series}_{what}", SPIKES, meaning, column=column)


ENDS: tuple[tuple[Literal["min", "max"], str], ...] = (("min", "Smallest"), ("max", "Largest"))
UNIFORM = (
    "For uncorrelated values of RMS 1, uniform attention over n visible keys gives 1/√n{uniform}"
)

# fmt: off
METRICS: list[Metric] = [
    Metric(
        "train/loss", LOSS, "Cross-entropy of the logged step's global batch", "nats a token",
        summary="min",
        plots=(Curve("Training loss", "{smoothing}, in nats per token.{incomparable}", smooth=True,
                     clip=True),),
    ),
    Metric(
        "eval/loss", LOSS, "Cross-entropy of the held-out sample, `eval.sequences`", "nats a token",
        summary="min",
        plots=(Curve("Held-out sample loss", "Loss of the held-out sample during training, in nats "
                     "per token; the tables have the loss of the whole held-out split after the "
                     "last step.{incomparable}", clip=True),),
    ),
    Metric("train/bits_per_byte", LOSS, "`train/loss` in bits a byte of text, by the mean bytes of "
           "a training token", "bits a byte"),
    Metric("eval/bits_per_byte", LOSS, "`eval/loss` in bits a byte of text, by the mean bytes of a "
           "held-out token", "bits a byte", summary="min"),
    Metric("eval/bits_per_byte/*", LOSS, "`eval/loss/*` of one source of a mixture in bits a byte",
           "bits a byte", summary="min"),
    Metric(
        "eval/loss/*", LOSS, "Cross-entropy of held-out text of one source of a mixture, "
        "`eval.sequences` of all sources together", "nats a token", summary="min",
        plots=(Curve("Held-out sample loss, {group}", clip=True),),
    ),
    Metric("train/z_loss", LOSS, "z-loss of the logged step, weighted", "nats a token"),
    Metric("train/target_share", LOSS, "Share of the logged step's targets that its loss is a mean "
           "over, where padding or a loss mask leaves some out", "share"),
    Metric("train/lr", LOSS, "Learning rate of the logged step",
           plots=(Curve("Learning rate"),)),

    Metric("tasks/*", TASKS, "Share of right answers among the candidates of a task's examples, or "
           "of one level of it alone", "share", summary="max",
           plots=(Curve("Right answers, {group}", "Share of right answers by likelihood."),)),
    Metric("tasks_chance/*", TASKS, "Expected share of right answers of a guess among the "
           "candidates of a task's examples", "share"),
    Metric("tasks_generated/*", TASKS, "Share of a task's answers that the model would generate, "
           "always taking the likeliest token", "share", summary="max",
           plots=(Curve("Generated answers, {group}", folded=True),)),

    *(spikes(definition, series, what)
      for what in ("score", "total", "judged", "rolling_score", "rolling_total")
      for definition in DEFINITIONS if definition != EVENTS or not what.startswith("rolling")
      for series in ("loss", "grad")),
    Metric(
        "spikes/skipped_total", SPIKES, "Updates left out so far: by train.skip_step=nonfinite "
        "where the loss or gradient norm was not finite, by train.skip_step=spike also where it "
        "spiked", "steps", plots=(Curve("Skipped updates"),),
        column=Column("last", "max", "mean", "Skipped", "updates"),
    ),

    Metric(
        "train/grad_norm", NORMS,
        "L2 norm of the gradient before clipping; often largest in the first steps", "L2 norm",
        summary="max",
        plots=(Curve("Gradient norm", log=True),),
        column=Column("all", "max", "max", "Gradient norm", "largest"),
    ),
    Metric(
        "train/update_norm", NORMS,
        "L2 norm of the change of all parameters in a step; 0 where the update was skipped",
        "L2 norm", summary="max", plots=(Curve("Update norm", log=True),),
    ),
    Metric(
        "train/param_norm", NORMS, "L2 norm of all parameters", "L2 norm",
        plots=(Curve("Parameter norm"),),
    ),
    Metric(
        "grad_norm/*", NORMS, "L2 norm of the gradient over a group of parameters: `embedding`, "
        "`attention`, `lambda`, `ffn`, `router`, `norm`, `output`", "L2 norm", summary="max",
        plots=(Curve("Gradient norm, {group}", "L2 norm over the parameters of the group {group}.",
                     log=True, folded=True),),
    ),

    Metric(
        "hidden_top1/*", OUTLIERS,
        "Largest magnitude in a block's output, over tokens and channels", "|value|",
        combine="max", summary="max",
        plots=(Layers("Largest magnitude, by layer", log=True),
               Curve("Largest magnitude, highest layer", log=True)),
        column=Column("all", "max", "max", "Outlier", "largest |value|"),
    ),
    Metric(
        "hidden_kurtosis/*", OUTLIERS,
        "Kurtosis of a block's output over channels, mean over tokens; 3 for a normal law",
        "kurtosis", combine="mean", summary="max",
        plots=(Layers("Kurtosis, by layer", mark=3), Curve("Kurtosis, highest layer", mark=3)),
        column=Column("last", "max", "mean", "Kurtosis", "over channels"),
    ),

    Metric(
        "context_rms/*", CONTEXT, "RMS over channels of what enters attention's output projection, "
        "or a head norm before it; mean over tokens and heads", "RMS", combine="mean",
        plots=(Layers("Mean context RMS, by layer", f"Mean over tokens and heads. "
                       f"{UNIFORM}, a single key 1, and DIFF V2 at most √2; a model's values are "
                       "not normalised, so it may lie on either side."),),
    ),
    Metric(
        "context_rms_min/*", CONTEXT, "Smallest context RMS of a token and head", "RMS",
        combine="min", summary="min",
        plots=(Layers("Smallest context RMS, by layer", f"Smallest over tokens and heads. {UNIFORM}"
                      "; a model's values are not normalised.", log=True, uniform=True),),
        column=Column("last", "min", "min", "Context RMS", "smallest"),
    ),
    Metric(
        "context_rms_max/*", CONTEXT, "Largest context RMS of a token and head", "RMS",
        combine="max", summary="max", plots=(Layers("Largest context RMS, by layer", log=True),),
        column=Column("last", "max", "max", "Largest context RMS"),
    ),
    Metric(
        "context_over_value_rms/*", CONTEXT, "Context RMS of a token and head over the RMS of its "
        "sequence's values, mean over tokens and heads", "ratio", combine="mean",
        plots=(Layers("Mean context RMS over values' RMS, by layer", log=True, uniform=True),),
        column=Column("last", "max", "mean"),
    ),
    *(Metric(
        f"context_over_value_rms_{end}/*", CONTEXT,
        f"{size} context RMS of a token and head over the RMS of its sequence's values", "ratio",
        combine=end, summary=end, column=Column("last", end, end),
    ) for end, size in ENDS),

    *(Metric(
        f"{name}_rms/*", RESIDUAL, f"RMS of {what}, over tokens and channels", "RMS",
        combine="rms", summary="max", plots=(Layers(f"RMS of {short}, by layer", log=True),),
    ) for name, short, what in (
        ("residual", "the residual stream", "the residual stream that a block reads"),
        ("attn_write", "what attention adds",
         "what a block's attention adds to the residual stream"),
        ("ffn_write", "what the FFN adds", "what a block's feed-forward layer, or its experts, "
         "add to the residual stream"),
    )),

    Metric(
        "attn_entropy/*", ATTENTION, "Entropy of the softmax maps before they are combined, a "
        "sink's share left out; uniform attention over n keys has ln n", "nats",
        combine="mean", probe=True, plots=(Layers("Entropy of attention, by layer"),),
    ),
    Metric(
        "attn_logit_top1/*", ATTENTION,
        "Largest q·k/√d over positions, visible keys, heads and sequences", "logit",
        combine="max", probe=True, summary="max",
        plots=(Layers("Largest attention logit, by layer"),),
    ),
    Metric(
        "sink_mass/*", ATTENTION, "Signed weight of the effective map, differences taken, on the "
        "first visible token: the start of the document where documents are masked", "weight",
        combine="mean", probe=True, plots=(Layers("Weight on the first token, by layer"),),
    ),
    Metric(
        "attn_negative_share/*", ATTENTION,
        "Magnitude of the effective map's negative weights over that of all its weights", "share",
        combine="mean", probe=True, plots=(Layers("Negative attention weights, by layer"),),
    ),

    Metric(
        "lambda_mean/*", LAMBDA, "Mean lambda over tokens and heads", "lambda", combine="mean",
        plots=(Layers("Mean lambda, by layer", "Mean over tokens and heads. Between 0 "
                       "and 1 under a sigmoid; DIFF V1's, and a raw projection, can leave that "
                       "range. At 0 the second map has no weight."),),
    ),
    *(Metric(
        f"lambda_{end}/*", LAMBDA, f"{size} lambda over tokens and heads", "lambda",
        combine=end, summary=end, plots=(Layers(f"{size} lambda, by layer"),),
    ) for end, size in ENDS),
    Metric(
        "lambda_head_*", LAMBDA, "Lambda of a head, mean over tokens, where it depends on the head",
        "lambda", combine="mean", probe=True,
    ),
    Metric(
        "gate_mean/*", GATE, "Mean gate over tokens, heads and channels: 0 is shut, 1 is open",
        "gate", combine="mean", plots=(Layers("Mean gate, by layer"),),
    ),

    Metric(
        "perf/tokens_per_s", PERFORMANCE,
        "Tokens of all ranks a second, since the last logged step", "tokens/s", summary="mean",
        column=Column("all", "median", "mean", "Speed", "tokens/s"),
    ),
    Metric("perf/step_ms", PERFORMANCE, "Time of a step, since the last logged one", "ms",
           summary="mean"),
    Metric("perf/data_ms", PERFORMANCE, "Time a step waits for its batch, of `perf/step_ms`", "ms",
           summary="mean"),
    Metric(
        "perf/mfu", PERFORMANCE, "Model FLOPs utilisation, where the GPU's peak is known", "share",
        summary="mean", column=Column("all", "median", "mean", "MFU", percent=True),
    ),
    Metric("perf/peak_memory_gib", PERFORMANCE,
           "Most memory that rank 0 has held: on the GPU, or resident on a CPU", "GiB",
           summary="max"),

    Metric("data/visible_keys", DATA, "Mean number of keys that a query sees with "
           "`data.mask_documents=true`, over all queries since the last logged step, padding "
           "included; FLOPs and MFU count attention over it", "keys per query",
           plots=(Curve("Visible keys per query"),)),
    Metric("data/epochs/*", DATA, "Passes over one source of a mixture so far", "epochs",
           plots=(Curve("Epochs of {group}", folded=True),)),
    Metric("data/tokens/*", DATA, "Tokens of one source of a mixture that were trained on so far, "
           "with padding", "tokens"),

    Metric(
        "expert_load_max/*", EXPERTS,
        "Tokens of the global batch that the busiest expert got, over the uniform number", "load",
        summary="max",
        plots=(Curve("Load of the busiest expert, highest layer", log=True),
               Layers("Load of the busiest expert, by layer")),
    ),
    Metric(
        "expert_load_min/*", EXPERTS,
        "Tokens of the global batch that the idlest expert got, over the uniform number", "load",
        summary="min", plots=(Layers("Load of the idlest expert, by layer"),),
    ),
    Metric(
        "router_entropy/*", EXPERTS,
        "Entropy of a token's scores over all experts, mean over tokens; ln E if uniform over E",
        "nats", combine="mean", plots=(Layers("Entropy of the router, by layer"),),
    ),
    Metric(
        "router_bias_range/*", EXPERTS, "Largest minus smallest of the experts' biases", "score",
        summary="max", plots=(Layers("Range of the balancing bias, by layer"),),
    ),
    Metric("train/balance_loss", EXPERTS, "Balance loss of the logged step, weighted",
           "nats a token"),
    Metric("train/router_z_loss", EXPERTS, "z-loss of the routers in the logged step, weighted",
           "nats a token"),
]
# fmt: on


def add_metric(metric: Metric) -> Metric:
    """Add a row, from a plugin; its section follows ours unless it is one of them.

    Adding a row twice has no effect. Raises ConfigError if another row covers the name.
    """
    if metric in METRICS:
        return metric
    for other in METRICS:
        if other.covers(metric.name) or metric.covers(other.name):
            raise ConfigError(f"the metric {metric.name} is there already, as {other.name}")
    METRICS.append(metric)
    if metric.section not in SECTIONS:
        SECTIONS.append(metric.section)
    return metric


@cache
def metric_of(name: str) -> Metric:
    """Return the row of a metric's full name, or of a statistic; raises KeyError."""
    for metric in METRICS:
        if name == metric.quantity or metric.covers(name):
            return metric
    raise KeyError(f"{name} has no row in diffllm/metrics/table.py; add_metric gives it one")
