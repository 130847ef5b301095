"""`mcp:<command or url>`: the tools of an MCP server, with a reward of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from envs.adapters.mcp_client import INVALID_PARAMS, MCPClient, MCPRefusedError
from envs.adapters.naming import Rows, named
from envs.adapters.tool_env import Result, ToolEnv
from envs.adapters.tools import Call


class MCPEpisode(NamedTuple):
    """What a reward function is given.

    Attributes:
        row: The task row.
        calls: The calls that the schema allowed, in order, with what they brought.
        answer: The policy's answer, None where the horizon came first.
        call: Calls a tool of the server, a hidden one too: name, arguments -> text. For rewards
            that look at the state that the policy left behind.
    """

    row: Mapping[str, Any]
    calls: Sequence[tuple[Call, Result]]
    answer: str | None
    call: Callable[[str, Mapping[str, Any]], str]


class MCPEnv(ToolEnv):
    """Tools of an MCP server (stdio or streamable HTTP).

    Each environment has a session of its own, and starts a new one, over stdio a new process, at
    every reset. `reset_tool` keeps the session and calls that tool instead; it gets the row's
    fields and the seed, as far as its schema names them.

    What a server keeps outside its process, such as files, outlives the episode and is there in the
    next: the command line, or `reset_tool`, has to begin anew. `sh -c 'cd "$(mktemp -d)" && exec
    <server> .'` gives each process an empty folder, and does not remove it.

    The observation is the text of the last result, at first what `reset_tool` answers, else "".

    Isolation: none. A command line is a process with this one's rights and environment variables,
    and its tools do what they do; put it into a container where it, or the policy that calls it, is
    not trusted.

    Args:
        target: Command line of a server, or the URL of its endpoint.
        rows: Task rows; see `ToolEnv`.
        reward: From `MCPEpisode` to the final reward: a function, or `"module:function"`.
        reset_tool: Tool that starts an episode; hidden from the policy.
        hide: Names of other tools that the policy must not see.
        timeout_s: Seconds that an answer of the server may take.
        horizon: See `ToolEnv`.
        won_reward: See `ToolEnv`.
        texts: See `ToolEnv`.

    Raises:
        ValueError: No server or no reward is named, or the server has no `reset_tool`.
    """

    def __init__(
        self,
        *,
        target: str = "",
        rows: Rows = ({},),
        reward: str | Callable[[MCPEpisode], float] | None = None,
        reset_tool: str | None = None,
        hide: Sequence[str] = (),
        timeout_s: float = 30.0,
        horizon: int = 16,
        won_reward: float | None = None,
        texts: Sequence[str] = ("yes", "no"),
    ):
        if not target:
            raise ValueError("mcp: needs a server: mcp:<command line> or mcp:<http url>")
        if reward is None:
            raise ValueError(
                "an MCP server gives no reward: set env_config={'reward': 'module:function'}, a "
                "function of an envs.adapters.mcp.MCPEpisode"
            )
        super().__init__(rows=rows, horizon=horizon, won_reward=won_reward, texts=texts)
        self.target = target
        self.reward = reward
        self.reset_tool = reset_tool
        self.hide = hide
        self.timeout_s = timeout_s
        self._score = named(reward, "reward")
        self._client: MCPClient | None = None
        self._calls: list[tuple[Call, Result]] = []

    def _open(self, row: dict[str, Any], seed: int) -> str:
        if self.reset_tool is None:
            self._release()
        self._row = row
        self._calls = []
        if self._client is None:
            self._client = MCPClient(self.target, self.timeout_s)
            self._offered = self._client.tools()
        hidden = {self.reset_tool, *self.hide}
        self._tools = [tool for tool in self._offered if tool["name"] not in hidden]
        return "" if self.reset_tool is None else self._begun(self.reset_tool, row, seed)

    def _begun(self, reset_tool: str, row: Mapping[str, Any], seed: int) -> str:
        found = next((tool for tool in self._offered if tool["name"] == reset_tool), None)
        if found is None:
            names = [tool["name"] for tool in self._offered]
            raise ValueError(f"the server has no reset_tool={reset_tool!r}: it has {names}")
        taken = found["parameters"].get("properties", {})
        given = {**row, "seed": seed}
        return self._ask(reset_tool, {name: given[name] for name in taken if name in given})

    def _call(self, call: Call) -> Result:
        assert self._client is not None
        try:
            result = Result(*self._client.call(call.name, call.arguments))
        except MCPRefusedError as error:
            # Whoever wrote the arguments may mend them; any other error is the server's.
            if error.code != INVALID_PARAMS:
                raise
            result = Result(str(error), is_error=True)
        self._calls.append((call, result))
        return result

    def _reward(self, answer: str | None) -> float:
        return float(self._score(MCPEpisode(self._row, tuple(self._calls), answer, self._ask)))

    def _ask(self, name: str, arguments: Mapping[str, Any]) -> str:
        assert self._client is not None
        text, is_error = self._client.call(name, arguments)
        if is_error:
            raise RuntimeError(f"the MCP server's tool {name!r} reports: {text}")
        return text

    def _release(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
