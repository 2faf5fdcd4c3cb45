"""The file of losses of a run's held-out documents, and errors for damaged files."""

import math
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from diffllm.core.errors import CheckpointError
from diffllm.evaluation.heldout import DocumentLosses, document_losses

SOME = DocumentLosses(
    nats=np.array([20.0, 6.0, 4.0]),
    tokens=np.array([5, 2, 1]),
    bytes=np.array([21, 5, 4]),
    texts=np.array([-(2**63), 2**63 - 1, 0]),
    sources=np.zeros(3, np.int64),
)


def test_document_losses_returns_losses_of_last_step_by_default(tmp_path):
    SOME.save(tmp_path, 9)
    later = replace(SOME, nats=SOME.nats / 2)
    later.save(tmp_path, 40)
    assert document_losses(tmp_path).nats.tolist() == [10.0, 3.0, 2.0]
    first = document_losses(tmp_path, step=9)
    for name in ("nats", "tokens", "bytes", "texts", "sources"):
        assert np.array_equal(getattr(first, name), getattr(SOME, name))


def test_document_losses_can_be_filtered_by_data_source(tmp_path):
    mixed = replace(SOME, sources=np.array([1, 0, 1]))
    mixed.save(tmp_path, 9)
    read = document_losses(tmp_path)
    first, second, none = (read.of_source(place) for place in range(3))
    assert first is not None
    assert second is not None
    assert (first.loss, second.loss, none) == (6 / 2, 24 / 6, None)
    assert first.bits_per_byte == pytest.approx(6 / math.log(2) / int(first.bytes.sum()))
    assert SOME.of_source(0) is not None
    assert SOME.of_source(0).loss == SOME.loss, "one source"


def test_heldout_loss_and_bits_per_byte_match_hand_calculation():
    assert SOME.loss == 30 / 8  # the mean over all tokens, not over documents
    assert SOME.bits_per_byte == pytest.approx(30 / 0.6931471805599453 / 30)
    empty = replace(SOME, bytes=0 * SOME.bytes)
    assert math.isnan(empty.bits_per_byte)
    diverged = replace(SOME, nats=np.array([1.0, math.nan, 2.0]))
    assert math.isnan(diverged.loss)
    assert math.isnan(diverged.bits_per_byte)


def test_document_losses_raises_error_for_run_without_losses(tmp_path):
    with pytest.raises(CheckpointError, match="has no losses of held-out documents; a run writes"):
        document_losses(tmp_path)
    SOME.save(tmp_path, 40)
    with pytest.raises(CheckpointError, match="has no losses of held-out documents after step 9"):
        document_losses(tmp_path, step=9)
    assert zipfile.is_zipfile(tmp_path / "heldout" / "step-00000040.npz")
