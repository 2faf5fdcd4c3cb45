"""One measurement of `peers.py`: a contestant, in the environment and process of its own.

    PYTHON benchmarks/peer_worker.py JOB    # JOB: the fields of `Job` as JSON

Prints the result as the last line of standard output. A contestant is a function that returns its
model and a function that makes one step and returns the loss. It imports its framework itself,
because other environments do not contain the framework.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP_NORM = 1e-4, (0.9, 0.95), 0.1, 1.0
WARMUP, WARMUP_TRAINER = 2, {False: 2, True: 12}
"""Steps before the first timed step. The compiled trainer compiles a second graph in step 10."""
LOG_INTERVAL = 10
"""The trainer's default interval of log lines and statistics, in steps."""
PACKAGES = ("torch", "torchtitan", "ai2-olmo-core", "litgpt", "lightning", "transformers")

Contestant = tuple[Any, Callable[[], Any]]


@dataclass
class Job:
    """A contestant and its settings.

    Args:
        shape: sizes of the model and of a batch.
        seconds: the least time that is measured.
        corpus: a directory for the trainer's data.
        nanochat: a checkout of nanochat.
    """

    contestant: str
    shape: dict[str, int]
    bf16: bool
    compiled: bool
    seconds: float
    threads: int
    attention: str
    corpus: str
    nanochat: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.shape["batch"] * self.shape["seq"]

    def batches(self) -> Iterator[tuple[Any, Any]]:
        """Yield inputs and targets, (b, T) int64 each: the same random tokens for everyone."""
        import torch

        generator = torch.Generator().manual_seed(0)
        size = self.shape["batch"], self.shape["seq"] + 1
        while True:
            tokens = torch.randint(1, self.shape["vocab"], size, generator=generator)
            yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def words(self, attention: str) -> list[str]:
        """Return the overrides for a config of diffllm."""
        s = self.shape
        return [
            f"attention={attention}", "model=mini", f"model.dim={s['dim']}",
            f"model.n_layers={s['layers']}", f"model.n_heads={s['heads']}",
            f"model.n_kv_heads={s['kv_heads']}", f"model.head_dim={s['dim'] // s['heads']}",
            f"model.ffn_dim={s['ffn']}", f"model.vocab_size={s['vocab']}", f"seq_len={s['seq']}",
            f"global_batch_size={s['batch']}", f"precision={'bf16' if self.bf16 else 'fp32'}",
            f"compile={str(self.compiled).lower()}", f"optim.lr={LEARNING_RATE}",
        ]  # fmt: skip


def diffllm(job: Job) -> Contestant:
    """`train_step` alone, without data loading, statistics and log lines."""
    from measuring import join_alone

    from diffllm.build import build
    from diffllm.config import load_config
    from diffllm.trainer import train_step

    data = job.batches()
    t = build(load_config(job.words(job.attention)), join_alone("cpu"))
    return t.model, lambda: train_step(t, data, 0).nll


def transformers(job: Job) -> Contestant:
    """Llama, or DiffLlama, in a plain loop."""
    from steps import their_model

    from diffllm.config import load_config

    name = {"diff_v1": "DiffLlama"}.get(job.attention, "Llama")
    attention = job.attention if name == "DiffLlama" else "standard"
    model = their_model(name, load_config(job.words(attention)))

    def loss(forward: Any, inputs: Any, targets: Any) -> Any:
        return forward(input_ids=inputs, labels=inputs).loss

    return plain_loop(model, loss, job, job.bf16)


def nanochat(job: Job) -> Contestant:
    """nanochat's model from a checkout, with fused AdamW and clipping."""
    s = job.shape
    os.environ["NANOCHAT_DTYPE"] = "bfloat16" if job.bf16 else "float32"
    sys.path.insert(0, str(job.nanochat))
    import torch
    from nanochat.gpt import GPT, GPTConfig

    with torch.device("meta"):
        model = GPT(
            GPTConfig(
                sequence_len=s["seq"], vocab_size=s["vocab"], n_layer=s["layers"],
                n_head=s["heads"], n_kv_head=s["kv_heads"], n_embd=s["dim"], window_pattern="L",
            )
        )  # fmt: skip
    model.to_empty(device="cpu")
    model.init_weights()

    def loss(forward: Any, inputs: Any, targets: Any) -> Any:
        return forward(inputs, targets)

    # The model casts its weights itself, so it needs no autocast.
    return plain_loop(model, loss, job, autocast=False)


def plain_loop(model: Any, loss: Any, job: Job, autocast: bool) -> Contestant:
    """Train with fused AdamW and clipping."""
    import torch

    data = job.batches()
    forward = torch.compile(model) if job.compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )

    def step() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            value = loss(forward, *next(data))
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return model, step


