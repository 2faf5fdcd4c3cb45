"""Training speed of diffllm against other frameworks on the CPU.

    python benchmarks/peers.py --install                                   # once
    python benchmarks/peers.py --out benchmarks/results/peers_cpu.json     # about 1 hour
    python benchmarks/peers.py --contestants diffllm LitGPT --segments A:bf16:eager --rounds 1

A round measures every contestant in every segment, each in a separate process (docs/speed.md).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import SimpleNamespace as Job
from typing import Any
from unittest.mock import MagicMock

import torch
from harness.process import ROOT, call

from diffllm.core.printing import Table
from diffllm.distributed import launcher

PEERS = ROOT / ".peers"
SHAPES = {
    "A": {"dim": 256, "layers": 6, "heads": 4, "kv_heads": 4, "head_dim": 64, "ffn": 688,
          "vocab": 4096, "batch": 16, "seq": 256},
    "B": {"dim": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64, "ffn": 1376,
          "vocab": 16384, "batch": 4, "seq": 1024},
}  # fmt: skip
KEYS = {
    "dim": "model.dim", "layers": "model.n_layers", "heads": "model.n_heads",
    "kv_heads": "model.n_kv_heads", "head_dim": "model.head_dim", "ffn": "model.ffn_dim",
    "vocab": "model.vocab_size", "seq": "seq_len",
}  # fmt: skip
"""Config keys of diffllm by the names in SHAPES."""
SEGMENTS = ("A:fp32:eager", "A:fp32:compiled", "A:bf16:eager", "A:bf16:compiled",
            "B:bf16:eager", "B:bf16:compiled")  # fmt: skip
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
LIMIT_S = 900  # time limit of one measurement
Row = dict[str, Any]


def enough(job: Job, warmup: int = 2, interval: int = 1) -> bool:
    """Record the start of a step; return whether the steps after the warm-up took long enough."""
    job.starts.append(time.perf_counter())
    job.steps = len(job.starts) - 1 - warmup
    job.taken = job.starts[-1] - job.starts[min(warmup, len(job.starts) - 1)]
    return job.steps > 0 and job.steps % interval == 0 and job.taken >= job.seconds


def loop(job: Job, model: Any, step: Callable[[], Any]) -> None:
    """Call `step`, which returns the loss, until enough steps are timed."""
    job.model = model
    while not enough(job):
        job.losses.append(float(step()))


def torch_loop(
    job: Job, model: Any, loss: Callable[..., Any], optimizer: Any = None, autocast: bool = True,
    backward: Callable[..., Any] = torch.Tensor.backward,
) -> None:  # fmt: skip
    """Run `loop` with the usual training step. `loss` takes inputs and targets, (b, T) int64."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    data = batches(job)

    def step() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and job.bf16):
            value = loss(*next(data))
        backward(value)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    loop(job, model, step)


