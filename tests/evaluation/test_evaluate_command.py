"""`diffllm evaluate`: output, stored results and errors."""

import codecs
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from runs.json_files import read_jsonl, write_jsonl
from runs.written import small_tokenizer, write_weights

from diffllm.cli import main
from diffllm.data.tasks import TASKS_VERSION
from diffllm.data.tasks.task import TASKS
from diffllm.data.tokenizer import Tokenizer
from diffllm.evaluation import suite
from diffllm.evaluation.answers import Answers
from diffllm.evaluation.evaluation import EvaluationOptions, Subject
from diffllm.statistics.estimates import wilson

FAST = ["tasks=[mqar,icl]", "limit=8"]


@pytest.fixture(scope="module")
def tokenizer_bytes() -> bytes:
    return small_tokenizer()


@pytest.fixture
def untrained_run(tmp_path: Path, tokenizer_bytes: bytes) -> Path:
    return write_weights(tmp_path / "run", tokenizer_bytes, "seq_len=256")


def test_evaluate_command_prints_accuracy_as_json_or_table(untrained_run, output_of):
    said = json.loads(output_of("evaluate", f"run={untrained_run}", *FAST, "--json"))
    assert list(said) == ["mqar", "icl"]
    for result in said.values():
        assert result["unit"] == "share of right answers"
        for score in result["scores"]:
            low, high = score["interval"]
            assert low <= score["value"] <= high
            assert 0 <= score["generated"] <= 1
            assert 0 < score["chance"] <= 0.5
        assert sum(score["examples"] for score in result["scores"]) <= 8
    assert set(said["mqar"]["scores"][0]["by_pairs"]) == {"2", "4", "8", "16"}
    assert set(said["icl"]["scores"][0]["by_order"]) <= {"0", "1", "2", "3"}
    table = output_of("evaluate", f"run={untrained_run}", *FAST)
    for text in ("step-00000000\n", "share of right answers", "filler 0", "shots 4"):
        assert text in table


def test_evaluate_command_reuses_result_of_same_settings(untrained_run, output_of, monkeypatch):
    words = ["evaluate", f"run={untrained_run}", *FAST, "--json"]
    first = output_of(*words)
    directory = untrained_run / "evaluation" / "step-00000000"
    assert sorted(path.name for path in directory.iterdir()) == ["icl.jsonl", "mqar.jsonl"]
    head, *lines = read_jsonl(directory / "mqar.jsonl")
    assert head["key"]["evaluation"] == "mqar"
    assert head["scores"] == json.loads(first)["mqar"]["scores"]
    assert len(lines) == sum(score["examples"] for score in head["scores"])
    right = [max(range(len(v)), key=v.__getitem__) for v in (x["log_likelihoods"] for x in lines)]
    correct = [best == line["answer"] for best, line in zip(right, lines, strict=True)]
    assert [line["correct"] for line in lines] == correct
    asked: list[str] = []
    made_anew = Answers.lines

    def made(self: Answers, subject: Subject, settings: dict[str, Any]) -> list[dict[str, Any]]:
        asked.append(self.name)
        return made_anew(self, subject, settings)

    monkeypatch.setattr(Answers, "lines", made)
    assert output_of(*words) == first
    assert asked == []
    # An incomplete file, as after a crash.
    (directory / "icl.jsonl").write_text("{", encoding="utf-8")
    assert output_of(*words) == first
    assert asked == ["icl"]
    assert main([*words, "seed=1"]) == 0
    assert asked == ["icl", "mqar", "icl"]
    monkeypatch.setattr("diffllm.evaluation.answers.TASKS_VERSION", TASKS_VERSION + 1)
    assert main(words) == 0
    assert asked == ["icl", "mqar", "icl", "mqar", "icl"]


