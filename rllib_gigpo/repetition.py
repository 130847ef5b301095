"""Whether a response has fallen into a loop."""

from __future__ import annotations

from collections.abc import Sequence

_LONGEST_PERIOD = 16
_LEAST_PERIODS = 3
_LEAST_TOKENS = 6


def is_repeating(token_ids: Sequence[int]) -> bool:
    """Whether at least half of a response is one short sequence of tokens, again and again.

    The loop stands at the end, before the end token at most; it is there at least 3 times and 6
    tokens long, and its period has at most 16 tokens.

    Args:
        token_ids: The response.
    """
    return _ends_in_loop(token_ids) or _ends_in_loop(token_ids[:-1])


def _ends_in_loop(ids: Sequence[int]) -> bool:
    size = len(ids)
    for period in range(1, min(_LONGEST_PERIOD, size // _LEAST_PERIODS) + 1):
        needed = max(_LEAST_PERIODS * period, _LEAST_TOKENS, (size + 1) // 2)
        last = range(size - 1, size - 1 - needed + period, -1)
        if needed <= size and all(ids[place] == ids[place - period] for place in last):
            return True
    return False
