"""KeyDoor broken in one way each, for the checks of the contract to notice, and two lesser kinds.

In a module of its own, so that the process which replays them imports little.
"""

from __future__ import annotations

import gymnasium

from envs.key_door import KeyDoor


class PositionalArguments(KeyDoor):
    def __init__(self, size=4):
        super().__init__(size=size)


class NoHorizon(KeyDoor):
    def __init__(self):
        super().__init__()
        self.horizon = 20.0


class PlainSpaces(KeyDoor):
    def __init__(self):
        super().__init__()
        self.action_space = gymnasium.spaces.Text(99)


class HashOrder(KeyDoor):
    def _info(self):
        return super()._info() | {"task": f"{hash('door')}"}


class Leftovers(KeyDoor):
    resets = 0

    def reset(self, **kwargs):
        self.resets += 1
        observation, info = super().reset(**kwargs)
        return observation, info | {"task": "again" if self.resets > 3 else "once"}


class OneTask(KeyDoor):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options={"layout": 1})


class ForgetfulPickle(KeyDoor):
    def __getstate__(self):
        return vars(self) | {"_steps": 19}


class StepCounter(KeyDoor):
    def _observation(self):
        return f"step {self._steps} . {super()._observation()}"


class CountDown(KeyDoor):
    """Counts legal moves only, so that actions without effect do not show it."""

    def reset(self, **kwargs):
        self._left = 50
        return super().reset(**kwargs)

    def _neighbour(self, action):
        self._left -= 1
        return super()._neighbour(action)

    def _observation(self):
        return f"{super()._observation()} {self._left}"


class IntegerReward(KeyDoor):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, int(reward), terminated, truncated, info


class SharedList(KeyDoor):
    def _info(self):
        self._actions = getattr(self, "_actions", [])
        self._actions[:] = [] if self._is_over else self.actions
        return super()._info() | {"admissible_actions": self._actions}


class RaisesOnNonsense(KeyDoor):
    def step(self, action):
        if action not in self.actions:
            raise ValueError(action)
        return super().step(action)


class AcceptsNonsense(KeyDoor):
    def step(self, action):
        *rest, info = super().step(action)
        return *rest, info | {"is_action_valid": True}


class NothingAdmissible(KeyDoor):
    def _info(self):
        return super()._info() | {"admissible_actions": []}


class BadAdmissible(KeyDoor):
    def _info(self):
        return super()._info() | {"admissible_actions": [*self.actions, "go up"]}


class NoEnd(KeyDoor):
    def step(self, action):
        self._steps -= 1
        return super().step(action)


class Silent(KeyDoor):
    """Keeps the contract; has no expert and does not say who won."""

    expert_action = property()

    def _info(self):
        return {key: value for key, value in super()._info().items() if key != "won"}


class GivesUp(KeyDoor):
    """Keeps the contract; its expert knows no task."""

    def expert_action(self):
        raise ValueError("no expert for this task")


def only_moves(env, observation, info, rng):
    return rng.choice(KeyDoor.actions)
