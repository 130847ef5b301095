"""The names that entities have in ALFWorld's texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

_SEPARATOR = "_bar_"
_CHARACTERS = {"_minus_": "-", "_plus_": "+", "_dot_": ".", "_comma_": ","}


def entity_names(entities: Iterable[str]) -> dict[str, str]:
    """Name every entity by its kind and a number, such as "mug 2".

    The kind is what stands before the first separator of the id, and basins are told from the sink
    or tub that they are part of. Numbers fall in the order of the ids, down to 1.

    Args:
        entities: The ids of all entities that any fact of the game mentions.
    """
    ids = sorted(entities)
    kinds = {entity: _kind(entity) for entity in ids if _SEPARATOR in entity}
    left = Counter(kinds.values())
    names = {}
    for entity in ids:
        if entity in kinds:
            names[entity] = f"{kinds[entity]} {left[kinds[entity]]}"
            left[kinds[entity]] -= 1
        else:
            names[entity] = f"{_readable(entity)} "
    return names


def _kind(entity: str) -> str:
    kind = _readable(entity.split(_SEPARATOR, 1)[0])
    return f"{kind}basin" if "basin" in entity else kind


def _readable(text: str) -> str:
    for mangled, character in _CHARACTERS.items():
        text = text.replace(mangled, character)
    return text
