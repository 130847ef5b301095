"""Every random draw of a run is a function of where it happens, never of what ran before.

That alone makes episodes equal for any number of runners, restores exact, and retries safe.
"""

import hashlib

_STREAMS = ("task", "response", "minibatch", "evaluation", "dropout")
_EVALUATION_BIT = 1 << 30


def derive_seed(seed: int, stream: str, *position: int) -> int:
    """Return the seed of one draw.

    Args:
        seed: The run's root seed.
        stream: What the draw is for: "task", "response", "minibatch", "evaluation" or "dropout".
        *position: Where the draw happens, such as (iteration, group, member, step).

    Returns:
        An integer in [0, 2**31), which environments, NumPy, torch and engines all accept. Those of
        "task" lie in the lower half and those of "evaluation" in the upper one, so that the two
        never meet, and either, taken modulo n, reaches each of n tasks.

    Raises:
        ValueError: Unknown stream.
    """
    if stream not in _STREAMS:
        raise ValueError(f"unknown seed stream {stream!r}: expected one of {_STREAMS}")
    text = ":".join((stream, str(seed), *map(str, position)))
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 33
    if stream == "task":
        return number & ~_EVALUATION_BIT
    if stream == "evaluation":
        return number | _EVALUATION_BIT
    return number
