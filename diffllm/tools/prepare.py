"""diffllm prepare [overrides]: the tokenizer and token shards that a run would make first."""

from diffllm.config import load_config
from diffllm.data import prepare


def main(argv: list[str]) -> None:
    """Prepare the corpus of a training config and say what there is."""
    if "-h" in argv or "--help" in argv:
        print("diffllm prepare [overrides as for train.py], e.g. data=files data.paths=[a.parquet]")
        return
    data = prepare(load_config(argv).data)
    manifest = data.manifest
    print(data.directory)
    print(f"{manifest.source}; {manifest.vocab_size} pieces, {manifest.dtype}")
    for name, split in manifest.splits.items():
        print(
            f"{name:<8} {split.documents:,} documents, {split.tokens:,} tokens, "
            f"{split.bytes / split.tokens:.2f} bytes a token"
        )
    print(
        f"skipped  {manifest.skipped_empty} empty, {manifest.skipped_undecodable} undecodable; "
        f"held-out unigram entropy {manifest.heldout_unigram_entropy:.3f} nats"
    )
