"""A run on `data=packages` whose packages differ from the reference."""

import sys
from pathlib import Path

from runs.command import documents, forked_call, success_of
from runs.json_files import read_json

import diffllm
from diffllm.data.text import packages


def run_on_another_package(words: list[str]) -> int:
    """Train on one small package, which is not in the reference."""
    Path("site/small").mkdir(parents=True)
    for i, text in enumerate(documents(100)):
        Path(f"site/small/module{i}.py").write_text(text, encoding="utf-8")
    sys.path.insert(0, "site")
    packages.REFERENCE_PACKAGES = {"small": ("2.0", "")}
    cfg = diffllm.load_config([*words, "run.dir=run"])
    diffllm.train(cfg)
    return 0


def test_train_prints_note_if_corpus_is_not_reference_corpus(tmp_path, tiny, environment):
    own = [w for w in tiny if not w.startswith(("data=", "data.paths", "data.heldout"))]
    words = [*own, "data=packages", "data.heldout_fraction=0.2", "steps=1"]
    done = success_of(forked_call(run_on_another_package, words, tmp_path, environment))
    note = "not the reference corpus: small missing (reference 2.0)"
    assert f"\ncorpus: {note}\n" in done.out
    assert read_json(tmp_path / "run/run.json")["corpus_note"] == note
