"""Every metric's name, and which value of a run its wandb summary keeps.

A name that ends in `/*` or `_*` stands for one a layer, a head and layer, or a parameter group.
"""

# No pattern may cover another's names: which of two wandb takes for a name changes from run to run.
SUMMARIES = {
    "train/loss": "min",
    "train/grad_norm": "max",
    "train/update_norm": "max",
    "train/param_norm": "last",
    "train/lr": "last",
    "train/z_loss": "last",
    "eval/loss": "min",
    "perf/tokens_per_s": "mean",
    "perf/step_ms": "mean",
    "perf/mfu": "mean",
    "perf/data_ms": "mean",
    "perf/peak_memory_gib": "max",
    "spikes/loss_total": "last",
    "spikes/grad_total": "last",
    "spikes/loss_score": "last",
    "spikes/grad_score": "last",
    "spikes/loss_rolling_total": "last",
    "spikes/grad_rolling_total": "last",
    "spikes/loss_rolling_score": "last",
    "spikes/grad_rolling_score": "last",
    "spikes/skipped_total": "last",
    "spikes_olmo2/loss_total": "last",
    "spikes_olmo2/grad_total": "last",
    "spikes_olmo2/loss_score": "last",
    "spikes_olmo2/grad_score": "last",
    "spikes_olmo2/loss_rolling_total": "last",
    "spikes_olmo2/grad_rolling_total": "last",
    "spikes_olmo2/loss_rolling_score": "last",
    "spikes_olmo2/grad_rolling_score": "last",
    "context_rms/*": "last",
    "context_rms_min/*": "min",
    "context_rms_max/*": "max",
    "hidden_top1/*": "max",
    "hidden_kurtosis/*": "max",
    "attn_logit_top1/*": "max",
    "attn_entropy/*": "last",
    "attn_negative_share/*": "last",
    "sink_mass/*": "last",
    "lambda_mean/*": "last",
    "lambda_min/*": "min",
    "lambda_max/*": "max",
    "lambda_head_*": "last",
    "gate_mean/*": "last",
    "grad_norm/*": "max",
    "router_entropy/*": "last",
    "expert_load_max/*": "max",
    "expert_load_min/*": "min",
    "router_bias_range/*": "max",
}


def covers(pattern: str, name: str) -> bool:
    """Whether a name of the table, or one with a `*` at its end, stands for this metric."""
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern
