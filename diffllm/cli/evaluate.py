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
    from diffllm.config.yaml_file import parse_yaml
    from diffllm.data.tasks.task import levels_of
    from diffllm.data.tokenizer import Tokenizer, tokenizer_of
    from diffllm.evaluation.evaluation import Subject
    from diffllm.evaluation.load import decoder
    from diffllm.evaluation.position import Position
    from diffllm.evaluation.suite import chosen, evaluate

    if args.every and args.step:
        raise ConfigError(
            f"step={args.step} cannot be combined with every=true; remove one of them"
        )
    names = [name.strip() for name in args.tasks.strip("[]").split(",") if name.strip()]
    root = Path(args.run)
    sweep = sorted(file.parent for file in root.glob("*/config.yaml"))
    runs = [root] if (root / "config.yaml").is_file() else sweep
    if not runs:
        raise CheckpointError(no_run(root))
    try:
        level = f"level={args.level}"
        levels = levels_of(parse_yaml(args.level), level) if args.level else []
    except ValueError as error:
        raise ConfigError(f"level={args.level} {error}") from None
    evaluations, asked = chosen(args.suite, names, levels)
    asked = replace(asked, seed=args.seed, limit=args.limit, seq_len=args.seq_len)
    if args.seq_len and Position.name not in [each.name for each in evaluations]:
        raise ConfigError(f"seq_len={args.seq_len} needs the task position: set tasks=[position]")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, dict[str, Result]] = {}
    skipped: dict[str, list[str]] = {}
    tables = args.every or runs == [root]
    for run in runs:
        checkpoints = run / "checkpoints"
        every = [step_of(path) for path in list_checkpoints(checkpoints)] if args.every else []
        for wanted in every or [args.step]:
            model, step = decoder(run, wanted)
            path = checkpoint_path(checkpoints, step)
            tokenizer = Tokenizer.from_file(tokenizer_of(run))
            subject = Subject(model.to(device), tokenizer, path, run, load_run_config(run))
            results, too_long = evaluate(subject, evaluations, asked)
            skipped |= {text: [*skipped.get(text, []), str(run)] for text in too_long}
            if results and not args.json:
                imported = "imported" in (read_record(run / "run.json") or {})
                unknown = ", trained on an unknown corpus" * imported
                blank = "\n" * (tables and any(found.values()))
                echo(f"{blank}{run}, {path.name}{unknown}", flush=True)
                if tables:
                    print_scores(results)
            found[str(path if args.every else run)] = results
    if not any(found.values()):
        raise ConfigError(listed(list(skipped)))
    for text, own in skipped.items():
        to_stderr(f"{text}; skipped for {shortlist(list(dict.fromkeys(own)), 3)}")
    if args.json:
        echo_json(found[args.run] if list(found) == [args.run] else found)
    elif runs != [root]:
        print_comparison(runs, args.step, [each.name for each in evaluations])


def print_scores(results: "dict[str, Result]") -> None:
    for unit in dict.fromkeys(result["unit"] for result in results.values()):
        own = [(name, result) for name, result in results.items() if result["unit"] == unit]
        scores = [(name, score) for name, result in own for score in result["scores"]]
        table = Table.of(HEADS, [[name, *cells(score)] for name, score in scores])
        echo(f"\n{unit}\n{without_empty(table)}")


def without_empty(table: Table) -> Table:
    return Table([each for each in table.columns if any(cell.text for cell in each.cells)])


def print_comparison(runs: list[Path], step: int, names: list[str]) -> None:
    """Print mean scores over seeds and gaps to the baseline for the tasks and measures `names`."""
    from diffllm.compare.report.comparison import read
    from diffllm.compare.report.evaluations import ALL

    comparison, _ = read(runs, step=step)
    lines = [
        (each, line)
        for name in names
        for each in (each for each in comparison.evaluated if each.name == name)
        for line in each.lines[: 1 if len(names) > 1 and each.lines[0].name == ALL else None]
    ]
    heads = ["task", "of", "row", "value", "chance", f"gap to {comparison.baseline}", "seeds"]
    for unit in dict.fromkeys(each.unit for each, _ in lines):
        rows = [
            [each.name, line.name, row.label, in_digits(cell.mean.mean), decimals(line.chance),
             with_interval(cell.gap, signed=True) if cell.gap else "", str(cell.mean.seeds)]
            for each, line in lines if each.unit == unit
            for row, cell in zip(comparison.rows, line.cells, strict=True) if cell
        ]  # fmt: skip
        table = ascii_minus(str(without_empty(Table.of(heads, rows, range(3)))))
        echo(f"\n{unit}, means over seeds; in brackets 95% intervals\n{table}")
    echo("".join(f"\nnote: {note}" for note in comparison.score_notes))


HEADS = ("task", "of", "value", "chance", "95% interval", "generated", "examples")


def cells(score: dict[str, Any]) -> list[str]:
    value, chance, made = (decimals(score.get(key)) for key in ("value", "chance", "generated"))
    low, high = score.get("interval") or (None, None)
    interval = f"{decimals(low)} to {decimals(high)}" if low is not None else ""
    return [score["of"], value, chance, interval, made, str(score.get("examples") or "")]


def decimals(value: float | None) -> str:
    return "" if value is None else ascii_minus(in_digits(value))
