"""The path of a training step through the package stays short.

One logged step with statistics is traced with `sys.setprofile`, from its first call in the loop to
the line in metrics.jsonl. The bounds are measured values: lower them when the path gets shorter.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

FILES, CHANGES = 43, 81

SCRIPT = '''
import json, sys
from pathlib import Path
import diffllm

package = Path(diffllm.__file__).parent
traced, calls = False, []

def on_event(frame, event, argument):
    """Note calls of our functions from the beginning of step 4 to the end of its line."""
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


def calls_of_a_step(directory: Path) -> list[tuple[str, str]]:
    """Train on text; return (file, function) of each call in a logged step, in order."""
    text = directory / "text.txt"
    text.write_text("\n\n".join(f"Document {i}: " + "lorem ipsum " * 20 for i in range(400)))
    words = [
        *("model=tiny", "attention=diff_v2", "model.vocab_size=512", "seq_len=64"),
        *("data=files", f"data.paths=[{text}]", f"data.cache_dir={directory / 'cache'}"),
        *("data.vocab_size=300", "data.heldout_fraction=0.1", "global_batch_size=4", "steps=6"),
        *("log_interval=2", "diagnostics.interval=2", "eval.interval=6", "checkpoint.interval=6"),
        *("optim.warmup_steps=2", "wandb.mode=disabled", "run.report=false"),
        f"run.dir={directory / 'run'}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True
    )
    return [(file, function) for file, function in json.loads(done.stdout.splitlines()[-1])]


def test_a_logged_step_passes_through_few_files_and_packages(tmp_path):
    calls = calls_of_a_step(tmp_path)
    assert calls[0] == ("distributed/watch.py", "reached")
    assert {"train_step", "forward", "judge"} <= {function for _, function in calls}
    files = {file for file, _ in calls}
    packages = [file.split("/")[0] for file, _ in calls]
    changes = sum(a != b for a, b in itertools.pairwise(packages))
    assert len(files) <= FILES, sorted(files)
    assert changes <= CHANGES, [name for name, _ in itertools.groupby(packages)]
