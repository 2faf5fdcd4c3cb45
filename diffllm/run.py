"""One run, from a typed config to a summary."""

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diffllm.checkpoint import Checkpointer
from diffllm.config import TrainConfig
from diffllm.data import TokenData, Tokenizer, prepare
from diffllm.display import Display
from diffllm.distributed.world import World, environment, join
from diffllm.errors import DataError, UserError
from diffllm.generate import generate
from diffllm.metrics import MetricsFile
from diffllm.model.attention.ops import prepare_backend
from diffllm.protection import SkippedTooOften
from diffllm.recorder import Outputs, Recorder
from diffllm.report import write_report
from diffllm.run_directory import RunDirectory, choose_path, resume_checkpoint, yaml_dict
from diffllm.summary import describe, headline, summarise, summary_text
from diffllm.trainer import LoopState, Training, build, compute_dtype, restore, train
from diffllm.wandb_run import WandbRun


def run(cfg: TrainConfig) -> None:
    """Prepare, build, train, report; in every process of a launch.

    Raises:
        UserError: something outside the code is wrong; nothing that was there is changed.
    """
    _, world_size, _ = environment()
    cfg.check_world(world_size)
    world = join(cfg.distributed)
    directory: RunDirectory | None = None

    def claim() -> dict[str, Any]:
        nonlocal directory
        directory = RunDirectory(choose_path(cfg), cfg)
        directory.check()
        checkpoint = None
        if not directory.finished():
            check_tokenizer(cfg)
            checkpoint = resume_checkpoint(cfg, directory.checkpoints)
        return {
            "path": str(directory.path),
            "finished": directory.finished(),
            "checkpoint": str(checkpoint) if checkpoint else None,
        }

    try:
        claimed = world.decide("run", claim)
        prepare_and_execute(cfg, world, claimed, directory)
    except UserError:
        if directory:
            directory.withdraw()
        raise


def prepare_and_execute(
    cfg: TrainConfig, world: World, claimed: dict[str, Any], directory: RunDirectory | None
) -> None:
    """All but the claim on the run directory, which is rank 0's."""
    display = Display(cfg.steps, enabled=world.rank == 0)
    if claimed["finished"]:
        display.say(f"{claimed['path']} is finished: {cfg.steps} steps")
        return
    device = world.device()
    attention = cfg.model.attention
    dtype = compute_dtype(cfg.precision, device)
    prepare_backend(attention.backend, device, attention.kernel_width(cfg.model), dtype)
    data = prepare(cfg.data)
    check_fit(cfg, data)
    if directory:
        directory.begin(data.directory / "tokenizer.model")
    torch.manual_seed(cfg.seed)
    world.init_process_group(device, cfg.distributed)
    try:
        checkpoint = Path(claimed["checkpoint"]) if claimed["checkpoint"] else None
        execute(cfg, device, data, display, Path(claimed["path"]), checkpoint, directory)
    finally:
        display.stop()
        dist.destroy_process_group()


def check_tokenizer(cfg: TrainConfig) -> None:
    """Raise DataError if data.tokenizer is none, or has more pieces than the model."""
    if cfg.data.tokenizer is None:
        return
    pieces = Tokenizer.from_file(cfg.data.tokenizer).vocab_size
    if pieces > cfg.model.vocab_size:
        raise DataError(
            f"data.tokenizer={cfg.data.tokenizer} has {pieces} pieces, more than "
            f"model.vocab_size={cfg.model.vocab_size}"
        )


def check_fit(cfg: TrainConfig, data: TokenData) -> None:
    """Raise DataError if the corpus is too short for one sequence."""
    for name, split in data.manifest.splits.items():
        if split.tokens < cfg.seq_len + 1:
            raise DataError(
                f"the {name} split has {split.tokens} tokens, fewer than one sequence needs "
                f"(seq_len + 1 = {cfg.seq_len + 1}); use more text or a smaller seq_len"
            )


def execute(
    cfg: TrainConfig,
    device: torch.device,
    data: TokenData,
    display: Display,
    path: Path,
    checkpoint: Path | None,
    directory: RunDirectory | None,
) -> None:
    """Build, train and report, inside a process group; `directory` is rank 0's."""
    started = time.perf_counter()
    t = build(cfg, device, data.manifest.eos_id if cfg.data.mask_documents else None)
    state = LoopState(corpus=f"{data.manifest.corpus}/{data.manifest.pieces_hash}")
    if checkpoint:
        restore(t, state, checkpoint)
        if path not in checkpoint.parents:
            state.wandb_id = None  # another run's
    facts = describe(cfg, t, data)
    display.say(headline(cfg, facts, data, path, state.step))
    outputs = None
    if directory:
        directory.describe(facts)
        config = {**yaml_dict(cfg), **facts}
        wandb = WandbRun(cfg.wandb, path, cfg.run.choices, cfg.run.sweep, config, state.wandb_id)
        state.wandb_id = wandb.id
        outputs = Outputs(MetricsFile(path / "metrics.jsonl", state.step), wandb)
    recorder = Recorder(
        device,
        cfg.steps,
        cfg.global_batch_size * cfg.seq_len,
        t.model.flops_per_token(),
        state.spikes,
        display,
        outputs,
    )
    checkpointer = Checkpointer(path / "checkpoints", cfg.checkpoint, state.step)
    try:
        stopped = train(t, state, data, recorder, checkpointer)
    except SkippedTooOften:
        if outputs:
            outputs.file.close()
            outputs.wandb.finish(exit_code=1)
            if cfg.run.report:
                display.say(f"report: {report_on(path)}")
        dist.barrier()  # a launcher ends rank 0 as soon as another rank has ended
        raise
    finally:
        display.stop()
    summary: dict[str, Any] = {}
    if stopped:
        display.say(
            f"stopped by {stopped} after step {state.step}, saved; "
            f"the same command with run.dir={path} continues"
        )
    else:
        text = sample(t, data)
        summary = summarise(cfg, state, data, recorder, time.perf_counter() - started)
    if directory and outputs:
        outputs.file.close()
        if not stopped:
            directory.finish({**summary, "sample": text})
            report = report_on(path) if cfg.run.report else "off (run.report)"
            display.say(summary_text(cfg, summary, path, text, report))
        outputs.wandb.finish(summary)


def report_on(path: Path) -> str:
    """Where the run's report.html is, or why there is none; never raises."""
    try:
        return str(write_report([path])[0])
    except Exception as error:
        return f"not written: {error!r}"


def sample(t: Training, data: TokenData) -> str:
    """A continuation of data.sample_prompt, or of the held-out split's first tokens."""
    tokenizer = data.tokenizer()
    if t.cfg.data.sample_prompt:
        prompt = tokenizer.encode(t.cfg.data.sample_prompt)
    else:
        prompt = data.split("heldout").tokens(0, 16).tolist()
    prompt = prompt[: max(1, t.cfg.seq_len // 2)]
    # Ranks that share out experts call the model together. Rounding may differ with what else is in
    # a product, so one could draw the end of text before another: none stops there.
    together = dist.get_world_size() > 1
    with torch.compiler.set_stance("force_eager"):
        (tokens,) = generate(
            t.model,
            [prompt],
            max_new_tokens=128,
            temperature=0.8,
            top_p=0.95,
            seed=t.cfg.seed,
            vocab_size=tokenizer.vocab_size,
            stop_token=None if together else tokenizer.eos_id,
            dtype=t.compute_dtype,
        )
    if tokenizer.eos_id in tokens[len(prompt) :]:
        del tokens[tokens.index(tokenizer.eos_id, len(prompt)) + 1 :]
    return tokenizer.decode(tokens)
