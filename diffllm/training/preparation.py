"""The device of a rank, and the prepared corpus of a run."""

from dataclasses import replace

import torch

from diffllm.config import TrainConfig
from diffllm.config.changes import is_within
from diffllm.data.preparation.prepare import prepare
from diffllm.data.prepared import Prepared
from diffllm.data.sequences import packing_counts
from diffllm.data.text.skipped import skipped_text
from diffllm.distributed.consistency import check_same
from diffllm.training.build import chosen_precision
from diffllm.training.checks import check_fit, corpus_facts
from diffllm.training.claim import Claimed
from diffllm.training.process import Process


def prepare_data(
    cfg: TrainConfig, process: Process, claimed: Claimed
) -> tuple[torch.device, Prepared]:
    """Choose the device of this rank, and prepare the corpus.

    Call this before the first collective: the preparation may take hours, but collectives have a
    timeout.
    """
    device = process.world.device()
    dtype = chosen_precision(cfg.precision, device).value
    attention = cfg.model.attention.resolve(cfg.model, device)
    attention.prepare(dtype, cfg.data.mask_documents)
    process.watch.reached("the preparation of the corpus")
    process.display.print(f"run {claimed.path}: preparing data")
    # Not stored in cfg: config.yaml must contain only the EOS that the user sets.
    with_eos = replace(cfg.data, eos_token=claimed.eos_token)
    hashes = claimed.hashes
    if is_within("corpus", cfg.run.allow_changes):
        hashes = hashes._replace(corpus=None)
    data = prepare(with_eos, cfg.prepare, hashes)
    for directory in data.directories:
        # Preparation names the files once; later runs only point to the list.
        text = skipped_text(directory)
        if text:
            process.display.print(text)
    check_fit(cfg, data)
    # Fill the cache here: counting may take longer than the timeout of collectives.
    packing_counts(data, cfg.data, cfg.seq_len)
    check_same(process.world, "corpus", corpus_facts(data))
    return device, data
