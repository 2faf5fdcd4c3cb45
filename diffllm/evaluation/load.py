"""The model of a run, for use."""

import os
from pathlib import Path

from diffllm.checkpoint import check_parameters, load_tensors, read_state, step_of
from diffllm.checkpoint.directory import with_checkpoint
from diffllm.config.saved import load_run_config, warn_of_plugins
from diffllm.data import Tokenizer
from diffllm.data.tokenizer_files import tokenizer_of
from diffllm.errors import CheckpointError
from diffllm.files import user_path
from diffllm.model import Transformer
from diffllm.model.attention.ops import Backend


def load_model(run: str | Path, step: int | None = None) -> tuple[Transformer, Tokenizer]:
    """Load a run's decoder and tokenizer: float32, in eval mode, on the current default device.

    The model is that of a checkpoint's step, None for the newest whole one. Raises CheckpointError
    without a run or such a checkpoint, or if it is damaged or of another model; PluginError for a
    variant that nothing here has registered.
    """
    if not isinstance(run, str | os.PathLike):
        raise CheckpointError(f"load_model takes the path of a run, not {run!r}")
    run = user_path(Path(run), "run")
    return decoder(run, step or 0)[0], Tokenizer.from_file(tokenizer_of(run))


def decoder(run: Path, step: int = 0) -> tuple[Transformer, int]:
    """Load a run's decoder as `load_model` does, and say the step of its checkpoint."""
    cfg = load_run_config(run)
    warn_of_plugins(run)
    cfg.model.attention.backend = Backend.sdpa  # the run's may not exist here

    def load(path: Path) -> tuple[Transformer, int]:
        model = Transformer(cfg.model)
        params = dict(model.named_parameters())
        check_parameters(path, read_state(path), params)
        model.reset_parameters()
        tensors = {**{n: p.detach() for n, p in params.items()}, **model.router_state()}
        load_tensors(path, {f"model.{n}": tensor for n, tensor in tensors.items()}, no_dist=True)
        return model.eval(), step_of(path)

    return with_checkpoint(run, step, load)
