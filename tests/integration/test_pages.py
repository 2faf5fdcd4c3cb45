"""Run the files, commands and Python of documentation pages in an empty directory."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from runs.command import ROOT, command, documents, success_of, write_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"`(mine/[\w./]+)`[^\n]*\n\n\Z")
SHIM = """#!{python}
import sys
sys.path[0] = {repo!r}
from diffllm.cli import main
sys.exit(main())
"""
CLUSTER = "submitit_slurm"
SMALLER_BATCH = {
    " model=tiny": " model=tiny global_batch_size=2",
    '"model=tiny"': '"model=tiny", "global_batch_size=2"',
    "global_batch_size: 8": "global_batch_size: 2",
    "flops=1e11": "flops=2e10",
}
"""Replacements in commands, Python and YAML files of pages: a quarter of the tokens per step."""


def with_smaller_batch(page: str) -> str:
    for text, replacement in SMALLER_BATCH.items():
        page = page.replace(text, replacement)
    return page


def script_of(page: str, cwd: Path) -> str:
    """Write a page's files, and return its commands and Python as one script."""
    lines, python = ["set -e"], [sys.executable, "-P"]
    for match in BLOCK.finditer(page):
        language, text = match[1], match[2]
        if name := FILE.search(page[: match.start()].rpartition("```")[2]):
            file = cwd / name[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif language == "python":
            (cwd / "session.py").touch()
            with open(cwd / "session.py", "a", encoding="utf-8") as file:
                file.write(text)
        elif not language and CLUSTER not in text:
            lines.append(text)
    if (cwd / "session.py").exists():
        lines.append(f"PYTHONPATH={ROOT}:$PYTHONPATH {shlex.join([*python, 'session.py'])}")
    return "\n".join(lines)


@pytest.mark.parametrize("page", ["experiments", "variants", "plugins", "sweeps", "python"])
def test_commands_in_documentation_page_succeed(page, tmp_path, environment):
    for name, text in {"diffllm": SHIM.format(python=sys.executable, repo=str(ROOT))}.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir()
        file.write_text(text, encoding="utf-8")
        file.chmod(0o755)
    cwd = tmp_path / "empty"
    (cwd / "texts").mkdir(parents=True)
    write_texts(cwd / "texts" / "a.jsonl", documents(300), column="content")
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    script = script_of(with_smaller_batch(text), cwd)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent)])
    env = {
        **environment,
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "disabled",
    }
    success_of(command(["bash", "-c", script], cwd, env, timeout=580))
