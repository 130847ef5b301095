"""Multi-turn question answering with a search tool."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from envs.search.actions import parse_tool_call
from envs.search.passages import format_hits
from envs.search.questions import SPLITS, Split, load_questions
from envs.search.retrievers import Retriever
from envs.search.rows import Question
from envs.search.scoring import exact_match, normalize_answer
from envs.search.sharing import shared_retriever
from envs.spaces import TextSpace

INVALID_ACTION = (
    "Invalid action: write exactly one <search>query</search> or <answer>text</answer> block."
)
EXAMPLE_ACTIONS = (
    "<search>birth town</search>",
    "<search>river</search>",
    "<search>founded in</search>",
    "<answer>unknown</answer>",
)


class Search(gymnasium.Env[str, str]):
    """Answer a question with at most a few tool calls, as in the search task of GiGPO's Table 2.

    An action holds exactly one `<search>query</search>` or `<answer>text</answer>` block (see
    `envs.search.actions`); the agent may pass its whole response or the block alone. A search
    shows the passages found, numbered, best first. An answer ends the episode with reward 1 if it
    matches an accepted answer exactly after normalisation (see `envs.search.scoring`), else 0;
    every other step gives 0. An invalid action costs a turn and is answered by a fixed sentence.
    After `horizon` actions without an answer the episode is truncated. A retriever that cannot
    answer raises `RetrieverError`: an outage is never a reward.

    The observation after `reset` is the question; later it is what the last action brought back.
    It is the anchor state too, also given as `info["anchor"]`.

    `info` holds `task` (the question), `task_id`, `data_source` (also as `task_type`: results are
    reported by it), `anchor`, `won`, `tool_calls` (searches so far), `repeated_query_share` (share
    of those whose normalised query had been asked before in this episode) and, after a step,
    `is_action_valid`.

    `reset(seed=s)` asks question `s % n` of the n questions of the split, whose order
    depends on their text alone: seeds 0 ... n-1 ask every question once, on every machine. A reset
    without a seed draws one.

    Pickling stores the names of questions and corpus, not their content.

    Args:
        split: `"train"`, `"test"` or `"all"`; train and test are disjoint, see
            `envs.search.questions.load_questions`.
        questions: One source or several, see `load_questions`. Default: the generated world.
        corpus: What is searched: `"generated"`, `"questions"` (the passages that the questions
            ship) or the path of a JSON lines file. None: the generated world for its own
            questions, else `"questions"`.
        retriever: `"bm25"`, `"dense"`, one or several URLs of retriever servers separated by
            commas, or a `Retriever` object. Named ones are built at the first search and shared by
            all environments of the process.
        retriever_settings: Further arguments of a named retriever, see
            `envs.search.sharing.shared_retriever`.
        topk: Passages per search.
        horizon: Actions per episode, the answer included.

    Raises:
        ValueError: An argument is out of range.
        FileNotFoundError: A question source does not exist.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it so

    def __init__(
        self,
        *,
        split: Split = "train",
        questions: str | Sequence[str | Question] = "generated",
        corpus: str | None = None,
        retriever: str | Retriever = "bm25",
        retriever_settings: Mapping[str, Any] | None = None,
        topk: int = 3,
        horizon: int = 4,
    ):
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        if topk < 1 or horizon < 1:
            raise ValueError(f"topk and horizon must be at least 1, got {topk} and {horizon}")
        self.split: Split = split
        self.topk = topk
        self.horizon = horizon
        self._sources = (questions,) if isinstance(questions, str) else tuple(questions)
        if corpus is None:
            corpus = "generated" if self._sources == ("generated",) else "questions"
        self._corpus = corpus
        self._retriever_name = retriever if isinstance(retriever, str) else None
        self._retriever = None if isinstance(retriever, str) else retriever
        self._retriever_settings = dict(retriever_settings or {})
        self._questions: tuple[Question, ...] | None = load_questions(self._sources, split)
        self.observation_space = TextSpace()
        self.action_space = TextSpace(EXAMPLE_ACTIONS)
        self._question: Question | None = None
        self._start_episode()

    @property
    def questions(self) -> tuple[Question, ...]:
        """The questions of the split, in the order of their seeds."""
        if self._questions is None:
            self._questions = load_questions(self._sources, self.split)
        return self._questions

    @property
    def retriever(self) -> Retriever:
        """What answers the searches; a named retriever is built at the first use."""
        if self._retriever is None:
            assert self._retriever_name is not None
            self._retriever = shared_retriever(
                self._retriever_name,
                corpus=self._corpus,
                questions=self._sources,
                **self._retriever_settings,
            )
        return self._retriever

    def task_ids(self) -> list[str]:
        """Return the ids of the split's questions; any goes to `reset` as an option."""
        return [question.task_id for question in self.questions]

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Ask a question.

        Args:
            seed: See the class for what it selects.
            options: `{"task_id": id}` asks that question of `task_ids()` in place of the seed's.

        Raises:
            ValueError: `task_id` is not in this split.
        """
        super().reset(seed=seed)
        if seed is None:
            seed = int(self.np_random.integers(len(self.questions)))
        self._question = self.questions[seed % len(self.questions)]
        if options and "task_id" in options:
            self._question = self._find(options["task_id"])
        self._start_episode()
        return self._question.question, self._info(self._question, self._question.question)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run the tool call that the action holds.

        Raises:
            ResetNeeded: No episode is running.
            RetrieverError: The retriever cannot answer.
        """
        question = self._running_question()
        call = parse_tool_call(action)
        observation = INVALID_ACTION
        if call is not None and call.kind == "search":
            observation = self._search(call.text)
        elif call is not None:
            self._ended = True
            self._won = exact_match(call.text, question.golden_answers)
            observation = f"Answered: {call.text}"
        self._turns += 1
        truncated = not self._ended and self._turns >= self.horizon
        terminated, self._ended = self._ended, self._ended or truncated
        info = {**self._info(question, observation), "is_action_valid": call is not None}
        return observation, float(self._won), terminated, truncated, info

    @property
    def golden_answers(self) -> tuple[str, ...]:
        """The accepted answers of the running question.

        Raises:
            ResetNeeded: No episode is running.
        """
        return self._running_question().golden_answers

    def expert_action(self) -> str:
        """Return the next action of an expert that knows the supporting passages and the answer.

        It searches for each supporting title that no search has brought up yet, in order, once
        each, and then answers; in the last turn it answers at once. It works from any state.

        Raises:
            ResetNeeded: No episode is running.
            ValueError: The data set names no supporting passages for this question.
        """
        question = self._running_question()
        if not question.supporting_titles:
            raise ValueError(
                f"question {question.task_id} names no supporting titles, so there is no expert "
                "for it; use the generated world or a data set with supporting facts"
            )
        if self._turns + 1 < self.horizon:
            for title in question.supporting_titles:
                if title not in self._titles_seen and normalize_answer(title) not in self._queries:
                    return f"<search>{title}</search>"
        return f"<answer>{question.golden_answers[0]}</answer>"

    def random_action(self, rng: random.Random) -> str:
        """Draw an action from the words of the question: mostly a search, one in four an answer.

        Raises:
            ResetNeeded: No episode is running.
        """
        words = self._running_question().question.rstrip("?").split()
        if rng.random() < 0.25:
            return f"<answer>{rng.choice(words)}</answer>"
        return f"<search>{' '.join(rng.sample(words, min(3, len(words))))}</search>"

    def __getstate__(self) -> dict[str, Any]:
        state = {**self.__dict__, "_questions": None}
        if self._retriever_name is not None:
            state["_retriever"] = None
        return state

    def _start_episode(self) -> None:
        self._turns = 0
        self._queries: list[str] = []
        self._titles_seen: set[str] = set()
        self._won = False
        self._ended = False

    def _find(self, task_id: str) -> Question:
        found = next((q for q in self.questions if q.task_id == task_id), None)
        if found is None:
            raise ValueError(
                f"task_id {task_id!r} is not one of this split's {len(self.questions)} questions; "
                "task_ids() lists them"
            )
        return found

    def _running_question(self) -> Question:
        if self._question is None or self._ended:
            raise ResetNeeded("no episode is running; call reset() first")
        return self._question

    def _search(self, query: str) -> str:
        # Retrieved first: after an outage the same action can be tried again.
        (hits,) = self.retriever.retrieve([query], self.topk)
        self._queries.append(normalize_answer(query))
        self._titles_seen.update(hit.passage.title for hit in hits)
        return format_hits(hits)

    def _info(self, question: Question, observation: str) -> dict[str, Any]:
        searches = len(self._queries)
        repeats = searches - len(set(self._queries))
        return {
            "task": question.question,
            "task_id": question.task_id,
            "data_source": question.data_source,
            "task_type": question.data_source,
            "anchor": observation,
            "won": self._won,
            "tool_calls": searches,
            "repeated_query_share": repeats / searches if searches else 0.0,
        }
