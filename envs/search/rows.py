"""From the row layouts of public question-answering data sets to one `Question` record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from envs.search.passages import Passage
from envs.search.scoring import normalize_answer


class Question(NamedTuple):
    """One task of `Search`.

    Attributes:
        question: The question, ending in a question mark.
        golden_answers: Accepted answers, at least one.
        id: Identifier within the data source.
        data_source: Name under which results are reported ("nq", "hotpotqa", ...).
        supporting_titles: Titles of the passages that hold the answer, in the order of the hops;
            empty where the data set does not say.
        passages: Passages that the data set ships with the question; empty where it ships none.
    """

    question: str
    golden_answers: tuple[str, ...]
    id: str
    data_source: str
    supporting_titles: tuple[str, ...] = ()
    passages: tuple[Passage, ...] = ()

    @property
    def task_id(self) -> str:
        """`<data source>:<id>`, the same in every process and on every machine."""
        return f"{self.data_source}:{self.id}"


def question_digest(text: str) -> str:
    """Return 64 hexadecimal digits that depend on the normalised question alone."""
    return hashlib.sha256(normalize_answer(text).encode("utf-8", "replace")).hexdigest()


def question_from_row(row: Mapping[str, Any], data_source: str) -> Question:
    """Read one row of a question-answering data set.

    Understood are the layouts of FlashRAG and Search-R1 (`question`, `golden_answers`, `metadata`,
    `reward_model`), verl-agent (`env_kwargs`), NQ-open, TriviaQA, PopQA, HotpotQA,
    2WikiMultihopQA, MuSiQue and Bamboogle.

    Args:
        row: The row; nested values are plain Python.
        data_source: Name of the source, used where the row names none.

    Raises:
        ValueError: The row has no question or no answer under a known key, or what is under a key
            has another form than in any of these layouts.
    """
    try:
        return _question(row, data_source)
    except (AttributeError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(
            f"the row has another layout than those that are known ({type(error).__name__}: "
            f"{error}); its keys are {sorted(map(str, row))}"
        ) from error


def _question(row: Mapping[str, Any], data_source: str) -> Question:
    row = {**_mapping(row.get("metadata")), **_mapping(row.get("env_kwargs")), **row}
    text = _first(row, "question", "Question")
    answers = _answers(row)
    if not isinstance(text, str) or not text.strip() or not answers:
        raise ValueError(
            "expected a row with 'question' and 'golden_answers' (or 'answer', 'answers', "
            f"'possible_answers', 'reward_model'), got keys {sorted(row)}"
        )
    text = text.strip()
    text = text if text.endswith("?") else f"{text}?"
    return Question(
        question=text,
        golden_answers=answers,
        id=str(_first(row, "id", "_id", "question_id", default=question_digest(text)[:16])),
        data_source=str(_first(row, "data_source", default=data_source)),
        supporting_titles=_supporting_titles(row),
        passages=_passages(row),
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _first(row: Mapping[str, Any], *keys: str, default: Any = None) -> Any:
    """Return the value of the first key that is present and not None."""
    return next((row[key] for key in keys if row.get(key) is not None), default)


def _answers(row: Mapping[str, Any]) -> tuple[str, ...]:
    value = _first(row, "golden_answers", "answers", "answer", "Answer", "possible_answers")
    if value is None:
        truth = _first(row, "ground_truth", default=_mapping(row.get("reward_model")))
        truth = _mapping(truth).get("ground_truth", truth)
        value = _mapping(truth).get("target", truth)
    if isinstance(value, str) and "possible_answers" in row and value.startswith("["):
        value = json.loads(value)
    if isinstance(value, Mapping):  # TriviaQA: {"value", "aliases"}; SQuAD: {"text"}
        value = [value.get("value"), *value.get("aliases", ()), *value.get("text", ())]
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return ()
    values = [*value, *(row.get("answer_aliases") or ())]
    return tuple(dict.fromkeys(str(v) for v in values if v is not None and str(v).strip()))


def _passages(row: Mapping[str, Any]) -> tuple[Passage, ...]:
    return tuple(
        Passage(id="", title=title, text=text) for title, text in _titles_and_texts(row) if text
    )


def _titles_and_texts(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    value = _first(row, "passages", "paragraphs", "context", default=())
    if isinstance(value, Mapping):  # Hugging Face's columns: {"title": [...], "sentences": [[...]]}
        sentences = value.get("sentences", value.get("content", ()))
        value = list(zip(value.get("title", ()), sentences, strict=True))
    pairs = []
    for item in value if isinstance(value, list | tuple) else ():
        if isinstance(item, Mapping):
            title, text = item.get("title", ""), _first(item, "text", "paragraph_text", default="")
        else:  # HotpotQA's own files: [title, [sentence, ...]]
            title, text = item
        sentences = [text] if isinstance(text, str) else text
        pairs.append((str(title), " ".join(sentence.strip() for sentence in sentences)))
    return pairs


def _supporting_titles(row: Mapping[str, Any]) -> tuple[str, ...]:
    titles = row.get("supporting_titles")
    facts = row.get("supporting_facts")
    if titles is None and isinstance(facts, Mapping):
        titles = facts.get("title", ())
    elif titles is None and isinstance(facts, list | tuple):
        titles = [fact[0] for fact in facts]
    elif titles is None:
        paragraphs = row.get("paragraphs")
        titles = [
            p["title"]
            for p in (paragraphs if isinstance(paragraphs, list | tuple) else ())
            if p.get("is_supporting")
        ]
    return tuple(dict.fromkeys(str(title) for title in titles))
