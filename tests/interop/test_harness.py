"""lm-evaluation-harness on a run's checkpoint: its numbers are those of single texts, what it has
made is kept, and standard output is the result alone."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from drawn_runs import small_tokenizer, write_run
from lm_eval_tasks import (
    CHOICES,
    CONTINUED,
    ROWS,
    check_samples,
    choice_scores,
    log_likelihood,
    split_encoding,
    text_score,
    write_task,
    write_tasks,
)
from tiers import slow_but

import diffllm
from diffllm.interop import harness
from diffllm.interop.harness import HarnessTask
from diffllm.tools import main

pytest.importorskip("lm_eval")
pytest.importorskip("transformers", "5")

ALL = "tasks=[choices,texts,continued]"
MIXTURE = ("model.moe.n_experts=4", "model.moe.expert_dim=32", "model.moe.n_shared=1")


@pytest.fixture(scope="module")
def tokenizer() -> bytes:
    return small_tokenizer()


@pytest.fixture
def run(tmp_path: Path, tokenizer: bytes) -> Path:
    return write_run(tmp_path / "run", tokenizer, "attention=diff_v2")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    write_tasks(tmp_path / "tasks")
    return tmp_path / "tasks"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def own_tasks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An index without lm-eval's own tasks, which takes it many seconds to read."""
    import lm_eval.tasks

    class Small(lm_eval.tasks.TaskManager):
        def __init__(self, include_path: Any = None, include_defaults: bool = True) -> None:
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", Small)


def values(result: dict[str, Any]) -> dict[str, float]:
    return {score["of"]: score["value"] for score in result["scores"]}


def words_for(run: Path, tasks: Path, *more: str) -> list[str]:
    return ["evaluate", f"run={run}", "suite=lm_eval", f"include={tasks}", *more]


def kept_lines(run: Path, task: str) -> list[Any]:
    """The key, the result and the samples that are kept of a task."""
    file = run / "evaluation" / "step-00000000" / f"lm_eval-{task}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    "variant", slow_but(["diff_v2"], ["diff_v2", "standard", "diff_v1", "moe"])
)
def test_numbers_are_those_of_single_texts(
    tmp_path: Path,
    tokenizer: bytes,
    tasks: Path,
    capsys: pytest.CaptureFixture[str],
    variant: str,
) -> None:
    words = ("attention=gated", *MIXTURE) if variant == "moe" else (f"attention={variant}",)
    run = write_run(tmp_path / "run", tokenizer, *words)
    assert main(words_for(run, tasks, ALL, "--json")) == 0
    said = json.loads(capsys.readouterr().out)
    assert list(said) == ["choices", "texts", "continued"]
    from diffllm.interop.in_memory import as_fast

    model, pieces = diffllm.load_model(run)
    fast = as_fast(run / "tokenizer.model", pieces, 288)
    check_samples({task: kept_lines(run, task)[2:] for task in ROWS}, model, pieces, fast)

    right = []
    for row in ROWS["choices"]:
        scores = choice_scores(model, pieces, row)
        right.append(scores.index(max(scores)) == row["answer"])
    share = sum(right) / len(right)
    assert values(said["choices"])["acc"] == pytest.approx(share)
    error = math.sqrt(share * (1 - share) / (len(right) - 1))
    (low, high), *_ = (
        each["interval"] for each in said["choices"]["scores"] if each["of"] == "acc"
    )
    assert (low, high) == pytest.approx((share - 1.96 * error, share + 1.96 * error))
    nats = sum(text_score(model, pieces, row) for row in ROWS["texts"])
    count = sum(len(row["text"].encode()) for row in ROWS["texts"])
    bits = values(said["texts"])["bits_per_byte"]
    assert bits == pytest.approx(-nats / count / math.log(2), rel=1e-4)
    assert values(said["continued"]) == {"exact_match": 0.0}
    scores = [result["scores"][0] for result in said.values()]
    assert [score["examples"] for score in scores] == [6, 4, 4]
    assert not any(score["shortened"] or score["shots"] for score in scores)


