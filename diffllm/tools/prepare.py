"""diffllm prepare [overrides]: the tokenizer, tokens and packing that a run would make first."""

from diffllm.config import load_config
from diffllm.data import packing_counts, prepare
from diffllm.data.shards import Split


def main(argv: list[str]) -> None:
    """Prepare the corpus of a training config and say what there is, source by source."""
    if "-h" in argv or "--help" in argv:
        print("diffllm prepare [overrides as for train.py], e.g. data=files data.paths=[a.parquet]")
        return
    cfg = load_config(argv)
    data = prepare(cfg.data)
    packed = packing_counts(data, cfg.data, cfg.seq_len)
    for name, source in data.sources.items() or [("", data)]:
        manifest = source.manifest
        if name:
            print(f"\n{name}")
        print(source.directory)
        print(f"{manifest.source}; {manifest.vocab_size} pieces, {manifest.dtype}")
        for split, counts in manifest.splits.items():
            print(f"{split:<8} {counts_text(counts)}")
        print(
            f"skipped  {manifest.skipped_empty} empty, {manifest.skipped_undecodable} undecodable; "
            f"held-out unigram entropy {manifest.heldout_unigram_entropy:.3f} nats"
        )
    if packed:
        print(f"packing  {packed.text()}")


def counts_text(split: Split) -> str:
    """The size of a split; bytes where the text is known."""
    said = f"{split.documents:,} documents, {split.tokens:,} tokens"
    return f"{said}, {split.bytes / split.tokens:.2f} bytes a token" if split.bytes else said
