"""Checks before a run starts: data, tokenizer and weights must fit the model."""

import shlex
from dataclasses import replace
from pathlib import Path

from diffllm.checkpoint.hf.conversion import TARGET_VARIANTS
from diffllm.checkpoint.manifest import check_parameters, read_state
from diffllm.config import TrainConfig
from diffllm.config.changes import Changes, changes_text, is_fixed_in_stage, is_within
from diffllm.config.origin import Origin, named_in, origin_of
from diffllm.config.saved import changes_to
from diffllm.config.words import printed_override
from diffllm.core.errors import CheckpointError, ConfigError, DataError
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
from diffllm.model import without_storage
from diffllm.model.config import InitMatch
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


def starting_point(cfg: TrainConfig) -> Path | None:
    """Return the checkpoint or model directory for `resume=weights:PATH` or `resume=stage:PATH`.

    Return None for other values of `cfg.resume`. Raises ConfigError or CheckpointError if the
    tensors do not match the model, or if a stage has another variant or no optimizer state.
    """
    named = named_in(cfg.resume)
    if named is None:
        return None
    path = named.path
    if cfg.model.init_match is not InitMatch.none:
        raise ConfigError(
            f"model.init_match={cfg.model.init_match.name} scales only initial parameters, but "
            f"resume={cfg.resume} loads trained parameters; set model.init_match=none"
        )
    origin = origin_of(path, named.step)
    if type(origin.model.attention) is not type(cfg.model.attention):
        variant = cfg.resolved.choices["attention"]
        hint = f"set attention={origin.attention}"
        if variant in TARGET_VARIANTS:
            convert = shlex.join(["diffllm", "import", f"hf={path}", f"attention={variant}"])
            hint = f"to convert: {convert} out=..."
        raise ConfigError(
            f"{path} has attention={origin.attention}, but the run has attention={variant}; {hint}"
        )
    checkpoint = origin.checkpoint()
    if named.kind == "stage":
        check_stage(cfg, origin, checkpoint)
    if checkpoint:
        state = read_state(checkpoint)
    else:
        # A Hugging Face directory has no state.json: its config.json determines the shapes.
        params = without_storage(origin.model).named_parameters()
        state = {"parameters": {name: list(param.shape) for name, param in params}}
    place = checkpoint or path
    check_parameters(place, state, dict(without_storage(cfg.model).named_parameters()))
    return place


def check_stage(cfg: TrainConfig, origin: Origin, checkpoint: Path | None) -> None:
    """Raise an error if `origin` cannot be the previous stage of a run with the config `cfg`.

    Its `checkpoint` must contain the state of optimizer and loop, and both models must have equal
    settings of the kind that `is_fixed_in_stage` selects.
    """
    weights = printed_override("resume", f"weights:{origin.path}")
    # A checkpoint without the state of the loop, such as an imported model, has no optimizer state.
    if checkpoint is None or read_state(checkpoint)["loop"] is None:
        raise CheckpointError(
            f"{origin.path} has no optimizer state, which a stage needs; to start from the "
            f"parameters alone, set {weights}"
        )
    changes = changes_to(origin.model, cfg.model, is_fixed_in_stage)
    if changes:
        model_changes = {f"model.{key}": pair for key, pair in changes.items()}
        text = changes_text(model_changes, "the previous stage")
        raise ConfigError(
            f"{text}; of the model, a stage can change only seq_len, model.rope and the balance of "
            f"experts; remove these overrides, or set {weights}"
        )


def check_same_tokens(cfg: TrainConfig, data: Prepared, path: Path) -> None:
    """Raise ConfigError if `data` and the weights in `path` have different tokenizers.

    Different tokenizers are allowed if `cfg.run.allow_changes` contains `tokenizer`, but not in a
    new stage.
    """
    named = named_in(cfg.resume)
    is_stage = named is not None and named.kind == "stage"
    if is_within("tokenizer", cfg.run.allow_changes) and not is_stage:
        return
    if Tokenizer.from_file(origin_of(path).tokenizer).pieces_hash != data.manifest.pieces_hash:
        other_fix = ""
        if not is_stage:
            allowed = ",".join([*cfg.run.allow_changes, "tokenizer"])
            other_fix = f", or set run.allow_changes=[{allowed}]"
        raise ConfigError(
            f"the data has a different tokenizer than {path}; set data.tokenizer to the "
            f"tokenizer of these weights{other_fix}"
        )
