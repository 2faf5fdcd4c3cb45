"""Copies of a training step to a GPU come from pinned memory and do not block the host."""

import ast
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from diffllm import load_config
from diffllm.model.attention.masks import Documents
from diffllm.training import loop, step

GPU = torch.device("cuda")


@pytest.fixture
def copied_tensors(monkeypatch):
    """Replace copies to a GPU by checks; return the copied tensors."""
    pinned, done, to = [], [], Tensor.to

    def pin_memory(self):
        pinned.append(self.clone())
        return pinned[-1]

    def checked_to(self, *args, **options):
        if GPU not in args:
            return to(self, *args, **options)
        assert any(self is tensor for tensor in pinned)
        assert options == {"non_blocking": True}
        done.append(self)
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(Tensor, "to", checked_to)
    return done


def test_documents_and_probe_positions_are_copied_from_pinned_memory(copied_tensors):
    documents = Documents.of(torch.randint(0, 4, (2, 16)), 0)
    for mine, other in zip(documents.to(GPU), documents, strict=True):
        assert torch.equal(mine, other)
    assert len(copied_tensors) == 3
    cfg = load_config(["model=tiny", "seq_len=64"])
    t = SimpleNamespace(cfg=cfg, compiled=True, device=GPU)
    assert step.probe(t, 0, step.Due(probes=True)) is copied_tensors[3]


def test_batches_are_pinned_and_copied_without_blocking(monkeypatch):
    options = {}
    monkeypatch.setattr(loop, "samples_of", lambda *_: None)
    monkeypatch.setattr(loop, "TrainLoader", lambda _, **found: options.update(found))
    t = SimpleNamespace(cfg=load_config([]), group=(0, 1), device=GPU, micro_batch_size=1)
    loop.training_loader(t, None, SimpleNamespace(stage=None, data=None))
    assert options["pin_memory"]
    calls = [
        call
        for call in ast.walk(ast.parse(inspect.getsource(step)))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".to")
    ]
    copies = {ast.unparse(call) for call in calls}
    assert copies == {
        "cpu_inputs.to(t.device, non_blocking=True)",
        "cpu_targets.to(t.device, non_blocking=True)",
        "documents.to(t.device)",
    }
