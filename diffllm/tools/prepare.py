"""diffllm prepare [overrides]: the tokenizer and token shards that a run would make first."""

from diffllm.config import load_config
from diffllm.data import Prepared, prepare
from diffllm.data.shards import Split


def main(argv: list[str]) -> None:
    """Prepare the corpus of a training config and say what there is, source by source."""
    if "-h" in argv or "--help" in argv:
        print("diffllm prepare [overrides as for train.py], e.g. data=files data.paths=[a.parquet]")
        return
    data = prepare(load_config(argv).data)
    sources = [f"{name}\n{data_text(source)}" for name, source in data.sources.items()]
    print("\n\n".join(sources or [data_text(data)]))


def data_text(data: Prepared) -> str:
    """Where tokens lie, what they are of, and how many there are."""
    manifest = data.manifest
    lines = [
        str(data.directory),
        f"{manifest.source}; {manifest.vocab_size} pieces, {manifest.dtype}",
        *(f"{name:<8} {counts_text(split)}" for name, split in manifest.splits.items()),
        f"skipped  {manifest.skipped_empty} empty, {manifest.skipped_undecodable} undecodable; "
        f"held-out unigram entropy {manifest.heldout_unigram_entropy:.3f} nats",
    ]
    return "\n".join(lines)


def counts_text(split: Split) -> str:
    """The size of a split; bytes where the text is known."""
    said = f"{split.documents:,} documents, {split.tokens:,} tokens"
    return f"{said}, {split.bytes / split.tokens:.2f} bytes a token" if split.bytes else said
