"""Run data/deduplicate.py and read the tokens in place.

Small programs replace SLURM and run the jobs locally.
"""

import re
import shlex
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from processes import PATIENCE_S
from runs.json_files import read_json, write_json
from sample_texts import sample_documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from diffllm import load_config, train
from diffllm.data.preparation.prepare import prepare
from diffllm.data.token_files import open_tokens

SCRIPT = Path(__file__).parents[2] / "data" / "deduplicate.py"
SBATCH = """
script="${@: -1}"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
export SLURM_NODELIST=node1
for task in $(seq 0 "${last:-0}"); do
  SLURM_ARRAY_TASK_ID=$task bash "$script" >> sbatch.log 2>&1 || exit 1
done
echo Submitted batch job 1
"""
SLURM = {"sbatch": SBATCH, "srun": 'exec "${@:4}"', "scontrol": "echo node1"}
"""Replacements of SLURM's programs; srun drops the words -l -n 1 of the command."""


@pytest.fixture
def corpus_texts(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Write a tokenizer and files that share texts; return the distinct texts."""
    texts = sample_documents(200)
    documents = [*texts, *texts[:70], *texts[40:60]]
    np.random.default_rng(0).shuffle(documents)
    Path("corpus").mkdir()
    for i in range(4):
        table = pyarrow.table({"text": documents[i::4]})
        pyarrow.parquet.write_table(table, f"corpus/{i}.parquet")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save("tokenizer.json")
    write_json(Path("tokenizer_config.json"), {"eos_token": "<eos>"})
    Path("bin").mkdir()
    for name, content in SLURM.items():
        Path("bin", name).write_text(f"#!/bin/bash\n{content}\n", encoding="utf-8")
        Path("bin", name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:{Path(sys.executable).parent}", ":")
    return texts


def run_deduplication() -> None:
    """Run the script with three tasks and two finders of duplicates."""
    Path("script.py").write_text(
        SCRIPT.read_text(encoding="utf-8").replace("500, 50", "3, 2"), encoding="utf-8"
    )
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, encoding="utf-8", timeout=PATIENCE_S
    )
    log = Path("sbatch.log").read_text(encoding="utf-8") if Path("sbatch.log").exists() else ""
    assert done.returncode == 0, done.stderr + log


def documents_in(path: Path) -> tuple[list[list[int]], list[int]]:
    """Read tokens and end of each document with datatrove."""
    from datatrove.pipeline.tokens import merger

    with open(f"{path}.index", "rb") as index, path.open("rb") as file:
        ends = merger.load_doc_ends(index)
        contents = merger.get_data_reader(file, ends, nb_bytes=2)
        return [np.frombuffer(content, "<u2").tolist() for content in contents], ends.tolist()


@pytest.mark.slow
def test_deduplicated_token_files_of_datatrove_are_usable_for_training(corpus_texts):
    pytest.importorskip("datatrove")
    run_deduplication()
    paths = sorted(Path("tokens").glob("*.ds"))
    assert len(paths) == 3
    tokenizer = Tokenizer.from_file("tokenizer.json")
    eos = tokenizer.token_to_id("<eos>")
    everything = []
    for path in paths:
        documents, ends = documents_in(path)
        file = open_tokens(path, tokenizer.get_vocab_size(), eos)
        assert [file.end_of(i) for i in range(file.documents)] == ends
        assert file.tokens(0, len(file)).tolist() == list(chain(*documents))
        assert all(document.index(eos) == len(document) - 1 for document in documents)
        everything += documents
    texts = [tokenizer.decode(document[:-1]) for document in everything]
    assert sorted(texts) == sorted(corpus_texts), "each text occurs once"

    (command,) = re.findall(
        r"^diffllm train (data=tokens .*ds\].*)$",
        (SCRIPT.parent / "README.md").read_text(encoding="utf-8"),
        re.M,
    )
    words = [*shlex.split(command), "model=micro", "seq_len=32", "steps=2", "run.name=first"]
    cfg = load_config([*words, "data.cache_dir=cache", "wandb.mode=disabled", "run.report=false"])
    data = prepare(cfg.data)
    splits = [data.split(name) for name in ("train", "heldout")]
    tokens = np.concatenate([split.tokens(0, len(split)) for split in splits])
    assert tokens.tolist() == list(chain(*everything))
    assert sum(split.documents for split in data.manifest.splits.values()) == len(corpus_texts)
    train(cfg)
    assert read_json(Path("outputs/first/summary.json"))["steps"] == 2
