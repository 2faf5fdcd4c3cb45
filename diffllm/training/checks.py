"""Checks before a run starts: the data and the tokenizer must fit the model."""

from dataclasses import replace
from pathlib import Path

from diffllm.config import TrainConfig
from diffllm.config.changes import Changes
from diffllm.core.errors import ConfigError, DataError
from diffllm.core.files import read_bytes
from diffllm.core.registry import SCHEMAS
from diffllm.data.config import DataConfig
from diffllm.data.prepared import Prepared
from diffllm.data.text.file_index import combined_hash
from diffllm.data.tokenizer import (
    FAST,
    LARGEST_TOKENIZER,
    Tokenizer,
    guesses_eos,
    located,
)
from diffllm.optim import Schedule, learning_rate
from diffllm.training.measure import heldout_samples


def learning_rate_jump(cfg: TrainConfig, changes: Changes, step: int) -> str | None:
    """Describe the jump of the learning rate when a run resumes with changed settings.

    Return None if the learning rate changes by at most 5%, or if `step` is 0 or `cfg.steps`.
    `changes` maps each changed config key to (old value, new value). `step` is the number of steps
    completed before the run resumes.
    """
    former = {}
    for key, (former_value, _) in changes.items():
        if key.startswith("optim."):
            former[key.removeprefix("optim.")] = former_value
    if "schedule" in former:
        former["schedule"] = Schedule[former["schedule"]]
    former_optim = replace(cfg.optim, **former)
    former_steps, _ = changes.get("steps", (cfg.steps, None))
    # `step` may be the end of the former schedule, where no next step exists.
    former_rate = learning_rate(former_optim, min(step, former_steps - 1), former_steps)
    rate = learning_rate(cfg.optim, step, cfg.steps)
    if step in (0, cfg.steps) or abs(rate - former_rate) <= 0.05 * former_rate:
        return None
    return (
        f"the learning rate changes from {former_rate:.2g} to {rate:.2g} at step {step + 1}, "
        f"because the schedule now covers {cfg.steps} steps"
    )


def corpus_facts(data: Prepared) -> dict[str, str]:
    """Return three hashes of a prepared corpus by name.

    "corpus" is the hash of the text, "tokenizer" of the vocabulary, and "tokens" of the shards.
    """
    token_hashes = []
    mask_hashes = []
    for split in data.manifest.splits.values():
        for shard in split.shards:
            token_hashes.append(shard.sha256)
            if shard.mask_sha256:
                mask_hashes.append(shard.mask_sha256)
    # The order is part of the hash "tokens", which existing checkpoints contain.
    return {
        "corpus": data.manifest.corpus,
        "tokenizer": data.manifest.pieces_hash,
        "tokens": combined_hash(token_hashes + mask_hashes),
    }


def former_eos(run: Path, data: DataConfig) -> str | None:
    """Return data.eos_token, or the EOS of the run in the directory `run` if this EOS is a guess.

    Older versions guessed by other rules, but a resumed run and a new stage need the same EOS.
    """
    copy = run / FAST
    if not guesses_eos(data.tokenizer, data.eos_token) or not copy.is_file():
        return data.eos_token
    if read_bytes(copy, LARGEST_TOKENIZER) != located(str(data.tokenizer)).read_bytes():
        return data.eos_token
    return Tokenizer.from_file(copy).eos_token


def check_pieces(cfg: TrainConfig, eos_token: str | None) -> None:
    """Raise DataError if data.tokenizer has more than model.vocab_size entries or no EOS.

    `eos_token` is the result of `former_eos`.
    """
    name, most = cfg.data.tokenizer, cfg.model.vocab_size
    if name is None:
        return
    pieces = Tokenizer.from_file(name, eos_token).vocab_size
    if pieces > most:
        raise DataError(
            f"data.tokenizer={name} has {pieces} entries, more than model.vocab_size={most}; "
            f"choose a tokenizer with at most {most} entries or a larger model.vocab_size"
        )


def check_fit(cfg: TrainConfig, data: Prepared) -> None:
    """Raise DataError if the prepared corpus does not match the config.

    The tokenizer must have at most model.vocab_size entries. Each split of each data source must
    contain at least one full sequence. Each held-out sample must contain at least one target.
    """
    pieces = data.manifest.vocab_size
    most = cfg.model.vocab_size
    if pieces > most:
        raise DataError(
            f"the tokenizer of the data has {pieces} entries, more than model.vocab_size={most}; "
            f"choose a tokenizer with at most {most} entries or a larger model.vocab_size"
        )
    for source, part in {"": data, **data.sources}.items():
        for name, split in part.manifest.splits.items():
            # The last token of a sequence is only a target.
            if split.tokens < cfg.seq_len + 1:
                of_source = f" of {source}" if source else ""
                advice = "use more text"
                if name == "heldout":
                    advice += ", a larger data.heldout_fraction"
                raise DataError(
                    f"the {name} split{of_source} has {split.tokens} tokens, fewer than "
                    f"seq_len + 1 = {cfg.seq_len + 1}; {advice} or a smaller seq_len"
                )
    for source, sample in heldout_samples(cfg, data).items():
        if not sample.stream.masked:
            continue
        if not any((targets >= 0).any() for _, targets in sample.batches(1)):
            of_source = f" of {source}" if source else ""
            raise DataError(
                f"the loss ignores all tokens of the held-out sample{of_source} "
                f"(eval.sequences={cfg.eval.sequences}), because they belong to prompts; "
                "increase eval.sequences or data.heldout_fraction"
            )


def check_named(cfg: TrainConfig) -> None:
    """Raise ConfigError if the class of `model.attention` does not match the attention= option."""
    name, attention = cfg.resolved.choices["attention"], type(cfg.model.attention)
    expected = SCHEMAS["attention", cfg.resolved.schemas["attention"]]
    if attention is not expected:
        raise ConfigError(
            f"attention={name} needs {expected.__name__} as the class of model.attention, not "
            f"{attention.__name__}; set attention= to a variant that uses {attention.__name__}"
        )
