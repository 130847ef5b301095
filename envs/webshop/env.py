"""WebShop: find and buy a product that an instruction describes (arXiv 2207.01206)."""

from __future__ import annotations

import os
import random
from typing import Any, Literal, get_args

import gymnasium

from envs.spaces import TextSpace
from envs.webshop.catalogue import GENERATED, open_catalogue
from envs.webshop.expert import expert_action
from envs.webshop.goals import Goal, GoalKind, Split, open_goals
from envs.webshop.pages import Page, header, thanks_page
from envs.webshop.reward import purchase_reward
from envs.webshop.shop import open_shop
from envs.webshop.state import State

RewardKind = Literal["binary", "score"]
Anchor = Literal["observation", "observation+options"]
SUCCESS_REWARD = 10.0
SEARCH_PLACEHOLDER = "search[<your query>]"
_EXAMPLE_ACTIONS = ["search[red running shoes]", "click[next >]", "click[< prev]", "click[buy now]"]


class WebShop(gymnasium.Env[str, str]):
    """An online shop played as text.

    Actions are `search[words]` and `click[name]` for anything on the page: a product, an option, a
    page of details, "< prev", "next >", "back to search", "buy now". Results come in pages of ten,
    fifty at most. Buying ends the episode. An action that is not possible changes nothing, costs a
    step, and sets `info["is_action_valid"]` to False.

    The observation is the page in the official text mode, without the instruction, which `info`
    holds as `task`: pieces joined by " [SEP] ". `info` also holds `admissible_actions`
    (`search[<your query>]` stands for any search), `won` (bought with a score of exactly 1),
    `score` (0 until something is bought), `task_id`, `anchor`, and after a step
    `is_action_valid`.

    Args:
        products: "generated": a made-up catalogue. Otherwise the path of an official items file
            (`items_shuffle*.json`, also .gz or .xz) or its folder, with `items_ins_v2*.json` and
            optionally `items_human_ins*.json` and `reviews.json` beside it. The first process
            that opens it compiles it into `$RLLIB_GIGPO_CACHE` (by default ~/.cache/rllib_gigpo).
        goals: "synthetic" or "human" instructions.
        split: "train" or "test"; see `envs.webshop.goals.GoalSet`.
        num_products: How many products to generate (300 by default), or how many of the file's
            first to use (all by default).
        horizon: Steps until the episode is truncated.
        reward: "binary": 10 for a purchase with a score of exactly 1, otherwise 0. "score": the
            official score of the purchase.
        anchor: What `info["anchor"]` says about the state. "observation": the page.
            "observation+options": also the options chosen on it, which the page does not show.
        show_task: Whether the observation starts with the instruction, as the official one does.
        show_attributes: Whether item pages link to the page of attributes (official default: no).

    Raises:
        FileNotFoundError: There is no catalogue at this path.
        ImportError: bm25s is not installed.
        ValueError: An argument is none of its values, or the split has no goals.
    """

    metadata = {"render_modes": []}  # noqa: RUF012 - gymnasium declares it without ClassVar

    def __init__(
        self,
        *,
        products: str | os.PathLike = GENERATED,
        goals: GoalKind = "synthetic",
        split: Split = "train",
        num_products: int | None = None,
        horizon: int = 15,
        reward: RewardKind = "binary",
        anchor: Anchor = "observation",
        show_task: bool = False,
        show_attributes: bool = False,
    ):
        _check("goals", goals, GoalKind)
        _check("split", split, Split)
        _check("reward", reward, RewardKind)
        _check("anchor", anchor, Anchor)
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1, got {horizon}")
        self.observation_space = TextSpace()
        self.action_space = TextSpace(_EXAMPLE_ACTIONS)
        self.catalogue = open_catalogue(os.fspath(products), num_products)
        self._shop = open_shop(self.catalogue, show_attributes)
        self._goals = open_goals(self.catalogue, goals, split)
        self.horizon = horizon
        self._reward_kind = reward
        self._anchor = anchor
        self._show_task = show_task
        self._is_over = True

    def task_ids(self) -> list[str]:
        """Return the ids of all goals of this split in order; any goes to `reset` as an option."""
        return self._goals.ids()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Draws the goal; the same seed draws the same goal on every machine.
            options: `{"task_id": id}` plays that goal of `task_ids()` in place of a drawn one.

        Raises:
            ValueError: `task_id` is not in this split.
        """
        super().reset(seed=seed)
        number = int(self.np_random.integers(len(self._goals)))
        if options and "task_id" in options:
            number = self._number(options["task_id"])
        self._goal: Goal = self._goals[number]
        self._state = State()
        self._page: Page = self._shop.page(self._state)
        self._steps = 0
        self._score = 0.0
        self._is_over = False
        observation = self._observation()
        return observation, self._info(observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Carry out an action.

        Raises:
            RuntimeError: No episode is running.
        """
        self._require_episode("step")
        state = self._shop.move(self._state, action)
        if state is not None:
            self._enter(state)
        self._steps += 1
        terminated = self._state.page == "thanks"
        truncated = not terminated and self._steps >= self.horizon
        self._is_over = terminated or truncated
        observation = self._observation()
        info = self._info(observation)
        info["is_action_valid"] = state is not None
        reward = SUCCESS_REWARD * info["won"] if self._reward_kind == "binary" else self._score
        return observation, float(reward), terminated, truncated, info

    def expert_action(self) -> str:
        """Return the next action of a shopper that knows the product behind the goal.

        Raises:
            RuntimeError: No episode is running.
        """
        self._require_episode("expert_action")
        return expert_action(self.catalogue, self._goal, self._state)

    def is_winnable(self) -> bool:
        """Return whether the goal's own product, bought with its own options, scores 1.

        The official reward gives less to some official goals: it compares some options by their
        colour alone.
        """
        self._require_episode("is_winnable")
        row = self.catalogue.row_of(self._goal.asin)
        assert row is not None, "goals are made from products of the catalogue"
        own = self.catalogue.product(row)
        return purchase_reward(own, self._goal, dict(self._goal.options)).score == 1.0

    def random_action(self, rng: random.Random) -> str:
        """Draw a possible action; a search is for up to three words of the instruction.

        Raises:
            RuntimeError: No episode is running.
        """
        self._require_episode("random_action")
        action = rng.choice(self._admissible())
        if action != SEARCH_PLACEHOLDER:
            return action
        words = self._goal.instruction.split()
        return f"search[{' '.join(rng.sample(words, min(3, len(words))))}]"

    def _enter(self, state: State) -> None:
        self._state = state
        if state.page == "thanks":
            bought = self.catalogue.product(state.row)
            self._score = purchase_reward(bought, self._goal, state.options).score
            self._page = thanks_page(self._score)
        else:
            self._page = self._shop.page(state)

    def _observation(self) -> str:
        if self._show_task and self._state.page != "thanks":
            return header(self._goal.instruction, self._state.page == "search") + self._page.text
        return self._page.text

    def _info(self, observation: str) -> dict[str, Any]:
        anchor = observation
        if self._anchor == "observation+options" and self._state.options:
            chosen = sorted(self._state.options.items())
            anchor = "\n".join([observation, *(f"{name}: {value}" for name, value in chosen)])
        return {
            "task": self._goal.instruction,
            "admissible_actions": [] if self._is_over else self._admissible(),
            "won": self._score == 1.0,
            "score": self._score,
            "anchor": anchor,
            "task_id": self._goal.task_id,
        }

    def _admissible(self) -> list[str]:
        if self._state.page == "search":
            return [SEARCH_PLACEHOLDER]
        return [f"click[{name}]" for name in self._page.clickables]

    def _number(self, task_id: str) -> int:
        number = self._goals.find(task_id)
        if number is None:
            raise ValueError(
                f"task_id {task_id!r} is not one of this split's {len(self._goals)} goals; "
                "task_ids() lists them"
            )
        return number

    def _require_episode(self, method: str) -> None:
        if self._is_over:
            raise RuntimeError(f"no episode is running; call reset() before {method}()")


def _check(name: str, value: str, allowed: Any) -> None:
    if value not in get_args(allowed):
        raise ValueError(f"{name} must be one of {get_args(allowed)}, got {value!r}")
