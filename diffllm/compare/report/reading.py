"""Explanations at the end of a report page."""

from diffllm.compare.arms.heldout import heldout_text
from diffllm.compare.arms.sentences import MISSING
from diffllm.compare.report.curves import POINTS
from diffllm.compare.report.notes import COMPUTE_OPTIMAL, is_early
from diffllm.compare.report.results import has_intervals
from diffllm.compare.report.rows import Row


def reading_terms(rows: list[Row]) -> list[tuple[str, str]]:
    """Return pairs of a term and its explanation for the page of these rows."""
    runs = [run for row in rows for run in row.runs]
    terms = [
        (
            "Held-out loss",
            f"Cross-entropy of {heldout_text(runs)} after the last step, in nats per token. A "
            "token's cross-entropy is minus the logarithm of its predicted probability; lower is "
            "better. Word frequencies alone are a model that predicts each token with its share "
            "of the held-out text.",
        ),
        (
            "Held-out sample loss",
            "Cross-entropy of a fixed sample of the held-out split (`eval.sequences`), measured "
            "during training.",
        ),
    ]
    if is_early(runs):
        terms.append(
            (
                "Early training",
                f"Fewer than {COMPUTE_OPTIMAL} tokens per parameter, about the number of "
                "compute-optimal training (Hoffmann et al., 2022, arXiv 2203.15556, "
                '"Chinchilla"). Gaps can change with more tokens.',
            )
        )
    if has_intervals(rows):
        terms.append(
            (
                "Intervals",
                "95%, Student's t over seeds: the uncertainty of the mean that is due to the "
                "seeds. A single seed has no interval. Student's t assumes that losses of seeds, "
                "and their differences, are normally distributed; a few seeds cannot show "
                "whether this holds.",
            )
        )
    trend_interval = "; mean and Student's t interval over seeds" if has_intervals(rows) else ""
    terms += [
        (
            "Gaps",
            "Differences to the baseline of the same seed, which starts from the same weights "
            f"and reads the same data in the same order. {interval_text(rows)} An arrow marks an "
            "interval, or a whole row, beyond the scale.",
        ),
        (
            "Trends",
            "Slope of a gap of held-out sample losses over log2 of tokens: a least-squares line "
            f"for each seed through the evaluations after 10% of training{trend_interval}. The "
            "learning rate decays over the same tokens.",
        ),
        *MEASUREMENTS,
    ]
    return terms


def interval_text(rows: list[Row]) -> str:
    """Explain intervals of gaps, and how many of them exclude 0 by chance."""
    if not has_intervals(rows):
        return "A single seed has no interval and no test."
    gaps = sum(row.gap is not None for row in rows)
    chance = "If the true gap is 0, one interval in twenty excludes 0 by chance"
    if gaps > 1:
        chance += (
            f": of the {gaps} gaps here, {round(gaps / 20, 2)} on average. Holm's correction "
            "accounts for this: with it, one page in twenty shows a gap if no true gap exists"
        )
    return (
        "Mean and interval are over the seeds of both rows. An interval that contains 0 shows no "
        f"difference, but does not show that the rows are equal. {chance}."
    )


MEASUREMENTS = (
    (
        "Diverged runs",
        "Runs that ended without a finite held-out loss, at their last step or because too many "
        "updates in a row were skipped. Means and t tests exclude diverged runs, and look better "
        "without them. The share of diverged runs has Clopper and Pearson's interval and "
        "Fisher's exact test against the baseline. A gap that favours the row with the larger "
        "share of diverged runs is never significant.",
    ),
    (
        "Events",
        "Values of the loss, or of the logarithm of the gradient norm, that are 4 standard "
        "deviations above a line through the 32 values before. Values with fewer than 8 quiet "
        "steps in between form one event. NaN and infinity always count. Rates are per judged "
        "step (a step with enough earlier values) over all seeds, with exact Poisson intervals "
        "(Garwood, 95%). The table of runs has the numbers of spikes of each run.",
    ),
    (
        "Figures",
        "Curves of training loss, gradient norm and learning rate show every step if the run "
        "has steps.npy, and all other training curves show logged steps, as do the tables. "
        "Where all seeds that logged a metric have a value, a line shows the mean over seeds "
        "and a band the range from lowest to highest. Elsewhere, thin lines show single seeds, "
        "and a cross marks the last finite value of a seed that ends early. Running means are "
        "centred. A triangle marks the first step of an event, as in the table; at the upper "
        "edge, its value is above the scale or not finite. Runs without events.jsonl have no "
        "triangles. The band of training loss and gradient norm covers every step of every "
        "seed. Longer runs are drawn in at most 1,000 intervals. A band has at most "
        f"{POINTS} points, each with the lowest and the highest value up to the next point. "
        "Figures by layer show the finished runs of a row, or all runs if no run has finished, "
        "at the last common logged step. The values are in the tables and in report.csv. If a "
        "legend names variants because there are more than ten rows, rows of a variant share a "
        "hue, with shades and dashes in the order of the table.",
    ),
    ("Directories", "Relative to the directory that contains all runs."),
    (MISSING, "Not measured, or not finite."),
)
