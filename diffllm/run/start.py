"""One run, from a typed config to a summary."""

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from diffllm.build import Training, build
from diffllm.checkpoint import Checkpointer, check_parameters, read_state
from diffllm.choices import chosen_precision
from diffllm.config import TrainConfig
from diffllm.config.changes import described
from diffllm.config.saved import yaml_dict
from diffllm.data import TokenData, prepare
from diffllm.distributed.consistency import check_same, check_tensors, code_version
from diffllm.distributed.launcher import environment
from diffllm.distributed.stop import REQUEUE, StoppedEarly, StopRequest
from diffllm.distributed.watch import Watch
from diffllm.distributed.world import World, join
from diffllm.errors import AgreedByAll, UserError
from diffllm.metrics.display import Display
from diffllm.metrics.file import MetricsFile
from diffllm.metrics.wandb_run import WandbRun
from diffllm.model import Transformer
from diffllm.model.generate import generate
from diffllm.recorder import Outputs, Recorder
from diffllm.report import write_report
from diffllm.run.checks import (
    check_fit,
    check_tokenizer,
    corpus_facts,
    data_order,
    order_changes,
    shared_config,
)
from diffllm.run.directory import (
    REQUEUE_FILE,
    RunDirectory,
    choose_path,
    request_requeue,
    resume_checkpoint,
)
from diffllm.run.summary import describe, headline, summarise, summary_text
from diffllm.spikes import SkippedTooOften
from diffllm.state import LoopState, restore
from diffllm.trainer import train

SETTLE_S = 60
"""How long a run that ends with an error waits for the checkpoint that is being written."""


class Launch(NamedTuple):
    """This process among the others of a launch."""

    world: World
    stop: StopRequest
    watch: Watch


def run(cfg: TrainConfig) -> None:
    """Prepare, build, train, report; in every process of a launch.

    Raises:
        UserError: something outside the code is wrong; nothing that was there is changed.
    """
    _, world_size, _ = environment()
    cfg.check_world(world_size)
    world = join(cfg.distributed)  # no handler of ours could run while this waits
    stop = StopRequest()
    try:
        launch(cfg, world, stop)
    except StoppedEarly as early:
        (number,) = early.args
        if world.rank == 0:
            print(f"stopped by {number.name} before the first step", flush=True)
            if number in REQUEUE and (cfg.run.dir or cfg.run.name):  # else nobody would find it
                choose_path(cfg).mkdir(parents=True, exist_ok=True)
                request_requeue(choose_path(cfg), number, None)
    finally:
        stop.close()


def launch(cfg: TrainConfig, world: World, stop: StopRequest) -> None:
    """Claim the run directory, and go on from there."""
    watch = Watch(world, cfg.distributed.timeout, stop)
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
        check_same(world, "code", code_version())
        check_same(world, "config", shared_config(cfg))
        claimed = world.decide("run", claim)
        prepare_and_execute(cfg, Launch(world, stop, watch), claimed, directory)
    except BaseException as error:
        watch.blame(error)
        if directory and isinstance(error, UserError):
            directory.withdraw()
        raise
    finally:
        watch.close()


def prepare_and_execute(
    cfg: TrainConfig, launch: Launch, claimed: dict[str, Any], directory: RunDirectory | None
) -> None:
    """All but the claim on the run directory, which is rank 0's."""
    world, _, watch = launch
    display = Display(cfg.steps, enabled=world.rank == 0)
    path = Path(claimed["path"])
    if directory:
        (path / REQUEUE_FILE).unlink(missing_ok=True)
    if claimed["finished"]:
        display.say(f"{path} is finished: {cfg.steps} steps")
        return
    device = world.device()
    dtype = chosen_precision(cfg.precision, device).value
    cfg.model.attention.prepare(cfg.model, device, dtype, cfg.data.mask_documents)
    watch.reached("the preparation of the corpus")
    data = prepare(cfg.data)
    check_fit(cfg, data)
    check_same(world, "corpus", corpus_facts(data))
    checkpoint = Path(claimed["checkpoint"]) if claimed["checkpoint"] else None

    def begin() -> None:
        assert directory
        if checkpoint:
            directory.changes |= order_changes(cfg, data, checkpoint)
            with torch.device("meta"):
                check_parameters(checkpoint, dict(Transformer(cfg.model).named_parameters()))
        step = read_state(checkpoint)["step"] if checkpoint else 0
        directory.begin(data.directory / "tokenizer.model", step)

    world.decide("begin", begin)
    torch.manual_seed(cfg.seed)
    watch.reached("the meeting of the ranks")
    world.init_process_group(device, cfg.distributed)
    watch.traces = path / "traces"
    watch.on_end = display.stop
    try:
        execute(cfg, device, data, display, path, checkpoint, directory, launch)
        watch.close()
    except BaseException as error:
        watch.blame(error)
        raise
    finally:
        display.stop()
        dist.destroy_process_group()


def execute(
    cfg: TrainConfig,
    device: torch.device,
    data: TokenData,
    display: Display,
    path: Path,
    checkpoint: Path | None,
    directory: RunDirectory | None,
    launch: Launch,
) -> None:
    """Build, train and report, inside a process group; `directory` is rank 0's."""
    started = time.perf_counter()
    launch.watch.reached("the building of the model")
    t = build(cfg, device, data.manifest.eos_id if cfg.data.mask_documents else None)
    state = LoopState(order=data_order(cfg, data))
    if checkpoint:
        launch.watch.reached(f"the reading of {checkpoint.name}")
        restore(t, state, checkpoint)
        if path not in checkpoint.parents:
            state.wandb_id = None  # another run's
    check_tensors(t.tensors(), t.meshes.dense.size(1))
    facts = describe(cfg, t, data)
    display.say(headline(cfg, facts, data, path, state.step))
    outputs = None
    if directory:
        if directory.changes:
            display.say(f"changed: {described(directory.changes)}")
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
        stopped = train(t, state, data, recorder, checkpointer, launch.stop, launch.watch)
    except UserError as error:
        checkpointer.settle(SETTLE_S)
        if outputs:
            outputs.file.close()
            outputs.wandb.finish(exit_code=1)
            if cfg.run.report and isinstance(error, SkippedTooOften):
                display.say(f"report: {report_on(path)}")
        if isinstance(error, AgreedByAll):
            dist.barrier()  # a launcher ends rank 0 as soon as another rank has ended
        raise
    finally:
        display.stop()
    summary: dict[str, Any] = {}
    if stopped:
        if directory and stopped in REQUEUE:
            request_requeue(path, stopped, state.step)
        display.say(
            f"stopped by {stopped.name} after step {state.step}, saved; "
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
