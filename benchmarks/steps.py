"""Training steps of ours and of the transformers library's, timed in turns."""

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformers

from diffllm.config import load_config
from diffllm.distributed.world import join
from diffllm.trainer import build, train_step

LAYERS, DIM, HEADS, KV_HEADS, SEQ, BATCH, VOCAB = 6, 256, 8, 4, 512, 8, 8192
PRECISIONS = ("float32", "bf16 autocast", "bf16 weights")
WARMUP = 3
Step = Callable[[], None]
Times = dict[str, list[float]]


def batch(device: torch.device) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), device=device)


def ours(device: torch.device, *overrides: str) -> Step:
    """A step of the trainer: FSDP2 over one process, float32 master weights, float32 loss."""
    cfg = load_config(
        [
            f"model.n_layers={LAYERS}",
            f"model.dim={DIM}",
            f"model.n_heads={HEADS}",
            f"model.n_kv_heads={KV_HEADS}",
            f"model.head_dim={DIM // HEADS}",
            f"model.vocab_size={VOCAB}",
            f"seq_len={SEQ}",
            f"global_batch_size={BATCH}",
            *overrides,
        ]
    )
    training = build(cfg, device)

    def step() -> None:
        tokens = batch(device)
        train_step(training, iter([(tokens[:, :-1], tokens[:, 1:])]), 0)

    return step


def theirs(
    name: str, precision: str, device: torch.device, compile: bool = False, **shape: Any
) -> Step:
    """A step of a transformers model, written as its users write it.

    Args:
        name: e.g. "Llama".
        precision: one of PRECISIONS.
        shape: what its config has besides the sizes of this file.
    """
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=LAYERS,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM // HEADS,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
        **shape,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(device)
    if precision == "bf16 weights":
        model = model.to(torch.bfloat16)
    forward = torch.compile(model) if compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16 autocast")

    def step() -> None:
        tokens = batch(device)[:, :-1]
        with autocast:
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def in_turns(steps: dict[str, Step], rounds: int, device: torch.device) -> Times:
    """Seconds of every step in every round, after a few that do not count."""
    times: Times = {name: [] for name in steps}
    for round_ in range(rounds + WARMUP):
        for name, step in steps.items():
            elapsed = seconds(step, device)
            if round_ >= WARMUP:
                times[name].append(elapsed)
    return times


def seconds(step: Step, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def fastest(times: Times, names: Iterable[str]) -> str:
    """By median."""
    return min(names, key=lambda name: statistics.median(times[name]))


def against(best: str, times: Times) -> dict[str, dict[str, float]]:
    """Every step's speed over that of `best`, paired by round; printed."""
    print(f"\n{'':36}ms/step   tokens/s   against {best} (pairwise median, min, max)", flush=True)
    results = {}
    for name, values in times.items():
        ratios = sorted(b / own for b, own in zip(times[best], values, strict=True))
        median = statistics.median(values)
        results[name] = {
            "ms": 1e3 * median,
            "tokens_per_s": BATCH * SEQ / median,
            "ratio": statistics.median(ratios),
            "ratio_min": ratios[0],
            "ratio_max": ratios[-1],
        }
        print(
            f"{name:34}{1e3 * median:9.0f}{BATCH * SEQ / median:11,.0f}   "
            f"{statistics.median(ratios):.2f}  {ratios[0]:.2f}  {ratios[-1]:.2f}",
            flush=True,
        )
    return results


def write(path: Path, device: torch.device, rounds: int, results: dict[str, Any]) -> None:
    """Results, and on what they were measured."""
    threads = torch.get_num_threads()
    gpu = device.type == "cuda"
    meta = {
        "device": torch.cuda.get_device_name() if gpu else f"{threads} CPU cores",
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "rounds": rounds,
    }
    path.write_text(json.dumps({**meta, "results": results}, indent=2) + "\n")


def run_alone(main: Callable[[torch.device], None]) -> None:
    """`main` on this machine's device, in a process group of one."""
    settings = load_config([]).distributed
    world = join(settings)
    device = world.device()
    world.init_process_group(device, settings)
    try:
        main(device)
    finally:
        torch.distributed.destroy_process_group()