@pytest.mark.slow
def test_evaluate_command_compares_variants_with_baseline(tmp_path, tokenizer_bytes, output_of):
    sweep = tmp_path / "sweep"
    names = [f"{variant}-seed{seed}" for variant in ("diff_v2", "standard") for seed in (0, 1)]
    for name in names:
        variant, seed = name.split("-seed")
        words = ["seq_len=320", f"attention={variant}", f"seed={seed}"]
        write_weights(sweep / name, tokenizer_bytes, *words)
    words = ["evaluate", f"run={sweep}", *FAST]
    said = json.loads(output_of(*words, "--json"))
    assert list(said) == [str(sweep / name) for name in names]
    text = output_of(*words)
    lines = text.splitlines()
    assert lines[:4] == [f"{sweep / name}, step-00000000" for name in names]
    table = [line.split() for line in lines if line.startswith(("mqar", "icl"))]
    mean = ["mean", "of", "all", "levels"]
    for row, name in zip(table, ("mqar", "mqar", "icl", "icl"), strict=True):
        assert row[:5] == [name, *mean]
    assert [row[5] for row in table] == ["standard", "diff_v2"] * 2
    assert all(row[-1] == "2" for row in table)  # seeds
    of_seed = [statistics.mean(s["value"] for s in said[str(sweep / name)]["mqar"]["scores"])
               for name in names]  # fmt: skip
    means = [statistics.mean(of_seed[2:]), statistics.mean(of_seed[:2])]
    assert [row[6] for row in table[:2]] == [f"{mean:.3f}" for mean in means]
    assert table[1][8] == f"{means[1] - means[0]:+.3f}"
    assert "gap to standard" in text
    text = output_of(*words[:2], "tasks=[mqar]", "limit=8", "every=true")
    assert text.count("share of right answers\n") == 4, "the table of each checkpoint"
    assert re.search(r"^mqar  filler 0 +diff_v2 ", text, re.M)
    assert "has not finished" not in text
    for name in names[2:]:
        shutil.rmtree(sweep / name)
    assert "gap to" not in output_of(*words)


def test_evaluate_command_skips_task_that_exceeds_the_context_length(
    tmp_path, tokenizer_bytes, capsys, error_of
):
    runs = tmp_path / "runs"
    short = write_weights(runs / "short", tokenizer_bytes, "seq_len=16")
    own = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "a b", "answer": " c"}])
    why = r"the task mqar needs \d+ tokens, but the model reads 15"
    line = f"{why}; skipped for {short}\n"
    for tasks in (f"[mqar,{own}]", f"[{own},mqar]"):
        assert main(["evaluate", f"run={short}", f"tasks={tasks}", "--json"]) == 0
        said = capsys.readouterr()
        assert list(json.loads(said.out)) == ["own"]
        assert re.fullmatch(line, said.err.splitlines(keepends=True)[-1])
    error = error_of("evaluate", f"run={runs}", "tasks=[mqar,needle]")
    assert re.fullmatch(f"error: {why}; the task needle needs .*", error)
    write_weights(runs / "long", tokenizer_bytes, "seq_len=256")
    assert main(["evaluate", f"run={runs}", "tasks=[mqar]", "limit=8"]) == 0
    said = capsys.readouterr()
    assert re.fullmatch(line, said.err.splitlines(keepends=True)[-1])
    assert f"{runs / 'long'}, step-00000000\n\nshare of right answers" in said.out
    assert str(short) not in said.out.partition("note")[0]


def test_evaluate_help_names_every_suite(capsys):
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " suite=  " in line]
    assert all(name in line for name in suite.SUITES)


def test_evaluate_command_skips_only_needle_task_if_seq_len_is_256(untrained_run, capsys):
    assert main(["evaluate", f"run={untrained_run}", "limit=4", "--json"]) == 0
    said = capsys.readouterr()
    results = json.loads(said.out)
    assert list(results) == [name for name in suite.SUITES["claims"] if name != "needle"]
    assert all(result["scores"] for result in results.values())
    why = "the task needle needs more tokens, but the model reads 255"
    assert f"{why}; skipped for {untrained_run}" in said.err


