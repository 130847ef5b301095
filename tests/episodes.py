"""Finished episodes as the rollouts record them, from a few numbers per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rllib_gigpo.games import SOLO_AGENT, SoloRecorder, TeamRecorder


@dataclass(frozen=True)
class Step:
    """One recorded step.

    Attributes:
        anchor: Anchor text of the state that was acted on.
        reward: Reward of the action.
        prompt: Prompt token ids.
        response: Response token ids.
        logps: Log-probabilities of the response; by default -1 per token.
        well_formed: The parser's verdict.
        accepted: The environment's verdict, or None where it gives none.
        version: Weight version.
        reason: Finish reason.
        agent: Who acted.
    """

    anchor: str
    reward: float = 0.0
    prompt: Sequence[int] = (1, 2)
    response: Sequence[int] = (3,)
    logps: Sequence[float] | None = None
    well_formed: bool = True
    accepted: bool | None = None
    version: int = 0
    reason: str = "stop"
    agent: str = SOLO_AGENT

    def extras(self) -> dict[str, Any]:
        logps = self.logps if self.logps is not None else [-1.0] * len(self.response)
        return {
            "action_logp": np.array(logps, np.float32),
            "action_text": "act",
            "format_is_valid": self.well_formed,
            "weight_version": self.version,
            "finish_reason": self.reason,
        }


def _ids(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def _info(anchor: str, accepted: bool | None) -> dict[str, Any]:
    verdict = {} if accepted is None else {"is_action_valid": accepted}
    return {"observation": anchor, "anchor": anchor, **verdict}


def solo(
    group: int, member: int, *steps: Step, truncated: bool = False, **facts: Any
) -> SingleAgentEpisode:
    """An episode of one agent; it terminates unless it is truncated."""
    recorder = SoloRecorder()
    first = steps[0] if steps else Step("nothing")
    recorder.start({SOLO_AGENT: _ids(first.prompt)}, {SOLO_AGENT: _info(first.anchor, None)})
    for number, step in enumerate(steps):
        later = steps[number + 1] if number + 1 < len(steps) else None
        recorder.step(
            observations={SOLO_AGENT: _ids(later.prompt if later else ())},
            actions={SOLO_AGENT: _ids(step.response)},
            rewards={SOLO_AGENT: step.reward},
            infos={SOLO_AGENT: _info(later.anchor if later else "the end", step.accepted)},
            terminated=later is None and not truncated,
            truncated=later is None and truncated,
            extras={SOLO_AGENT: step.extras()},
        )
    episode = recorder.episode
    episode.is_truncated = truncated
    episode.custom_data.update({"group": group, "member": member, "numbers": {}, **facts})
    return episode


def team(
    group: int, member: int, *steps: Step, truncated: bool = False, **facts: Any
) -> MultiAgentEpisode:
    """An episode whose agents act one after the other, as `Step.agent` says."""
    recorder = TeamRecorder(lambda agent: f"policy of {agent}")
    first = steps[0] if steps else Step("nothing")
    recorder.start({first.agent: _ids(first.prompt)}, {first.agent: _info(first.anchor, None)})
    verdicts: dict[str, bool | None] = {}
    for number, step in enumerate(steps):
        verdicts[step.agent] = step.accepted
        later = steps[number + 1] if number + 1 < len(steps) else None
        seen = {later.agent: later} if later else dict.fromkeys(verdicts)
        recorder.step(
            observations={a: _ids(s.prompt if s else ()) for a, s in seen.items()},
            actions={step.agent: _ids(step.response)},
            rewards={step.agent: step.reward},
            infos={
                a: _info(s.anchor if s else "the end", verdicts.get(a)) for a, s in seen.items()
            },
            terminated=later is None and not truncated,
            truncated=later is None and truncated,
            extras={step.agent: step.extras()},
        )
    episode = recorder.episode
    episode.is_truncated = truncated
    episode.custom_data.update({"group": group, "member": member, "numbers": {}, **facts})
    return episode
