"""diffllm evaluate run=<run or sweep> [key=value ...]: tasks and measures on checkpoints.

suite=claims contains the retrieval and in-context tasks needle, mqar and icl: the model chooses
among candidates by likelihood. suite=checkpoint contains measures on held-out data: position (loss
by position, distance and repetition), outliers, and quantise (loss with 8, 6 and 4 bits).
suite=attention_mass measures the attention weight on the part of a prompt that contains the answer.
Results are stored in <run>/evaluation/ and reused. For a sweep, the command also prints tables of
means over seeds and gaps to the baseline. Tasks that are too long for a run are skipped.

diffllm evaluate run=outputs/mine
diffllm evaluate run=outputs/compare tasks=[needle,mqar] limit=100 --json
diffllm evaluate run=outputs/mine suite=checkpoint every=true
diffllm evaluate run=outputs/mine tasks=[position] seq_len=4096
diffllm evaluate run=outputs/mine tasks=[needle] level='{length: 512, needles: 6, queries: 2}'
diffllm evaluate run=outputs/mine tasks=[mqar] level='{filler: [0, 64, 256]}'
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffllm.cli.arguments import CommandArguments, argument, parse, plugins_argument
from diffllm.compare.arms.sentences import (
    ascii_minus,
    in_digits,
    with_interval,
)
from diffllm.core.errors import CheckpointError, ConfigError, listed
from diffllm.core.printing import Table, echo, echo_json, to_stderr
from diffllm.metrics.records import read_record

if TYPE_CHECKING:
    from diffllm.data.tasks.task import Level
    from diffllm.evaluation.suite import Result


@dataclass
class EvaluateArguments(CommandArguments):
    run: str = argument("directory of a run or of a sweep", path=True)
    step: int = argument("step of the checkpoint; 0: the newest complete checkpoint", 0)
    every: bool = argument("true: all checkpoints, for scores at equal loss", False)
    suite: str = argument("claims, attention_mass, checkpoint, needle_4k or needle_64k", "claims")
    tasks: str = argument("[a,b]: only these tasks; or .jsonl or .ndjson files of examples", "")
    level: str = argument("{key: value or list}: difficulty of the single task in tasks", "")
    limit: int | None = argument("maximum examples or documents", None, least=1)
    seq_len: int | None = argument(
        "maximum tokens of a document for position; default: length of the run", None, least=1
    )
    seed: int = argument("seed of the examples", 0)
    plugins: str = plugins_argument()


def evaluate_command(argv: list[str]) -> None:
    if "suite=lm_eval" in argv:
        raise ConfigError("suite=lm_eval was removed: use diffllm export, then lm_eval --model hf")
    args = parse(EvaluateArguments, argv, __doc__)
    import torch

    from diffllm.checkpoint.directory import checkpoint_path, list_checkpoints, step_of
    from diffllm.compare.arms.directories import shortlist
    from diffllm.config.saved import load_run_config, no_run
    from diffllm.data.tokenizer import Tokenizer, tokenizer_of
    from diffllm.evaluation.evaluation import Subject
    from diffllm.evaluation.load import decoder
    from diffllm.evaluation.position import Position
    from diffllm.evaluation.suite import chosen, evaluate

    if args.every and args.step:
        raise ConfigError(
            f"step={args.step} cannot be combined with every=true; remove one of them"
        )
    words = [word.strip() for word in args.tasks.strip("[]").split(",")]
    root = Path(args.run)
    runs = [root]
    if not (root / "config.yaml").is_file():
        runs = sorted(file.parent for file in root.glob("*/config.yaml"))
    if not runs:
        raise CheckpointError(no_run(root))
    levels = parse_levels(args.level)
    evaluations, options = chosen(args.suite, [word for word in words if word], levels)
    options = replace(options, seed=args.seed, limit=args.limit, seq_len=args.seq_len)
    names = [evaluation.name for evaluation in evaluations]
    if args.seq_len and Position.name not in names:
        raise ConfigError(f"seq_len={args.seq_len} needs the task position: set tasks=[position]")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results_by_path: dict[str, dict[str, Result]] = {}
    skipped: dict[str, list[str]] = {}
    # The runs of a sweep have one common table of means instead, after the last run.
    has_tables = args.every or runs == [root]
    for run in runs:
        checkpoints = run / "checkpoints"
        steps = [args.step]
        if args.every:
            # If no checkpoint exists, `decoder` raises the error.
            steps = [step_of(path) for path in list_checkpoints(checkpoints)] or steps
        for requested_step in steps:
            model, step = decoder(run, requested_step)
            path = checkpoint_path(checkpoints, step)
            tokenizer = Tokenizer.from_file(tokenizer_of(run))
            subject = Subject(model.to(device), tokenizer, path, run, load_run_config(run))
            results, too_long = evaluate(subject, evaluations, options)
            for text in too_long:
                skipped.setdefault(text, []).append(str(run))
            if results and not args.json:
                title = f"{run}, {path.name}"
                if "imported" in (read_record(run / "run.json") or {}):
                    title += ", trained on an unknown corpus"
                if has_tables and any(results_by_path.values()):
                    title = f"\n{title}"
                echo(title, flush=True)
                if has_tables:
                    print_scores(results)
            results_by_path[str(path if args.every else run)] = results
    if not any(results_by_path.values()):
        raise ConfigError(listed(list(skipped)))
    for text, skipped_runs in skipped.items():
        to_stderr(f"{text}; skipped for {shortlist(list(dict.fromkeys(skipped_runs)), 3)}")
    if args.json:
        is_single = list(results_by_path) == [args.run]
        echo_json(results_by_path[args.run] if is_single else results_by_path)
    elif runs != [root]:
        print_comparison(runs, args.step, names)


def parse_levels(text: str) -> "list[Level]":
    """Parse the value of level=, a YAML dict; raises ConfigError for an invalid value."""
    from diffllm.config.yaml_file import parse_yaml
    from diffllm.data.tasks.task import levels_of

    if not text:
        return []
    try:
        return levels_of(parse_yaml(text), f"level={text}")
    except ValueError as error:
        raise ConfigError(f"level={text} {error}") from None


def print_scores(results: "dict[str, Result]") -> None:
    for unit in dict.fromkeys(result["unit"] for result in results.values()):
        rows = []
        for name, result in results.items():
            if result["unit"] == unit:
                rows += [[name, *cells(score)] for score in result["scores"]]
        echo(f"\n{unit}\n{without_empty(Table.of(SCORE_HEADS, rows))}")


def without_empty(table: Table) -> Table:
    columns = []
    for column in table.columns:
        if any(cell.text for cell in column.cells):
            columns.append(column)
    return Table(columns)


def print_comparison(runs: list[Path], step: int, names: list[str]) -> None:
    """Print mean scores over seeds and gaps to the baseline for the tasks and measures `names`."""
    from diffllm.compare.report.checkpoint_scores import ALL
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.evaluations import Evaluated, ScoreLine

    comparison, _ = read(runs, step=step)
    lines: list[tuple[Evaluated, ScoreLine]] = []
    for name in names:
        for evaluated in comparison.evaluated:
            if evaluated.name != name:
                continue
            evaluated_lines = evaluated.lines
            # Of several evaluations, print only the mean of all levels, to keep tables short.
            if len(names) > 1 and evaluated_lines[0].name == ALL:
                evaluated_lines = evaluated_lines[:1]
            lines += [(evaluated, line) for line in evaluated_lines]
    heads = ["task", "of", "row", "value", "chance", f"gap to {comparison.baseline}", "seeds"]
    for unit in dict.fromkeys(evaluated.unit for evaluated, _ in lines):
        rows = []
        for evaluated, line in lines:
            if evaluated.unit != unit:
                continue
            for row, cell in zip(comparison.rows, line.cells, strict=True):
                if not cell:
                    continue
                names_of_row = [evaluated.name, line.name, row.label]
                numbers = [in_digits(cell.mean.mean), decimals(line.chance)]
                gap = with_interval(cell.gap, signed=True) if cell.gap else ""
                rows.append([*names_of_row, *numbers, gap, str(cell.mean.seeds)])
        table = ascii_minus(str(without_empty(Table.of(heads, rows, range(3)))))
        echo(f"\n{unit}, means over seeds; in brackets 95% intervals\n{table}")
    echo("".join(f"\nnote: {note}" for note in comparison.score_notes))


SCORE_HEADS = ("task", "of", "value", "chance", "95% interval", "generated", "examples")


def cells(score: dict[str, Any]) -> list[str]:
    value, chance = decimals(score.get("value")), decimals(score.get("chance"))
    generated = decimals(score.get("generated"))
    low, high = score.get("interval") or (None, None)
    interval = f"{decimals(low)} to {decimals(high)}" if low is not None else ""
    return [score["of"], value, chance, interval, generated, str(score.get("examples") or "")]


def decimals(value: float | None) -> str:
    return "" if value is None else ascii_minus(in_digits(value))
