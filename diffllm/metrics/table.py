"""The table of all metrics, used by metrics.jsonl, wandb, the report and docs/metrics.md."""

from functools import cache
from typing import Literal

from diffllm.core.errors import ConfigError
from diffllm.metrics.metric import Bars, Column, Curve, Layers, Metric, Plot
from diffllm.metrics.sections import (
    ATTENTION,
    CONTEXT,
    COST,
    DATA,
    EXPERTS,
    GAPS,
    GATE,
    LAMBDA,
    LOSS,
    NORMS,
    OUTLIERS,
    PERFORMANCE,
    RESIDUAL,
    SECTIONS,
    SPIKES,
    TASKS,
)

DEFINITIONS = {
    "spikes": "above mean + 6 sigma of the previous 128",
    "spikes_olmo2": "7 sigma or more from the mean of the previous 1,000",
    "spikes_detrended": "4 sigma above the line through the previous 32",
}
"""Definitions of a spike, by the first part of a metric's name."""
EVENT_DEFINITION = "spikes_detrended"
"""The definition that counts events; an event can contain several close spikes."""


def spikes(definition: str, series: str, count: str) -> Metric:
    """Return the spike metric "DEFINITION/SERIES_COUNT", such as "spikes/loss_total"."""
    rule = DEFINITIONS[definition]
    value = "loss" if series == "loss" else "gradient norm"
    since = "of the definition's window" if count.startswith("rolling") else "of the run so far"
    number = "Share" if count.endswith("score") else "Number"
    meaning = f"{number} of steps {since} with a {value} {rule}"
    if count == "judged":
        meaning = f"Number of steps {since} that could be judged by the {value}"
    elif definition == EVENT_DEFINITION:
        rate = " per judged step" if count == "score" else ""
        logarithm = "log " if series == "grad" else ""
        meaning = f"Events{rate} {since}: steps with a {logarithm}{value} {rule}"
        meaning += "; spikes with fewer than 8 quiet steps between them are one event"
    column = None if count.startswith("rolling") else Column("last", "max", "mean")
    plots: tuple[Plot, ...] = ()
    if definition == EVENT_DEFINITION and count == "total":
        title = f"Spikes of the {value}"
        plots = (Curve(title), Bars(f"{title}, total"))
    return Metric(f"{definition}/{series}_{count}", SPIKES, meaning, plots=plots, column=column)


def all_spikes() -> list[Metric]:
    metrics = []
    for count in ("score", "total", "judged", "rolling_score", "rolling_total"):
        for definition in DEFINITIONS:
            # Events are counted without a window.
            if definition == EVENT_DEFINITION and count.startswith("rolling"):
                continue
            for series in ("loss", "grad"):
                metrics.append(spikes(definition, series, count))
    return metrics


ENDS: tuple[tuple[Literal["min", "max"], str], ...] = (("min", "Smallest"), ("max", "Largest"))
UNIFORM = (
    "For uncorrelated values of RMS 1, uniform attention over n visible keys gives 1/√n{uniform}"
)

