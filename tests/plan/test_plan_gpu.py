"""Planned peak memory against a measurement on a GPU."""

import pytest
import torch
import torch.distributed as dist

from diffllm.config import load_config
from diffllm.plan.simulate import EVERYTHING, simulate
from diffllm.training.build import build
from diffllm.training.step import train_step

DENSE = ["model=dense_1p3b", "model.n_layers=6", "attention=diff_v2", "seq_len=4096"]
MOE = ["model=moe_1b", "model.n_layers=6", "attention=standard", "seq_len=4096"]
BATCH = ["global_batch_size=4", "micro_batch_size=2", "steps=200"]


def measured_peak(cfg):
    """Measure the peak bytes of tensors during a step, without earlier allocations."""
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.memory_allocated(device)
    t = build(cfg, device)
    shape = (2, cfg.micro_batches(1)[0], cfg.seq_len)
    generator = torch.Generator().manual_seed(0)

    def batches():
        while True:
            yield torch.randint(0, cfg.model.vocab_size, shape, generator=generator).unbind()

    train_step(t, batches(), 0, EVERYTHING)  # compiles and tunes kernels
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    train_step(t, batches(), 1, EVERYTHING)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device) - before


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
@pytest.mark.parametrize("model", [DENSE, MOE])
def test_planned_peak_memory_matches_peak_measured_on_gpu(model, checkpointing, compiled, tmp_path):
    words = [f"activation_checkpointing={checkpointing}", f"compile={compiled}"]
    cfg = load_config([*model, *BATCH, *words])
    planned = simulate(cfg, 1).peak
    torch._dynamo.reset()
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        measured = measured_peak(cfg)
    finally:
        dist.destroy_process_group()
    assert planned.total == pytest.approx(measured, rel=0.1), planned
