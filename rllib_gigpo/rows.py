"""Episodes become rows: one SampleBatch row per environment step of one agent.

    episodes -> episodes_to_batch -> MultiAgentBatch {module: SampleBatch of N rows}
             -> shard_batch       -> one batch per learner: all scalars, own tokens
             -> MinibatchPlan     -> row numbers of each optimizer step, the same on every learner

Scalar columns, each [N]: `group`, `episode`, `agent`, `step`, `anchor` (int64), `reward` (float64,
the environment's), `valid`, `truncated` (bool), `num_prompt_tokens`, `num_response_tokens`
(int64), `engine_logp` (float64, sum over the response), `weight_version` (int64), `learner` (int64,
which learner holds the row's tokens), `agent_id` and `module_id` (str). Token columns, object
arrays [N] of int32 / float32 arrays: `prompt_ids`, `response_ids`, `response_logps`, and where a
critic values truncated episodes `next_prompt_ids` (of the state after a truncated episode, on its
last row; empty elsewhere); None on a row that another learner holds. Where prompts show pictures,
`images` and `next_images` hold a tuple of PlacedPicture per row: uint8, one object per distinct
picture, so that a batch carries it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from rllib_gigpo.advantages import StepTable
from rllib_gigpo.games import SOLO_AGENT
from rllib_gigpo.grouping import AnchorKey
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.vision import Picture, PlacedPicture

TOKEN_COLUMNS = ("prompt_ids", "response_ids", "response_logps")
_OWNED_COLUMNS = (*TOKEN_COLUMNS, "next_prompt_ids", "images", "next_images")

_NO_IDS = np.zeros(0, dtype=np.int32)

# What SampleBatch is to code that only reads and adds columns.
Columns = dict[str, np.ndarray]

Images = tuple[PlacedPicture, ...]
AnchorIds = Callable[[Sequence[AnchorKey], np.ndarray, np.ndarray], np.ndarray]


def agent_episodes(
    episode: SingleAgentEpisode | MultiAgentEpisode,
) -> list[tuple[Any, SingleAgentEpisode]]:
    """Return (agent id, its episode) for every agent that acted, in agent-id order."""
    if isinstance(episode, SingleAgentEpisode):
        return [(SOLO_AGENT, episode)]
    agents = sorted(episode.agent_episodes.items(), key=lambda item: str(item[0]))
    return [(agent, single) for agent, single in agents if len(single) > 0]


def step_is_valid(episode: SingleAgentEpisode, step: int) -> bool:
    """Whether a step's action was valid: the parser's verdict, and the environment's if any."""
    well_formed = episode.extra_model_outputs["format_is_valid"][step]
    return bool(well_formed and episode.infos[step + 1].get("is_action_valid", True))


def episodes_to_batch(
    episodes: Sequence[SingleAgentEpisode | MultiAgentEpisode],
    anchor_ids: AnchorIds,
    module_of: Callable[[Any], str] = lambda agent: "default_policy",
) -> MultiAgentBatch:
    """Turn finished episodes into rows.

    Args:
        episodes: Episodes as the rollouts record them, in any order; rows come sorted by (group,
            member, agent, step), so the batch does not depend on who played what.
        anchor_ids: From anchor texts [N], group ids [N] and agent codes [N] to anchor ids [N].
        module_of: From agent id to RLlib module id.

    Returns:
        One SampleBatch per module that acted.

    Raises:
        ValueError: No episode has a step.
    """
    ordered = sorted(episodes, key=lambda e: (e.custom_data["group"], e.custom_data["member"]))
    names = sorted({str(agent) for e in ordered for agent, _ in agent_episodes(e)})
    codes = {name: code for code, name in enumerate(names)}
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, episode in enumerate(ordered):
        for agent, single in agent_episodes(episode):
            module = module_of(agent)
            target = rows.setdefault(module, [])
            place = {
                "agent_id": str(agent),
                "module_id": module,
                "group": episode.custom_data["group"],
                "episode": number,
                "agent": codes[str(agent)],
            }
            target.extend({**place, **row} for row in _rows_of(single))
    if not any(rows.values()):
        raise ValueError(
            f"none of the {len(ordered)} episodes has a step, so there is nothing to learn from: "
            "their first prompts are over the limit; raise llm(max_prompt_tokens=...)"
        )
    env_steps = sum(e.env_steps() for e in ordered)
    batches = {module: _to_batch(found, anchor_ids) for module, found in rows.items()}
    return MultiAgentBatch(batches, env_steps=env_steps)


