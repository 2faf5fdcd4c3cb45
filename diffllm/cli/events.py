"""diffllm events run=<dir> [key=value ...]: list spikes, skipped updates, restarts and stalls."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from diffllm.cli.arguments import RunArguments, argument, parse
from diffllm.core.errors import CheckpointError, ConfigError, DataError
from diffllm.core.printing import Table, echo, echo_json
from diffllm.core.run_files import RunFile
from diffllm.metrics.events import (
    EVENT_KINDS,
    BatchPlace,
    Event,
    read_events,
    samples_text,
    short_hash,
)

if TYPE_CHECKING:
    import numpy as np

    from diffllm.config import TrainConfig
    from diffllm.data.prepared import Prepared
    from diffllm.data.tokenizer import Tokenizer

EVENTS_USAGE = """\
diffllm events run=<dir> [key=value ...]: list spikes, skipped updates, restarts and stalls

show=text also prints the training samples of each listed step: their beginning, or with show=full
the whole text. Reading the text needs the data of the run.

diffllm events run=outputs/mine
diffllm events run=outputs/mine step=1203 show=text"""
SHOW = ("nothing", "text", "full")
CHARACTERS = 400
"""Characters of a sample that show=text prints."""
EVENT_HEADS = (
    "step",
    "tokens",
    "event",
    "definition",
    "value",
    "height",
    "lr",
    "samples",
    "detail",
)


@dataclass
class EventsArguments(RunArguments):
    step: int | None = argument("only events of this step", None, least=0)
    kind: str = argument(f"only {', '.join(EVENT_KINDS)}", "")
    show: str = argument("text, full: the samples of each listed step", SHOW[0])


class SampleText(NamedTuple):
    """A training sample: its sequence in a source, and the text of each document or part of one."""

    source: str
    sequence: int
    documents: list[str]


StepTexts = Iterator[tuple[int, list[SampleText]]]


def events_command(argv: list[str]) -> None:
    args = parse(EventsArguments, argv, EVENTS_USAGE)
    if args.show not in SHOW:
        raise ConfigError(f"show={args.show} must be one of {', '.join(SHOW)}")
    if args.kind and args.kind not in EVENT_KINDS:
        raise ConfigError(f"kind={args.kind} must be one of {', '.join(EVENT_KINDS)}")
    run = Path(args.run)
    events = chosen_events(run, args)
    texts = None
    if args.show != SHOW[0]:
        texts = texts_of_steps(run, events)
    if args.json:
        echo_json(json_lines(events, texts))
        return
    echo(table_of(events) if events else "no events")
    if texts is None:
        return
    characters = None if args.show == "full" else CHARACTERS
    for step, samples in texts:
        print_samples(step, samples, characters)


def json_lines(events: Sequence[Event], texts: StepTexts | None) -> list[dict[str, Any]]:
    lines = [asdict(event) for event in events]
    if texts is not None:
        samples_by_step = dict(texts)
        for line in lines:
            samples = samples_by_step.get(line["step"], [])
            line["text"] = [sample._asdict() for sample in samples]
    return lines


def chosen_events(run: Path, args: EventsArguments) -> list[Event]:
    if not (run / RunFile.CONFIG).is_file():
        from diffllm.config.saved import no_run  # imports Hydra, which is slow

        raise CheckpointError(no_run(run))
    events = []
    for event in read_events(run):
        if args.step in (None, event.step) and args.kind in ("", event.kind):
            events.append(event)
    return events


def table_of(events: Iterable[Event]) -> Table:
    rows = []
    for event in events:
        rows.append(
            [
                str(event.step),
                f"{event.tokens:,}",
                event.kind,
                event.definition or "-",
                number_text(event.value),
                number_text(event.height),
                number_text(event.lr),
                samples_text(event) or "-",
                event.detail,
            ]
        )
    return Table.of(EVENT_HEADS, rows, left=(2, 3, 7, 8))


def number_text(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"


def print_samples(step: int, samples: Sequence[SampleText], characters: int | None) -> None:
    """Print the samples of a step, each cut to `characters` characters unless this is None."""
    for i, sample in enumerate(samples, 1):
        place = f"{sample.source}, sequence {sample.sequence}"
        echo(f"\n--- step {step}, sample {i} of {len(samples)}: {place} ---")
        text = "\n--- end of document ---\n".join(sample.documents)
        if characters is not None and len(text) > characters:
            omitted = len(text) - characters
            text = f"{text[:characters]}... ({omitted:,} more, show=full)"
        echo(text)


def texts_of_steps(run: Path, events: Sequence[Event]) -> StepTexts:
    """Open the run's data; return an iterator over each step with a batch, and its samples.

    Raises DataError if the data is missing or has changed since a step.
    """
    batches = {event.step: event.batch for event in events if event.batch}
    if not batches:
        return iter(())
    from diffllm.config.saved import load_run_config
    from diffllm.evaluation.load import own_data
    from diffllm.training.checks import corpus_facts

    cfg = load_run_config(run)
    try:
        data = own_data(run, cfg)
    except DataError as error:
        raise DataError(
            f"the text needs the data of {run}, but {error}; move or link the data to the path in "
            f"{run / RunFile.CONFIG}, or omit show="
        ) from error
    facts = corpus_facts(data)
    tokens_hash = short_hash(facts["tokens"])
    # Check all steps before the first text is printed.
    for step, batch in batches.items():
        if batch.tokens_hash != tokens_hash:
            raise DataError(
                f"step {step} read other tokens (hash {batch.tokens_hash}...) than the current "
                "data of the run, which a later start has changed with run.allow_changes; choose "
                "a later step=N, or omit show="
            )
    tokenizer = data.tokenizer()

    # A generator: the text of all steps may not fit into memory.
    def read_steps() -> StepTexts:
        for step, batch in batches.items():
            samples = texts_of_batch(cfg, data, tokenizer, batch)
            yield step, list(samples)

    return read_steps()


def texts_of_batch(
    cfg: "TrainConfig", data: "Prepared", tokenizer: "Tokenizer", batch: BatchPlace
) -> Iterator[SampleText]:
    from dataclasses import replace

    from diffllm.data.config import Packing
    from diffllm.data.samples import Place, training_samples

    if batch.packing not in Packing.__members__:
        raise CheckpointError(f"an event has the unknown data.packing={batch.packing}")
    # The run may have changed these settings since the step.
    data_config = replace(cfg.data, packing=Packing[batch.packing])
    # A place names samples of a source, so weights and the length of the run have no effect.
    samples = training_samples(data, data_config, batch.seq_len, batch.seed, 1, batch.stage)
    for source, (first, stop) in batch.samples.items():
        sequences, (inputs, targets) = samples.read(Place(source, first, stop))
        last_targets = targets[:, -1].tolist()
        rows = zip(sequences.tolist(), inputs.numpy(), last_targets, strict=True)
        for sequence, row, last_target in rows:
            documents = documents_in(row, last_target, tokenizer)
            yield SampleText(source, sequence, documents)


def documents_in(inputs: "np.ndarray", last_target: int, tokenizer: "Tokenizer") -> list[str]:
    """Decode a sequence, inputs (T,) and the last target, as one text per document.

    A negative target is ignored. Padding consists of EOS and gives no document.
    """
    # Targets are the inputs shifted by one token, so only the last target is no input.
    tokens = inputs.tolist()
    if last_target >= 0:
        tokens.append(last_target)
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == tokenizer.eos_id:
            documents.append([])
        else:
            documents[-1].append(token)
    return [tokenizer.decode(document) for document in documents if document]
