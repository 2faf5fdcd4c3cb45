"""The table of docs/plan.md, as Markdown: what models need of 8, 64 and 512 H200.

    python benchmarks/plan_table.py [overrides and keys of diffllm plan]

Every line is a `diffllm plan` with micro-batches of four sequences of 4,096 tokens, one a rank and
step; what does not fit has the times of the nearest change that does. A step takes the longer of
computing and sending.
"""

import sys

from diffllm.plan.cluster import OWN_KEYS, Cluster
from diffllm.plan.estimate import DAY, GIB, plan
from diffllm.plan.suggest import nearest_change
from diffllm.tools.arguments import parse

MODELS = {"dense_1p3b": [], "dense_7b": [], "moe_30a3": ["parallel.expert=8"]}
VARIANTS = ("standard", "diff_v2")
GPUS = (8, 64, 512)
BATCH = "micro_batch_size=4"
TOKENS = "tokens=1e12"

COLUMNS = (
    "Model",
    "Attention",
    "H200",
    "GiB a rank",
    "with checkpointing",
    "fits",
    "ms to compute",
    "ms to send",
    "tokens a second",
    "days",
)


def main(argv: list[str]) -> None:
    """Print one line a model, variant and number of GPUs."""
    own = [word for word in argv if word.partition("=")[0] in OWN_KEYS]
    overrides = [word for word in argv if word not in own]
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for model, extra in MODELS.items():
        for variant in VARIANTS:
            for gpus in GPUS:
                cluster = parse(Cluster, [TOKENS, f"gpus={gpus}", *own], "")
                words = [f"model={model}", f"attention={variant}", "seq_len=4096", BATCH, *extra]
                print(line(cluster, [*words, *overrides]), flush=True)


def line(cluster: Cluster, overrides: list[str]) -> str:
    """One row of the table."""
    made = plan(cluster, set(), overrides)
    peaks = [(made.steps[policy].peak.total + made.reserve) / GIB for policy in (False, True)]
    fits = "yes"
    if not made.fits:
        change = nearest_change(made)
        fits = f"with `{' '.join(change.words)}`" if change else "no"
        made = change or made
    assert made.seconds
    cells = [
        made.cfg.run.choices["model"],
        made.cfg.run.choices["attention"],
        f"{cluster.gpus}",
        *[f"{peak:.1f}" for peak in peaks],
        fits,
        f"{1e3 * made.compute_seconds:,.0f}",
        f"{1e3 * made.communication_seconds:,.0f}",
        f"{made.tokens_per_s:,.0f}",
        f"{made.seconds / DAY:,.1f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main(sys.argv[1:])
