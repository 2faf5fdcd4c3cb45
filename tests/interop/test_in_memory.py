"""A decoder in memory, as transformers has it: its own parameters, logits, and ids of texts."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exported_runs import CASES
from tiers import slow_but

import diffllm
from diffllm.model.generate import generate
from diffllm.tools import main

transformers = pytest.importorskip("transformers", "5")

TEXT = "def f(x):\n    return  \u2581x </s> é\U0001f600\n"


@pytest.mark.parametrize("name", slow_but(["diff_v2", "mixture", "tied"], CASES))
@torch.no_grad()
def test_it_computes_the_same_with_the_same_parameters(
    make_run: Callable[..., Path], name: str
) -> None:
    from diffllm.interop.in_memory import as_transformers

    model, tokenizer = diffllm.load_model(make_run(name, *CASES[name][1]))
    made = as_transformers(model, tokenizer)
    ids = torch.randint(2, 400, (2, 48), generator=torch.Generator().manual_seed(0))
    expected = model(ids)
    assert expected.std() > 0.3
    torch.testing.assert_close(made(ids).logits, expected, rtol=0, atol=1e-5)
    (greedy,) = generate(
        model, [ids[0].tolist()], 24, temperature=0.0, vocab_size=416, stop_token=tokenizer.eos_id
    )
    assert made.generate(ids[:1], max_new_tokens=24)[0].tolist() == greedy
    theirs = {p.data_ptr() for p in made.parameters()} | {b.data_ptr() for b in made.buffers()}
    assert {p.data_ptr() for p in model.parameters()} <= theirs


def test_the_tokenizer_is_the_one_of_an_export(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    from diffllm.interop.in_memory import as_fast

    run = make_run("run", "attention=diff_v2")
    assert main(["export", f"run={run}", f"out={tmp_path / 'hf'}"]) == 0
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    model, tokenizer = diffllm.load_model(run)
    for path in (run / "tokenizer.model", tmp_path / "hf" / "tokenizer.json"):
        made = as_fast(path, tokenizer, model.cfg.seq_len)
        assert made(TEXT)["input_ids"] == exported(TEXT)["input_ids"] == tokenizer.encode(TEXT)
        assert made.decode(made(TEXT)["input_ids"]) == TEXT
        for name in ("eos_token_id", "pad_token_id", "bos_token_id", "padding_side",
                     "model_max_length", "model_input_names"):  # fmt: skip
            assert getattr(made, name) == getattr(exported, name), name
