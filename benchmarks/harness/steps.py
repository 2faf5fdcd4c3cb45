"""Training steps of diffllm and of peers: time, FLOPs, memory, overhead of diagnostics."""

import random
import statistics
import time
from typing import Any

import torch

from diffllm.config import TrainConfig, load_config
from diffllm.metrics.diagnostics import named_values
from diffllm.model import ModelConfig, Transformer
from diffllm.model.attention import kernels
from diffllm.model.attention.kernels import Kernel
from diffllm.model.auto_setting import ASKED, AutoSetting
from diffllm.plan.simulate import EVERYTHING, simulate
from diffllm.training.build import build, chosen_precision
from diffllm.training.memory import GIB
from diffllm.training.record import grad_norm_by_group, peak_flops
from diffllm.training.step import Due, train_step
from harness.machine import Step, join_alone, seconds, synchronize
from harness.plain_llama import PlainLlama

DOCUMENT_END = 0
"""Token at the end of a document, for steps with masked documents."""
WARM = 3  # warm-up steps, which compile
KINDS = {
    "off": Due(),
    "statistics": Due(statistics=True, update=True),
    "probes": Due(statistics=True, probes=True, update=True),
}


def measure(rounds: int, repeats: int, **contestant: Any) -> dict[str, Any]:
    """Return the time of a training step: the median over `rounds` of the mean of `repeats` steps.

    Also return the speed, the MFU and the peak memory.
    """
    device = join_alone()
    cfg, step = build_step(device, **contestant)
    start = time.perf_counter()
    for _ in range(WARM):
        step()
    synchronize(device)
    first_steps = time.perf_counter() - start
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    times = [seconds(step, device, repeats) for _ in range(rounds)]
    tokens_per_s = cfg.global_batch_size * cfg.seq_len / statistics.median(times)
    peak = peak_flops(device)
    flops = flops_per_token(cfg.model) if peak else {}
    return {
        "ms": 1e3 * statistics.median(times),
        "slowest_ms": 1e3 * max(times),
        "tokens_per_s": tokens_per_s,
        **{f"mfu_{kind}": count * tokens_per_s / peak for kind, count in flops.items()},
        "peak_gib": torch.cuda.max_memory_allocated(device) / GIB if gpu else None,
        "first_steps_s": first_steps,
        "rounds_ms": [1e3 * value for value in times],
    }


def diagnostics(words: list[str], rounds: int) -> dict[str, Any]:
    """Measure the overhead of diagnostics at their default intervals.

    The `KINDS` of steps alternate in random order: "off"; "statistics", as in every 10th step of a
    run; "probes", as in every 100th step. The overhead is the extra time at these rates, relative
    to a step without diagnostics.
    """
    cfg = load_config(words)
    t = build(cfg, join_alone())
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for round_ in range(rounds + 2):
        for kind in random.Random(round_).sample(list(KINDS), len(KINDS)):
            batches, due = micro_batches(cfg, t.device), KINDS[kind]
            synchronize(t.device)
            start = time.perf_counter()
            out = train_step(t, iter(batches), 0, due)
            if due.update:  # work of the host on the statistics
                named_values(out.stats)
                grad_norm_by_group(out.grad_norms)
            out.nll.item()  # waits for a GPU
            seconds[kind].append(time.perf_counter() - start)
    off, measured, probed = (statistics.median(seconds[kind][2:]) for kind in KINDS)
    probes = 1 / cfg.diagnostics.probe_interval
    others = 1 / cfg.diagnostics.interval - probes
    return {
        "overhead": (others * (measured - off) + probes * (probed - off)) / off,
        "seconds": {"off": off, "statistics": measured, "probes": probed},
    }


def memory(words: list[str]) -> dict[str, float]:
    """Return the peak GiB of a step with all diagnostics: planned and, on a GPU, measured.

    The measured peak of torch's CUDA allocator excludes CUDA's context and fragmentation.
    """
    cfg = load_config(words)
    # Plan before the process group exists, because a plan creates a process group.
    plan = simulate(cfg, 1).peak.total / GIB
    device = join_alone()
    if device.type == "cpu":
        return {"plan_gib": plan}
    t = build(cfg, device)
    for number in range(2):  # the first step compiles and chooses kernels
        torch.cuda.reset_peak_memory_stats(device)
        train_step(t, iter(micro_batches(cfg, device)), number, EVERYTHING)
        torch.cuda.synchronize(device)
    measured = torch.cuda.max_memory_allocated(device) / GIB
    return {"plan_gib": plan, "measured_gib": measured, "measured_over_plan": measured / plan}