def test_results_are_kept_by_all_that_they_depend_on(
    run: Path, tasks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    made_anew = HarnessTask.lines

    def made(self: HarnessTask, *others: Any) -> Any:
        asked.append(self.name)
        return made_anew(self, *others)

    def said(*more: str) -> dict[str, Any]:
        asked.clear()
        assert main(words_for(run, tasks, "tasks=[choices,continued]", "--json", *more)) == 0
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(HarnessTask, "lines", made)
    first = said()
    assert asked == ["choices", "continued"]
    monkeypatch.setattr(harness, "language_model", lambda subject: pytest.fail("it is opened"))
    assert said() == first
    assert asked == []
    monkeypatch.undo()
    monkeypatch.setattr(HarnessTask, "lines", made)

    (run / "evaluation" / "step-00000000" / "lm_eval-choices.jsonl").write_text('{"task":')
    assert said() == first
    assert asked == ["choices"]
    assert said("limit=2")["choices"]["scores"][0]["examples"] == 2
    assert asked == ["choices", "continued"]
    assert len(kept_lines(run, "choices")) == 4
    assert said() == first

    write_task(tasks, CHOICES, [{**row, "answer": 1} for row in ROWS["choices"]])
    assert values(said()["choices"]) != values(first["choices"])
    assert asked == ["choices"]
    write_task(tasks, {**CONTINUED, "description": "# code\n"}, ROWS["continued"])
    said()
    assert asked == ["continued"]
    manifest = next((run / "checkpoints").glob("step-*/manifest.json"))
    manifest.write_text(manifest.read_text() + "\n")
    said()
    assert asked == ["choices", "continued"]


def test_standard_output_is_json_whatever_a_task_prints(
    run: Path, tasks: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tasks / "loud.py").write_text(
        "def docs(found):\n    print('{loud')\n    return found\n\n\n"
        "def results(doc, answers):\n    print('louder}')\n"
        "    return {'acc': 1.0, 'odd': float('nan')}\n"
    )
    (tasks / "loud.yaml").write_text(
        "include: choices.yaml\ntask: loud\nprocess_docs: !function loud.docs\n"
        "process_results: !function loud.results\n"
        "metric_list:\n  - metric: acc\n  - metric: odd\n    aggregation: mean\n"
        "    higher_is_better: true\n"
    )
    assert main(words_for(run, tasks, "tasks=[loud]", "limit=3", "--json")) == 0
    out, err = capfd.readouterr()
    assert "{loud" in err
    assert "louder}" in err
    (result,) = json.loads(out, parse_constant=pytest.fail).values()
    assert values(result) == {"acc": 1.0}
    assert result["scores"][0]["examples"] == 3
    assert kept_lines(run, "loud")[2]["odd"] is None


def test_a_table_has_metrics_with_their_errors(
    run: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_for(run, tasks, "tasks=[choices]")) == 0
    result = kept_lines(run, "choices")[1]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for metric in ("acc", "acc_norm"):
        value, error = result["values"][metric], result["stderr"][metric]
        low, high = value - 1.96 * error, value + 1.96 * error
        assert ["choices", metric, f"{value:.3f}", f"{low:.3f}", "to", f"{high:.3f}", "6"] in lines


def test_requests_that_lose_their_beginnings_are_counted(
    run: Path, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {**ROWS["choices"][0], "prompt": "def f(x):\n" * times + "return"} for times in (1, 200)
    ]
    write_task(tasks, CHOICES, rows)
    assert main(words_for(run, tasks, "tasks=[choices]", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["choices"]["scores"][0]["shortened"] == 3
    model, pieces = diffllm.load_model(run)
    for choice, answer in zip(
        rows[1]["choices"], kept_lines(run, "choices")[3]["filtered_resps"], strict=True
    ):
        ids, start = split_encoding(pieces, rows[1]["prompt"], choice)
        assert start > 288
        expected = log_likelihood(model, ids[-289:], start - len(ids) + 289)
        assert answer[0] == pytest.approx(expected, abs=1e-3)


def test_what_cannot_be_is_one_line(
    run: Path, tasks: Path, own_tasks_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tasks / "gone.yaml").write_text(
        json.dumps({**CHOICES, "task": "gone", "dataset_kwargs": {"data_files": "/no/file.jsonl"}})
    )
    (tasks / "hub.yaml").write_text(
        json.dumps({**CHOICES, "task": "of_hub", "dataset_path": "someone/something"})
    )
    long = {**CONTINUED["generation_kwargs"], "max_gen_toks": 300}
    write_task(tasks, {**CONTINUED, "task": "long", "generation_kwargs": long}, ROWS["continued"])
    wrong = {**CHOICES, "task": "wrong", "doc_to_text": "{{nothing.at.all}}"}
    write_task(tasks, wrong, ROWS["choices"])
    for words, *parts in (
        (["suite=lm_eval", "tasks=[gone]"], "tasks: gone cannot be loaded: ", "/no/file.jsonl"),
        (["suite=lm_eval", "tasks=[of_hub]"], "tasks: of_hub cannot be loaded: ", "reach"),
        (["suite=lm_eval", "tasks=[choises]"], "choises is no task of lm-eval", "choices?"),
        (["suite=lm_eval", "tasks=[choises]"], "`lm-eval ls tasks` lists them"),
        (["suite=lm_eval", "tasks=[long]"], "tasks: long cannot be run: ", "300"),
        (["suite=lm_eval", "tasks=[wrong]"], "tasks: wrong cannot be loaded: UndefinedError"),
        (["suite=lm_eval", f"include={tasks / 'no'}"], "include=", "is not a directory"),
        (["suite=lm_eval", "seed=1"], "seed=1 draws examples"),
        (["suite=lm_eval", "step=7", "tasks=[choices]"], "has no checkpoint of step 7"),
        ([], f"include={tasks} belongs to suite=lm_eval"),
        (
            ["suite=harness"],
            "suite=harness must be one of claims, checkpoint, needle_4k, needle_64k, lm_eval",
        ),
    ):
        given = [f"run={run}", *([] if words == ["suite=harness"] else [f"include={tasks}"])]
        capsys.readouterr()
        assert main(["evaluate", *given, *words]) == 2, words
        out, err = capsys.readouterr()
        assert out == ""
        error = err.splitlines()[-1]
        assert error.startswith("error: "), err
        assert "Traceback" not in err
        assert all(part in error for part in parts), error
    assert not (run / "evaluation").exists()


def test_without_lm_eval_the_line_says_what_to_install(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", f"run={run}", "suite=lm_eval"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: suite=lm_eval needs lm-eval: pip install 'diffllm[lm-eval]'")


@pytest.mark.slow
def test_other_suites_import_no_extras(run: Path) -> None:
    script = (
        "import sys\nfrom diffllm.tools import main\n"
        f"assert main(['evaluate', 'run={run}', 'tasks=[mqar]', 'limit=2']) == 0\n"
        "print({'lm_eval', 'transformers', 'accelerate', 'evaluate'} & set(sys.modules))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "set()"


CHOICE = {"text": ["a stone", "water", "air", "wood"], "label": ["A", "B", "C", "D"]}
HUB: dict[tuple[str, str | None], dict[str, Any]] = {
    ("allenai/ai2_arc", "ARC-Challenge"): {
        "question": "It burns?", "choices": CHOICE, "answerKey": "D",
    },
    ("allenai/ai2_arc", "ARC-Easy"): {"question": "It flows?", "choices": CHOICE, "answerKey": "B"},
    ("aps/super_glue", "boolq"): {"passage": "Wood burns.", "question": "does it", "label": 1},
    ("Rowan/hellaswag", None): {
        "activity_label": "Fire", "ctx_a": "A man has wood.", "ctx_b": "he", "label": "0",
        "endings": ["lights it", "drinks it", "reads it", "is it"],
    },
    ("allenai/openbookqa", "main"): {
        "question_stem": "It burns:", "choices": CHOICE, "answerKey": "D",
    },
    ("baber/piqa", None): {
        "goal": "To burn wood,", "sol1": "light it", "sol2": "wet it", "label": 0,
    },
    ("allenai/winogrande", "winogrande_xl"): {
        "sentence": "Wood burns and stone does not, as _ is dry.", "option1": "wood",
        "option2": "stone", "answer": "1",
    },
}  # fmt: skip
"""Rows as the hub's data sets have them."""


@pytest.mark.slow
def test_the_tasks_of_the_paper_are_the_default(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def load_dataset(path: str, name: str | None = None, **others: Any) -> Any:
        rows = datasets.Dataset.from_list([HUB[path, name]] * 3)
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert main(["evaluate", f"run={run}", "suite=lm_eval", "--json", "limit=2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert tuple(said) == harness.ZERO_SHOT
    for name, result in said.items():
        score = result["scores"][0]
        assert (score["shots"], score["examples"]) == (0, 2), name
        assert values(result)["acc"] in (0, 1), name
    normed = {name for name, result in said.items() if "acc_norm" in values(result)}
    assert normed == set(harness.ZERO_SHOT) - {"boolq", "winogrande"}


def test_a_group_is_its_tasks(
    run: Path, tasks: Path, own_tasks_alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (tasks / "both.yaml").write_text("group: both\ntask: [continued, choices]\n")
    assert main(words_for(run, tasks, "tasks=[both]", "limit=1", "--json")) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"continued", "choices"}
