"""The held-out text of runs: its size, in words, and a warning about too little text."""

from collections.abc import Iterable

from diffllm.compare.arms.run import Run
from diffllm.core.run_files import finite
from diffllm.data.shards import thin_heldout

HELDOUT = "heldout_tokens"
"""Number of tokens of the final held-out loss; unknown in runs of older versions."""
HELDOUT_SPLIT = "heldout_split_tokens"
"""Number of tokens of the whole held-out split; unknown in runs of older versions."""


def thin_note(runs: Iterable[Run]) -> str:
    """Return a warning if a run has too little held-out text for a reliable loss, otherwise "".

    If several runs have too little text, the warning is about the run with the fewest documents.
    """
    warnings = []
    for run in runs:
        documents = run.summary_number("heldout_documents")
        tokens = run.summary_number("heldout_tokens")
        if not documents or not tokens:
            continue
        # With masked tokens, `tokens` does not count the prompts of the held-out text.
        is_masked = run.cfg.data.prompt_column or getattr(run.cfg.data, "answers_only", False)
        key = "eval.tokens or data.heldout_fraction"
        if is_whole_split(run):
            key = "data.heldout_fraction"
        warning = thin_heldout(int(documents), None if is_masked else int(tokens), key)
        if warning:
            warnings.append((documents, warning))
    _, note = min(warnings, default=(0, ""))
    return note


def is_whole_split(run: Run) -> bool:
    """Return whether run.json shows that the final loss covers the whole held-out split.

    Older versions did not record the size of the split; the result is then False.
    """
    measured = finite(run.facts.get(HELDOUT))
    split = finite(run.facts.get(HELDOUT_SPLIT))
    return measured is not None and split is not None and measured >= split


def heldout_text(runs: Iterable[Run]) -> str:
    """Describe the text of the final held-out loss by the recorded numbers of tokens.

    For example "the whole held-out split (21 documents, 2,048 tokens)". If runs differ in these
    numbers, or did not record them, return "held-out documents".
    """
    sizes = set()
    for run in runs:
        if run.final_loss is not None:
            measured = finite(run.facts.get(HELDOUT))
            whole_split = finite(run.facts.get(HELDOUT_SPLIT))
            sizes.add((measured, whole_split, run.summary_number("heldout_documents")))
    if len(sizes) != 1:
        return "held-out documents"
    tokens, split, documents = sizes.pop()
    if tokens is None:
        return "held-out documents"
    noun = "document" if documents == 1 else "documents"
    count = f"{documents:,.0f} " if documents else ""
    if split is None:
        return f"{count}held-out {noun} ({tokens:,.0f} tokens)"
    if tokens < split:
        return f"{count}{noun} of the held-out split ({tokens:,.0f} of {split:,.0f} tokens)"
    of_documents = f"{count}{noun}, " if documents else ""
    return f"the whole held-out split ({of_documents}{tokens:,.0f} tokens)"
