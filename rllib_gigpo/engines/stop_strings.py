"""Finds the token that ends a response without decoding the response at every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

_Verdict = Literal["go on", "look", "stop"]

# Tokens decoded beyond the stop string's own length, for context at the cut and empty pieces.
_MARGIN = 4


class StopRule:
    """Whether the newest token ends a response; verdicts on single tokens are remembered.

    Most tokens can neither end nor contain a stop string. Only where the newest token's text ends
    with the right characters are the last few tokens decoded together.

    Args:
        tokenizer: Turns tokens into text; needed for stop strings only.
        stop: Strings that end a response; they may span several tokens.
        stop_token_ids: Tokens that end a response.

    Raises:
        ValueError: Stop strings without a tokenizer, or an empty stop string.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: tuple[str, ...],
        stop_token_ids: tuple[int, ...],
    ):
        if "" in stop:
            raise ValueError(f"stop={stop!r} holds an empty string, which would end every response")
        if stop and tokenizer is None:
            raise ValueError(
                f"stop={stop!r} needs the model's tokenizer: pass tokenizers={{policy_id: ...}} "
                "to the engine, or use stop_token_ids"
            )
        self._tokenizer = tokenizer
        self._stop = stop
        self._verdicts: dict[int, _Verdict] = dict.fromkeys(stop_token_ids, "stop")
        # A token is at least one byte of text.
        self._window = _MARGIN + max((len(string.encode()) for string in stop), default=0)

    def ends(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of the response's tokens completes a stop string or is a stop token."""
        token = token_ids[-1]
        verdict = self._verdicts.get(token)
        if verdict is None:
            verdict = self._verdicts[token] = self._judge(token)
        if verdict == "look":
            text = self._decode(token_ids[-self._window :])
            return any(string in text for string in self._stop)
        return verdict == "stop"

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self._tokenizer is not None
        return str(
            self._tokenizer.decode(
                list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def _judge(self, token: int) -> _Verdict:
        if not self._stop:
            return "go on"
        alone = self._decode([token])
        # A word's text inside a response may differ from its text alone by a leading space.
        inside = self._decode([token, token])[len(alone) :]
        if any(string in alone and string in inside for string in self._stop):
            return "stop"
        if any(self._may_end(string, text) for string in self._stop for text in (alone, inside)):
            return "look"
        return "go on"

    @staticmethod
    def _may_end(string: str, text: str) -> bool:
        """Whether `string` can end inside `text`, given the right text before it."""
        if "\N{REPLACEMENT CHARACTER}" in text:  # part of a character: its bytes are split
            return True
        return string in text or any(
            string.endswith(text[:end]) for end in range(1, min(len(text), len(string)) + 1)
        )