def torchtitan(job: Job) -> Contestant:
    """Llama 3 with torchtitan's layers, chunked loss, optimizer and clipping."""
    s, data = job.shape, job.batches()
    # The Llama model imports Triton kernels for mixtures of experts, which need a GPU.
    sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()
    import torch
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.config import CompileConfig
    from torchtitan.distributed import utils
    from torchtitan.distributed.compile import apply_compile
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    dim, vocab = s["dim"], s["vocab"]
    rope = ComplexRoPE.Config(
        dim=dim // s["heads"], max_seq_len=s["seq"], theta=500000, scaling="llama"
    )
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
    config = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            fuse_qkv=True, n_layers=s["layers"], dim=dim, n_heads=s["heads"],
            n_kv_heads=s["kv_heads"], hidden_dim=s["ffn"], rope=rope, attn_backend="sdpa",
        ),
    )  # fmt: skip
    with torch.device("meta"):
        model = config.build()
    compiling = CompileConfig(enable=job.compiled)
    one_loss = CrossEntropyLoss.Config(global_vocab_size=vocab)
    loss = ChunkedLossWrapper.Config(loss_fn=one_loss).build(compile_config=compiling)
    if job.compiled:
        parallel = types.SimpleNamespace(tp_enabled=False)
        apply_compile(model, compile_config=compiling, parallel_dims=parallel)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.train()
    loss.set_lm_head(model.lm_head)
    model._skip_lm_head = True
    optimizers = default_adamw(lr=LEARNING_RATE).build(model_parts=[model])

    def step() -> Any:
        optimizers.zero_grad(set_to_none=True)
        inputs, targets = next(data)
        valid = (targets != -100).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=job.bf16):
            value, _ = loss(model(inputs), targets, valid)
            value.backward()
        utils.clip_grad_norm_(list(model.parameters()), CLIP_NORM, foreach=True)
        optimizers.step()
        return value.detach()

    return model, step


def olmo_core(job: Job) -> Contestant:
    """A Llama-like transformer in OLMo-core's train module."""
    s, data = job.shape, job.batches()
    import torch
    from olmo_core.config import DType
    from olmo_core.nn.feed_forward import FeedForwardConfig
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.train_module.transformer import TransformerTrainModule

    config = TransformerConfig.llama_like(
        d_model=s["dim"], vocab_size=s["vocab"], n_layers=s["layers"], n_heads=s["heads"],
        n_kv_heads=s["kv_heads"], rope_theta=10000, layer_norm_eps=1e-5,
        feed_forward=FeedForwardConfig(hidden_size=s["ffn"], bias=False, dtype=DType.float32),
    )  # fmt: skip
    module = TransformerTrainModule(
        model=config.build(init_device="cpu"),
        optim=AdamWConfig(lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True),
        rank_microbatch_size=s["batch"] * s["seq"],
        max_sequence_length=s["seq"],
        autocast_precision=torch.bfloat16 if job.bf16 else None,
        max_grad_norm=CLIP_NORM,
        device=torch.device("cpu"),
    )
    if job.compiled:
        module.model.apply_compile()
    losses: dict[str, Any] = {}
    # The part of the trainer that a step calls. The trainer stores the metrics in the same way.
    trainer = types.SimpleNamespace(
        record_metric=lambda name, value, *_, **__: losses.update({name: value}),
        record_ce_loss=lambda value, *_, **__: losses.update(loss=value.detach()),
    )
    module._attach_trainer(trainer)

    def step() -> Any:
        inputs, targets = next(data)
        module.zero_grads()
        module.train_batch({"input_ids": inputs, "labels": targets})
        module.optim_step()
        return losses["loss"]

    return module.model, step