def test_accuracy_interval_depends_on_number_of_independent_clusters():
    facts = [{"rule": i // 4, "order": i % 4, "labels": "yes/no"} for i in range(20)]
    lines = [
        {"level": 0, "correct": i < 14, "generated": False, "candidates": 2, **fact}
        for i, fact in enumerate(facts)
    ]
    (score,) = Answers(TASKS["icl"]).scores({"levels": [{"shots": 4}]}, lines)
    assert (score.value, score.examples, score.more["independent"]) == (0.7, 20, 5)
    assert score.interval == wilson(0.7, 5)


@torch.no_grad()
def test_evaluation_refuses_invalid_argument(untrained_run, tmp_path, tokenizer_bytes, error_of):
    short = write_weights(tmp_path / "short", tokenizer_bytes, "seq_len=16")
    (tmp_path / "empty").mkdir()
    for words, said in (
        ([f"run={untrained_run}", "tasks=[nedle]"], "tasks: nedle must be one of"),
        (
            [f"run={untrained_run}", "suite=lm_eval"],
            "suite=lm_eval was removed: use diffllm export",
        ),
        (
            [f"run={untrained_run}", "every=true", "step=7"],
            "step=7 cannot be combined with every=true",
        ),
        ([f"run={untrained_run}", "step=5"], "has no checkpoint of step 5"),
        ([f"run={tmp_path / 'empty'}"], "is not a run directory"),
        ([f"run={short}", "tasks=[mqar]"], "the task mqar needs"),
        (
            [f"run={untrained_run}", "tasks=[phonebook]"],
            "tasks: phonebook was removed; use needle, mqar",
        ),
    ):
        error = error_of("evaluate", *words)
        assert said in error


OWN = """
from diffllm.data.tasks.task import Example, Task, task


@task("copied")
class Copied(Task):
    def levels(self, length):
        return [{"letters": 3}]

    def example(self, rng, level, count):
        letters = rng.sample("abcdefghij", level["letters"])
        return Example(" ".join(letters) + "\\n", tuple(letters), 0)
"""


def test_evaluate_command_runs_task_of_plugin_file(untrained_run, tmp_path, output_of, monkeypatch):
    (tmp_path / "copied_task.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TASKS, "copied", TASKS["mqar"])  # monkeypatch removes the task at the end.
    monkeypatch.delitem(TASKS, "copied")
    words = [
        "evaluate",
        f"run={untrained_run}",
        "plugins=[copied_task]",
        "tasks=[copied]",
        "limit=6",
    ]
    (score,) = json.loads(output_of(*words, "--json"))["copied"]["scores"]
    assert (score["level"], score["examples"]) == ({"letters": 3}, 6)
    assert score["chance"] == pytest.approx(1 / 3)


def test_evaluate_command_runs_task_from_examples_file(untrained_run, tmp_path, output_of):
    choice = {"answer": " c", "candidates": [" c", " d"]}
    lines = [{"prompt": f"a b{i}", **choice} for i in range(60)]
    lines.append({"prompt": "a b", "answer": " c", "level": {"kind": "open"}})
    lines.append({"prompt": "a b " * 200, **choice})  # too long
    own = write_jsonl(tmp_path / "own.ndjson", lines)
    words = ["evaluate", f"run={untrained_run}", f"tasks=[{own}]", "--json"]
    first, second = json.loads(output_of(*words))["own"]["scores"]
    assert (first["of"], first["examples"], first["chance"]) == ("", 60, 0.5)
    assert (second["of"], second["examples"], second["chance"]) == ("kind open", 1, 0)
    assert second["value"] == second["generated"]
    assert json.loads(output_of(*words, "limit=10"))["own"]["scores"][0]["examples"] == 5


def test_evaluate_command_refuses_equal_file_names(untrained_run, tmp_path, output_of, error_of):
    example = {"prompt": "a", "answer": " b", "candidates": [" b", " c"]}
    for folder in ("arc", "piqa"):
        (tmp_path / folder).mkdir()
    arc = write_jsonl(tmp_path / "arc" / "test.jsonl", [example])
    piqa = write_jsonl(tmp_path / "piqa" / "test.jsonl", [example, example])
    words = ["evaluate", f"run={untrained_run}", "--json"]
    error = error_of(*words, f"tasks=[{arc},{piqa}]")
    assert error.startswith(f"error: tasks: {arc} and {piqa} have the same name test,")
    assert not (untrained_run / "evaluation").exists()
    link = tmp_path / "piqa.jsonl"
    link.symlink_to(piqa)
    again = arc.parent / ".." / "arc" / "test.jsonl"
    results = json.loads(output_of(*words, f"tasks=[{arc},{again},{link}]"))
    counts = {name: result["scores"][0]["examples"] for name, result in results.items()}
    assert counts == {"test": 1, "piqa": 2}
    # Stored results of one file are not overwritten by those of another.
    stored = untrained_run / "evaluation" / "step-00000000" / "test.jsonl"
    before = stored.read_bytes()
    error = error_of(*words, f"tasks=[mqar,{piqa}]", "limit=4")
    assert error.startswith(f"error: tasks: {piqa} has the name of {arc}, whose results would be")
    assert stored.read_bytes() == before
    assert not stored.with_name("mqar.jsonl").exists()
    # An edited file replaces its results, and a copy reuses them.
    write_jsonl(arc, [example, example])
    assert main([*words, f"tasks=[{arc}]"]) == 0
    edited = stored.read_bytes()
    assert edited != before
    assert main([*words, f"tasks=[{piqa}]"]) == 0
    assert stored.read_bytes() == edited


def test_evaluate_command_ignores_byte_order_mark_of_examples(untrained_run, tmp_path, output_of):
    own = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "a b", "answer": " c"}])
    outputs = []
    for mark in (b"", codecs.BOM_UTF8):
        own.write_bytes(mark + own.read_bytes())
        outputs.append(output_of("evaluate", f"run={untrained_run}", f"tasks=[{own}]", "--json"))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"prompt": "a"}, "line 2: answer is missing"),
        ({"prompt": "a", "answer": ""}, "line 2: prompt, answer and candidates must not be empty"),
        ({"prompt": "a", "answer": "b", "candidates": ["c"]}, "line 2: candidates must differ"),
        ({"prompt": "a", "answer": "b", "level": {"x": [1]}}, "line 2: level must map"),
    ],
)
def test_error_of_invalid_examples_has_line_number(untrained_run, tmp_path, error_of, line, said):
    own = write_jsonl(tmp_path / "own.jsonl", [{"prompt": "a", "answer": "b"}, line])
    error = error_of("evaluate", f"run={untrained_run}", f"tasks=[{own}]")
    assert error.startswith(f"error: tasks: {own}, {said}")


