"""Exact match between a predicted answer and the accepted ones."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Lower-case, drop ASCII punctuation, then the articles a, an, the, then collapse blanks.

    The order matters: "A.N. Other" loses its points first and then reads "an other". Source: the
    normalisation of SQuAD's evaluation, as Search-R1 (arXiv 2503.09516) uses it for its reward.
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, golden_answers: Iterable[str]) -> bool:
    """Return whether the prediction equals any accepted answer after `normalize_answer`."""
    normalized = normalize_answer(prediction)
    return any(normalize_answer(answer) == normalized for answer in golden_answers)
