"""Draw the held-out sample loss of four variants against tokens, from the runs of one sweep.

    python train.py -m attention=standard,gated,diff_v1,diff_v2 seed=0,1,2 data=packages \\
        model=micro model.match_params_to=diff_v2 steps=1000 seq_len=256 global_batch_size=4 \\
        eval.interval=50 eval.sequences=128 eval.tokens=2e5 run.sweep=four_variants
    python benchmarks/four_variants.py outputs/four_variants

The script writes curves.csv (every evaluation of every run) and runs.json (facts and final losses
of the runs) into benchmarks/results/four_variants/, and losses.png from these two files. Without an
argument, the script only redraws losses.png.
"""

import csv
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from diffllm.compare.report.styles import variant_style

RESULTS = Path(__file__).parent / "results" / "four_variants"
VARIANTS = ("standard", "gated", "diff_v1", "diff_v2")
FACTS = ("parameters", "flops_per_token", "corpus", "device", "torch", "compute_dtype")
FROM_TOKENS = 150_000
"""Start of the axis. In the first steps all curves fall steeply, which would hide differences."""


def write_curves(sweep: Path) -> None:
    from diffllm.compare.arms.run import load_run

    RESULTS.mkdir(parents=True, exist_ok=True)
    runs = [load_run(path.parent) for path in sorted(sweep.glob("*/summary.json"))]
    with (RESULTS / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["variant", "seed", "tokens", "heldout_sample_loss"])
        for run in runs:
            series = run.series("eval/loss")
            for tokens, loss in zip(series.tokens, series.values, strict=True):
                table.writerow([run.variant, run.cfg.seed, tokens, f"{loss:.6f}"])
    facts: dict[str, Any] = {
        f"{run.variant}-seed{run.cfg.seed}": {
            **{name: run.facts[name] for name in FACTS},
            "python": run.facts["environment"]["python"],
            "final_heldout_loss": run.final_loss,
            "heldout_tokens": run.facts["heldout_tokens"],
        }
        for run in runs
    }
    (RESULTS / "runs.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def overlap(first: list[float], second: list[float]) -> bool:
    return min(first) <= max(second) and min(second) <= max(first)


def draw() -> None:
    """Draw losses.png: means over seeds as lines, ranges over seeds as bands.

    The curves show the sample that is measured during training. The legend shows the loss of whole
    documents after training, which the gaps of reports compare.
    """
    curves: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in VARIANTS}
    with (RESULTS / "curves.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            curves[row["variant"]][int(row["tokens"])].append(float(row["heldout_sample_loss"]))
    facts = json.loads((RESULTS / "runs.json").read_text(encoding="utf-8"))
    sizes = [run["parameters"] for run in facts.values()]
    finals: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for run, values in facts.items():
        finals[run.rpartition("-seed")[0]].append(values["final_heldout_loss"])
    (seeds,) = {len(each) for of_variant in curves.values() for each in of_variant.values()}
    figure = Figure(figsize=(8, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for name in VARIANTS:
        color, _ = variant_style(name)
        final = sum(finals[name]) / len(finals[name])
        losses = {at / 1e6: of for at, of in curves[name].items() if at >= FROM_TOKENS}
        tokens, means = list(losses), [sum(of) / len(of) for of in losses.values()]
        ends = ([end(of) for of in losses.values()] for end in (min, max))
        axes.plot(tokens, means, color=color, label=f"{name}  {final:.3f}")
        axes.fill_between(tokens, *ends, color=color, alpha=0.2, linewidth=0)
    axes.set_title(
        f"Four attention variants, {sum(sizes) / len(sizes) / 1e6:.2f}M parameters: mean and range "
        f"of {seeds} seeds"
    )
    axes.set_xlabel("training tokens, millions")
    axes.set_ylabel("held-out sample loss, nats per token\n(lower is better)")
    axes.legend(
        title="held-out loss of whole documents\nafter training, mean of seeds", frameon=False
    )
    if overlap(finals["gated"], finals["diff_v2"]):
        at = sorted(curves["diff_v2"])[len(curves["diff_v2"]) // 2]
        loss = sum(curves["diff_v2"][at]) / seeds
        axes.annotate(
            "gated and diff_v2 overlap", (at / 1e6, loss), (-150, -40),
            textcoords="offset points", arrowprops={"arrowstyle": "-", "color": "#5d6570"},
        )  # fmt: skip
    axes.grid(color="#e5e5e5")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(RESULTS / "losses.png", dpi=160, metadata={"Software": None})


if __name__ == "__main__":
    if sys.argv[1:]:
        write_curves(Path(sys.argv[1]))
    draw()
