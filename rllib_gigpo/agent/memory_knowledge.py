"""Knowledge from outside the episode: passages for the observation, skills for the task."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"\w+")


class Passages:
    """Texts that are searched by BM25 (Robertson and Zaragoza 2009), in this process.

    The score of a text is the sum over the query's words of `idf * tf * (k1 + 1) / (tf + k1 * (1 -
    b + b * length / mean length))` with `idf = ln(1 + (N - n + 0.5) / (n + 0.5))`, where tf is how
    often the word stands in the text, n the number of texts that hold it, N that of all texts.

    Args:
        texts: The passages, at least one.
        k1: How soon repeated words stop counting.
        b: How much long texts are discounted, 0 to 1.

    Raises:
        ValueError: There is no text.
    """

    def __init__(self, texts: Sequence[str], k1: float = 1.5, b: float = 0.75):
        if not texts:
            raise ValueError("Passages() got no text: give at least one")
        self.texts = tuple(texts)
        counts = [Counter(_words(text)) for text in self.texts]
        mean_length = sum(map(Counter.total, counts)) / len(counts) or 1.0
        held: Counter[str] = Counter(word for count in counts for word in count)
        self._weights: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, count in enumerate(counts):
            discount = k1 * (1 - b + b * count.total() / mean_length)
            for word, tf in count.items():
                idf = math.log(1 + (len(counts) - held[word] + 0.5) / (held[word] + 0.5))
                self._weights[word].append((number, idf * tf * (k1 + 1) / (tf + discount)))

    def search(self, query: str, k: int) -> list[str]:
        """Return the k best passages that share a word with the query, best first."""
        scores: dict[int, float] = defaultdict(float)
        for word in _words(query):
            for number, weight in self._weights.get(word, ()):
                scores[number] += weight
        best = sorted(scores, key=lambda number: (-scores[number], number))[:k]
        return [self.texts[number] for number in best]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Passages":
        # Nothing changes it: the episodes' copies of a memory share one index.
        return self


class Knowledge:
    """Shows the passages that fit the current observation best.

    Args:
        passages: What is searched.
        k: Most passages shown, at least 1.
        with_task: Whether the words of the task are searched for, too.

    Raises:
        ValueError: k below 1.
    """

    def __init__(self, passages: Passages, k: int = 3, with_task: bool = False):
        if k < 1:
            raise ValueError(f"Knowledge(k={k}): at least one passage must be shown")
        self.passages = passages
        self.k = k
        self.with_task = with_task
        self._found: list[str] = []

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Forget the step."""

    def look(self, task: str, observation: str) -> None:
        """Search for the observation."""
        query = f"{task} {observation}" if self.with_task else observation
        self._found = self.passages.search(query, self.k)

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return the passages, best first; the least fitting give way."""
        shown = self._found[: max(0, len(self._found) - drop)]
        lines = (f"[{number}] {text}" for number, text in enumerate(shown, 1))
        return "\n".join(("What is known of this:", *lines)) if shown else "", len(shown)


@dataclass(frozen=True)
class Skill:
    """One hint.

    Attributes:
        name: What it is called in the prompt.
        hint: What to do.
        when: Regular expression of the tasks it is for, case ignored; empty fits every task.
    """

    name: str
    hint: str
    when: str = ""


class Skills:
    """Shows the hints that are for the task, in the order of the library.

    Args:
        library: All skills; name the most useful first.
        k: Most skills shown, at least 1.

    Raises:
        ValueError: k below 1, or a pattern that is no regular expression.
    """

    def __init__(self, library: Sequence[Skill], k: int = 3):
        if k < 1:
            raise ValueError(f"Skills(k={k}): at least one skill must be shown")
        for skill in library:
            try:
                re.compile(skill.when)
            except re.error as error:
                raise ValueError(
                    f"the skill {skill.name!r} has when={skill.when!r}: {error}"
                ) from error
        self.library = tuple(library)
        self.k = k
        self._chosen: list[Skill] = []

    def add(self, observation: str, action: str, info: Mapping[str, Any]) -> None:
        """Forget the step."""

    def look(self, task: str, observation: str) -> None:
        """Choose the skills of the task."""
        fitting = (s for s in self.library if re.search(s.when, task, re.IGNORECASE))
        self._chosen = [skill for skill, _ in zip(fitting, range(self.k), strict=False)]

    def render(self, drop: int = 0) -> tuple[str, int]:
        """Return the hints; the last give way."""
        shown = self._chosen[: max(0, len(self._chosen) - drop)]
        lines = (f"- {skill.name}: {skill.hint}" for skill in shown)
        return "\n".join(("Skills for this task:", *lines)) if shown else "", len(shown)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
