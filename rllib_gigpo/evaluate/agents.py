"""How a model is prompted without training: plain, ReAct, Reflexion.

The environment's own profile writes each step's prompt and reads each response, for all of them, so
what differs is what the model sees besides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message
from rllib_gigpo.encoding import PromptTooLongError
from rllib_gigpo.playing.desk import Asked
from rllib_gigpo.playing.play import Played
from rllib_gigpo.seeding import derive_seed
from rllib_gigpo.vision.pictures import Picture

PROMPTINGS = ("plain", "react", "reflexion")

_REACT = (
    "Solve the task by turns of thought and action. Before each action, write down what the last "
    "observation tells you, what you have found out so far, and what is left to do. You see your "
    "own earlier thoughts, actions and observations."
)
_REFLECT = (
    "You tried a task and did not complete it. Below are the task, your actions and what they led "
    "to. In two to four sentences, say what went wrong and what you will do differently the next "
    "time. Write the plan only.\n\n{trajectory}"
)
_REMEMBER = "What you learned from earlier tries of the same task:\n{reflections}"


class Chat(Protocol):
    """A model: from chat messages, their pictures and a seed to a text."""

    def __call__(
        self, messages: Sequence[Message], pictures: Mapping[str, Picture], seed: int
    ) -> str:
        """Return the response."""
        ...


class PromptedAgent:
    """Plays one episode at a time: a player for `rllib_gigpo.playing.play`.

    "plain" asks with the profile's prompt alone, which holds its memory of the last steps, as in
    training. "react" (arXiv 2210.03629) keeps the whole conversation: every prompt so far, with the
    thought and action that answered it. "reflexion" (arXiv 2303.11366) is "react" whose reflections
    on failed tries stand in front of the next try.

    Args:
        chat: The model; where it finds a prompt too long, it is asked again with less history.
        prompting: One of `PROMPTINGS`.
        profile: The environment's profile.
        seed: Of this episode's responses.
        reflections: What earlier tries of the same task taught.
    """

    def __init__(
        self,
        chat: Chat,
        prompting: str,
        profile: AgentProfile,
        seed: int = 0,
        reflections: Sequence[str] = (),
    ):
        if prompting not in PROMPTINGS:
            raise ValueError(f"prompting={prompting!r}: expected one of {', '.join(PROMPTINGS)}")
        self._chat = chat
        self._prompting = prompting
        self._profile = profile
        self._seed = seed
        self._reflections = list(reflections)
        self._said: list[Message] = []
        self._pictures: dict[str, Picture] = {}

    def __call__(self, asked: Asked) -> str:
        """Return the response to a step's prompt."""
        self._pictures |= asked.context.pictures
        seed = derive_seed(self._seed, "evaluation", asked.step)
        response = self._ask(asked, seed)
        if self._prompting != "plain":
            self._said += [asked.messages[-1], {"role": "assistant", "content": response}]
        return response

    def _ask(self, asked: Asked, seed: int) -> str:
        tries = self._prompts(asked)
        messages = next(tries)
        while True:
            try:
                return self._chat(messages, self._pictures, seed)
            except PromptTooLongError:
                shorter = next(tries, None)
                if shorter is None:
                    raise
                messages = shorter

    def _prompts(self, asked: Asked) -> Iterator[list[Message]]:
        """Yield the step's prompt, then ever shorter ones: the oldest history goes first."""
        if self._prompting == "plain":
            yield asked.messages
            _, entries = asked.memory.render()
            for drop in range(1, entries + 1):
                history, shown = asked.memory.render(drop)
                context = replace(asked.context, history=history, history_length=shown)
                yield self._profile.prompt(context)
            return
        for start in range(0, len(self._said) + 1, 2):
            yield [self._instructions(asked), *self._said[start:], asked.messages[-1]]

    def _instructions(self, asked: Asked) -> Message:
        system = [m["content"] for m in asked.messages if m["role"] == "system"]
        parts = [*system, _REACT]
        if self._reflections:
            listed = "\n".join(f"- {text}" for text in self._reflections)
            parts.append(_REMEMBER.format(reflections=listed))
        return {"role": "system", "content": "\n\n".join(parts)}


def reflect(chat: Chat, played: Played, seed: int) -> str:
    """Ask the model what a failed try taught.

    Args:
        chat: The model.
        played: The try.
        seed: Of the response.
    """
    lines: list[str] = []
    pictures: dict[str, Any] = {}
    for number, (asked, response) in enumerate(played.asked):
        pictures |= asked.context.pictures
        if number == 0:
            lines.append(f"Task: {asked.context.task}")
        lines += [f"Observation: {asked.context.observation}", f"You: {response}"]
    lines.append(f"The end, with a return of {played.total:g}.")
    text = _REFLECT.format(trajectory="\n".join(lines))
    return chat([{"role": "user", "content": text}], pictures, seed).strip()