def build_step(
    device: torch.device,
    words: list[str],
    kind: str = "ours",
    precision: str = "bf16 autocast",
    compiled: bool = True,
    document_length: int | None = None,
    document_kernel: str | None = None,
) -> tuple[TrainConfig, Step]:
    """Build a model, its optimizer and a training step.

    Args:
        words: overrides of the config; a peer uses only the shape.
        kind: "ours" (diffllm), "plain" (`PlainLlama`), or a model of transformers such as "Llama".
        precision, compiled: settings of a peer; for "ours" the config decides.
        document_length: mean length of masked documents, only for "ours"; None disables the mask.
        document_kernel: name of the `Kernel` that masks documents on Hopper; None: the default.
    """
    cfg = load_config(words)
    if document_kernel:
        kernels.DOCUMENTS_ON_HOPPER = AutoSetting(Kernel[document_kernel], ASKED)
    if kind == "ours":
        return cfg, ours(cfg, device, document_length)
    with device:
        model = PlainLlama(cfg.model) if kind == "plain" else their_model(kind, cfg)
    return cfg, peer_step(model, cfg, precision, device, compiled)


def with_documents(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """Replace random tokens by document ends; documents have `length` tokens on average."""
    ends = torch.rand(tokens.shape, device=tokens.device) < 1 / length
    return tokens.masked_fill(ends, DOCUMENT_END)


def micro_batches(
    cfg: TrainConfig, device: torch.device, document_length: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return random inputs and targets, (b, T) int64 each, of every micro-batch of one step."""
    size, count = cfg.micro_batches(1)
    batches = []
    for _ in range(count):
        tokens = torch.randint(1, cfg.model.vocab_size, (size, cfg.seq_len + 1), device=device)
        tokens = with_documents(tokens, document_length) if document_length else tokens
        batches.append((tokens[:, :-1], tokens[:, 1:]))
    return batches


def ours(cfg: TrainConfig, device: torch.device, document_length: int | None = None) -> Step:
    """Return the trainer's step: float32 weights and loss, clipping, skip guard, fused AdamW.

    Raises ConfigError if the attention backend cannot run on the device.
    """
    dtype = chosen_precision(cfg.precision, device).value
    attention = cfg.model.attention.resolve(cfg.model, device)
    attention.prepare(dtype, document_length is not None)
    t = build(cfg, device, DOCUMENT_END if document_length else None)
    # The boundaries of documents are computed on the host.
    where = torch.device("cpu") if document_length else device

    def step() -> None:
        train_step(t, iter(micro_batches(cfg, where, document_length)), 0)

    return step


def their_model(name: str, cfg: TrainConfig) -> Any:
    """Build a transformers model, such as "Llama", in the shape of `cfg`."""
    import transformers  # the import takes seconds, and only peers need transformers

    m, moe = cfg.model, cfg.model.moe
    assert not moe.n_shared, "Qwen3Moe has no shared experts"
    experts = {
        "num_experts": moe.n_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.expert_dim,
        "norm_topk_prob": moe.renormalise,
        "mlp_only_layers": list(range(moe.n_dense_layers)),
        "output_router_logits": False,
    }
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=m.n_layers,
        hidden_size=m.dim,
        intermediate_size=m.ffn_dim,
        num_attention_heads=m.n_heads,
        num_key_value_heads=m.n_kv_heads,
        head_dim=m.head_dim,
        vocab_size=m.vocab_size,
        max_position_embeddings=cfg.seq_len,
        rms_norm_eps=m.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope.theta},
        tie_word_embeddings=m.tie_embeddings,
        use_cache=False,
        attn_implementation="sdpa",
        **(experts if moe.n_experts else {}),
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


def peer_step(
    model: Any, cfg: TrainConfig, precision: str, device: torch.device, compiled: bool
) -> Step:
    """Return a step with clipping and fused AdamW, with the sequences and batches of `cfg`.

    The precision is "float32", "bf16 autocast" or "bf16 weights".
    """
    if precision == "bf16 weights":
        model = model.to(torch.bfloat16)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16 autocast")
    plain = isinstance(model, PlainLlama)

    def step() -> None:
        batches = micro_batches(cfg, device)
        for x, y in batches:
            with autocast:
                loss = forward(x, y) if plain else forward(input_ids=x, labels=x).loss
            (loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def flops_per_token(model: ModelConfig) -> dict[str, float]:
    """Return training FLOPs per token at a model's seq_len by two conventions.

    "causal" counts attention over the mean of (S + 1) / 2 keys per query, like perf/mfu. "full"
    counts attention over all S keys, like torchtitan and other frameworks.
    """
    with torch.device("meta"):
        built = Transformer(model)
    return {"causal": built.flops_per_token(), "full": built.flops_per_token(model.seq_len)}
