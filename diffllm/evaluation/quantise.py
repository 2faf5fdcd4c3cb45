"""The cost of fewer bits: the change of loss and of retrieval where matrices, what they multiply,
or both are rounded."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffllm.analysis.quantise import Rounding, quantised
from diffllm.data.progress import track
from diffllm.errors import CheckpointError, ConfigError, DataError
from diffllm.evaluation.answers import Answers, line, questions
from diffllm.evaluation.evaluation import (
    Asked,
    Evaluation,
    Line,
    Score,
    Settings,
    Subject,
    evaluation,
)
from diffllm.evaluation.own_data import (
    TOKENS,
    FirstSequences,
    HeldoutSequence,
    own_corpus,
    own_data,
    sequences_for,
)
from diffllm.evaluation.scoring import Question, score
from diffllm.statistics.bootstrap import of_documents
from diffllm.tasks.task import TASKS, Example

VERSION = 1
"""Changed whenever lines or scores change, so that older results are made anew."""
BITS = (8, 6, 4)
NEEDLES = 50
"""Needle questions, all levels together."""
PLAIN = "unquantised"


@dataclass(frozen=True)
class Arm:
    """A way to round a model."""

    name: str
    weights: Rounding | None = None
    activations: Rounding | None = None

    @property
    def level(self) -> dict[str, Any]:
        """The number of bits, and what has so few; empty without rounding."""
        if (rounding := self.weights or self.activations) is None:
            return {}
        return {"bits": rounding.bits, "rounded": self.name.replace(f" {rounding.bits}", "", 1)}


def arms() -> list[Arm]:
    """List the arms, the unquantised one first, each kind from many bits to few."""
    found = [Arm(PLAIN)]
    for by_row, weights, activations in ((True, "channel", "token"), (False, "tensor", "tensor")):
        for bits in BITS:
            found.append(Arm(f"weights {bits} per {weights}", Rounding(bits, by_row)))
        for bits in BITS:
            name = f"activations {bits} per {activations}"
            found.append(Arm(name, activations=Rounding(bits, by_row)))
    for bits in BITS:
        how = Rounding(bits, by_row=True)
        found.append(Arm(f"both {bits} per channel and token", how, how))
    return found


ARMS = arms()


@evaluation("quantise")
class Quantise(Evaluation):
    """Measures the loss over the sequences of the pass over outliers in each arm, and needles.

    A score is the loss of an arm minus that of the model as it is, over the same sequences; with
    it stands the latter, so that models can be compared where their losses are equal. Scores that
    begin with "needles" are the share of needle questions with a right answer minus that of the
    model as it is. What rounding is, `diffllm.analysis.quantise` says; one
    sequence, or one question with its candidates, is read at a time.
    """

    unit = "change of loss, nats a token, and of the share of needles found"

    def settings(self, subject: Subject, asked: Asked) -> Settings:
        return {
            "version": VERSION,
            "sequences": asked.limit or sequences_for(TOKENS, subject.cfg.seq_len),
            "corpus": own_corpus(subject.run, subject.cfg),
            "needle": needle_settings(subject, asked.seed),
        }

    def lines(self, subject: Subject, settings: Settings) -> list[Line]:
        data = own_data(subject.run, subject.cfg)
        first = FirstSequences(data, subject.cfg, settings["sequences"], subject.device)
        sequences = [each for each in first if bool((each.targets >= 0).any())]
        if not sequences:
            raise DataError("the held-out sequences have no token that is to be predicted")
        needles = needle_questions(subject, settings["needle"])
        found: list[Line] = []
        with track(self.name, len(ARMS) * len(sequences)) as advance:
            for arm in ARMS:
                with quantised(subject.model, arm.weights, arm.activations):
                    found += loss_lines(subject, arm.name, sequences, advance)
                    found += needle_lines(subject, arm.name, needles)
        return found

    def scores(self, settings: Settings, lines: Sequence[Line]) -> list[Score]:
        nats = {arm.name: of_arm(lines, arm.name, "nats") for arm in ARMS}
        tokens = of_arm(lines, PLAIN, "tokens")
        loss = float(nats[PLAIN].sum() / tokens.sum())
        needles = {line["arm"]: line for line in lines if "asked" in line}
        found = []
        for arm in ARMS[1:]:
            change = nats[arm.name] - nats[PLAIN]
            found.append(
                Score(
                    arm.name,
                    float(change.sum() / tokens.sum()),
                    of_documents(change, tokens),
                    len(tokens),
                    more={"loss": loss, "level": arm.level},
                )
            )
        asked = [arm.name for arm in ARMS[1:] if arm.name in needles]
        return found + [needle_score(needles[PLAIN], needles[name]) for name in asked]


def needle_settings(subject: Subject, seed: int) -> Settings | str:
    """Return the settings of a few needle questions, or why there are none."""
    try:
        return Answers(TASKS["needle"]).settings(subject, Asked(seed, NEEDLES))
    except ConfigError as error:
        return f"left out: {error}"


@torch.no_grad()
def loss_lines(
    subject: Subject,
    arm: str,
    sequences: Sequence[HeldoutSequence],
    advance: Callable[[int], None],
) -> list[Line]:
    """Return a line with the loss of each sequence, by the model as it is now."""
    found = []
    for i, each in enumerate(sequences):
        losses = subject.model(
            each.inputs, each.targets, documents=each.documents, by_token=True
        ).double()
        nats = losses.sum().item()
        if not math.isfinite(nats):
            raise CheckpointError(
                f"{subject.checkpoint}: the loss of held-out tokens is not finite ({arm})"
            )
        tokens = int((each.targets >= 0).sum())
        found.append({"arm": arm, "sequence": i, "nats": nats, "tokens": tokens})
        advance(1)
    return found


def needle_questions(
    subject: Subject, settings: Settings | str
) -> list[tuple[int, Example, Question]]:
    """Make the needle questions; none where they are left out."""
    if isinstance(settings, str):
        return []
    longest = subject.model.cfg.seq_len
    return questions(TASKS["needle"], settings, subject.tokenizer, longest)


def needle_lines(
    subject: Subject, arm: str, asked: Sequence[tuple[int, Example, Question]]
) -> list[Line]:
    """Return a line with how many questions the model as it is now answers right; none without
    questions."""
    right = 0
    for level, example, question in asked:
        (scored,) = score(subject.model, [question])
        right += bool(line(level, example, scored)["correct"])
    return [{"arm": arm, "right": right, "asked": len(asked)}] if asked else []


def of_arm(lines: Sequence[Line], arm: str, key: str) -> np.ndarray:
    """Return a number of each sequence of an arm, (sequences,) float64."""
    own = (line for line in lines if line["arm"] == arm and "sequence" in line)
    return np.array([line[key] for line in own], np.float64)


def needle_score(plain: Line, own: Line) -> Score:
    """Return how an arm's share of right answers differs from that of the model as it is."""
    shares = [line["right"] / line["asked"] for line in (own, plain)]
    more = {"share": shares[0], "unquantised": shares[1]}
    return Score(f"needles, {own['arm']}", shares[0] - shares[1], None, own["asked"], more=more)
