"""SearchTeam: a searcher asks a search engine, an answerer reads what it found."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium.error import ResetNeeded
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from envs.search.actions import parse_tool_call
from envs.search.env import Search
from envs.search.questions import Split
from envs.search.retrievers import Retriever
from envs.search.rows import Question
from envs.spaces import TextSpace
from envs.turns import TeamStep, move_of

SEARCHER, ANSWERER = "searcher", "answerer"
INVALID_ACTIONS = {
    SEARCHER: "Invalid action: write exactly one <search>query</search> block.",
    ANSWERER: (
        "Invalid action: write exactly one <answer>text</answer> or <search>what is missing"
        "</search> block."
    ),
}


class SearchTeam(MultiAgentEnv):
    """`searcher` and `answerer` answer a question of `Search` in turns, the searcher first.

    The searcher writes `<search>query</search>`; the answerer sees the passages found. It ends the
    episode with `<answer>text</answer>`, or writes `<search>what is missing</search>`, which the
    searcher sees in its next turn. Both get the same reward at the end: 1 if the answer matches an
    accepted one exactly after normalisation, else 0. After `horizon` actions of both agents the
    episode is truncated.

    Anything else is invalid and costs a turn: the other agent goes on with what there is, and the
    agent reads in its own next turn what it should have written. An invalid query finds nothing.

    `info` holds the keys of `Search` (`task` is the question) and `is_action_valid` about the
    agent's own last action. The observation is the anchor. The reset seed chooses the question as
    in `Search`.

    Args:
        split: As in `Search`, like all arguments but the last.
        questions: As in `Search`.
        corpus: As in `Search`.
        retriever: As in `Search`.
        retriever_settings: As in `Search`.
        topk: As in `Search`.
        horizon: Actions per episode over both agents, at least 2.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self,
        *,
        split: Split = "train",
        questions: str | Sequence[str | Question] = "generated",
        corpus: str | None = None,
        retriever: str | Retriever = "bm25",
        retriever_settings: Mapping[str, Any] | None = None,
        topk: int = 3,
        horizon: int = 6,
    ):
        super().__init__()
        if horizon < 2:
            raise ValueError(f"horizon must be at least 2, one turn for each agent, got {horizon}")
        self.horizon = horizon
        self._search = Search(
            split=split,
            questions=questions,
            corpus=corpus,
            retriever=retriever,
            retriever_settings=retriever_settings,
            topk=topk,
            # Its limit must not come first: what the answerer asks for is no action there.
            horizon=horizon + 1,
        )
        self.agents = [SEARCHER, ANSWERER]
        self.possible_agents = list(self.agents)
        self.observation_spaces = dict.fromkeys(self.agents, self._search.observation_space)
        self.action_spaces = {
            SEARCHER: TextSpace(("<search>birth town</search>", "<search>river</search>")),
            ANSWERER: TextSpace(("<answer>unknown</answer>", "<search>birth town</search>")),
        }
        self._turn: str | None = None

    def task_ids(self) -> list[str]:
        """Return the ids of the questions; any goes to `reset` as an option, as in `Search`."""
        return self._search.task_ids()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """Ask a question; see `Search` for what `seed` and `options` select."""
        question, info = self._search.reset(seed=seed, options=options)
        self._turn, self._taken = SEARCHER, 0
        self._seen = {SEARCHER: question, ANSWERER: question}
        self._was_valid: dict[str, bool] = {}
        self._game_info = info
        return {SEARCHER: question}, {SEARCHER: self._info(SEARCHER)}

    def step(self, action_dict: dict[str, str]) -> TeamStep:
        """Take the action of the agent whose turn it is.

        Raises:
            ResetNeeded: No episode is running.
            ValueError: Another agent acted, or more than one.
            RetrieverError: The retriever cannot answer; the same action can be tried again.
        """
        mover, action = move_of(self._turn, action_dict)
        call = parse_tool_call(action)
        kind = None if call is None else call.kind
        other = ANSWERER if mover == SEARCHER else SEARCHER
        ends = mover == ANSWERER and kind == "answer"
        is_valid = kind == "search" or ends
        if ends or (mover == SEARCHER and is_valid):
            shown, reward, _, _, self._game_info = self._search.step(action)
            self._seen[other] = shown
        else:
            reward = 0.0
            if call is not None and is_valid:
                self._seen[other] = f"Missing: {call.text}"
        self._was_valid[mover] = is_valid
        if not is_valid:
            self._seen[mover] = INVALID_ACTIONS[mover]
        self._taken += 1
        truncated = not ends and self._taken >= self.horizon
        is_over = ends or truncated
        self._turn = None if is_over else other
        told = [SEARCHER, ANSWERER] if is_over else [other]
        return (
            {agent: self._seen[agent] for agent in told},
            dict.fromkeys(told if is_over else [mover], reward),
            dict.fromkeys([*told, "__all__"], ends),
            dict.fromkeys([*told, "__all__"], truncated),
            {agent: self._info(agent) for agent in told},
        )

    def expert_action(self) -> str:
        """Return what an expert that knows the supporting passages and the answer does.

        Raises:
            ResetNeeded: No episode is running.
            ValueError: The data set names no supporting passages for this question.
        """
        if self._turn is None:
            raise ResetNeeded("no episode is running; call reset() first")
        action = self._search.expert_action()
        is_answer = action.startswith("<answer>")
        if self._turn == ANSWERER:
            if is_answer or self._taken + 2 >= self.horizon:
                return f"<answer>{self._search.golden_answers[0]}</answer>"
            return action
        if is_answer:
            # All that supports the answer was found: ask for the question's own words.
            return f"<search>{self._game_info['task'].rstrip('?')}</search>"
        return action

    def random_action(self, rng: random.Random) -> str:
        """Draw an action of the agent whose turn it is from the words of the question.

        Raises:
            ResetNeeded: No episode is running.
        """
        action = self._search.random_action(rng)
        if self._turn == SEARCHER:
            return action.replace("answer>", "search>")
        return action

    def _info(self, agent: str) -> dict[str, Any]:
        own = {key: value for key, value in self._game_info.items() if key != "is_action_valid"}
        own["anchor"] = self._seen[agent]
        if agent in self._was_valid:
            own["is_action_valid"] = self._was_valid[agent]
        return own
