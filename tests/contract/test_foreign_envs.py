"""Adapted environments of other projects keep the contract, each against a world that is there.

Servers and games are real ones: processes that speak MCP, a WebSocket server of OpenEnv's messages,
games that TextWorld compiles.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rllib_gigpo.env_checks import CHECKS, ContractNote, check_seeds_give_different_tasks
from rllib_gigpo.registry import get_env_spec
from rllib_gigpo.scripted import random_legal
from tests import mcp_dial_server, openenv_dial_server
from tests.dial_worlds import ROWS
from tests.missing import skip_or_fail

Make = Callable[[], Any]

DIALS = [{**row, "dial": number} for number in range(5) for row in ROWS]
MCP = {
    "rows": ROWS,
    "reward": "tests.dial_worlds:opened",
    "reset_tool": "start",
    "hide": ("box",),
    "horizon": 8,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "FrozenLake": ("gym:FrozenLake-v1", {}),
    "Taxi": ("gym:Taxi-v3", {}),
    "CliffWalking": ("gym:CliffWalking-v1", {"horizon": 40}),
    "Blackjack": ("gym:Blackjack-v1", {"horizon": 12}),
    "CartPole": ("gym:CartPole-v1", {}),
    "MiniGrid": ("gym:minigrid:MiniGrid-DoorKey-5x5-v0", {}),
    "TRL": ("trl:tests.dial_worlds:DialEnv", {"rows": ROWS, "won_reward": 1.0}),
    "SkyRL": (
        "skyrl:tests.dial_worlds:DialText",
        {"rows": DIALS, "won_reward": 1.0, "examples": ("turn left", "turn right", "unlock")},
    ),
    "MCP over pipes": (f"mcp:{sys.executable} -m tests.mcp_dial_server", MCP),
    "MCP over HTTP": ("mcp:{mcp}", MCP),
    "OpenEnv simulation": ("openenv:{simulation}", {"rows": ROWS, "won_reward": 1.0}),
    "OpenEnv text": ("openenv:{text}", {"rows": ROWS}),
    "OpenEnv tools": ("openenv:{tools}", {"rows": ROWS, "won_reward": 1.0}),
    "TextWorld": ("textworld:{games}", {}),
}
# Every seed starts the same walk from the same place: there is one task only.
ONE_TASK = {"CliffWalking"}


@pytest.fixture(scope="module")
def places() -> Iterator[Callable[[str], str]]:
    """From a name in braces to an address; what it names starts when it is first asked for."""
    started: dict[str, tuple[str, Callable[[], Any]]] = {}

    def start(name: str) -> tuple[str, Callable[[], Any]]:
        if name == "games":
            from tests.textworld_games import two_games

            return str(two_games()), lambda: None
        if name == "mcp":
            server = mcp_dial_server.over_http()
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

            def stop() -> None:
                server.shutdown()
                server.server_close()

            return f"http://127.0.0.1:{server.server_port}/mcp", stop
        running = openenv_dial_server.running(name, max_sessions=64)
        address, _ = running.__enter__()
        return address, lambda: running.__exit__(None, None, None)

    def place(name: str) -> str:
        if name not in started:
            started[name] = start(name)
        return started[name][0]

    yield place
    for _, stop in started.values():
        stop()


def made(case: str, places: Callable[[str], str]) -> Make:
    name, config = CONFIGS[case]
    before, brace, rest = name.partition("{")
    if brace:
        name = before + places(rest.removesuffix("}"))
    try:
        make = functools.partial(get_env_spec(name).make, config)
        make().close()
    except ImportError as error:
        skip_or_fail(str(error))
    return make


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", CONFIGS)
def test_adapter_keeps_the_contract(case, check, places):
    make = made(case, places)
    if case in ONE_TASK and check is check_seeds_give_different_tasks:
        with pytest.raises(ContractNote, match="same task"):
            check(make, random_legal)
    else:
        check(make, random_legal)
