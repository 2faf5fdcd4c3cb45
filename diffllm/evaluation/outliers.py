"""The outliers of a checkpoint over fixed held-out tokens: the pass of `diffllm outliers`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffllm.analysis.outliers import measure
from diffllm.analysis.spread import TOP
from diffllm.data.progress import track
from diffllm.errors import CheckpointError
from diffllm.evaluation.evaluation import (
    Asked,
    Evaluation,
    Line,
    Score,
    Settings,
    Subject,
    evaluation,
)
from diffllm.evaluation.own_data import TOKENS, FirstSequences, own_corpus, own_data, sequences_for

VERSION = 1
"""Changed whenever lines or scores change, so that older results are made anew."""
NUMBERS = (*(f"top_{k}" for k in TOP), "median", "rms", "kurtosis")
Place = Mapping[str, Any]
"""A layer, and where there are several a map."""


@evaluation("outliers")
class Outliers(Evaluation):
    """Keeps all numbers of each layer. A score is the largest among layers, and for logits among
    maps, of the hidden states' or the logits' magnitudes: top_k is the k-th largest of all."""

    unit = "magnitude, largest of layers (kurtosis: a ratio)"

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        return {
            "version": VERSION,
            "sequences": asked.limit or sequences_for(TOKENS, subject.cfg.seq_len),
            "corpus": own_corpus(subject.run, subject.cfg),
        }

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        data = own_data(subject.run, subject.cfg)
        sequences = FirstSequences(data, subject.cfg, settings["sequences"], subject.device)
        with track(self.name, len(sequences)) as advance:

            def batches() -> Iterator[Any]:
                for sequence in sequences:
                    yield sequence.batch
                    advance(1)

            try:
                layers = measure(subject.model, batches())
            except CheckpointError as error:
                raise CheckpointError(f"{subject.checkpoint}: {error}") from None
        count = len(sequences)
        about = {"sequences": count, "tokens": count * subject.cfg.seq_len}
        return [{"layer": i, **about, **numbers} for i, numbers in enumerate(layers)]

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[Score]:
        hidden = [({"layer": line["layer"]}, line["hidden"]) for line in lines]
        logits = [
            ({"layer": line["layer"], "map": name}, numbers)
            for line in lines
            for name, numbers in line["logits"].items()
        ]
        count = lines[0]["sequences"]
        found = [largest(f"hidden {name}", hidden, name, count) for name in NUMBERS]
        found += [largest(f"logits {name}", logits, name, count) for name in NUMBERS]
        return [score for score in found if score is not None]


def largest(
    label: str, places: Sequence[tuple[Place, Mapping[str, Any]]], name: str, examples: int
) -> Score | None:
    """Return the largest number of this name and its place; None where no place has it."""
    there = [(numbers[name], where) for where, numbers in places if numbers[name] is not None]
    if not there:
        return None
    value, where = max(there, key=lambda pair: pair[0])
    return Score(label, value, examples=examples, more=where)
