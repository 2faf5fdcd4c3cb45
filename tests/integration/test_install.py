"""The wheel, installed outside of the repository."""

import os
import sys
import zipfile
from pathlib import Path

import pytest
from runs.command import ROOT, command, documents, success_of, write_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CHECK = """
import sys
from pathlib import Path
import diffllm
from diffllm.config.plugins import config_directory

target = Path(sys.argv[1]).resolve()
assert Path(diffllm.__file__).resolve().is_relative_to(target), diffllm.__file__
assert config_directory().resolve().is_relative_to(target), config_directory()
for name in ("page.html.jinja", "page.css"):
    assert (Path(diffllm.__file__).parent / "compare" / "arms" / name).is_file(), name
"""


TINY = [
    *("model=tiny", "model.vocab_size=512", "data=files", "steps=2", "optim.warmup_steps=0"),
    *("seq_len=32", "global_batch_size=4", "eval.sequences=4", "wandb.mode=disabled"),
]


def output(words: list[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    env = {**os.environ, **(env or {})}
    return success_of(command(words, cwd, env, timeout=280)).out


def test_installed_wheel_contains_config_and_runs_commands(tmp_path: Path) -> None:
    wheels, target, elsewhere = (tmp_path / name for name in ("wheels", "target", "elsewhere"))
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    output([*pip, "wheel", str(ROOT), "--no-deps", "--wheel-dir", str(wheels)], tmp_path)
    (wheel,) = wheels.glob("diffllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    conf = {path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")}
    assert {f"diffllm/{name}" for name in conf} <= names
    output([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], tmp_path)
    code = f"import sys; sys.path.insert(0, {str(target)!r})\n{CHECK}"
    output([sys.executable, "-P", "-c", code, str(target)], elsewhere)

    corpus = write_texts(elsewhere / "corpus.jsonl", documents(300))
    env = {"PYTHONPATH": str(target), "DIFFLLM_CACHE": str(tmp_path / "cache")}
    words = [*TINY, f"data.paths=[{corpus}]"]
    module = [sys.executable, "-P", "-m", "diffllm"]
    assert "held-out loss" in output([*module, "train", *words, "run.name=one"], elsewhere, env)
    swept = output([*module, "train", "-m", "seed=0,1", *words, "run.sweep=two"], elsewhere, env)
    assert "comparison outputs/two/report.html" in swept
    script = target / "bin" / "diffllm"
    overrides = ["run=outputs/one", "prompt=a"]
    generated = output([sys.executable, "-P", str(script), "generate", *overrides], elsewhere, env)
    assert generated.startswith("a")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ranks = output(
        [sys.executable, "-P", *launcher, "-m", "diffllm", "train", *words, "run.name=ranks"],
        elsewhere,
        env,
    )
    assert "2 x CPU" in ranks
