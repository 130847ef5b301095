"""A small invented world to ask about: people, towns, rivers and works, and nothing real.

Every name is invented, so no model can answer from memory and each answer has to be searched
for. The world is a function of its sizes and seed alone. Only `random.Random.random` is drawn
from: Python promises the same stream for it in every version, which it does not for `choice`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

from envs.search.passages import Passage
from envs.search.rows import Question

T = TypeVar("T")

_NAMES: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("world_names.json").read_text(encoding="utf-8")
)
_KINDS = (
    ("novel", "wrote", "author"),
    ("opera", "composed", "composer"),
    ("portrait", "painted", "painter"),
    ("stage play", "wrote", "playwright"),
    ("statue", "carved", "sculptor"),
)


class World(NamedTuple):
    """What can be searched, and what is asked about it."""

    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]


class _River(NamedTuple):
    name: str
    mountain: str
    length: int
    outlet: str


class _Town(NamedTuple):
    name: str
    river: _River
    founded: int
    product: str


class _Person(NamedTuple):
    name: str
    profession: str
    town: _Town
    born: int
    teacher: str | None
    later_town: str


class _Work(NamedTuple):
    title: str
    kind: tuple[str, str, str]
    maker: _Person
    year: int
    setting: str


@lru_cache(maxsize=1)
def generated_world() -> World:
    """Return the world of the default sizes, built once per process."""
    return generate_world()


def generate_world(
    *, seed: int = 0, rivers: int = 24, towns: int = 60, people: int = 150, works: int = 150
) -> World:
    """Invent a world: one passage per thing, one-hop and two-hop questions about all of them.

    Args:
        seed: Seed of the world.
        rivers: Number of rivers, at most 24.
        towns: Number of towns, at most 128.
        people: Number of people, at most 3,900.
        works: Number of works, at most 256.

    Returns:
        Passages, and questions whose `data_source` is `"one_hop"` or `"two_hop"` and whose
        `supporting_titles` name the passages in the order they are needed.

    Raises:
        ValueError: A size is below one or above the number of distinct names.
    """
    rng = random.Random(seed)
    river_list = [
        _River(
            name=f"River {name}",
            mountain=f"Mount {mountain}",
            length=40 + int(rng.random() * 860),
            outlet=_choose(rng, _NAMES["outlets"]),
        )
        for name, mountain in zip(
            _distinct(rng, _joined("river"), rivers),
            _distinct(rng, _NAMES["mountains"], rivers),
            strict=True,
        )
    ]
    town_list = [
        _Town(
            name=name,
            river=_choose(rng, river_list),
            founded=1050 + int(rng.random() * 600),
            product=_choose(rng, _NAMES["products"]),
        )
        for name in _distinct(rng, _joined("town"), towns)
    ]
    person_list = _people(rng, town_list, people)
    titles = _distinct(rng, [f"The {title}" for title in _joined("title", " ")], works)
    work_list = []
    for title in titles:
        maker = _choose(rng, person_list)
        year = maker.born + 20 + int(rng.random() * 45)
        setting = _choose(rng, town_list).name
        work_list.append(_Work(title, _choose(rng, _KINDS), maker, year, setting))
    pages = [
        *((thing.name, _river_text(thing)) for thing in river_list),
        *((thing.name, _town_text(thing)) for thing in town_list),
        *((thing.name, _person_text(thing)) for thing in person_list),
        *((thing.title, _work_text(thing)) for thing in work_list),
    ]
    return World(
        passages=tuple(Passage(str(i), title, text) for i, (title, text) in enumerate(pages)),
        questions=tuple(_questions(river_list, town_list, person_list, work_list)),
    )


def _joined(kind: str, separator: str = "") -> list[str]:
    heads, tails = _NAMES[f"{kind}_heads"], _NAMES[f"{kind}_tails"]
    return [f"{head}{separator}{tail}" for tail in tails for head in heads]


def _choose(rng: random.Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _distinct(rng: random.Random, names: Sequence[str], count: int) -> list[str]:
    """Return `count` of the names in random order (Fisher-Yates)."""
    if not 1 <= count <= len(names):
        raise ValueError(f"asked for {count} names such as {names[0]!r}; 1 to {len(names)} exist")
    pool = list(names)
    for i in range(count):
        j = i + int(rng.random() * (len(pool) - i))
        pool[i], pool[j] = pool[j], pool[i]
    return pool[:count]


def _people(rng: random.Random, towns: Sequence[_Town], count: int) -> list[_Person]:
    full_names = [f"{g} {s}" for g in _NAMES["given_names"] for s in _joined("surname")]
    names = _distinct(rng, full_names, count)
    people: list[_Person] = []
    for i, name in enumerate(names):
        # Born in order of the list, so that a teacher is never younger than the pupil.
        elders = people[max(0, i - 40) : max(0, i - 8)]
        people.append(
            _Person(
                name=name,
                profession=_choose(rng, _NAMES["professions"]),
                town=_choose(rng, towns),
                born=1690 + 200 * i // count + int(rng.random() * 3),
                teacher=_choose(rng, elders).name if elders else None,
                later_town=_choose(rng, towns).name,
            )
        )
    return people


def _river_text(river: _River) -> str:
    return (
        f"The {river.name} rises on {river.mountain} and runs for {river.length} kilometres until "
        f"it flows into {river.outlet}. Its lower course is open to barges from April to October."
    )


def _town_text(town: _Town) -> str:
    return (
        f"{town.name} is a market town on the banks of the {town.river.name}. It was founded in "
        f"{town.founded} and is known far beyond its walls for its {town.product}."
    )


def _person_text(person: _Person) -> str:
    training = (
        f"was a pupil of {person.teacher}" if person.teacher else "had no formal teacher at all"
    )
    article = "an" if person.profession[0] in "aeiou" else "a"
    return (
        f"{person.name} was {article} {person.profession}, born in {person.town.name} in "
        f"{person.born}. {person.name.split()[1]} {training} and settled in {person.later_town} "
        "later in life."
    )


def _work_text(work: _Work) -> str:
    kind, verb, _ = work.kind
    return (
        f"{work.title} is a {kind} that {work.maker.name} {verb} in {work.year}. The {kind} takes "
        f"its subject from a legend told in {work.setting}."
    )


def _accepted(answer: str) -> tuple[str, ...]:
    """Accept a river or a mountain with and without the word that says what it is."""
    kind, _, name = answer.partition(" ")
    return (answer, name) if kind in {"River", "Mount"} else (answer,)


def _questions(
    rivers: Sequence[_River],
    towns: Sequence[_Town],
    people: Sequence[_Person],
    works: Sequence[_Work],
) -> Iterator[Question]:
    person_by_name = {person.name: person for person in people}
    number = 0

    def ask(text: str, answer: object, *titles: str) -> Question:
        nonlocal number
        number += 1
        source = ("one_hop", "two_hop")[len(titles) - 1]
        return Question(text, _accepted(str(answer)), str(number), source, titles)

    for river in rivers:
        name = river.name
        yield ask(f"On which mountain does the {name} rise?", river.mountain, name)
        yield ask(f"How many kilometres long is the {name}?", river.length, name)
        yield ask(f"Into which water does the {name} flow?", river.outlet, name)
    for town in towns:
        name, river = town.name, town.river
        yield ask(f"Which river does {name} lie on?", river.name, name)
        yield ask(f"In which year was {name} founded?", town.founded, name)
        yield ask(f"What is the town of {name} known for?", town.product, name)
        yield ask(
            f"Into which water does the river that {name} lies on flow?",
            river.outlet,
            name,
            river.name,
        )
    for person in people:
        name, town = person.name, person.town
        yield ask(f"In which town was {name} born?", town.name, name)
        yield ask(f"In which year was {name} born?", person.born, name)
        yield ask(f"What was the profession of {name}?", person.profession, name)
        river_name = town.river.name
        yield ask(f"Which river does the birth town of {name} lie on?", river_name, name, town.name)
        yield ask(f"What is the birth town of {name} known for?", town.product, name, town.name)
        if person.teacher:
            teacher = person_by_name[person.teacher]
            yield ask(
                f"In which town was the teacher of {name} born?",
                teacher.town.name,
                name,
                teacher.name,
            )
    for work in works:
        title, maker, (kind, verb, role) = work.title, work.maker, work.kind
        yield ask(f"Who {verb} the {kind} {title}?", maker.name, title)
        yield ask(f"In which year was the {kind} {title} finished?", work.year, title)
        who = f"the {role} of the {kind} {title}"
        yield ask(f"In which town was {who} born?", maker.town.name, title, maker.name)
        yield ask(f"In which year was {who} born?", maker.born, title, maker.name)
