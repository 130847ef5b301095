"""Draws that depend on content alone, so they agree between processes, machines and versions."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


def stable_hash(text: str) -> int:
    """Return the same integer in [0, 2**64) for the same text everywhere.

    Lone surrogates, which a language model's output may hold, are hashed like any character.
    """
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def stable_unit(text: str) -> float:
    """Return the same number in [0, 1) for the same text everywhere."""
    # 53 bits are what a float holds exactly: 64 could round up to 1.
    return (stable_hash(text) >> 11) / 2**53


def stable_choice(items: Sequence[T], key: str) -> T:
    """Draw one item by `key`."""
    return items[stable_hash(key) % len(items)]


def stable_sample(items: Sequence[T], count: int, key: str) -> list[T]:
    """Draw `count` distinct positions by `key`; the items come in a drawn order."""
    order = sorted(range(len(items)), key=lambda i: stable_hash(f"{key}/{i}"))
    return [items[i] for i in order[:count]]
