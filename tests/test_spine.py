"""A training step runs through few files, without nested functions or host synchronisation.

One logged step with statistics is traced with `sys.setprofile`, from its first call in the loop to
the line in metrics.jsonl. The bounds are measured values: lower them when the path gets shorter.
"""

import ast
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from runs.command import command, success_of

import diffllm

FILES, CHANGES = 29, 37
PACKAGE = Path(diffllm.__file__).parent

SCRIPT = '''
import json, sys
from pathlib import Path
import diffllm

package = Path(diffllm.__file__).parent
traced, calls = False, []

def on_event(frame, event, argument):
    """Record calls of diffllm functions from the start of step 4 until the line of metrics."""
    global traced
    code = frame.f_code
    if not code.co_filename.startswith(str(package)):
        return
    file = Path(code.co_filename).relative_to(package)
    if event == "call" and code.co_name == "reached":
        traced = frame.f_locals["place"] == "step 4"
    if event == "call" and traced:
        calls.append((str(file), code.co_name))
    if event == "return" and (file.name, code.co_name) == ("sinks.py", "write"):
        traced = False

cfg = diffllm.load_config(sys.argv[1:])
sys.setprofile(on_event)
diffllm.train(cfg)
sys.setprofile(None)
print(json.dumps(calls))
'''


HOST = '''
import sys
import torch
import diffllm
from diffllm.distributed.watch import Watch

quiet, reached = False, Watch.reached

def at(watch, place):
    """Forbid host reads from the beginning of an unlogged step to the next step."""
    global quiet
    quiet = place in ("step 3", "step 5")
    print(place)
    reached(watch, place)

def guarded(name):
    real = getattr(torch.Tensor, name)
    def read(*args, **words):
        # The kernel for documents on CPUs is no part of a step on a GPU.
        on_cpu = sys._getframe(1).f_code.co_filename.endswith("cpu_documents.py")
        assert on_cpu or not quiet, f"{name} reads a tensor on the host"
        return real(*args, **words)
    return read

Watch.reached = at
for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
    setattr(torch.Tensor, name, guarded(name))
diffllm.train(diffllm.load_config(sys.argv[1:]))
'''


def trained_by(script: str, directory: Path, *more: str) -> list[str]:
    """Run a script with the overrides of a small run on text; return the printed lines."""
    text = directory / "text.txt"
    documents = [f"Document {i}: " + "lorem ipsum " * 20 for i in range(400)]
    text.write_text("\n\n".join(documents), encoding="utf-8")
    words = [
        *("model=tiny", "attention=diff_v2", "model.vocab_size=512", "seq_len=64", "steps=6"),
        *("data=files", f"data.paths=[{text}]", f"data.cache_dir={directory / 'cache'}"),
        *("data.vocab_size=300", "data.heldout_fraction=0.1", "global_batch_size=4"),
        *("log_interval=2", "diagnostics.interval=2", "eval.interval=6", "checkpoint.interval=6"),
        *("precision=fp32", "optim.warmup_steps=2", "wandb.mode=disabled", "run.report=false"),
        f"run.dir={directory / 'run'}",
        *more,
    ]
    done = success_of(command([sys.executable, "-c", script, *words], PACKAGE.parent, os.environ))
    return done.out.splitlines()


def calls_of_a_step(directory: Path) -> list[tuple[str, str]]:
    """Return (file, function) of each call in a logged step, in order."""
    printed = trained_by(SCRIPT, directory)
    return [(file, function) for file, function in json.loads(printed[-1])]


@pytest.mark.slow
def test_training_step_calls_code_in_limited_number_of_source_files(tmp_path):
    calls = calls_of_a_step(tmp_path)
    assert calls[0] == ("distributed/watch.py", "reached")
    assert {"train_step", "forward", "judge"} <= {function for _, function in calls}
    files = {file for file, _ in calls}
    packages = [file.split("/")[0] for file, _ in calls]
    changes = sum(a != b for a, b in itertools.pairwise(packages))
    assert len(files) <= FILES, sorted(files)
    assert changes <= CHANGES, [name for name, _ in itertools.groupby(packages)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("masked", ["false", "true"])
def test_unlogged_training_step_reads_no_tensor_value_on_host(tmp_path, masked):
    printed = trained_by(HOST, tmp_path, f"data.mask_documents={masked}")
    assert {"step 3", "step 5", "the end, after step 6"} <= set(printed)


def functions(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_training_functions_meet_structure_limits():
    files = sorted((PACKAGE / "training").glob("*.py"))
    assert {"loop.py", "run.py", "start.py", "step.py"} <= {path.name for path in files}
    for path in files:
        for function in functions(path):
            inside = [node for node in ast.walk(function) if node is not function]
            where = f"{path.name}: {function.name}"
            nested = [node for node in inside if isinstance(node, ast.FunctionDef | ast.Nonlocal)]
            assert not nested, f"{where} has a nested function or nonlocal"
            arguments = function.args
            count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
            assert count <= 6, f"{where} takes {count} arguments"


def test_callbacks_of_rank_0_broadcasts_do_not_append_to_lists():
    """Callbacks must return rank 0's objects through `broadcast_and_keep`."""
    chosen = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for call in ast.walk(tree):
            name = getattr(getattr(call, "func", None), "attr", "")
            if name not in ("broadcast_from_rank0", "broadcast_and_keep"):
                continue
            chosen += 1
            choose = call.args[1]
            names = {node.id for node in ast.walk(choose) if isinstance(node, ast.Name)}
            for part in (choose, *(own[name] for name in names if name in own)):
                filled = {getattr(node, "attr", "") for node in ast.walk(part)}
                assert not filled & {"append", "extend"}, f"{path}: {ast.unparse(call)}"
    assert chosen > 5