def batches(job: Job) -> Iterator[tuple[Any, Any]]:
    """Yield random inputs and targets, (b, T) int64 each, equal for all contestants."""
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(1, job.vocab, (job.batch, job.seq + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def config(job: Job, *more: str) -> Any:
    """Return a diffllm config with the sizes and settings of a job."""
    from diffllm.config import load_config

    words = [f"{key}={getattr(job, name)}" for name, key in KEYS.items()]
    words += [f"attention={job.attention}", f"precision={'bf16' if job.bf16 else 'fp32'}"]
    words += [f"global_batch_size={job.batch}", f"compile={job.compiled}"]
    return load_config(["model=mini", *words, f"optim.lr={ADAMW['lr']}", *more])


def diffllm_step(job: Job) -> None:
    """Run `train_step` alone, without data loading, statistics and log lines."""
    from harness.machine import join_alone

    from diffllm.training.build import build
    from diffllm.training.step import train_step

    data, t = batches(job), build(config(job), join_alone())
    loop(job, t.model, lambda: train_step(t, data, 0).nll)


def diffllm_trainer(job: Job) -> None:
    """Run the whole trainer; a step includes data loading, diagnostics and log lines."""
    from diffllm import train
    from diffllm.training import loop

    original = loop.train_step

    def timed_step(t: Any, *args: Any) -> Any:
        job.model = t.model
        # A compiled trainer compiles a second graph in step 10. The log interval is 10 steps.
        if enough(job, warmup=12 if job.compiled else 2, interval=10):
            raise KeyboardInterrupt
        out = original(t, *args)
        job.losses.append(float(out.nll))
        return out

    loop.train_step = timed_step  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):
        words = ["data=synthetic", "data.answers_only=false", "data.examples=20000"]
        words += [f"data.cache_dir={folder}/cache", f"run.dir={folder}/run", "run.report=false"]
        train(config(job, "steps=100000", *words))


def torchtitan(job: Job) -> None:
    """Train Llama 3 with torchtitan's layers, chunked loss and optimizer, and SDPA."""
    # The Llama model imports this module, whose Triton kernels need a GPU.
    sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.models import common, llama3

    llama3.get_attention_config = lambda _: common.attention.ScaledDotProductAttention.Config()
    rope = common.ComplexRoPE.Config(
        dim=job.head_dim, max_seq_len=job.seq, theta=5e5, scaling="llama"
    )
    spec = llama3.llama3_configs["debugmodel"]("sdpa")
    spec.dim = spec.norm.normalized_shape = spec.tok_embeddings.embedding_dim = job.dim
    spec.vocab_size = spec.tok_embeddings.num_embeddings = job.vocab
    spec.lm_head.in_features, spec.lm_head.out_features = job.dim, job.vocab
    spec.layers = llama3._build_llama3_layers(
        fuse_qkv=True, n_layers=job.layers, dim=job.dim, n_heads=job.heads,
        n_kv_heads=job.kv_heads, hidden_dim=job.ffn, rope=rope, attn_backend="sdpa",
    )  # fmt: skip
    model, compiling = spec.build(), CompileConfig(enable=job.compiled)
    model.init_weights(buffer_device=None)
    if job.compiled:
        apply_compile(model, compile_config=compiling, parallel_dims=MagicMock(tp_enabled=False))
    one = CrossEntropyLoss.Config(global_vocab_size=job.vocab)
    chunked = ChunkedLossWrapper.Config(loss_fn=one).build(compile_config=compiling)
    chunked.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizers = default_adamw(**ADAMW).build(model_parts=[model])
    torch_loop(job, model, lambda x, y: chunked(model(x), y, (y != -100).sum())[0], optimizers)


def olmo_core(job: Job) -> None:
    """Train a Llama-like transformer in OLMo-core's train module."""
    from olmo_core.nn.feed_forward import FeedForwardConfig
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.train_module.transformer import TransformerTrainModule

    spec = TransformerConfig.llama_like(
        d_model=job.dim, vocab_size=job.vocab, n_layers=job.layers, n_heads=job.heads,
        n_kv_heads=job.kv_heads, rope_theta=10000, layer_norm_eps=1e-5,
        feed_forward=FeedForwardConfig(hidden_size=job.ffn, bias=False),
    )  # fmt: skip
    module = TransformerTrainModule(
        model=spec.build(init_device="cpu"), optim=AdamWConfig(**ADAMW, fused=True),
        rank_microbatch_size=job.batch * job.seq, max_sequence_length=job.seq,
        autocast_precision=torch.bfloat16 if job.bf16 else None, max_grad_norm=1.0,
    )  # fmt: skip
    if job.compiled:
        module.model.apply_compile()  # OLMo-core's trainer compiles only with CUDA
    trainer, data = MagicMock(), batches(job)
    module._attach_trainer(trainer)

    def step() -> Any:
        trainer.reset_mock()  # otherwise the mock keeps the tensors of all calls
        inputs, targets = next(data)
        module.zero_grads()
        module.train_batch({"input_ids": inputs, "labels": targets})
        module.optim_step()
        return trainer.record_ce_loss.call_args.args[0]

    loop(job, module.model, step)


def litgpt(job: Job) -> None:
    """Train LitGPT's model and loss, set up by Lightning Fabric as in LitGPT's pretraining."""
    import lightning
    from litgpt import GPT, Config
    from litgpt.pretrain import initialize_weights
    from litgpt.utils import chunked_cross_entropy

    spec = Config.from_name(
        "Llama-2-7b-hf", block_size=job.seq, vocab_size=job.vocab, intermediate_size=job.ffn,
        n_layer=job.layers, n_embd=job.dim, n_head=job.heads, n_query_groups=job.kv_heads,
    )  # fmt: skip
    precision = "bf16-mixed" if job.bf16 else "32-true"
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = GPT(spec)
    initialize_weights(fabric, model, n_layer=job.layers, n_embd=job.dim)
    forward = fabric.setup(job.compile(model))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(forward.parameters(), **ADAMW))
    torch_loop(
        job, model, lambda x, y: chunked_cross_entropy(forward(x), y), optimizer, autocast=False,
        backward=fabric.backward,
    )  # fmt: skip


