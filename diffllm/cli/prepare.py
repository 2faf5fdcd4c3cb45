"""diffllm prepare [overrides]: make the tokenizer, the token shards and the packing of a run."""

from typing import Any

from diffllm.cli.arguments import take_json
from diffllm.config import load_config
from diffllm.config.help import sections_text
from diffllm.core.printing import echo, echo_json
from diffllm.core.standard_streams import messages_on_stderr, result
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import Prepared
from diffllm.data.sequences import packing_counts
from diffllm.data.shards import Split, thin_heldout
from diffllm.data.text.skipped import skipped_text
from diffllm.data.tokenizer import eos_text, guesses_eos

USAGE = """\
diffllm prepare [overrides as for train.py] [--json], e.g. data=files data.paths=[a.parquet]

Relevant keys: seq_len, for packing, and the keys below; `python train.py --help` lists all keys."""


def prepare_command(argv: list[str]) -> None:
    if "-h" in argv or "--help" in argv:
        echo(f"{USAGE}\n\n{sections_text(['data', 'prepare'])}")
        return
    as_json, overrides = take_json(argv)
    cfg = load_config(overrides)
    with messages_on_stderr(as_json):
        data = prepare(cfg.data, cfg.prepare)
        packed = packing_counts(data, cfg.data, cfg.seq_len)
    eos_token = data.tokenizer().eos_token
    guessed = guesses_eos(cfg.data.tokenizer, cfg.data.eos_token)
    if as_json:
        content = {
            **prepared_values(data),
            "eos_token": eos_token,
            "eos_guessed": guessed,
            "packing": packed.numbers() if packed else None,
            "sources": {name: prepared_values(source) for name, source in data.sources.items()},
        }
        with result():
            echo_json(content)
        return
    texts = [f"{name}\n{prepared_text(source)}" for name, source in data.sources.items()]
    echo("\n\n".join(texts or [prepared_text(data)]))
    echo(eos_text(eos_token, data.manifest.eos_id, guessed))
    if packed:
        if texts:
            echo("")
        echo(f"packing  {packed.text()}")


def prepared_values(data: Prepared) -> dict[str, Any]:
    """Return the values that --json prints for a corpus; `bytes` is None if unknown."""
    manifest = data.manifest
    splits = {}
    for name, split in manifest.splits.items():
        splits[name] = {
            "documents": split.documents,
            "tokens": split.tokens,
            "bytes": split.bytes or None,
            "share_predicted": split.share_predicted,
        }
    return {
        "directory": None if data.sources else str(data.directory),
        "source": manifest.source,
        "vocab_size": manifest.vocab_size,
        "dtype": manifest.dtype,
        "note": manifest.note or None,
        "splits": splits,
        "skipped_empty": manifest.skipped_empty,
        "skipped_other": manifest.skipped_undecodable,
        "heldout_unigram_entropy": manifest.heldout_unigram_entropy,
    }


def prepared_text(data: Prepared) -> str:
    manifest, heldout = data.manifest, data.manifest.splits["heldout"]
    empty, other = manifest.skipped_empty, manifest.skipped_undecodable
    counts_of_skipped = f"skipped  {empty} empty and {other} other files"
    lines = [
        str(data.directory),
        f"{manifest.source}; {manifest.vocab_size} pieces, {manifest.dtype}",
    ]
    if manifest.note:
        lines.append(f"corpus   {manifest.note}")
    for name, split in manifest.splits.items():
        lines.append(f"{name:<8} {counts_text(split)}")
    # The list is newer than the manifest, so the counts of the manifest may differ.
    lines.append(skipped_text(data.directory) or counts_of_skipped)
    lines.append(f"held-out unigram entropy {manifest.heldout_unigram_entropy:.3f} nats")
    warning = thin_heldout(heldout.documents, heldout.tokens)
    if warning:
        lines.append(warning)
    return "\n".join(lines)


def counts_text(split: Split) -> str:
    text = f"{split.documents:,} documents, {split.tokens:,} tokens"
    if not split.bytes:
        return text
    if split.masked:
        text += f", {split.share_predicted:.0%} of them targets"
    # The bytes of a split are those of its predicted tokens.
    predicted_tokens = split.tokens * split.share_predicted
    return f"{text}, {split.bytes / predicted_tokens:.2f} bytes per token"
