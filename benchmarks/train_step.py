"""A training step of ours against the transformers library's, alternating in one process.

    python benchmarks/train_step.py [--rounds 15] [--json benchmarks/results/NAME.json]

6 layers, 256 wide, 8/4 heads, sequence 512, batch 8, vocabulary 8192; forward, loss, backward,
gradient clipping and fused AdamW. Ours is the trainer's own step: FSDP2 over one process, float32
master weights, float32 loss. Theirs runs in three precisions (float32, bf16 autocast, bf16
weights) and the fastest of them is what ours is compared with.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from diffllm.config import load_config
from diffllm.distributed.world import join
from diffllm.trainer import build, train_step

LAYERS, DIM, HEADS, KV_HEADS, FFN, SEQ, BATCH, VOCAB = 6, 256, 8, 4, 768, 512, 8, 8192
Step = Callable[[], None]


def batch(device: torch.device) -> torch.Tensor:
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), device=device)


def ours(attention: str, compile: bool, overrides: tuple[str, ...] = ()) -> Step:
    """A step of the trainer."""
    cfg = load_config(
        [
            f"attention={attention}",
            f"model.n_layers={LAYERS}",
            f"model.dim={DIM}",
            f"model.n_heads={HEADS}",
            f"model.n_kv_heads={KV_HEADS}",
            f"model.head_dim={DIM // HEADS}",
            f"model.ffn_dim={FFN}",
            f"model.vocab_size={VOCAB}",
            f"seq_len={SEQ}",
            f"global_batch_size={BATCH}",
            f"compile={str(compile).lower()}",
            *overrides,
        ]
    )
    training = build(cfg, WORLD.device())

    def step() -> None:
        tokens = batch(training.device)
        train_step(training, iter([(tokens[:, :-1], tokens[:, 1:])]), 0)

    return step


def theirs(name: str, precision: str) -> Step:
    """A step of a transformers model, written as its users write it."""
    config_class = getattr(transformers, f"{name}Config")
    config = config_class(
        num_hidden_layers=LAYERS,
        hidden_size=DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        intermediate_size=FFN,
        vocab_size=VOCAB,
        max_position_embeddings=SEQ,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    device = WORLD.device()
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(device)
    if precision == "bf16 weights":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16 autocast")

    def step() -> None:
        tokens = batch(device)[:, :-1]
        with autocast:
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds(step: Step, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = WORLD.device()
    results: dict[str, dict[str, float]] = {}
    for attention, peer in (("standard", "Llama"), ("diff_v1", "DiffLlama")):
        steps = {
            f"{attention}, eager": ours(attention, compile=False),
            f"{attention}, compiled": ours(attention, compile=True),
            **{
                f"{peer}, {precision}": theirs(peer, precision)
                for precision in ("float32", "bf16 autocast", "bf16 weights")
            },
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for round_ in range(args.rounds + 3):
            for name, step in steps.items():
                elapsed = seconds(step, device)
                if round_ >= 3:
                    times[name].append(elapsed)
        best = min(
            (n for n in steps if n.startswith(peer)), key=lambda n: statistics.median(times[n])
        )
        print(f"\n{'':28}ms/step   tokens/s   against {best} (pairwise median, min, max)")
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
                f"{name:26}{1e3 * median:9.0f}{BATCH * SEQ / median:11,.0f}   "
                f"{statistics.median(ratios):.2f}  {ratios[0]:.2f}  {ratios[-1]:.2f}"
            )
    if args.json:
        name = (
            torch.cuda.get_device_name()
            if device.type == "cuda"
            else f"{torch.get_num_threads()} CPU cores"
        )
        meta = {
            "device": name,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "rounds": args.rounds,
        }
        args.json.write_text(json.dumps({**meta, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    settings = load_config([]).distributed
    WORLD = join(settings)
    WORLD.init_process_group(WORLD.device(), settings)
    main()
    torch.distributed.destroy_process_group()