def transformers(job: Job) -> None:
    """Train Llama, or DiffLlama for diff_v1, in a plain loop."""
    from harness.steps import their_model

    kind = "DiffLlama" if job.attention == "diff_v1" else "Llama"
    model = job.compile(their_model(kind, config(job)))
    torch_loop(job, model, lambda x, _: model(input_ids=x, labels=x).loss)


def nanochat(job: Job) -> None:
    """Train nanochat's model in a plain loop."""
    os.environ["NANOCHAT_DTYPE"] = "bfloat16" if job.bf16 else "float32"
    from nanochat.gpt import GPT, GPTConfig

    sizes = {"n_layer": job.layers, "n_head": job.heads, "n_kv_head": job.kv_heads}
    sizes |= {"n_embd": job.dim, "vocab_size": job.vocab, "sequence_len": job.seq}
    model = GPT(GPTConfig(**sizes, window_pattern="L"))
    model.init_weights()
    model = job.compile(model)
    torch_loop(job, model, model, autocast=False)  # nanochat's layers cast their weights


OURS, TRAINER = "diffllm", "diffllm trainer"
CONTESTANTS: dict[str, tuple[Callable[[Job], None], str, str]] = {
    OURS: (diffllm_step, "diffllm", ""),
    TRAINER: (diffllm_trainer, "diffllm", ""),
    "torchtitan": (torchtitan, "torchtitan", "torchtitan"),
    "OLMo-core": (olmo_core, "olmo_core", "ai2-olmo-core"),
    "LitGPT": (litgpt, "litgpt", "litgpt"),
    "transformers": (transformers, "transformers", "transformers"),
    "nanochat": (nanochat, "nanochat", ""),
}
"""Training function, module, and package that provides the version, by contestant."""
REQUIREMENTS = {path.stem: path for path in sorted(Path(__file__).parent.glob("requirements/*"))}
"""Pinned packages by framework. They are installed without dependencies, to keep this torch."""


def work(name: str, job: Row) -> Row:
    """Measure a contestant in this process."""
    if name.startswith("diffllm"):  # like a run, before the first matrix product reads MKL_CBWR
        launcher.set_variables()
        launcher.keep_memory()
    torch.manual_seed(0)
    state = Job(**job, starts=[], losses=[])
    state.compile = lambda model: torch.compile(model) if state.compiled else model
    train, _, package = CONTESTANTS[name]
    train(state)
    return {
        "tokens_per_s": state.batch * state.seq * state.steps / state.taken,
        "steps": state.steps, "seconds": state.taken, "losses": state.losses[:2],
        "parameters": sum(p.numel() for p in state.model.parameters()),
        "mkl_cbwr": os.environ.get("MKL_CBWR"),
        "version": version(package) if package else None,
    }  # fmt: skip


def measure(name: str, folder: Path, segment: str, args: argparse.Namespace) -> Row:
    """Measure a contestant in a separate process; on failure the result is an "error"."""
    shape, precision, mode = segment.split(":")
    job = {**SHAPES[shape], "bf16": precision == "bf16", "compiled": mode == "compiled",
           "seconds": args.seconds, "attention": args.attention}  # fmt: skip
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    env.pop("MKL_CBWR", None)  # only diffllm uses MKL_CBWR, set in `work`
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH")]))
    status, found = call("peers.work", {"name": name, "job": job}, LIMIT_S, env=env)
    found = found if status == "ok" else {"error": f"{status}: {found}"}
    return {"contestant": name, "segment": segment, **found}


