"""Tasks of lm-eval that local files define, one for each kind of request, and the answers that a
run's model gives to them one text at a time."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from diffllm.data import Tokenizer
from diffllm.model import Transformer
from diffllm.model.generate import generate

CHOICES = {
    "task": "choices", "dataset_path": "json", "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{prompt}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
    "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}  # fmt: skip
TEXTS = {
    "task": "texts", "dataset_path": "json", "test_split": "test",
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip
CONTINUED = {
    "task": "continued", "dataset_path": "json", "test_split": "test",
    "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "x",
    "target_delimiter": "", "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["\n\n\n\n"], "max_gen_toks": 12, "do_sample": False},
}  # fmt: skip
ROWS: dict[str, list[dict[str, Any]]] = {
    "choices": [
        {"prompt": f"def f{i}(x):\n    return", "choices": [f" x + {i}", " y", " 12"],
         "answer": i % 3}
        for i in range(6)
    ],
    "texts": [{"text": f"def g{i}(y):\n    return y + {i}\n\n# something\n" * (i + 1)}
              for i in range(4)],
    "continued": [{"prompt": f"def h{i}(z):"} for i in range(4)],
}  # fmt: skip


def write_task(directory: Path, task: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a task as lm-eval's own YAML, which JSON is too, and its documents."""
    directory.mkdir(exist_ok=True)
    file = directory / f"{task['task']}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    content = {**task, "dataset_kwargs": {"data_files": {"test": str(file)}}}
    (directory / f"{task['task']}.yaml").write_text(json.dumps(content))


def write_tasks(directory: Path) -> None:
    """Write the tasks of all three kinds."""
    for task in (CHOICES, TEXTS, CONTINUED):
        write_task(directory, task, ROWS[task["task"]])


@torch.no_grad()
def log_likelihood(model: Transformer, ids: list[int], start: int) -> float:
    """The sum of the log-probabilities of ids[start:]."""
    found = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return found.gather(1, torch.tensor(ids[1:])[:, None])[start - 1 :].sum().item()


def split_encoding(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Ids of both, and where the continuation begins, as lm-eval tells them apart."""
    return tokenizer.encode(context + continuation), len(tokenizer.encode(context))


def choice_scores(model: Transformer, tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[float]:
    """The log-likelihoods of a row's choices, one text at a time."""
    spelt = [split_encoding(tokenizer, row["prompt"], choice) for choice in row["choices"]]
    return [log_likelihood(model, ids, start) for ids, start in spelt]


def text_score(model: Transformer, tokenizer: Tokenizer, row: Mapping[str, Any]) -> float:
    """The log-likelihood of a row's text behind the end of a document."""
    ids = [tokenizer.eos_id, *tokenizer.encode(row["text"])]
    assert len(ids) < 288
    return log_likelihood(model, ids, 1)


def continuation(model: Transformer, tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[int]:
    """The 12 greedy tokens behind a row's prompt, or those up to the end of a document."""
    ids = tokenizer.encode(row["prompt"])
    (tokens,) = generate(
        model, [ids], max_new_tokens=12, temperature=0.0, vocab_size=tokenizer.vocab_size,
        stop_token=tokenizer.eos_id,
    )  # fmt: skip
    return tokens[len(ids) :]


def check_samples(
    samples: Mapping[str, Sequence[Mapping[str, Any]]],
    model: Transformer,
    tokenizer: Tokenizer,
    fast: Any,
) -> None:
    """Compare lm-eval's samples of the three tasks with single texts.

    Args:
        samples: lines as lm-eval logs them, by task, in the order of the rows.
        fast: the tokenizer of transformers, which decodes what is generated.
    """
    for row, line in zip(ROWS["choices"], samples["choices"], strict=True):
        found = [float(answer[0]) for answer in line["filtered_resps"]]
        assert found == pytest.approx(choice_scores(model, tokenizer, row), abs=1e-3)
    for row, line in zip(ROWS["texts"], samples["texts"], strict=True):
        (answer,) = line["filtered_resps"]
        answer = float(answer[0] if isinstance(answer, list) else answer)
        assert answer == pytest.approx(text_score(model, tokenizer, row), abs=1e-2)
    for row, line in zip(ROWS["continued"], samples["continued"], strict=True):
        tokens = continuation(model, tokenizer, row)
        assert line["filtered_resps"] == [fast.decode(tokens, skip_special_tokens=True)]
