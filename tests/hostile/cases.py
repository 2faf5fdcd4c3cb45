"""Cases that are drawn: the thing done to a place, the command that then comes, its right ends."""

import json
import os
import random
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hostile import ends as hostile_ends
from hostile import outputs as hostile_outputs
from hostile import sources as corpora
from hostile.commands import BROKEN, CLOSED, FULL, GONE, Ended, Streams
from hostile.damage import SECRET, damage, take_away
from hostile.judging import DIVERGED, FINISHED, REFUSED, broken_rules, differences
from hostile.outputs import Drawn, problems_of_run
from hostile.paths import hostile_path
from hostile.place import Place

EITHER = frozenset({FINISHED, REFUSED})
Start = Callable[[Sequence[str]], Ended]


@dataclass(frozen=True)
class Case:
    """A command in a place that something was done to."""

    what: str
    """The thing that was done."""
    words: Sequence[str]
    """The command: "train" or one of diffllm's tools, and its words."""
    expected: Collection[str] = EITHER
    codes: Collection[int] = (0, 2)
    """The exit codes that there may be: 1 is for one of several runs or checkpoints that is bad."""
    trains_first: bool = False
    """Whether a refusal may come in the middle of training, as that of a full disk does."""
    streams: Streams = Streams()  # noqa: RUF009
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of the place."""
    after: Callable[[Ended, Start], list[str]] = lambda ended, start: []
    """Lists the rules that its end broke, beside those of every command; may start others."""


def readers(place: Place) -> dict[str, list[str]]:
    """Return the commands that read the run of a place, or its sweep, by what they do."""
    return {
        "a run that goes on": [
            "train", *place.tiny, "run.name=run", "steps=6", "run.allow_changes=[steps]",
        ],
        "a run that is finished": ["train", *place.tiny, "run.name=run"],
        "a run from its checkpoint": [
            "train", *place.tiny, "run.name=other", "resume=outputs/run", "steps=6",
        ],
        "a sweep that goes on": ["train", "-m", "run.sweep=sweep", "seed=0,1", *place.tiny],
        "report of a run": ["report", "outputs/run"],
        "report of a sweep": ["report", "outputs/sweep"],
        "report of all": ["report", "outputs", "outputs/sweep"],
        "power": ["power", "pilot=outputs/sweep", "gap=0.02"],
        "checkpoints": ["checkpoints", "run=outputs/run"],
        "a run from its weights": [
            "train", *place.tiny, "run.name=other", "resume=weights:outputs/run",
        ],
        "consolidate": ["consolidate", "run=outputs/run", "out=exported"],
        "export": ["export", "run=outputs/run", "out=exported"],
        "import": ["import", "hf=outputs/run", "out=outputs/imported"],
        "generate": ["generate", "run=outputs/run", "prompt=def a", "max_new_tokens=4"],
        "outliers": ["outliers", "run=outputs/run", "tokens=64"],
        "attention-map": ["attention-map", "run=outputs/run", "prompt=def a"],
    }  # fmt: skip


NUMBERS = (
    "nan", "inf", "-inf", "-1", "0", "-0.0", "1e-300", "1e-45", "1e38", "1e308", "1e309",
    "999999999999", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "0x10",
    "1_000", "1e3", "0.5", "١٢", "true", "null", "''", "[]", "{}", "[1]", "{a: 1}", "???",
    "${seed}", "${nothing}", "${oc.env:HOME}", "abc", "\udcff", "a\nb", "1,2", "1;2", "a" * 5000,
)  # fmt: skip
"""Values that a key of a number may be given."""
KEYS = (
    "seed", "optim.lr", "optim.min_lr", "optim.weight_decay", "optim.clip_norm",
    "optim.warmup_steps", "optim.betas", "optim.eps", "eval.interval", "eval.sequences",
    "eval.tokens", "log_interval", "diagnostics.interval", "checkpoint.interval",
    "checkpoint.keep_last", "data.heldout_fraction", "data.num_workers", "data.prefetch_factor",
    "data.vocab_size", "data.tokenizer_sample_bytes", "model.vocab_size", "model.num_heads",
    "model.rope_theta", "model.norm_eps", "spikes.window", "distributed.timeout", "attention",
    "precision", "train.skip_step", "parallel.shard", "parallel.replicate", "prepare.processes",
    "run.name", "run.sweep", "wandb.project", "wandb.mode", "wandb.tags", "data.text_column",
    "data.sample_prompt", "data.packing", "data.mask_documents", "compile", "resume",
)  # fmt: skip
"""Keys, some of which there are not: those of lengths and widths would only take long."""


def values(rng: random.Random, place: Place) -> Case:
    """Give keys of a new run values that hardly anybody means."""
    chosen = [(rng.choice(KEYS), rng.choice(NUMBERS)) for _ in range(rng.choice((1, 1, 1, 2)))]
    words = [f"{rng.choice(('', '', '', '+', '++'))}{key}={value}" for key, value in chosen]
    name = [] if any(key == "run.name" for key, _ in chosen) else ["run.name=new"]
    return Case(
        f"overrides {shown(words)}",
        ["train", *place.tiny, *name, *words],
        {FINISHED, REFUSED, DIVERGED},
    )


ARGUMENTS: dict[str, tuple[str, ...]] = {
    "generate": ("max_new_tokens", "temperature", "top_p", "seed", "step", "prompt"),
    "outliers": ("tokens", "step"),
    "attention-map": ("layer", "head", "step", "out"),
    "consolidate": ("step", "dtype", "max_shard_size", "out"),
    "export": ("step", "dtype", "max_shard_size", "out", "own", "format"),
    "import": ("attention", "perturb", "seed", "out"),
    "checkpoints": ("verify",),
    "power": ("gap", "alpha", "power", "sides", "comparisons"),
    "report": ("baseline", "out"),
    "count": ("model.num_layers", "model.dim", "seq_len", "model.match_params_to"),
    "noise-floor": ("keys", "lambda", "amplitude", "correlation", "draws"),
}


def arguments(rng: random.Random, place: Place) -> Case:
    """Give arguments of a tool values that hardly anybody means."""
    tool = rng.choice(list(ARGUMENTS))
    words = [f"{rng.choice(ARGUMENTS[tool])}={rng.choice(NUMBERS)}"]
    known = next((w for w in readers(place).values() if w[0] == tool), [tool])
    small = ["max_new_tokens=4"] if tool == "generate" else []
    kept = [word for word in [*known[1:], *small] if word.partition("=")[0] not in words[0]]
    return Case(f"{tool} {shown(words)}", [tool, *kept, *words])


STREAMS = {"full": FULL, "closed": CLOSED, "no reader": BROKEN, "no terminal": GONE}
RIGHT = {"finished": {FINISHED}, "diverged": {DIVERGED}, "refused": {REFUSED}}


def of_drawn(drawn: Drawn, place: Place) -> Case:
    """Make a case of a command, its streams and how it has to end."""
    words = list(drawn.words)
    if words[0] in ("train", "prepare") and not {"--help", "--cfg"} & {*words}:
        words += [word for word in place.tiny if word.startswith("data.paths=")]

    def after(ended: Ended, start: Start) -> list[str]:
        return [
            f"{run}: {problem}"
            for run in drawn.runs
            for problem in problems_of_run(drawn, place.path / run)
        ]

    streams = Streams(STREAMS.get(drawn.stdout), STREAMS.get(drawn.stderr))
    what = f"{shown(words)}; stdout {drawn.stdout}, stderr {drawn.stderr}"
    if drawn.environment:
        what += f", {dict(drawn.environment)}"
    return Case(
        what,
        words,
        RIGHT[drawn.expected],
        trains_first=drawn.expected == "diverged",
        streams=streams,
        environment=drawn.environment,
        after=after,
    )


def outputs(rng: random.Random, place: Place) -> Case:
    """Let what a command says go to where it cannot be written."""
    return of_drawn(hostile_outputs.draw(rng), place)


def ends(rng: random.Random, place: Place) -> Case:
    """Train to the end with values that make losses no numbers, that are refused, or just legal."""
    return of_drawn(hostile_ends.draw(rng), place)


def storage(rng: random.Random, place: Place) -> Case:
    """Let the disk of the runs be full at some file; with room, the same command has to finish."""
    outputs = place.path / "outputs"
    before = place.path / "outputs-before"
    outputs.rename(before)
    outputs.mkdir()
    used = sum(-(-path.stat().st_size // 4096) * 4096 for path in before.rglob("*"))
    room = int(2 ** rng.uniform(12, 21))
    size = used + 4096 * sum(1 for _ in before.rglob("*")) + room
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(outputs)], check=True)
    subprocess.run(["cp", "-a", f"{before}/.", str(outputs)], check=True)
    new = rng.random() < 0.5
    words = readers(place)["a run that goes on"]
    if new:
        words = ["train", *place.tiny, "run.name=new"]

    def after(ended: Ended, start: Start) -> list[str]:
        subprocess.run(
            ["mount", "-o", "remount,size=100m", str(outputs)], check=True, capture_output=True
        )
        again = start(words)
        broken = [f"with room: {rule}" for rule in broken_rules(again, {FINISHED})]
        if not broken and not (outputs / ("new" if new else "run") / "summary.json").is_file():
            broken.append("with room: there is no summary.json")
        return broken

    kind = "a new run" if new else "a run that goes on"
    return Case(
        f"{kind} on a disk with {room:,} bytes left", words, EITHER, trains_first=True, after=after
    )


RUN_FILES = (
    "config.yaml", "metrics.jsonl", "run.json", "summary.json", "saved.json", "changes.jsonl",
    "diverged.json", "run.log", "requeue", "tokenizer.model", "report.html",
    "heldout/step-00000004.npz",
    "checkpoints", "heldout", "traces", ".lock", "checkpoints/.step-00000006.incomplete",
    "checkpoints/step-00000006", "checkpoints/step-00000004",
    *(f"checkpoints/step-{step:08d}/{name}"
      for step in (2, 4) for name in ("manifest.json", "state.json", ".metadata", "__0_0.distcp")),
)  # fmt: skip
"""Files of a run that are damaged; those that it does not have are made first."""
MADE = {
    "changes.jsonl": '{"step": 0, "changes": {"log_interval": [1, 2]}}\n',
    "diverged.json": '{"step": 3, "reason": "too many skips"}\n',
    "requeue": '{"signal": "SIGTERM", "step": 2}\n',
}


def files(rng: random.Random, place: Place) -> Case:
    """Damage a file or two of a run or of the sweep; then comes any command that reads them."""
    said = []
    of_sweep = rng.random() < 0.3
    run = place.sweep / "seed0" if of_sweep else place.run
    if rng.random() < 0.4:
        (run / "summary.json").unlink()
        said.append("unfinished")
    names = [*RUN_FILES, *(["../sweep.json"] * 5 if of_sweep else [])]
    for name in rng.sample(names, rng.choice((1, 1, 1, 2))):
        file = run / name
        if file.parent.is_dir() and not file.is_symlink():
            if not file.exists():
                file.write_text(MADE.get(name, "{}\n"))
            said.append(
                take_away(rng, file, file.parents[2]) if file.is_dir() else damage(rng, file)
            )
    known = {
        name: words for name, words in readers(place).items()
        if ("sweep" in " ".join(words)) == of_sweep or name == "report of all"
    }  # fmt: skip
    name = rng.choice(list(known))
    outside = contents_outside(place)

    def after(ended: Ended, start: Start) -> list[str]:
        broken = differences(outside, contents_outside(place))
        if SECRET in ended.out + ended.err:
            broken.append("it shows what lies outside")
        for file in (place.path / "exported").glob("*"):
            if file.is_file() and SECRET.encode() in file.read_bytes():
                broken.append("it copies what lies outside")
        return broken

    several = name == "a sweep that goes on" or known[name][0] == "checkpoints"
    codes = {0, 1, 2} if several else {0, 2}
    return Case(f"{name}; {', '.join(said)}", known[name], codes=codes, after=after)


def contents_outside(place: Place) -> dict[str, bytes]:
    """Return the files outside of the runs that links may lead to, by their names."""
    return {
        path.name: path.read_bytes()
        for path in place.path.rglob("outside-*")
        if path.is_file() and not path.is_symlink()
    }


REWRITABLE = ("good jsonl", "good txt", "good json", "line_ends_in_texts jsonl")


def sources(rng: random.Random, place: Place) -> Case:
    """Prepare a corpus that is odd or damaged; at times another text of its sizes follows, with the
    times of before."""
    directory = place.path / "corpus"
    directory.mkdir()
    kind = rng.choice(REWRITABLE) if rng.random() < 0.2 else None
    drawn = corpora.draw(rng, directory, kind)
    given = [f"data.tokenizer={place.run}", f"data.cache_dir={place.path / 'cache'}"]
    words = [*drawn.words, *given]
    rewrites = drawn.kind in REWRITABLE and rng.random() < 0.8

    def after(ended: Ended, start: Start) -> list[str]:
        if drawn.expected is None or ended.code != 0:
            return []
        broken = wrong_texts(start(["texts", *words]), drawn.expected)
        if rewrites and not broken:
            other = corpora.rewritten(rng, drawn)
            again = start(["prepare", *words])
            broken = broken_rules(again, {FINISHED})
            broken = broken or wrong_texts(start(["texts", *words]), other.expected or [])
            broken = [f"written over: {rule}" for rule in broken]
        return broken

    expected = REFUSED if drawn.expected is None else FINISHED
    what = drawn.kind + ", then written over" * rewrites
    return Case(what, ["prepare", *words], {expected}, after=after)


def wrong_texts(ended: Ended, expected: Sequence[str]) -> list[str]:
    """Say whether the tokens that were prepared are not of these texts."""
    try:
        found = json.loads(ended.out)
    except ValueError:
        return [f"its tokens cannot be read: {ended.err[-200:]}"]
    return [] if found == sorted(expected) else ["its tokens are of other texts"]


PATH_KEYS = (
    "run.dir", "data.paths", "data.cache_dir", "data.tokenizer", "resume", "data.dataset",
    "data", "--config-dir", "DIFFLLM_CACHE",
)  # fmt: skip
"""Keys of a run whose values are paths, and a variable."""
PATH_ARGUMENTS = {
    "checkpoints": ("run",), "consolidate": ("run", "out"), "generate": ("run",),
    "outliers": ("run",), "attention-map": ("run", "out"), "report": ("", "out"),
    "power": ("pilot",), "noise-floor": ("out",), "export": ("run", "out"),
    "import": ("hf", "out"),
}  # fmt: skip


def paths(rng: random.Random, place: Place) -> Case:
    """Give a key or an argument a path that leads nowhere."""
    what, path = hostile_path(rng, place.path / "hostile")
    environment: dict[str, str] = {}
    if rng.random() < 0.15:
        what, path = "~ without a HOME", "~/run"
        environment["HOME"] = ""
    if rng.random() < 0.5:
        key = rng.choice(PATH_KEYS)
        words = ["train", *place.tiny, "run.name=new"]
        if key == "DIFFLLM_CACHE":
            environment[key] = path.replace("\udcff", "?")
            words = [word for word in words if not word.startswith("data.paths")]
        elif key == "--config-dir":
            words += [key, path]
        else:
            words = [word for word in words if word.partition("=")[0] != key]
            words.append(f"{key}={quoted(path)}")
        return Case(f"{key}: {what}", words, EITHER, environment=environment)
    tool = rng.choice(list(PATH_ARGUMENTS))
    argument = rng.choice(PATH_ARGUMENTS[tool])
    known = next((w for w in readers(place).values() if w[0] == tool), [tool])
    kept = [word for word in known[1:] if word.partition("=")[0] != argument]
    if not argument:
        kept = []
    words = [tool, *kept, f"{argument}={path}" if argument else path]
    return Case(f"{tool} {argument}: {what}", words, EITHER, environment=environment)


def quoted(path: str) -> str:
    """Return a path as Hydra takes it for one value."""
    return "'" + path.replace("'", "\\'") + "'"


def unmounted(place: Place) -> None:
    """Take away a disk that a case has brought."""
    if os.path.ismount(place.path / "outputs"):
        subprocess.run(["umount", "-l", str(place.path / "outputs")], check=True)


def shown(words: Sequence[str]) -> str:
    """Return words as a report can show them."""
    text = " ".join(words).encode("unicode_escape").decode()
    return text if len(text) < 120 else f"{text[:100]}...({len(text)})"


def inside(path: Path, root: Path) -> str:
    """Return a path as it lies below a root."""
    return str(path.relative_to(root))


FAMILIES: dict[str, Callable[[random.Random, Place], Case]] = {
    "files": files,
    "paths": paths,
    "sources": sources,
    "values": values,
    "arguments": arguments,
    "outputs": outputs,
    "ends": ends,
    "storage": storage,
}