def summary(rows: list[Row]) -> dict[str, Row]:
    """Return the range of speeds, and of speed ratios within a round, by segment and contestant."""
    found: dict[str, Row] = {}
    for segment in dict.fromkeys(row["segment"] for row in rows):
        speeds: dict[str, dict[int, float]] = {name: {} for name in CONTESTANTS}
        for row in rows:
            if row["segment"] == segment and "error" not in row:
                speeds[row["contestant"]][row["round"]] = row["tokens_per_s"]
        lists = {name: list(of.values()) for name, of in speeds.items()}
        for a, b in [*((OURS, name) for name in CONTESTANTS if name != OURS), (TRAINER, OURS)]:
            both = speeds[a].keys() & speeds[b].keys()
            lists[f"{a} / {b}"] = [speeds[a][i] / speeds[b][i] for i in both]
        found[segment] = {name: {"median": median(of), "min": min(of), "max": max(of)}
                          for name, of in lists.items() if of}  # fmt: skip
    return found


def table(results: dict[str, Row]) -> Table:
    """Return a table of speeds in tokens per second and ratios: median and range."""
    rows = []
    for name in dict.fromkeys(name for of in results.values() for name in of):
        form = "{median:.2f} ({min:.2f} to {max:.2f})"
        form = form if " / " in name else form.replace(".2f", ",.0f")
        cells = [form.format(**of[name]) if name in of else "" for of in results.values()]
        rows.append([name, *cells])
    return Table.of(["median (minimum to maximum)", *results], rows)


def compare(folders: dict[str, Path], args: argparse.Namespace) -> list[Row]:
    """Measure all contestants in all segments and rounds; write results and print a table."""
    from harness.machine import facts

    from diffllm.core.git import git_state

    known = facts() | {"device": "cpu", "seconds": args.seconds, "attention": args.attention}
    known |= {"nanochat": args.nanochat and git_state(args.nanochat)}
    names, rows = list(folders), []
    for number in range(args.rounds):
        for i, segment in enumerate(args.segments):
            first = (number + i) % max(1, len(names))
            for name in names[first:] + names[:first]:
                row = {"round": number, **measure(name, folders[name], segment, args)}
                said = row.get("error") or f"{row['tokens_per_s']:,.0f} tokens/s"
                print(f"round {number + 1}, {segment}, {name}: {said}", file=sys.stderr, flush=True)
                rows.append(row)
                if args.out:
                    results = {**known, "rounds": rows, "results": summary(rows)}
                    args.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(table(summary(rows)).markdown())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--install", nargs="*", choices=REQUIREMENTS, help="install peers (all)")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument("--segments", nargs="+", choices=SEGMENTS, default=SEGMENTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="minimum time of a measurement")
    parser.add_argument("--attention", default="standard", help="attention variant of diffllm")
    parser.add_argument("--nanochat", type=Path, metavar="DIR", help="a checkout of nanochat")
    parser.add_argument("--out", type=Path, help="a JSON file for results and all rounds")
    args = parser.parse_args()
    if args.nanochat and not (args.nanochat / "nanochat/gpt.py").is_file():
        parser.error(f"--nanochat={args.nanochat} does not contain nanochat/gpt.py")
    if args.install is not None:
        pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--upgrade"]
        for name in args.install or REQUIREMENTS:
            target = ["--target", str(PEERS / name), "-r", str(REQUIREMENTS[name])]
            subprocess.run([*pip, *target], check=True)
        return
    folders = {}
    for name in args.contestants:
        folder = args.nanochat if name == "nanochat" else PEERS / name
        if PathFinder.find_spec(CONTESTANTS[name][1], [str(folder), *sys.path]):
            folders[name] = folder
        else:
            print(f"{name}: skipped, not installed (see docs/speed.md)", file=sys.stderr)
    rows = compare(folders, args)
    sys.exit(not rows or any("error" in row for row in rows))


if __name__ == "__main__":
    main()