def _rows_of(episode: SingleAgentEpisode) -> list[dict[str, Any]]:
    extras = episode.extra_model_outputs
    last = len(episode) - 1
    return [
        {
            "step": step,
            "anchor_text": episode.infos[step]["anchor"],
            "reward": episode.rewards[step],
            "valid": step_is_valid(episode, step),
            "truncated": bool(episode.is_truncated and step == last),
            "weight_version": extras["weight_version"][step],
            "prompt_ids": episode.observations[step],
            "response_ids": episode.actions[step],
            "response_logps": extras["action_logp"][step],
            # The last observation is empty unless the episode was truncated and a critic asks.
            "next_prompt_ids": episode.observations[last + 1] if step == last else _NO_IDS,
            "images": episode.infos[step].get("images", ()),
            "next_images": episode.infos[last + 1].get("images", ()) if step == last else (),
        }
        for step in range(len(episode))
    ]


_DTYPES = {
    "agent_id": np.str_,
    "module_id": np.str_,
    "group": np.int64,
    "episode": np.int64,
    "agent": np.int64,
    "step": np.int64,
    "reward": np.float64,
    "valid": np.bool_,
    "truncated": np.bool_,
    "weight_version": np.int64,
}


def _to_batch(rows: list[dict[str, Any]], anchor_ids: AnchorIds) -> SampleBatch:
    columns = {
        name: np.array([row[name] for row in rows], dtype=dtype) for name, dtype in _DTYPES.items()
    }
    columns["anchor"] = anchor_ids(
        [row["anchor_text"] for row in rows], columns["group"], columns["agent"]
    )
    for name in TOKEN_COLUMNS:
        columns[name] = object_array([row[name] for row in rows])
    if any(len(row["next_prompt_ids"]) for row in rows):
        columns["next_prompt_ids"] = object_array([row["next_prompt_ids"] for row in rows])
    if any(row["images"] or row["next_images"] for row in rows):
        one = one_object_each()
        for name in ("images", "next_images"):
            columns[name] = object_array([one(row[name]) for row in rows])
    return complete_batch(SampleBatch(columns))


def one_object_each() -> Callable[[Images], Images]:
    """Return a function that replaces equal pictures by the first object of each."""
    seen: dict[bytes, Picture] = {}

    def replaced(images: Images) -> Images:
        return tuple(
            PlacedPicture(seen.setdefault(placed.picture.key, placed.picture), placed.runs)
            for placed in images
        )

    return replaced


def complete_batch(batch: SampleBatch) -> SampleBatch:
    """Add the columns that follow from the others, where they are missing."""
    n = len(batch["group"])
    if "num_response_tokens" not in batch:
        batch["num_prompt_tokens"] = np.array([len(ids) for ids in batch["prompt_ids"]], np.int64)
        batch["num_response_tokens"] = np.array(
            [len(ids) for ids in batch["response_ids"]], np.int64
        )
    if "response_logps" in batch and "engine_logp" not in batch:
        batch["engine_logp"] = np.array([float(np.sum(p)) for p in batch["response_logps"]])
    defaults = {
        "agent": np.zeros(n, np.int64),
        "valid": np.ones(n, np.bool_),
        "truncated": np.zeros(n, np.bool_),
        "weight_version": np.zeros(n, np.int64),
        "learner": np.zeros(n, np.int64),
    }
    for name, column in defaults.items():
        if name not in batch:
            batch[name] = column
    return batch


def modules_of(batch: MultiAgentBatch) -> list[tuple[str, Columns]]:
    """Return (module id, its columns) for every module of a batch."""
    return [(str(module), dict(rows.items())) for module, rows in batch.policy_batches.items()]