def test_evaluate_command_refuses_invalid_task_and_level_arguments(
    untrained_run, tmp_path, output_of, error_of
):
    words = ["evaluate", f"run={untrained_run}", "tasks=[mqar]", "--json"]
    (score,) = json.loads(output_of(*words, "level={filler: 6}"))["mqar"]["scores"]
    assert (score["of"], score["examples"]) == ("filler 6", 50)
    scores = json.loads(output_of(*words, "level={filler: [4, 6]}", "limit=8"))["mqar"]["scores"]
    assert [score["level"] for score in scores] == [{"filler": 4}, {"filler": 6}]
    mqar = write_jsonl(tmp_path / "mqar.jsonl", [{"prompt": "a", "answer": "b"}])
    mass = write_jsonl(tmp_path / "attention_mass_mqar.jsonl", [{"prompt": "a", "answer": "b"}])
    gone = tmp_path / "gone.jsonl"
    for more, said in (
        (["tasks=[mqar]", "level={filler: 500}"], "the task mqar at {'filler': 500} needs"),
        (
            ["tasks=[mqar]", "level={pairs: 5}"],
            "level={'pairs': 5} must have exactly the settings filler of the task mqar",
        ),
        (["tasks=[mqar]", "level=[5"], "level=[5 is not YAML: "),
        (
            ["tasks=[mqar]", "level={filler: [[4]]}"],
            "level={filler: [[4]]} must be a mapping such as",
        ),
        (["tasks=[mqar]", "level={}"], "level={} must have exactly the settings filler of"),
        (["level={filler: 5}"], "level=[{'filler': 5}] applies to a single task"),
        ([f"tasks=[{gone}]"], f"tasks: {gone} cannot be read: No such file"),
        ([f"tasks=[{mqar}]"], f"tasks: {mqar} has the name of the task mqar"),
        ([f"tasks=[{mass}]"], f"tasks: {mass} has the name of the task attention_mass_mqar"),
    ):
        error = error_of("evaluate", f"run={untrained_run}", *more)
        assert error.startswith(f"error: {said}"), error


def test_evaluate_command_fails_if_tokenizer_cannot_encode_answers(
    tmp_path, tokenizer_bytes, error_of, monkeypatch
):
    run = write_weights(tmp_path / "run", tokenizer_bytes, "seq_len=2048")
    decode = Tokenizer.decode
    monkeypatch.setattr(Tokenizer, "decode", lambda *of: decode(*of).replace("7", "\ufffd"))
    error = error_of("evaluate", f"run={run}", "tasks=[needle]")
    assert error.startswith("error: the run's tokenizer cannot encode ' ")
    assert "an answer of the task needle: decoding returns" in error
    assert not (run / "evaluation").exists()


@pytest.mark.parametrize(("limit", "asked"), [(1, [1]), (4, [2, 1, 1]), (None, [50, 50, 50])])
def test_evaluate_command_divides_example_limit_between_task_levels(untrained_run, limit, asked):
    wanted = EvaluationOptions(limit=limit, levels={"mqar": TASKS["mqar"].levels(128)[:3]})
    tokenizer = Tokenizer.from_file(untrained_run / "tokenizer.model")
    numbers = Answers(TASKS["mqar"]).examples(wanted, tokenizer, 10_000)["examples"]
    assert [number for number in numbers if number] == asked
