"""The model of a run, for use."""

from pathlib import Path

from diffllm.checkpoint import check_parameters, find_checkpoint, load_tensors, read_state
from diffllm.config.saved import load_run_config
from diffllm.data import Tokenizer
from diffllm.data.tokenizer_files import tokenizer_in
from diffllm.model import Transformer
from diffllm.model.attention.ops import Backend


def load_model(run: str | Path, step: int | None = None) -> tuple[Transformer, Tokenizer]:
    """Load a run's decoder and tokenizer: float32, in eval mode, on the current default device.

    The model is that of a checkpoint's step, None for the newest whole one. Raises CheckpointError
    without a run or such a checkpoint, or if it is damaged or of another model; PluginError for a
    variant that nothing here has registered.
    """
    run = Path(run).expanduser()
    cfg = load_run_config(run)
    path = find_checkpoint(run, step or 0)
    cfg.model.attention.backend = Backend.sdpa  # the run's may not exist here
    model = Transformer(cfg.model)
    params = dict(model.named_parameters())
    check_parameters(path, read_state(path), params)
    model.reset_parameters()
    tensors = {**{n: p.detach() for n, p in params.items()}, **model.router_state()}
    load_tensors(path, {f"model.{n}": tensor for n, tensor in tensors.items()}, no_dist=True)
    return model.eval(), Tokenizer.from_file(tokenizer_in(run))
