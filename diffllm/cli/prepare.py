"""diffllm prepare [overrides]: make the tokenizer, the token shards and the packing of a run."""

from diffllm.config import load_config
from diffllm.config.help import sections_text
from diffllm.core.printing import echo
from diffllm.data.mixture import Prepared
from diffllm.data.preparation.prepare import prepare
from diffllm.data.sequences import packing_counts
from diffllm.data.shards import Split, thin_heldout
from diffllm.data.tokenizer import eos_text, guesses_eos

USAGE = """\
diffllm prepare [overrides as for train.py], e.g. data=files data.paths=[a.parquet]

Relevant keys: seq_len, for packing, and the keys below; `python train.py --help` lists all keys."""


def prepare_command(argv: list[str]) -> None:
    if "-h" in argv or "--help" in argv:
        echo(f"{USAGE}\n\n{sections_text(['data', 'prepare'])}")
        return
    cfg = load_config(argv)
    data = prepare(cfg.data, cfg.prepare)
    guessed = guesses_eos(cfg.data.tokenizer, cfg.data.eos_token)
    eos = eos_text(data.tokenizer().eos_token, data.manifest.eos_id, guessed)
    sources = [f"{name}\n{prepared_text(source)}" for name, source in data.sources.items()]
    echo("\n\n".join(sources or [prepared_text(data)]))
    echo(eos)
    if packed := packing_counts(data, cfg.data, cfg.seq_len):
        echo("\n" * bool(sources) + f"packing  {packed.text()}")


def prepared_text(data: Prepared) -> str:
    manifest, heldout = data.manifest, data.manifest.splits["heldout"]
    lines = [
        str(data.directory),
        f"{manifest.source}; {manifest.vocab_size} pieces, {manifest.dtype}",
        *([f"corpus   {manifest.note}"] if manifest.note else []),
        *(f"{name:<8} {counts_text(split)}" for name, split in manifest.splits.items()),
        f"skipped  {manifest.skipped_empty} empty, {manifest.skipped_undecodable} hidden or "
        f"unsupported; held-out unigram entropy {manifest.heldout_unigram_entropy:.3f} nats",
        thin_heldout(heldout.documents, heldout.tokens),
    ]
    return "\n".join(filter(None, lines))


def counts_text(split: Split) -> str:
    said = f"{split.documents:,} documents, {split.tokens:,} tokens"
    if not split.bytes:
        return said
    asked = split.tokens * split.share_predicted
    of_all = f", {split.share_predicted:.0%} of them targets" * split.masked
    return f"{said}{of_all}, {split.bytes / asked:.2f} bytes per token"
