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

from collections.abc import Iterator
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
from diffllm.core.run_files import (
    RunFile,
    RunFolder,
    checkpoint_path,
    list_checkpoints,
    read_facts,
    step_of,
)

if TYPE_CHECKING:
    from diffllm.compare.report.evaluations import ScoreCell
    from diffllm.data.tasks.task import Level
    from diffllm.evaluation.evaluation import Evaluation, EvaluationOptions
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
    from diffllm.compare.arms.run_search import shortlist

    if args.every and args.step:
        raise ConfigError(
            f"step={args.step} cannot be combined with every=true; remove one of them"
        )
    root = Path(args.run)
    runs = runs_in(root)
    is_sweep = runs != [root]
    evaluations, options = chosen_evaluations(args)
    results_by_path: dict[str, dict[str, Result]] = {}
    runs_by_message: dict[str, list[str]] = {}
    # The runs of a sweep have one common table of means instead, after the last run.
    has_tables = args.every or not is_sweep
    for run, checkpoint, results, messages in checkpoint_results(runs, args, evaluations, options):
        for message in messages:
            skipped_runs = runs_by_message.setdefault(message, [])
            # With every=true, each checkpoint of a run has the same message.
            if str(run) not in skipped_runs:
                skipped_runs.append(str(run))
        if results and not args.json:
            title = title_of(run, checkpoint)
            if has_tables and any(results_by_path.values()):
                title = f"\n{title}"
            echo(title, flush=True)
            if has_tables:
                print_scores(results)
        path = checkpoint if args.every else run
        results_by_path[str(path)] = results
    if not any(results_by_path.values()):
        raise ConfigError(listed(list(runs_by_message)))
    for message, skipped_runs in runs_by_message.items():
        to_stderr(f"{message}; skipped for {shortlist(skipped_runs, 3)}")
    if args.json:
        is_single = list(results_by_path) == [args.run]
        echo_json(results_by_path[args.run] if is_single else results_by_path)
    elif is_sweep:
        names = [evaluation.name for evaluation in evaluations]
        print_comparison(runs, args.step, names)


def runs_in(root: Path) -> list[Path]:
    """Return the run `root`, or the runs of the sweep `root`."""
    from diffllm.config.saved import no_run

    if (root / RunFile.CONFIG).is_file():
        return [root]
    runs = sorted(file.parent for file in root.glob(f"*/{RunFile.CONFIG}"))
    if not runs:
        raise CheckpointError(no_run(root))
    return runs


def chosen_evaluations(
    args: EvaluateArguments,
) -> "tuple[list[Evaluation], EvaluationOptions]":
    from diffllm.evaluation.position import Position
    from diffllm.evaluation.suite import chosen

    names = []
    for word in args.tasks.strip("[]").split(","):
        name = word.strip()
        if name:
            names.append(name)
    levels = parse_levels(args.level)
    evaluations, options = chosen(args.suite, names, levels)
    has_position = any(evaluation.name == Position.name for evaluation in evaluations)
    if args.seq_len and not has_position:
        raise ConfigError(f"seq_len={args.seq_len} needs the task position: set tasks=[position]")
    options = replace(options, seed=args.seed, limit=args.limit, seq_len=args.seq_len)
    return evaluations, options


def checkpoint_results(
    runs: list[Path],
    args: EvaluateArguments,
    evaluations: "list[Evaluation]",
    options: "EvaluationOptions",
) -> "Iterator[tuple[Path, Path, dict[str, Result], list[str]]]":
    """Yield run, checkpoint, results, and messages of skipped evaluations, for each checkpoint."""
    import torch

    from diffllm.config.saved import load_run_config
    from diffllm.data.tokenizer import Tokenizer, tokenizer_of
    from diffllm.evaluation.evaluation import Subject
    from diffllm.evaluation.load import decoder
    from diffllm.evaluation.suite import evaluate

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for run in runs:
        directory = run / RunFolder.CHECKPOINTS
        steps = []
        if args.every:
            steps = [step_of(checkpoint) for checkpoint in list_checkpoints(directory)]
        # Without every=true, this is the requested step. With it, `args.step` is 0, and `decoder`
        # raises the error about missing checkpoints.
        if not steps:
            steps = [args.step]
        for requested_step in steps:
            model, step = decoder(run, requested_step)
            checkpoint = checkpoint_path(directory, step)
            tokenizer = Tokenizer.from_file(tokenizer_of(run))
            cfg = load_run_config(run)
            subject = Subject(model.to(device), tokenizer, checkpoint, run, cfg)
            results, messages = evaluate(subject, evaluations, options)
            # Evaluations are slow: the caller prints these results before the next ones start.
            yield run, checkpoint, results, messages


def title_of(run: Path, checkpoint: Path) -> str:
    title = f"{run}, {checkpoint.name}"
    if "imported" in read_facts(run):
        title += ", trained on an unknown corpus"
    return title


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
    units = dict.fromkeys(result["unit"] for result in results.values())
    for unit in units:
        rows = []
        for name, result in results.items():
            if result["unit"] == unit:
                rows += [[name, *cells(score)] for score in result["scores"]]
        table = without_empty(Table.of(SCORE_HEADS, rows))
        echo(f"\n{unit}\n{table}")


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

    comparison, _ = read(runs, step=step)
    rows_by_unit: dict[str, list[list[str]]] = {}
    for name in names:
        for evaluation in comparison.evaluated:
            if evaluation.name != name:
                continue
            lines = evaluation.lines
            # Of several evaluations, print only the mean of all levels, to keep tables short.
            if len(names) > 1 and lines[0].name == ALL:
                lines = lines[:1]
            for line in lines:
                rows = rows_by_unit.setdefault(evaluation.unit, [])
                for row, score in zip(comparison.rows, line.cells, strict=True):
                    if score:
                        labels = [evaluation.name, line.name, row.label]
                        rows.append([*labels, *comparison_cells(score, line.chance)])
    heads = ["task", "of", "row", "value", "chance", f"gap to {comparison.baseline}", "seeds"]
    for unit, rows in rows_by_unit.items():
        table = without_empty(Table.of(heads, rows, range(3)))
        text = ascii_minus(str(table))
        echo(f"\n{unit}, means over seeds; in brackets 95% intervals\n{text}")
    notes = [f"\nnote: {note}" for note in comparison.score_notes]
    echo("".join(notes))


def comparison_cells(score: "ScoreCell", chance: float | None) -> list[str]:
    """Return the cells of a mean score: value, chance, gap and number of seeds."""
    value = in_digits(score.mean.mean)
    gap = ""
    if score.gap:
        gap = with_interval(score.gap, signed=True)
    return [value, decimals(chance), gap, str(score.mean.seeds)]


SCORE_HEADS = ("task", "of", "value", "chance", "95% interval", "generated", "examples")


def cells(score: dict[str, Any]) -> list[str]:
    value = decimals(score.get("value"))
    chance = decimals(score.get("chance"))
    generated = decimals(score.get("generated"))
    interval = ""
    bounds = score.get("interval")
    if bounds and bounds[0] is not None:
        low, high = bounds
        interval = f"{decimals(low)} to {decimals(high)}"
    examples = score.get("examples")
    count = str(examples) if examples else ""
    return [score["of"], value, chance, interval, generated, count]


def decimals(value: float | None) -> str:
    return "" if value is None else ascii_minus(in_digits(value))