def litgpt(job: Job) -> Contestant:
    """LitGPT's model, loss and optimizer, set up by Lightning Fabric as in its pretraining."""
    s, data = job.shape, job.batches()
    import lightning
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.pretrain import initialize_weights
    from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer

    config = Config(
        name="benchmark", block_size=s["seq"], vocab_size=s["vocab"],
        padded_vocab_size=s["vocab"], n_layer=s["layers"], n_embd=s["dim"], n_head=s["heads"],
        n_query_groups=s["kv_heads"], rotary_percentage=1.0, parallel_residual=False, bias=False,
        norm_class_name="RMSNorm", norm_eps=1e-5, mlp_class_name="LLaMAMLP",
        intermediate_size=s["ffn"],
    )  # fmt: skip
    precision = "bf16-mixed" if job.bf16 else "32-true"
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = GPT(config)
    initialize_weights(fabric, model, n_layer=config.n_layer, n_embd=config.n_embd)
    forward = fabric.setup(torch.compile(model) if job.compiled else model)
    settings = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": BETAS}
    optimizer = fabric.setup_optimizers(
        instantiate_torch_optimizer(
            {"class_path": "torch.optim.AdamW", "init_args": settings},
            forward.parameters(),
            fused=fabric.device.type == "cuda",
        )
    )

    def step() -> Any:
        inputs, targets = next(data)
        value = chunked_cross_entropy(forward(inputs), targets)
        fabric.backward(value)
        fabric.clip_gradients(forward, optimizer, max_norm=CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return model, step


CONTESTANTS = {
    "diffllm": diffllm,
    "torchtitan": torchtitan,
    "OLMo-core": olmo_core,
    "LitGPT": litgpt,
    "transformers": transformers,
    "nanochat": nanochat,
}


def random_corpus(folder: Path, vocab: int) -> list[str]:
    """Write random tokens in datatrove's format and a tokenizer; return their overrides."""
    import numpy as np
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    tokens, vocabulary = folder / f"{vocab}.ds", folder / f"{vocab}.json"
    if not vocabulary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        count, length = 4_000_000, 1000
        values = np.random.default_rng(0).integers(1, vocab, count, dtype=np.uint16)
        values[length - 1 :: length] = 0
        values.tofile(tokens)
        ends = np.arange(length, count + 1, length, dtype=np.uint64)
        ends.tofile(f"{tokens}.index")
        pieces = {"<|endoftext|>": 0, **{f"w{i}": i for i in range(1, vocab)}}
        tokenizer = Tokenizer(WordLevel(pieces, unk_token="w1"))
        tokenizer.add_special_tokens(["<|endoftext|>"])
        tokenizer.save(str(vocabulary))
    return [f"data.paths=[{tokens}]", f"data.tokenizer={vocabulary}"]


def measure_trainer(job: Job) -> dict[str, Any]:
    """Time a run of train.py from the start of one step to the start of a later step.

    The number of steps between both is a multiple of `LOG_INTERVAL`.
    """
    import diffllm
    from diffllm import trainer
    from diffllm.run.python import Stopped

    corpus, run = Path(job.corpus), tempfile.mkdtemp()
    cfg = diffllm.load_config(
        [
            *job.words(job.attention), *random_corpus(corpus, job.shape["vocab"]), "data=tokens",
            "steps=100000", f"run.dir={run}/run", "run.report=false",
            f"data.cache_dir={corpus}/cache",
        ]
    )  # fmt: skip
    warmup, original = WARMUP_TRAINER[job.compiled], trainer.train_step
    starts: list[float] = []
    losses: list[Any] = []
    found: dict[str, Any] = {}

    def timed_step(t: Any, *args: Any) -> Any:
        starts.append(time.perf_counter())
        steps = len(starts) - 1 - warmup
        if steps > 0 and steps % LOG_INTERVAL == 0 and "steps" not in found:
            taken = starts[-1] - starts[warmup]
            if taken >= job.seconds:
                parameters = count(t.model)
                found.update(steps=steps, seconds=taken, parameters=parameters, losses=losses[:2])
                os.kill(os.getpid(), signal.SIGINT)  # the run saves and ends
        out = original(t, *args)
        if len(losses) < WARMUP:
            losses.append(float(out.nll))
        return out

    trainer.train_step = timed_step  # type: ignore[assignment]
    try:
        with suppress(Stopped):
            diffllm.train(cfg)
    finally:
        shutil.rmtree(run, ignore_errors=True)
    return {**found, "warmup_s": starts[warmup] - starts[0]}


def measure_steps(job: Job) -> dict[str, Any]:
    """Time steps of a contestant until `job.seconds` have passed."""
    model, step = CONTESTANTS[job.contestant](job)
    parameters, begun, steps = count(model), time.perf_counter(), 0
    losses = [float(step()) for _ in range(WARMUP)]
    start = time.perf_counter()
    while time.perf_counter() - start < job.seconds:
        step()
        steps += 1
    taken = time.perf_counter() - start
    return {
        "steps": steps, "seconds": taken, "parameters": parameters, "losses": losses,
        "warmup_s": start - begun,
    }  # fmt: skip


def count(model: Any) -> int:
    """Return the number of parameters. Shared parameters count once."""
    return sum(p.numel() for p in model.parameters())


def versions() -> dict[str, str]:
    """Return the versions of the frameworks in this environment."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main(job: Job) -> None:
    if job.contestant.startswith("diffllm"):
        from diffllm.distributed.launcher import set_variables

        set_variables()  # a run sets these variables too; MKL reads them when torch is imported
    import torch

    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    found = (measure_trainer if job.contestant == "diffllm trainer" else measure_steps)(job)
    facts = {"versions": versions(), "mkl_cbwr": os.environ.get("MKL_CBWR")}
    speed = job.tokens * found["steps"] / found["seconds"]
    print(f"\n{json.dumps({'tokens_per_s': speed, **found, **facts})}", flush=True)
    os._exit(0)  # do not wait for the processes of a data loader or compiler


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
