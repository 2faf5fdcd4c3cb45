"""A corpus of one document: its end is held out."""

from dataclasses import replace
from itertools import chain

from diffllm.core.errors import DataError
from diffllm.data.text.corpus import Corpus, TextsPart


def cut_in_two(corpus: Corpus, fraction: float) -> Corpus | None:
    """Cut a corpus of a single document into two of a part each, the last of which is its end.

    The end is `fraction` of the text, or a little more to begin with a line or a word. None for a
    corpus of several documents; DataError is raised for one without two that differ, or without a
    text that can be cut.
    """
    too_few = DataError(
        "the corpus has fewer than two distinct documents, too few to hold one out; "
        "cut txt files into more with data.sample_by=paragraph"
    )
    if corpus.has_prompts:
        return None
    texts = corpus.texts()
    text = next(texts, None)
    if text is None:
        raise DataError(f"{corpus.description}: no document has any text")
    second = next(texts, None)
    if second is not None:
        if all(text == other for other in chain([second], texts)):
            raise too_few
        return None
    end = len(text.rstrip())
    size = max(1, round(fraction * end))
    latest, earliest = end - size, max(0, end - 2 * size)
    cuts = (text.rfind(mark, earliest, latest) + 1 for mark in "\n ")
    cut = next((cut for cut in cuts if cut), latest)
    if text[:cut].isspace() or not cut:
        raise too_few
    blank = sum(not t or t.isspace() for p in corpus.parts for d in p.read() for t in d.texts)
    halves = [TextsPart("its beginning", [text[:cut]]), TextsPart("its end", [text[cut:]])]
    return replace(corpus, list_parts=lambda: halves, skipped_empty=corpus.skipped_empty + blank)
