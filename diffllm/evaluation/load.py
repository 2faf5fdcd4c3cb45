"""Load the model, the tokenizer and the data of a run.

Shapes: T sequence length.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from diffllm.checkpoint.manifest import check_parameters, read_state
from diffllm.checkpoint.run_checkpoints import with_checkpoint
from diffllm.config import TrainConfig
from diffllm.config.saved import load_run_config, warn_of_plugins
from diffllm.core.errors import ConfigError
from diffllm.core.files import user_path
from diffllm.core.run_files import RunFile, read_facts, step_of
from diffllm.data.preparation.prepare import RunHashes, prepare
from diffllm.data.prepared import Prepared
from diffllm.data.sequences import StreamSequences, sequences_in
from diffllm.data.text.skipped import rule_text
from diffllm.data.tokenizer import Tokenizer, tokenizer_of
from diffllm.evaluation import TOKENS
from diffllm.evaluation.evaluation import EvaluationOptions, Settings, Subject
from diffllm.model import Transformer
from diffllm.model.attention.masks import Documents
from diffllm.model.attention.ops import Backend


def load_model(run: str | Path, step: int | None = None) -> tuple[Transformer, Tokenizer]:
    """Load a run's decoder and tokenizer from a checkpoint.

    The decoder is in float32 and in eval mode, on the current default device. Raises
    CheckpointError if the checkpoint is missing or damaged, and UserError if the run's attention
    variant is not registered.

    Args:
        step: step of the checkpoint; None selects the newest complete checkpoint.
    """
    run = user_path(Path(run), "run")
    model, _ = decoder(run, step or 0)
    return model, Tokenizer.from_file(tokenizer_of(run))


def decoder(run: Path, step: int = 0) -> tuple[Transformer, int]:
    """Load a run's decoder as `load_model` does; return the decoder and the step of its checkpoint.

    A `step` of 0 selects the newest complete checkpoint.
    """
    from diffllm.checkpoint.reader import load_tensors  # imports torch.distributed.checkpoint

    cfg = load_run_config(run)
    warn_of_plugins(run)
    cfg.model.attention.backend = Backend.sdpa  # The run's backend may be unavailable.

    def load(path: Path) -> tuple[Transformer, int]:
        model = Transformer(cfg.model)
        params = dict(model.named_parameters())
        check_parameters(path, read_state(path), params)
        # Fills the buffers that checkpoints do not contain: RoPE tables and lambda_init of DIFF V1.
        model.reset_parameters()
        tensors = {name: param.detach() for name, param in params.items()}
        tensors |= model.router_state()
        stored = {f"model.{name}": tensor for name, tensor in tensors.items()}
        # Loads into the memory of these tensors, which are the parameters of the model.
        load_tensors(path, stored, no_dist=True)
        return model.eval(), step_of(path)

    return with_checkpoint(run, step, load)


def own_data(run: Path, cfg: TrainConfig) -> Prepared:
    """Open the prepared corpus that a run was trained on.

    data.tokenizer is replaced by the copy in the run directory. Raises ConfigError if the corpus
    has changed since training, or if the copy of the tokenizer is not the original.
    """
    data_config = cfg.data
    if data_config.tokenizer:
        # The files of the copy in the run directory name the EOS that the run was trained with.
        data_config = replace(data_config, tokenizer=str(tokenizer_of(run)), eos_token=None)
    facts = read_facts(run)  # Without run.json, no hashes are known.
    run_hashes = RunHashes(facts.get("corpus"), facts.get("tokenizer"))
    data = prepare(data_config, cfg.prepare, run_hashes)
    hashes = {"corpus": data.manifest.corpus, "tokenizer": data.manifest.pieces_hash}
    for name, current_hash in hashes.items():
        if facts.get(name, current_hash) != current_hash:
            rule = rule_text(data.directories) if name == "corpus" else ""
            raise ConfigError(
                f"{run / RunFile.CONFIG}: the {name} has changed since training (hash "
                f"{current_hash[:12]} instead of {str(facts[name])[:12]}); restore the original "
                f"{name}{rule}"
            )
    return data


def own_corpus(run: Path, cfg: TrainConfig) -> str:
    """Return the hash of the corpus that a run was trained on."""
    facts = read_facts(run)
    corpus = facts.get("corpus")
    if not corpus:
        corpus = own_data(run, cfg).manifest.corpus
    return str(corpus)


class HeldoutSequence(NamedTuple):
    """Inputs and targets of one held-out sequence, (1, T) int64 each, and its document boundaries.

    Negative targets are ignored in the loss. `documents` contains the boundaries; None if
    data.mask_documents is false.
    """

    inputs: Tensor
    targets: Tensor
    documents: Documents | None


def first_sequences(
    run: Path, cfg: TrainConfig, most: int, device: torch.device
) -> list[HeldoutSequence]:
    """Read the first sequences of a run's held-out split, at most `most`, onto `device`."""
    data = own_data(run, cfg)
    stream = data.split("heldout")
    sequences = StreamSequences(stream, cfg.seq_len)
    count = min(most, sequences_in(stream, cfg.seq_len))
    first = []
    for i in range(count):
        inputs, targets = sequences.read(np.array([i]))
        documents = None
        if cfg.data.mask_documents:
            documents = Documents.of(inputs, data.manifest.eos_id).to(device)
        first.append(HeldoutSequence(inputs.to(device), targets.to(device), documents))
    return first


def sequences_for(tokens: int, seq_len: int) -> int:
    """Return the smallest number of sequences with at least `tokens` tokens in total."""
    return math.ceil(tokens / seq_len)


def pass_settings(subject: Subject, options: EvaluationOptions, version: int) -> Settings:
    """Return the settings of an evaluation that runs the model on `first_sequences`.

    The settings are the version of the evaluation, the number of sequences and the hash of the
    corpus. Stored results with other settings are not reused.
    """
    return {
        "version": version,
        "sequences": options.limit or sequences_for(TOKENS, subject.cfg.seq_len),
        "corpus": own_corpus(subject.run, subject.cfg),
    }
