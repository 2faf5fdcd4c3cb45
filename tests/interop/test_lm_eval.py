"""The documented commands export a run and evaluate the export with lm-eval on local task files.

The results of lm-eval equal those of the run's model for single texts.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.json_files import read_jsonl, write_jsonl

import diffllm
from diffllm.data.tokenizer import Tokenizer
from diffllm.model import Transformer
from diffllm.model.generate import generate

TaskManager = pytest.importorskip("lm_eval.tasks").TaskManager
transformers = pytest.importorskip("transformers", "5")
pytestmark = pytest.mark.slow

PAGE = Path(diffllm.__file__).parents[1] / "docs" / "evaluation.md"
TEXTS = {
    "task": "texts", "dataset_path": "json", "test_split": "test",
    "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}  # fmt: skip
ENDED = {
    "task": "ended", "dataset_path": "json", "test_split": "test",
    "output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": "{{end}}",
    "metric_list": [{"metric": "acc"}],
}  # fmt: skip
CONTINUED = {
    "task": "continued", "dataset_path": "json", "test_split": "test",
    "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "x",
    "target_delimiter": "", "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["\n\n\n\n"], "max_gen_toks": 12, "do_sample": False},
}  # fmt: skip
ROWS: dict[str, list[dict[str, Any]]] = {
    "mine": [
        {"question": f"def f{i}(x):\n    return", "choices": [f"x + {i}", "y", "12"],
         "answer": i % 3}
        for i in range(6)
    ],
    "texts": [{"text": f"def g{i}(y):\n    return y + {i}\n\n# something\n" * (i + 1)}
              for i in range(4)],
    "ended": [{"question": f"def e{i}(x):\n    return", "end": f"x + {i}"} for i in range(4)],
    "continued": [{"prompt": f"def h{i}(z):"} for i in range(4)],
}  # fmt: skip


def section() -> str:
    """Return the section of docs/evaluation.md about lm-eval."""
    return (
        PAGE.read_text(encoding="utf-8")
        .partition("## lm-evaluation-harness\n")[2]
        .partition("\n## ")[0]
    )


def documented_command(start: str) -> list[str]:
    """Return the last documented command with this start, as a command of this environment."""
    blocks = re.findall(r"^```\n(.*?)^```", section(), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", "").splitlines()
    name, *words = shlex.split([line for line in lines if line.startswith(start)][-1])
    return [str(Path(sys.executable).with_name(name)), *words]


def write_tasks(directory: Path) -> None:
    """Write the documented task, a task of each other kind of request, and their documents."""
    directory.mkdir()
    (documented,) = re.findall(r"^```yaml\n(.*?)^```", section(), re.DOTALL | re.MULTILINE)
    (directory / "mine.yaml").write_text(documented, encoding="utf-8")
    for task in (TEXTS, ENDED, CONTINUED):
        files = {"data_files": {"test": f"tasks/{task['task']}.jsonl"}}
        content = json.dumps({**task, "dataset_kwargs": files})  # JSON is valid YAML
        (directory / f"{task['task']}.yaml").write_text(content, encoding="utf-8")
    for name, rows in ROWS.items():
        write_jsonl(directory / f"{name}.jsonl", rows)


def samples(directory: Path, task: str) -> list[dict[str, Any]]:
    (file,) = directory.rglob(f"samples_{task}_*.jsonl")
    lines = read_jsonl(file)
    return sorted(lines, key=lambda line: line["doc_id"])


@torch.no_grad()
def log_likelihood(model: Transformer, ids: list[int], start: int) -> float:
    """Return the sum of the log-probabilities of ids[start:]."""
    found = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return found.gather(1, torch.tensor(ids[1:])[:, None])[start - 1 :].sum().item()


def choice_scores(model: Transformer, tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[float]:
    """Return the log-likelihoods of the choices of a row after the question, text by text."""
    start = len(tokenizer.encode(row["question"]))
    texts = [f"{row['question']} {choice}" for choice in row["choices"]]
    return [log_likelihood(model, tokenizer.encode(text), start) for text in texts]


def text_score(model: Transformer, tokenizer: Tokenizer, row: Mapping[str, Any]) -> float:
    """Return the log-likelihood of a row's text after an end-of-document token."""
    ids = [tokenizer.eos_id, *tokenizer.encode(row["text"])]
    assert len(ids) < model.cfg.seq_len
    return log_likelihood(model, ids, 1)


def continuation(model: Transformer, tokenizer: Tokenizer, row: Mapping[str, Any]) -> list[int]:
    """Return up to 12 greedy tokens after a row's prompt, up to the end of the document."""
    ids = tokenizer.encode(row["prompt"])
    (tokens,) = generate(
        model, [ids], max_new_tokens=12, temperature=0.0, vocab_size=tokenizer.vocab_size,
        stop_token=tokenizer.eos_id,
    )  # fmt: skip
    return tokens[len(ids) :]


@pytest.mark.parametrize("variant", ["diff_v2", "standard"])
def test_lm_eval_scores_of_export_match_scores_of_run(make_run, tmp_path, variant):
    (tmp_path / "outputs").mkdir()
    run = make_run("outputs/mine", f"attention={variant}")
    write_tasks(tmp_path / "tasks")
    evaluation = documented_command("lm_eval")
    evaluation[evaluation.index("mine")] = "mine,texts,ended,continued"
    more = ["--device", "cpu", "--batch_size", "4", "--output_path", "out", "--log_samples"]
    offline = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    for words in (documented_command("diffllm export"), [*evaluation, *more]):
        ended = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, **offline},
            capture_output=True,
            encoding="utf-8",
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    found = {task: samples(tmp_path / "out", task) for task in ROWS}
    model, tokenizer = diffllm.load_model(run)
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "mine-hf", trust_remote_code=True)
    for row, line in zip(ROWS["mine"], found["mine"], strict=True):
        likelihoods = [float(answer[0]) for answer in line["filtered_resps"]]
        assert likelihoods == pytest.approx(choice_scores(model, tokenizer, row), abs=1e-3)
    for row, line in zip(ROWS["ended"], found["ended"], strict=True):
        (answer,) = line["filtered_resps"]
        start = tokenizer.encode(row["question"])
        ids = tokenizer.encode(row["question"] + row["end"])
        expected = log_likelihood(model, ids, len(start))
        assert float(answer[0]) == pytest.approx(expected, abs=1e-3)
    for row, line in zip(ROWS["texts"], found["texts"], strict=True):
        (answer,) = line["filtered_resps"]
        answer = float(answer[0] if isinstance(answer, list) else answer)
        assert answer == pytest.approx(text_score(model, tokenizer, row), abs=1e-2)
    for row, line in zip(ROWS["continued"], found["continued"], strict=True):
        tokens = continuation(model, tokenizer, row)
        assert line["filtered_resps"] == [fast.decode(tokens, skip_special_tokens=True)]


def test_lm_eval_contains_every_task_on_claims_page():
    text = (
        (PAGE.parent / "claims.md")
        .read_text(encoding="utf-8")
        .partition("\n## Downstream tasks\n")[2]
    )
    rows = [line.split("|")[3] for line in text.splitlines() if line.startswith("|")]
    names = {name for row in rows[2:] for name in row.strip(" `").split(",")}
    assert {"hellaswag", "longbench_qasper", "gsm8k"} <= names
    assert names <= set(TaskManager().all_tasks)
