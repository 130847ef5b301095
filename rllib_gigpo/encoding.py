"""From agent state to prompt token ids, within the prompt limit."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rllib_gigpo.agent.memory import Memory, look
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message, PromptContext

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHE_SIZE = 8192


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> np.ndarray:
    """Return the token ids of chat messages with the generation prompt, int32 [P]."""
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return np.array(encoded, dtype=np.int32)


class PromptTooLongError(ValueError):
    """A prompt is over its limit although no history is left to drop."""


class PromptEncoder:
    """Tokenises the prompts of one agent profile with the model's own chat template.

    Args:
        tokenizer: The model's tokenizer; its chat template is used as shipped.
        profile: The agent profile.
        max_prompt_tokens: Limit of a prompt in tokens.
        on_long_prompt: What happens once dropping history no longer helps: "error",
            "end_episode" (encode raises PromptTooLongError, the rollout truncates the episode), or
            "shorten_observation" (the end of the observation is cut).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        profile: AgentProfile,
        max_prompt_tokens: int,
        on_long_prompt: str = "error",
    ):
        self.tokenizer = tokenizer
        self.profile = profile
        self.max_prompt_tokens = max_prompt_tokens
        self.on_long_prompt = on_long_prompt
        self._cache: OrderedDict[tuple, np.ndarray] = OrderedDict()

    def encode(self, context: PromptContext, memory: Memory) -> np.ndarray:
        """Return the prompt's token ids, int32 [P] with P <= max_prompt_tokens.

        The oldest history is dropped first, entry by entry; see `Memory.render`.

        Raises:
            PromptTooLongError: Too long without any history, and observations are not shortened.
        """
        look(memory, context.task, context.observation)
        _, entries = memory.render()
        for drop in range(entries + 1):
            history, shown = memory.render(drop)
            ids = self._tokenize(replace(context, history=history, history_length=shown))
            if len(ids) <= self.max_prompt_tokens:
                return ids
        if self.on_long_prompt == "shorten_observation":
            return self._shorten(context)
        raise PromptTooLongError(
            f"the prompt has {len(ids)} tokens without any history, max_prompt_tokens is "
            f"{self.max_prompt_tokens}: raise llm(max_prompt_tokens=...), or choose "
            "agent(on_long_prompt='shorten_observation' or 'end_episode')"
        )

    def decode(self, token_ids: np.ndarray) -> str:
        """Return a response's text without special tokens."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _shorten(self, context: PromptContext) -> np.ndarray:
        """Bisect for the longest start of the observation that fits."""
        ids = self._tokenize(replace(context, observation=""))
        if len(ids) > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt is over max_prompt_tokens={self.max_prompt_tokens} even with an empty "
                "observation: raise llm(max_prompt_tokens=...) or shorten the prompt template"
            )
        fits, too_long = 0, len(context.observation)
        while too_long - fits > 1:
            keep = (fits + too_long) // 2
            tried = self._tokenize(replace(context, observation=context.observation[:keep]))
            if len(tried) <= self.max_prompt_tokens:
                fits, ids = keep, tried
            else:
                too_long = keep
        return ids

    def _tokenize(self, context: PromptContext) -> np.ndarray:
        return self.tokenize(self.profile.prompt(context))

    def tokenize(self, messages: list[Message]) -> np.ndarray:
        """Return the token ids of chat messages with the generation prompt, int32 [P]."""
        key = tuple((message["role"], message["content"]) for message in messages)
        ids = self._cache.get(key)
        if ids is None:
            ids = chat_ids(self.tokenizer, messages)
            ids.setflags(write=False)
            self._cache[key] = ids
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(key)
        return ids