def object_array(items: Sequence[Any]) -> np.ndarray:
    """Return a 1-D object array of the items (np.array would try to make a matrix of them)."""
    array = np.empty(len(items), dtype=object)
    array[:] = items
    return array


def step_table(batch: Columns) -> StepTable:
    """Return the columns from which every advantage is computed."""
    return StepTable(
        group=batch["group"],
        episode=batch["episode"],
        agent=batch["agent"],
        step=batch["step"],
        anchor=batch["anchor"],
        reward=batch["reward"],
        valid=batch["valid"],
    )


class MinibatchPlan(NamedTuple):
    """How the rows of an iteration are drawn into optimizer steps.

    Every learner draws the same plan from the same seed. Sizes differ by at most one row, and no
    row is drawn twice or left out.

    Attributes:
        minibatch_size: Rows per optimizer step at most, over all learners, or None.
        num_minibatches: Optimizer steps per epoch, or None; both None is one step over all rows.
        seed: Root seed.
    """

    minibatch_size: int | None
    num_minibatches: int | None
    seed: int

    def draw(self, num_rows: int, iteration: int, epoch: int) -> list[np.ndarray]:
        """Return the row numbers of each minibatch of one epoch."""
        count = self.num_minibatches or 1
        if self.minibatch_size is not None:
            count = -(-num_rows // self.minibatch_size)
        rng = np.random.default_rng(derive_seed(self.seed, "minibatch", iteration, epoch))
        return np.array_split(rng.permutation(num_rows), max(1, min(count, num_rows)))


def assign_learners(
    num_tokens: np.ndarray, minibatches: Sequence[np.ndarray], num_learners: int
) -> np.ndarray:
    """Decide which learner holds the tokens of each row.

    Inside each minibatch the longest rows are dealt first, each to the learner with the fewest
    tokens so far, so learners do equal work in every optimizer step.

    Args:
        num_tokens: Prompt plus response tokens [N].
        minibatches: Row numbers of the first epoch's minibatches.
        num_learners: Number of learners L.

    Returns:
        Learner index [N].
    """
    owner = np.zeros(len(num_tokens), dtype=np.int64)
    for rows in minibatches:
        load = np.zeros(num_learners, dtype=np.int64)
        for row in rows[np.argsort(-num_tokens[rows], kind="stable")]:
            learner = int(np.argmin(load))
            owner[row] = learner
            load[learner] += num_tokens[row]
    return owner


class RowData(TrainingData):
    """Training data that shards itself: every learner gets all scalars and its own tokens.

    RLlib's own sharding would cut groups and episodes apart.

    Args:
        batch: All rows of the iteration.
        plan: Draws the minibatches.
    """

    def __init__(self, batch: MultiAgentBatch, plan: MinibatchPlan):
        super().__init__(batch=batch)
        self._rows = batch
        self._plan = plan

    def shard(
        self,
        num_shards: int,
        len_lookback_buffer: int | None = None,
        *,
        iteration: int = 0,
        **kwargs: Any,
    ) -> list[tuple[TrainingData, dict[str, Any]]]:
        """Return one (training data, update arguments) pair per learner."""
        owners = {}
        for module, rows in modules_of(self._rows):
            tokens = rows["num_prompt_tokens"] + rows["num_response_tokens"]
            minibatches = self._plan.draw(len(tokens), iteration, epoch=0)
            owners[module] = assign_learners(tokens, minibatches, num_shards)
        return [
            (TrainingData(batch=_own_share(self._rows, owners, learner)), {})
            for learner in range(num_shards)
        ]


def _own_share(
    batch: MultiAgentBatch, owners: dict[str, np.ndarray], learner: int
) -> MultiAgentBatch:
    share = {}
    for module, rows in modules_of(batch):
        columns = {**rows, "learner": owners[module]}
        for name in _OWNED_COLUMNS:
            if name in columns:
                held = columns[name].copy()
                held[owners[module] != learner] = None
                columns[name] = held
        share[module] = SampleBatch(columns)
    return MultiAgentBatch(share, env_steps=batch.env_steps())
