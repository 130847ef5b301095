"""From agent state to prompt token ids, within the prompt limit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rllib_gigpo.agent.memory import Memory, look
from rllib_gigpo.agent.profile import AgentProfile
from rllib_gigpo.agent.prompt import Message, PromptContext
from rllib_gigpo.vision.pictures import Picture, PlacedPicture, split_marks, units

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rllib_gigpo.vision.sight import Sight

_CACHE_SIZE = 8192
# History of more characters per token of the limit than this is not tried whole.
_LIKELY_CHARACTERS = 8
# No text has more characters per token than this, but for runs of one character.
_MOST_CHARACTERS = 64
_NO_PICTURES: Mapping[str, Picture] = {}


class Encoded(NamedTuple):
    """A prompt as a model reads it.

    Attributes:
        ids: Token ids, int32 [P].
        images: Where pictures stand in the place of tokens.
    """

    ids: np.ndarray
    images: tuple[PlacedPicture, ...] = ()


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Any]) -> np.ndarray:
    """Return the token ids of chat messages with the generation prompt, int32 [P]."""
    encoded = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return np.array(encoded, dtype=np.int32)


def well_formed(text: str) -> str:
    """Return a text in which halves of surrogate pairs, which no tokenizer takes, are U+FFFD.

    JSON can spell them out, and so they come from web pages and data sets.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    pictures: Mapping[str, Picture] = _NO_PICTURES,
    sight: Sight | None = None,
) -> Encoded:
    """Encode chat messages whose texts may hold marks of pictures.

    Args:
        tokenizer: The model's tokenizer; its chat template places the pictures.
        messages: Chat messages.
        pictures: The pictures of the marks, by name.
        sight: The model's image side, or None for a text model.

    Raises:
        ValueError: A picture for a text model.
    """
    messages = [{**message, "content": well_formed(message["content"])} for message in messages]
    parts = [split_marks(message["content"], pictures) for message in messages]
    shown = [part for content in parts for part in content if isinstance(part, Picture)]
    if sight is None and not shown:
        return Encoded(chat_ids(tokenizer, messages))
    if sight is None:
        raise ValueError(
            f"the prompt shows {len(shown)} picture(s), and the model reads text alone: choose an "
            "image-text model (of type qwen2_vl, qwen2_5_vl, qwen3_vl, idefics3, smolvlm or "
            "llava), or play the environment's text view, where it has one (view='text')"
        )
    # The templates of image-text models take a content in parts, some of them nothing else.
    in_parts = [
        {"role": message["role"], "content": [_part(part) for part in content]}
        for message, content in zip(messages, parts, strict=True)
    ]
    return Encoded(*sight.place(chat_ids(tokenizer, in_parts).tolist(), shown, tokenizer))


