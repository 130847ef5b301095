"""The reference mode of the rollouts: all episodes take their turns together."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Turns(Protocol):
    """When an episode may send the requests of its next turn."""

    async def wait(self, place: int) -> None:
        """Wait until the episode with this number may go on."""
        ...

    def leave(self) -> None:
        """Tell that an episode has ended."""
        ...


class FreeTurns:
    """Every episode goes on at once."""

    async def wait(self, place: int) -> None:
        """Do not wait."""

    def leave(self) -> None:
        """Nobody waits for anybody."""


class Lockstep:
    """No episode goes on before every running one is ready for its next turn.

    Batches then do not depend on how long environments take, which makes whole runs repeat bit for
    bit; the price is that everything waits for the slowest episode.

    Args:
        episodes: Number of running episodes.
    """

    def __init__(self, episodes: int):
        self._running = episodes
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def wait(self, place: int) -> None:
        """Wait for the other running episodes."""
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = ready
        self._go_on_together()
        await ready

    def leave(self) -> None:
        """Tell that an episode has ended."""
        self._running -= 1
        self._go_on_together()

    def _go_on_together(self) -> None:
        if len(self._waiting) < self._running:
            return
        # By number, so that the batch does not depend on who was ready first; and later, so that
        # whoever came last waits like the others.
        waiting = [self._waiting[place] for place in sorted(self._waiting)]
        self._waiting = {}
        asyncio.get_running_loop().call_soon(_release, waiting)


def _release(waiting: list[asyncio.Future[None]]) -> None:
    for ready in waiting:
        if not ready.done():
            ready.set_result(None)
