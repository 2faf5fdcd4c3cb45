"""`eval.suites`: tasks that are evaluated during training, through train.py."""

import json
from pathlib import Path

import pytest
from runs.command import command, success_of, tool, train, train_command
from runs.json_files import read_jsonl, write_jsonl

RUN = [
    "data=synthetic", "data.task=mqar", "data.level={filler: 4}", "data.examples=2000",
    "data.num_workers=0", "model=tiny", "seq_len=96", "global_batch_size=4", "log_interval=2",
    "eval.interval=2", "eval.sequences=4", "checkpoint.interval=2", "wandb.mode=disabled",
    "run.report=false",
]  # fmt: skip
ASKED = ["eval.suites=[mqar]", "eval.levels={mqar: {filler: 4}}", "eval.suites_interval=3"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("tasks")


def test_task_scores_in_training_match_scores_of_evaluate_command(directory, environment):
    directories = [f"run.dir={directory}/run", f"data.cache_dir={directory}/cache"]
    result = success_of(train([*RUN, *ASKED, "steps=4", *directories], directory, environment))
    lines = lines_by_step(directory / "run")
    found = {step: values["tasks/mqar"] for step, values in lines.items() if "tasks/mqar" in values}
    assert list(found) == [3, 4]
    words = ["tasks=[mqar]", "level={filler: 4}", "limit=64", "--json"]
    evaluated = tool(["evaluate", f"run={directory}/run", *words], directory, environment)
    (score,) = json.loads(evaluated.out)["mqar"]["scores"]
    assert found[4] == score["value"]
    assert lines[4]["tasks_generated/mqar"] == score["generated"]
    assert lines[4]["tasks_chance/mqar"] == score["chance"]
    assert f" mqar {found[4]:.2f} (chance {score['chance']:.2f})" in result.out
    words = ["tasks=[mqar]", "level={filler: 4}", "limit=4", "every=true", "--json"]
    result = tool(["evaluate", f"run={directory}/run", *words], directory, environment)
    assert list(json.loads(result.out)) == [
        f"{directory}/run/checkpoints/step-{step:08d}" for step in (2, 4)
    ]


def lines_by_step(run: Path) -> dict[int, dict[str, float]]:
    lines = read_jsonl(run / "metrics.jsonl")
    return {line["step"]: line for line in lines}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval.suites=[nedle]"], "eval.suites: nedle must be one of"),
        (
            ["eval.suites=[claim]"],
            "eval.suites: claim must be one of claims, icl, mqar, needle, needle_4k, needle_64k, "
            "or a .jsonl or .ndjson file; did you mean claims?",
        ),
        (["eval.suites=[induction]"], "eval.suites: induction was removed; use needle"),
        (["eval.suites=[mqar]", "eval.levels={mqar: {filler: 90}}"], "the task mqar at"),
        (["eval.levels={mqar: {filler: 4}}"], "eval.levels: mqar must be a task of eval.suites"),
        (["eval.suites=[mqar]", "eval.levels={mqar: 4}"], "eval.levels: mqar must be a mapping"),
        (
            ["eval.suites=[needle_4k,needle]"],
            "eval.suites: needle_4k and needle contain the task needle at different levels",
        ),
        (
            ["eval.suites=[arc/test.jsonl,piqa/test.jsonl]"],
            "eval.suites: {place}/arc/test.jsonl and {place}/piqa/test.jsonl have the same name",
        ),
    ],
)
def test_train_refuses_invalid_task_setting(directory, environment, words, said):
    run = directory / "refused"
    for folder in ("arc", "piqa"):
        (directory / folder).mkdir(exist_ok=True)
        write_jsonl(directory / folder / "test.jsonl", [{"prompt": "a", "answer": "b"}])
    words = [*RUN, *words, "steps=4", f"run.dir={run}", f"data.cache_dir={directory}/cache"]
    result = train(words, directory, environment)
    assert result.code == 2, result
    (line,) = (line for line in result.err.splitlines() if line.startswith("error: "))
    assert line.startswith(f"error: {said.replace('{place}', str(directory))}"), line
    assert not run.exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tiny_model_solves_mqar_task_after_training(directory, environment):
    easy = "{filler: 0}"
    words = [
        *("data=synthetic", "data.task=mqar", "data.examples=200_000", "data.packing=best_fit"),
        *("data.mask_documents=true", "model=tiny", "attention=diff_v2", "model.vocab_size=640"),
        *("seq_len=64", "global_batch_size=32", "steps=900", "optim.lr=5e-4", "precision=fp32"),
        *("optim.schedule=wsd", "eval.interval=900", "checkpoint.interval=900"),
        *("wandb.mode=disabled", "run.report=false", f"data.level={easy}"),
    ]
    directories = [f"run.dir={directory}/learned", f"data.cache_dir={directory}/learned_cache"]
    # A minute of training on a free core may take ten minutes on a busy machine.
    success_of(command(train_command([*words, *directories]), directory, environment, timeout=900))
    scores = {}
    for task in ("mqar", "attention_mass_mqar"):
        asked = [f"tasks=[{task}]", f"level={easy}", "--json"]
        evaluated = tool(["evaluate", f"run={directory}/learned", *asked], directory, environment)
        assert evaluated.code == 0, evaluated
        scores |= json.loads(evaluated.out)
    (share,) = scores["mqar"]["scores"]
    assert share["value"] > 0.9 > 3 * share["chance"]
    target = scores["attention_mass_mqar"]["scores"][0]
    assert target["of"].endswith("target")
    assert target["by_layer"]["1"] > 0.7 > 3 * target["chance"]