def _part(part: str | Picture) -> dict[str, str]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


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
            "shorten_observation" (the end of the observation is cut; a picture stays whole or
            goes).
        sight: The model's image side, or None for a text model.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        profile: AgentProfile,
        max_prompt_tokens: int,
        on_long_prompt: str = "error",
        sight: Sight | None = None,
    ):
        self.tokenizer = tokenizer
        self.profile = profile
        self.max_prompt_tokens = max_prompt_tokens
        self.on_long_prompt = on_long_prompt
        self.sight = sight
        # Pictures by name: the cache is not to keep those of past rollouts alive.
        self._cache: OrderedDict[tuple, tuple[np.ndarray, tuple[Any, ...]]] = OrderedDict()

    def encode(self, context: PromptContext, memory: Memory) -> Encoded:
        """Return the prompt, of at most max_prompt_tokens tokens; pictures count as theirs.

        The oldest history is dropped first, entry by entry; see `Memory.render`.

        Raises:
            PromptTooLongError: Too long without any history, and observations are not shortened.
        """
        look(memory, context.task, context.observation)
        if self.on_long_prompt == "shorten_observation" and self._is_far_over(context):
            return self._shorten(context)
        found = self._with_history(context, memory)
        if len(found.ids) <= self.max_prompt_tokens:
            return found
        if self.on_long_prompt == "shorten_observation":
            return self._shorten(context)
        raise PromptTooLongError(
            f"the prompt has {len(found.ids)} tokens without any history, max_prompt_tokens is "
            f"{self.max_prompt_tokens}: raise llm(max_prompt_tokens=...), or choose "
            "agent(on_long_prompt='shorten_observation' or 'end_episode')"
        )

    def _with_history(self, context: PromptContext, memory: Memory) -> Encoded:
        """Return the prompt with as much history as fits, or without any where none does.

        The work is bounded by the limit, however long the memory is: what is far over the limit is
        never tokenised.
        """
        text, entries = memory.render()

        def encoded(kept: int) -> Encoded:
            history, shown = memory.render(entries - kept)
            return self._tokenize(replace(context, history=history, history_length=shown))

        if entries == 0 or len(text) <= _LIKELY_CHARACTERS * self.max_prompt_tokens:
            found = encoded(entries)
            if entries == 0 or len(found.ids) <= self.max_prompt_tokens:
                return found
        fits, found, too_long = 0, encoded(0), entries + 1
        if len(found.ids) > self.max_prompt_tokens:
            return found
        while too_long - fits > 1:
            doubled = min(2 * fits + 1, entries)
            kept = doubled if doubled < too_long else (fits + too_long) // 2
            tried = encoded(kept)
            if len(tried.ids) <= self.max_prompt_tokens:
                fits, found = kept, tried
            else:
                too_long = kept
        return found

    def decode(self, token_ids: np.ndarray) -> str:
        """Return a response's text without special tokens."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _is_far_over(self, context: PromptContext) -> bool:
        """Whether an observation is so long that the prompt cannot fit, whatever is dropped.

        A guess on the safe side: where it says no, the prompt is tokenised whole.
        """
        return len(context.observation) > _MOST_CHARACTERS * self.max_prompt_tokens

    def _shorten(self, context: PromptContext) -> Encoded:
        """Find the longest start of the observation that fits.

        As with history, what is far over the limit is never tokenised.
        """
        found = self._tokenize(replace(context, observation=""))
        if len(found.ids) > self.max_prompt_tokens:
            raise PromptTooLongError(
                f"the prompt is over max_prompt_tokens={self.max_prompt_tokens} even with an empty "
                "observation: raise llm(max_prompt_tokens=...) or shorten the prompt template"
            )
        pieces = units(context.observation)
        fits, too_long = 0, len(pieces) + 1
        tried_first = self.max_prompt_tokens
        while too_long - fits > 1:
            doubled = min(max(tried_first, 2 * fits), len(pieces))
            keep = doubled if doubled < too_long else (fits + too_long) // 2
            tried = self._tokenize(replace(context, observation="".join(pieces[:keep])))
            if len(tried.ids) <= self.max_prompt_tokens:
                fits, found = keep, tried
            else:
                too_long = keep
        return found

    def _tokenize(self, context: PromptContext) -> Encoded:
        return self.tokenize(self.profile.prompt(context), context.pictures)

    def tokenize(
        self, messages: list[Message], pictures: Mapping[str, Picture] = _NO_PICTURES
    ) -> Encoded:
        """Return chat messages with the generation prompt as the model reads them."""
        key = tuple((message["role"], message["content"]) for message in messages)
        found = self._cache.get(key)
        if found is None:
            encoded = encode_chat(self.tokenizer, messages, pictures, self.sight)
            encoded.ids.setflags(write=False)
            if len(encoded.ids) > self.max_prompt_tokens:
                # Never answered, so never asked for again; and its text may be megabytes.
                return encoded
            images = tuple((placed.picture.name, placed.runs) for placed in encoded.images)
            self._cache[key] = (encoded.ids, images)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
            return encoded
        self._cache.move_to_end(key)
        ids, images = found
        return Encoded(ids, tuple(PlacedPicture(pictures[name], runs) for name, runs in images))
