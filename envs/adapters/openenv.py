"""`openenv:<url>`: environments behind an OpenEnv server."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envs.adapters.base import AdapterEnv, Turn
from envs.adapters.naming import Rows, chosen_row, load_rows, prompt_text
from envs.adapters.openenv_client import (
    OpenEnvClient,
    OpenEnvError,
    RefusedError,
    action_schema,
)
from envs.adapters.tool_env import NO_CALL
from envs.adapters.tools import Call, Tool, fault, json_value, parse_action, random_call

_FENCED = re.compile(r"\A\s*```(?:json)?\s*(\{.*\})\s*```\s*\Z", re.DOTALL)
_STEP = "step"


class OpenEnv(AdapterEnv):
    """A session with an OpenEnv server, without OpenEnv's package.

    Two kinds of server are told apart by the schema of their actions:

    - Tool servers (MCP, OpenEnv's RFC 003): `info["tools"]` is what they list; an action is the
      JSON text of a call, `{"name": ..., "arguments": {...}}`.
    - All others: one tool, `step`, whose arguments are the action's fields. The fields alone as
      JSON, fenced or not, do as well, and any text where the one required field is a text.

    `<answer>text</answer>` ends the episode without a word to the server, with reward 0. What
    fits no schema never reaches the server and is flagged, as is what the server refuses; the
    observation tells why. The observation is the text of the server's one, without the fields in
    `hide`: none may count steps. The anchor is the observation and never OpenEnv's `State`, which
    holds an episode id and a step count.

    A reward may be absent in OpenEnv's protocol. On the way that is 0; from a server that ends the
    episode without one it is an error, unless `final_reward` says what it is worth.

    Isolation: that of the server, which runs the actions; this process only reads its answers.
    OpenEnv's servers are meant to run in containers.

    Args:
        target: The server, such as `http://127.0.0.1:8000`.
        rows: Task rows; see `ToolEnv`. All fields but `prompt` go to the server's reset, with the
            seed. A server that ignores the seed cannot start the members of a group alike.
        hide: Fields of the observation that are not shown.
        timeout_s: Seconds that connecting and every answer may take.
        horizon: Most actions of an episode; the server ends it earlier by itself.
        won_reward: Reward of the last step from which an episode counts as won.
        final_reward: Reward of a last step to which the server gives none; None is an error.
        texts: What random actions draw texts from.

    Raises:
        ValueError: No server is named.
    """

    def __init__(
        self,
        *,
        target: str = "",
        rows: Rows = ({},),
        hide: Sequence[str] = ("metadata", "episode_id", "step_count"),
        timeout_s: float = 60.0,
        horizon: int = 30,
        won_reward: float | None = None,
        final_reward: float | None = None,
        texts: Sequence[str] = ("yes", "no"),
    ):
        if not target:
            raise ValueError("openenv: needs a server, such as openenv:http://127.0.0.1:8000")
        super().__init__(horizon=horizon)
        self.target = target
        self.rows = rows
        self.hide = hide
        self.timeout_s = timeout_s
        self.won_reward = won_reward
        self.final_reward = final_reward
        self.texts = texts
        self._loaded_rows = load_rows(rows)
        self._client: OpenEnvClient | None = None
        self._fields: Tool | None = None
        self._tools: list[Tool] = []

    def task_ids(self) -> list[str]:
        """Return the numbers of the rows; any goes to `reset` as the option `task_id`."""
        return [str(number) for number in range(len(self._loaded_rows))]

    def random_action(self, rng: random.Random) -> str:
        """Draw a call that fits the schema."""
        return random_call(self._tools, rng, self.texts)

    def _start(self, seed: int, options: Mapping[str, Any]) -> Turn:
        number, row = chosen_row(self._loaded_rows, seed, options)
        try:
            if self._client is None:
                self._describe(action_schema(self.target, self.timeout_s))
                self._client = OpenEnvClient(self.target, self.timeout_s)
            fields = {key: value for key, value in row.items() if key != "prompt"}
            answer = self._client.reset({**fields, "seed": seed})
            if self._fields is None:
                self._tools = _listed(self._client.step({"type": "list_tools"}))
        except Exception:
            self._release()
            raise
        self._facts = {"task": prompt_text(row.get("prompt")), "task_id": str(number)}
        return self._turn(answer)

    def _act(self, action: str) -> Turn:
        if isinstance(parse_action(action), str):
            facts = {**self._told_now(False, 0.0), "is_action_valid": True}
            return Turn(self._seen, terminated=True, info=facts)
        data, wrong = self._parse(action)
        if data is None:
            return self._refused(wrong)
        assert self._client is not None
        try:
            turn = self._turn(self._client.step(data))
        except RefusedError as error:
            return self._refused(str(error))
        except Exception:
            self._release()
            raise
        # Of a text that becomes a field as it stands nobody can say that it is an action.
        is_told = parse_action(action) is not None or _json_object(action) is not None
        info = {**turn.info, **({"is_action_valid": True} if is_told else {})}
        return Turn(turn.observation, turn.reward, turn.terminated, info=info)

    def _release(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _describe(self, schema: Mapping[str, Any]) -> None:
        """Take the action schema for one tool, or leave the tools to the server's list."""
        own = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        if not own or {"tool_name", "arguments"} <= set(own):
            self._fields = None
            return
        parameters = {**schema, "properties": own, "additionalProperties": False}
        described = schema.get("description") or "Acts in the environment."
        self._fields = {"name": _STEP, "description": described, "parameters": parameters}
        self._tools = [self._fields]

    def _parse(self, action: str) -> tuple[dict[str, Any] | None, str]:
        """Return the data of a step message, or None and what is wrong."""
        call = parse_action(action)
        if self._fields is None:
            if not isinstance(call, Call):
                return None, NO_CALL
            wrong = fault(call, self._tools)
            data = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            return (None, wrong) if wrong else (data, "")
        if isinstance(call, Call) and call.name == _STEP:
            arguments = call.arguments
        else:
            arguments = _json_object(action)
        if arguments is None:
            field = _text_field(self._fields["parameters"])
            if field is None or not action.strip():
                return None, f"That was no JSON object that fits {self._fields['parameters']}."
            arguments = {field: action}
        wrong = fault(Call(_STEP, arguments), [self._fields])
        return (None, wrong) if wrong else (arguments, "")

    def _turn(self, answer: Mapping[str, Any]) -> Turn:
        done = bool(answer.get("done"))
        reward = self._reward(answer.get("reward"), done)
        self._seen = observation_text(answer["observation"], self.hide)
        return Turn(self._seen, reward, done, info=self._told_now(done, reward))

    def _reward(self, reward: Any, done: bool) -> float:
        if reward is None:
            reward = self.final_reward if done else 0.0
        if reward is None:
            raise OpenEnvError(
                f"the OpenEnv server {self.target} ended an episode without a reward: set "
                "env_config['final_reward'], 0.0 where the end earns nothing"
            )
        if not isinstance(reward, int | float):
            raise OpenEnvError(
                f"the OpenEnv server {self.target} gave reward {repr(reward)[:80]}: expected a "
                "number"
            )
        return float(reward)

    def _refused(self, why: str) -> Turn:
        return Turn(why, info={**self._told_now(False, 0.0), "is_action_valid": False})

    def _told_now(self, done: bool, reward: float) -> dict[str, Any]:
        facts: dict[str, Any] = {**self._facts, "tools": self._tools}
        if self.won_reward is not None:
            facts["won"] = done and reward >= self.won_reward
        return facts


def observation_text(observation: Mapping[str, Any], hide: Sequence[str]) -> str:
    """Return a server's observation as text.

    One field is shown alone, several as lines "name: value". The result of a tool call is shown as
    the text that the tool gave.
    """
    shown = {k: v for k, v in observation.items() if k not in hide and v is not None}
    if "tool_name" in shown and ("result" in shown or "error" in shown):
        error = shown.get("error")
        return _text(error.get("message", error)) if error else _text(shown.get("result"))
    if len(shown) == 1:
        return _text(next(iter(shown.values())))
    return "\n".join(f"{name}: {_text(value)}" for name, value in shown.items())


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("content"), list):
        parts = [part.get("text") for part in value["content"] if isinstance(part, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str))
    return json.dumps(value, ensure_ascii=False)


def _listed(answer: Mapping[str, Any]) -> list[Tool]:
    return [
        {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        for tool in answer["observation"]["tools"]
    ]


def _json_object(text: str) -> dict[str, Any] | None:
    fenced = _FENCED.match(text)
    value = json_value(fenced[1] if fenced else text)
    return value if isinstance(value, dict) else None


def _text_field(parameters: Mapping[str, Any]) -> str | None:
    """Return the one required field, where it is a text."""
    required = parameters.get("required", ())
    if len(required) != 1:
        return None
    (name,) = required
    is_text = parameters["properties"].get(name, {}).get("type") == "string"
    return name if is_text else None