# fmt: off
METRICS: list[Metric] = [
    Metric("tokens", COST, "Tokens trained on, padding included", "tokens"),
    Metric("tokens_per_parameter", COST, "`tokens` per active parameter", "tokens"),
    Metric("training_flops", COST, "FLOPs of all matrix products, forward and backward; with "
           "`data.mask_documents`, attention counts the keys that queries saw so far", "FLOPs"),
    Metric("train_seconds", COST, "Time of training without evaluations and saves", "s"),
    Metric("wall_seconds", COST, "Time of training with evaluations and saves", "s"),

    Metric(
        "train/loss", LOSS, "Cross-entropy of the step's global batch", "nats per token",
        summary="min",
        plots=(Curve("Training loss", "{smoothing}, in nats per token.{incomparable}", smooth=True,
                     clip=True, axes=("tokens", "training_flops")),),
    ),
    Metric(
        "eval/loss", LOSS, "Cross-entropy of the held-out sample, `eval.sequences`",
        "nats per token", summary="min",
        plots=(Curve("Held-out sample loss", "Loss of the held-out sample during training, in nats "
                     "per token; the tables have the loss of {heldout} after the last step."
                     "{pairing}{incomparable}", clip=True, axes=("tokens", "training_flops")),),
    ),
    Metric("train/bits_per_byte", LOSS, "`train/loss` in bits per byte, from the mean number of "
           "bytes per predicted token in the training split", "bits per byte"),
    Metric("eval/bits_per_byte", LOSS, "`eval/loss` in bits per byte of the sample's predicted "
           "text in UTF-8", "bits per byte", summary="min"),
    Metric("eval/bits_per_byte/*", LOSS, "`eval/loss/*` of one source of a mixture in bits per "
           "byte of its sampled text", "bits per byte", summary="min"),
    Metric(
        "eval/loss/*", LOSS, "Cross-entropy of held-out text of one source of a mixture, "
        "`eval.sequences` of all sources together", "nats per token", summary="min",
        plots=(Curve("Held-out sample loss, {group}", clip=True),),
    ),
    Metric("train/z_loss", LOSS, "z-loss of the logged step, weighted", "nats per token"),
    Metric("train/target_share", LOSS, "Share of the logged step's targets that count in the loss, "
           "if padding or a loss mask excludes some", "share"),
    Metric("train/lr", LOSS, "Learning rate of the step",
           plots=(Curve("Learning rate"),)),

    Metric("tasks/*", TASKS, "Share of right answers among the candidates of a task's examples, or "
           "of one level of the task", "share", summary="max",
           plots=(Curve("Right answers, {group}", "Share of right answers by likelihood."),)),
    Metric("tasks_chance/*", TASKS, "Expected share of right answers of random guesses among the "
           "candidates of a task's examples", "share"),
    Metric("tasks_generated/*", TASKS, "Share of a task's answers that greedy decoding would "
           "generate", "share", summary="max",
           plots=(Curve("Generated answers, {group}", folded=True),)),

    *all_spikes(),
    Metric("train/skipped", SPIKES, "1 if the update of the step was skipped, else 0",
           summary="max"),
    Metric(
        "spikes/skipped_total", SPIKES, "Updates skipped so far: with train.skip_step=nonfinite if "
        "the loss or gradient norm is not finite, with train.skip_step=spike also if either is a "
        "spike", "steps", plots=(Curve("Skipped updates"), Bars("Skipped updates, total")),
        column=Column("last", "max", "mean", "Skipped", "updates"),
    ),

    Metric(
        "train/grad_norm", NORMS,
        "L2 norm of the gradient before clipping; often largest in the first steps", "L2 norm",
        summary="max",
        plots=(Curve("Gradient norm", log=True),),
        column=Column("all", "max", "max", "Gradient norm", "largest logged"),
    ),
    Metric(
        "train/update_norm", NORMS,
        "L2 norm of the change of all parameters in a step; 0 if the update was skipped",
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
               Curve("Largest magnitude, maximum over layers", log=True)),
        column=Column("all", "max", "max", "Outlier", "largest |value|"),
    ),
    Metric(
        "hidden_kurtosis/*", OUTLIERS,
        "Kurtosis of a block's output over channels, mean over tokens; 3 for a normal distribution",
        "kurtosis", combine="mean", summary="max",
        plots=(Layers("Kurtosis, by layer", mark=3),
               Curve("Kurtosis, maximum over layers", mark=3)),
        column=Column("last", "max", "mean", "Kurtosis", "over channels"),
    ),

    Metric(
        "context_rms/*", CONTEXT, "RMS over channels of the context, the input of attention's "
        "output projection or of a head norm before; mean over tokens and heads", "RMS",
        combine="mean",
        plots=(Layers("Mean context RMS, by layer", f"Mean over tokens and heads. "
                       f"{UNIFORM}, a single key 1, and DIFF V2 at most √2. The values of a model "
                       "are not normalised, so the measured RMS can be above or below."),),
    ),
    Metric(
        "context_rms_min/*", CONTEXT, "Smallest context RMS of a token and head", "RMS",
        combine="min", summary="min",
        plots=(Layers("Smallest context RMS, by layer", f"Smallest over tokens and heads. {UNIFORM}"
                      ". The values of a model are not normalised.", log=True, uniform=True),),
        column=Column("last", "min", "min", "Context RMS", "smallest"),
    ),
    Metric(
        "context_rms_max/*", CONTEXT, "Largest context RMS of a token and head", "RMS",
        combine="max", summary="max", plots=(Layers("Largest context RMS, by layer", log=True),),
        column=Column("last", "max", "max", "Largest context RMS"),
    ),
    Metric(
        "context_over_value_rms/*", CONTEXT, "Context RMS of a token and head, divided by the RMS "
        "of the sequence's values; mean over tokens and heads", "ratio", combine="mean",
        plots=(Layers("Mean context RMS over values' RMS, by layer", log=True, uniform=True),),
        column=Column("last", "max", "mean"),
    ),
    *(Metric(
        f"context_over_value_rms_{end}/*", CONTEXT,
        f"{size} context RMS of a token and head, divided by the RMS of the sequence's values",
        "ratio",
        combine=end, summary=end, column=Column("last", end, end),
    ) for end, size in ENDS),

    *(Metric(
        f"{name}_rms/*", RESIDUAL, f"RMS of {quantity}, over tokens and channels", "RMS",
        combine="rms", summary="max", plots=(Layers(f"RMS of {short}, by layer", log=True),),
    ) for name, short, quantity in (
        ("residual", "the residual stream", "the residual stream that a block reads"),
        ("attn_write", "attention's contribution",
         "the contribution of a block's attention to the residual stream"),
        ("ffn_write", "the FFN's contribution", "the contribution of a block's feed-forward layer, "
         "or of its experts, to the residual stream"),
    )),

    Metric(
        "attn_entropy/*", ATTENTION, "Entropy of the softmax maps before their combination, "
        "without the share of a sink; ln n for uniform attention over n keys", "nats",
        combine="mean", probe=True, plots=(Layers("Entropy of attention, by layer"),),
    ),
    Metric(
        "attn_logit_top1/*", OUTLIERS,
        "Largest q·k/√d over positions, visible keys, heads and sequences", "logit",
        combine="max", probe=True, summary="max",
        plots=(Layers("Largest attention logit, by layer"),),
    ),
    Metric(
        "sink_mass/*", ATTENTION, "Signed weight of the effective map (after any difference) on "
        "the first visible token: the start of the document if documents are masked", "weight",
        combine="mean", probe=True, plots=(Layers("Weight on the first token, by layer"),),
    ),
    Metric(
        "attn_negative_share/*", ATTENTION,
        "Total magnitude of the effective map's negative weights, as a share of all weights",
        "share",
        combine="mean", probe=True, plots=(Layers("Negative attention weights, by layer"),),
    ),

    Metric(
        "lambda_mean/*", LAMBDA, "Mean lambda over tokens and heads", "lambda", combine="mean",
        plots=(Layers("Mean lambda, by layer", "Mean over tokens and heads. A sigmoid limits "
                       "lambda to 0 to 1; lambda of DIFF V1 or of a raw projection can leave this "
                       "range. At 0 the second map has no weight."),),
    ),
    *(Metric(
        f"lambda_{end}/*", LAMBDA, f"{size} lambda over tokens and heads", "lambda",
        combine=end, summary=end, plots=(Layers(f"{size} lambda, by layer"),),
    ) for end, size in ENDS),
    Metric(
        "lambda_head_*", LAMBDA, "Lambda per head, mean over tokens, if lambda depends on the head",
        "lambda", combine="mean", probe=True,
    ),
    Metric(
        "gate_mean/*", GATE, "Mean gate over tokens, heads and channels: 0 is closed, 1 is open",
        "gate", combine="mean", plots=(Layers("Mean gate, by layer"),),
    ),

    Metric(
        "perf/tokens_per_s", PERFORMANCE,
        "Tokens per second of all ranks, since the last logged step", "tokens/s", summary="mean",
        plots=(Curve("Tokens per second"),),
        column=Column("all", "median", "mean", "Speed", "tokens/s"),
    ),
    Metric("perf/step_ms", PERFORMANCE, "Mean time per step since the last logged step", "ms",
           summary="mean", plots=(Curve("Time per step", folded=True),)),
    Metric("perf/data_ms", PERFORMANCE, "Part of `perf/step_ms` in which the step waits for its "
           "batch", "ms", summary="mean", plots=(Curve("Wait for data per step", folded=True),)),
    Metric(
        "perf/mfu", PERFORMANCE, "Model FLOPs utilisation, if the GPU's peak is known", "share",
        summary="mean", plots=(Curve("Model FLOPs utilisation"),),
        column=Column("all", "median", "mean", "MFU", percent=True),
    ),
    Metric("perf/peak_memory_gib", PERFORMANCE,
           "Peak memory of rank 0: allocated on the GPU, or resident on a CPU", "GiB",
           summary="max", plots=(Curve("Peak memory", folded=True),)),

    Metric("gap/*", GAPS, "In the wandb run of a comparison: held-out sample loss of a row minus "
           "the baseline's; `/low` and `/high` are the ends of the 95% interval. "
           "`gap/noise_floor` is half the width of the noise floor", "nats per token"),

    Metric("data/visible_keys", DATA, "Mean number of keys that a query sees with "
           "`data.mask_documents=true`, over all queries since the last logged step, padding "
           "included; FLOPs and MFU count attention over this number", "keys per query",
           plots=(Curve("Visible keys per query"),)),
    Metric("data/epochs/*", DATA, "Passes over one source of a mixture so far", "epochs",
           plots=(Curve("Epochs, {group}", folded=True),)),
    Metric("data/tokens/*", DATA, "Training tokens of one source of a mixture so far, padding "
           "included", "tokens"),

    Metric(
        "expert_load_max/*", EXPERTS,
        "Load of the busiest expert in the global batch, without padding", "load",
        summary="max",
        plots=(Layers("Load of the busiest expert, by layer"),
               Curve("Load of the busiest expert, maximum over layers", log=True)),
    ),
    Metric(
        "expert_load_min/*", EXPERTS,
        "Load of the least busy expert in the global batch, without padding", "load",
        summary="min", plots=(Layers("Load of the least busy expert, by layer"),),
    ),
    Metric(
        "router_entropy/*", EXPERTS,
        "Entropy of a token's scores over all E experts, mean over tokens without padding; ln E if "
        "uniform",
        "nats", combine="mean", plots=(Layers("Entropy of the router, by layer"),),
    ),
    Metric(
        "router_bias_range/*", EXPERTS, "Largest minus smallest of the experts' biases", "score",
        summary="max", plots=(Layers("Range of the balancing bias, by layer"),),
    ),
    Metric("train/balance_loss", EXPERTS, "Balance loss of the logged step, weighted, mean over "
           "tokens without padding", "nats per token"),
    Metric("train/router_z_loss", EXPERTS, "z-loss of the routers in the logged step, weighted, "
           "mean over tokens without padding", "nats per token"),
]
# fmt: on
COST_AXES = ("step", *(metric.name for metric in METRICS if metric.section is COST))
"""Names of the values that every step has, and that figures can have as their x-axis."""


def add_metric(metric: Metric) -> Metric:
    """Add a plugin's metric to the table of metrics, and its section if the section is new.

    If the table already contains an equal metric, do nothing. Raises ConfigError if the name
    matches a different metric of the table. Names can be patterns, such as `eval/loss/*`.
    """
    if metric in METRICS:
        return metric
    for other in METRICS:
        if other.covers(metric.name) or metric.covers(other.name):
            raise ConfigError(
                f"metric {metric.name} conflicts with the existing metric {other.name}; "
                "choose another name"
            )
    METRICS.append(metric)
    if metric.section not in SECTIONS:
        SECTIONS.append(metric.section)
    return metric


@cache
def metric_of(name: str) -> Metric:
    """Return the metric that `name` refers to, such as "train/loss".

    The name of a metric with layers is a pattern that ends in "/*". For example, both
    "context_rms/0" and "context_rms" refer to the metric "context_rms/*". Raises ConfigError if
    `name` refers to no metric.
    """
    for metric in METRICS:
        if name == metric.quantity or metric.covers(name):
            return metric
    raise ConfigError(
        f"metric {name} has no description; a plugin must describe each of its metrics with "
        "diffllm.metrics.table.add_metric (see docs/plugins.md)"
    )
