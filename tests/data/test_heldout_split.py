"""Choice of held-out documents: fraction, minimum, and pieces of a single document."""

from collections import Counter

import numpy as np
import pytest
from runs.json_files import write_jsonl
from sample_texts import contents, documents_of, sample_documents

from diffllm.data.config import SampleBy
from diffllm.data.preparation.encoding import HASH_OFFSET, Document, document_hashes
from diffllm.data.preparation.prepare import prepare
from diffllm.data.preparation.workers import PrepareConfig
from diffllm.data.shards import LEAST_TOKENS, thin_heldout
from diffllm.data.text import files
from diffllm.statistics.bootstrap import LEAST_DOCUMENTS

LINES = sample_documents(10_000)


def of_lines(documents: int, lines: int) -> list[str]:
    """Return distinct documents with `lines` lines each."""
    return ["\n".join(LINES[i * lines : (i + 1) * lines]) for i in range(documents)]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("texts", "fraction", "enough"),
    [
        (of_lines(168, 30), 0.02, True),
        (of_lines(19, 30), 0.02, False),
        (of_lines(3, 5), 0.02, False),
        (of_lines(2, 5), 1e-9, False),
        (of_lines(10_000, 1), 0.005, True),
        (of_lines(2_000, 1), 0.1, False),
        (of_lines(1_000, 5), 0.3, True),
        ([*of_lines(100, 20), *[LINES[0]] * 50, "\n".join(LINES)], 0.02, True),
    ],
)
def test_heldout_split_contains_documents_with_smallest_hashes(
    tmp_path, make_config, prepared, monkeypatch, texts, fraction, enough
):
    monkeypatch.setattr(files, "PART_BYTES", 200_000)
    write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    options = {"tokenizer": str(prepared.directory), "heldout_fraction": fraction}
    data, other = (
        prepare(
            make_config(tmp_path / "a.jsonl", cache_dir=str(tmp_path / f"{n}"), **options),
            PrepareConfig(processes=n),
        )
        for n in (1, 2)
    )
    assert contents(data) == contents(other)
    heldout, train = (documents_of(data, split) for split in ("heldout", "train"))
    assert sorted(heldout + train) == sorted(texts)
    assert not set(heldout) & set(train)

    sizes = {text: len(data.tokenizer().encode(text)) + 1 for text in set(texts)}
    hashes = dict(zip(sizes, document_hashes([Document(t.encode()) for t in sizes]), strict=True))
    counts = {text: n * np.array([1, sizes[text]]) for text, n in Counter(texts).items()}
    total, so_far, chosen = sum(counts.values()), np.zeros(2), []
    for text in sorted(sizes, key=hashes.__getitem__):
        below = int(hashes[text]) + HASH_OFFSET < fraction * 2**64
        missing = (so_far < (LEAST_DOCUMENTS, LEAST_TOKENS)).any()
        allowed = (so_far + counts[text] <= total / 5).all()
        if not (below or (missing and allowed) or not chosen):
            break
        chosen.append(text)
        so_far = so_far + counts[text]
    assert set(heldout) == set(chosen)
    split = data.manifest.splits["heldout"]
    assert bool(thin_heldout(split.documents, split.tokens)) is not enough


@pytest.mark.parametrize(
    ("text", "pieces", "share"),
    [
        ("\n".join(LINES), 20, (0.1, 0.12)),
        ("\n".join(LINES[:200]), 16, (0.15, 0.25)),
        ("\n".join(LINES[:10]), 1, (0.1, 0.4)),
        ("x" * 30_000, 12, (0.19, 0.21)),
    ],
)
def test_heldout_text_of_single_document_is_spread_over_the_document(
    tmp_path, make_config, prepared, capfd, text, pieces, share
):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    whole = make_config(
        tmp_path / "a.txt", sample_by=SampleBy.document, tokenizer=str(prepared.directory)
    )
    data = prepare(whole)
    assert "held-out tokens, pieces of a single document, in" in capfd.readouterr().err
    heldout, train = (documents_of(data, split) for split in ("heldout", "train"))
    assert data.manifest.cut
    assert len(heldout) == len(train) == pieces
    assert "".join(t + h for t, h in zip(train, heldout, strict=True)) == text
    assert share[0] <= sum(map(len, heldout)) / len(text) <= share[1]
    if "\n" in text:
        assert all(piece.endswith("\n") for piece in (*train, *heldout[:-1]))
    ends = np.cumsum([len(t) + len(h) for t, h in zip(train, heldout, strict=True)]) / len(text)
    np.testing.assert_allclose(ends, np.arange(1, pieces + 1) / pieces, atol=0.02)
