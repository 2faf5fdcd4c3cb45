"""One rank in this process: train a few steps; save, damage and resume a checkpoint.

with gloo_group():                                    # required by FSDP and DCP
    logits, values = trained_run(path, ["attention=diff_v2"])
    loop = resume(build(cfg, device), path / "checkpoints" / "step-00000003")
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor

from diffllm import load_config
from diffllm.checkpoint.manifest import (
    FORMAT,
    check_loop,
    check_parameters,
    file_records,
    read_state,
    write_manifest,
)
from diffllm.checkpoint.writer import Checkpointer
from diffllm.config import TrainConfig
from diffllm.core.files import write_atomic
from diffllm.metrics.spikes import SpikeMonitor
from diffllm.training.build import Training, build
from diffllm.training.state import LoopState, continued, restore, save
from diffllm.training.step import train_step
from runs.json_files import write_json

SMALL = [
    *("model=tiny", "seq_len=8", "global_batch_size=2", "model.dim=32", "model.ffn_dim=32"),
    *("model.vocab_size=64", "precision=fp32", "optim.warmup_steps=0", "optim.lr=0.1"),
]
TOKENS = torch.arange(16).view(2, 8) % 64


@contextmanager
def gloo_group() -> Iterator[None]:
    """Initialise a process group of one rank, without ports or files."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained_run(run: Path, overrides: list[str]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Train three steps and save; return the model's logits and its unsharded tensors."""
    cfg = load_config([*SMALL, *overrides])
    t = build(cfg, torch.device("cpu"))
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    for number in range(3):
        tokens = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(number))
        mine = tokens[rank :: max(1, ranks)]
        train_step(t, iter([(mine[:, :-1], mine[:, 1:])]), number)
    checkpointer = Checkpointer(run / "checkpoints", cfg.checkpoint)
    save(t, LoopState(step=3), checkpointer)
    checkpointer.close()
    if rank == 0:
        write_config_and_tokenizer(run, cfg)
    with torch.no_grad():
        logits = t.model(TOKENS)
    values = {**t.params, **t.model.router_state()}
    return logits, {name: unsharded(value) for name, value in values.items()}


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor or of all shards of a DTensor."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def write_config_and_tokenizer(run: Path, cfg: TrainConfig) -> None:
    write_atomic(run / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    (run / "tokenizer.model").write_bytes(b"pieces")


def resume(t: Training, path: Path) -> LoopState:
    """Check a checkpoint, load it into `t`, and return its loop state."""
    saved = read_state(path)
    check_loop(path, saved)
    check_parameters(path, saved, t.params)
    state, _ = continued(path, saved, saved["loop"].get("order", {}), [])
    restore(t, state, path, saved["ranks"])
    return state


def write_checkpoint(directory: Path, step: int, **parts: object) -> Path:
    """Write a checkpoint with a valid manifest, but without tensors, into `directory`.

    Args:
        parts: fields of state.json that replace those of an empty run.
    """
    path = directory / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / ".metadata").write_bytes(b"no index")
    state = {"format": FORMAT, "step": step, "parameters": {}, "ranks": 1, "loop": loop_of(step)}
    write_json(path / "state.json", {**state, **parts})
    sign(path)
    return path


def loop_of(step: int) -> dict[str, object]:
    """Return the loop state of a run that has read no data."""
    spikes = SpikeMonitor().state_dict()
    run = {"wandb_id": None, "seconds": 0.0, "compiled": False, "mkl_mode": "AVX2,STRICT"}
    return {"step": step, "data": {}, "order": {}, "spikes": spikes, **run}


def sign(path: Path) -> None:
    """Write a manifest that matches the files, as in a forged checkpoint."""
    files = file_records(file for file in path.iterdir() if file.name != "manifest.json")
    step = int(path.name.removeprefix("step-"))
    write_manifest(path, step, files)


def flip_bit(file: Path) -> None:
    """Flip one bit in the middle of a file, but keep size and time."""
    about, content = file.stat(), bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
