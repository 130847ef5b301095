"""One small world, a dial that opens a box, as other projects' environments would have it."""

from __future__ import annotations

import random
from typing import Any, Literal

ROWS = [{"prompt": "Open the box."}, {"prompt": [{"role": "user", "content": "Open it."}]}]


class Dial:
    """A dial with ten numbers; the right one opens the box."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.shown, self.secret = rng.sample(range(10), 2)
        self.is_open = False

    def look(self) -> str:
        return f"The dial shows {self.shown}."

    def turn(self, direction: str, clicks: int) -> str:
        self.shown = (self.shown + (clicks if direction == "right" else -clicks)) % 10
        return self.look()

    def unlock(self) -> str:
        self.is_open = self.shown == self.secret
        if self.is_open:
            return "The box is open."
        return f"Too {'low' if self.shown < self.secret else 'high'}."


class DialEnv:
    """The dial as TRL's `environment_factory` takes it."""

    def reset(self, seed: int = 0, **row: Any) -> str:
        self.dial = Dial(seed)
        return self.dial.look()

    def turn(self, direction: Literal["left", "right"], clicks: int = 1) -> str:
        """Turn the dial.

        Args:
            direction: Which way.
            clicks (int): How far, 0 to 9.

        Returns:
            What the dial shows.
        """
        if clicks > 9:
            raise ValueError("the dial has ten numbers")
        return self.dial.turn(direction, clicks)

    async def unlock(self) -> str:
        """Try the lid."""
        return self.dial.unlock()

    def get_reward(self) -> float:
        return float(self.dial.is_open)

    def _secret(self) -> int:
        return self.dial.secret


class Silent:
    """A TRL environment without a reward or a first text."""

    def reset(self, **row: Any) -> None:
        self.row = row

    def say(self, text: str) -> str:
        """Say it."""
        return text


FACTORIES = {"dial": DialEnv, "silent": Silent}


def silent_reward(env: Silent, row: dict[str, Any], answer: str | None) -> float:
    return 1.0 if answer == row["wanted"] else 0.0


def dial_state(env: DialEnv) -> str:
    return f"dial {env.dial.shown}"


def opened(episode: Any) -> float:
    """Reward of the MCP dial: what the server says of the box."""
    return float(episode.call("box", {}) == "open")


def answered_yes(episode: Any) -> float:
    """Reward that depends on the answer and on the number of calls."""
    return (episode.answer == "yes") - 0.125 * len(episode.calls)


class DialText:
    """The dial with skyrl-gym's methods, for where skyrl-gym is not installed."""

    def __init__(self, env_config: Any = None, extras: dict[str, Any] | None = None):
        self.extras = extras or {}
        self.tries = 0

    def init(self, prompt: list[dict]) -> tuple[list[dict], dict]:
        self.dial = Dial(self.extras["dial"])
        return [*prompt, {"role": "user", "content": self.dial.look()}], {}

    def step(self, action: str) -> dict[str, Any]:
        words = action.split()
        told = "Say 'turn left', 'turn right' or 'unlock'."
        if words[:1] == ["turn"] and words[1:] in (["left"], ["right"]):
            told = self.dial.turn(words[1], 1)
        elif words == ["unlock"]:
            self.tries += 1
            told = self.dial.unlock()
        return {
            "observations": [{"role": "user", "content": told}],
            "reward": float(self.dial.is_open),
            "done": self.dial.is_open,
            "metadata": {"tries": self.tries, "secret": str(self.dial.secret), "ok": True},
        }

    def get_metrics(self) -> dict[str, Any]:
        return {"shown_at_end": self.dial.shown}

    def close(self) -> None:
        self.is_closed = True
