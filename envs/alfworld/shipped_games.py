"""The games that come with this package: small homes written for it, in ALFWorld's game format.

`shipped/rooms.json` describes five rooms, what each receptacle may hold and the tasks played there;
`shipped/domain.pddl` and `shipped/grammar.twl2` are the rules and the texts. A game id names its
room, task and layout number, and the layout (which object starts where) is a hash of that id, so an
id means the same game on every machine and no game file needs to be stored.

An id has the form of a real game's path: `<split>/<task>-<object>-None-<target>-<room>/layout_<n>`
followed by `/game.tw-pddl`. Splits whose name ends in `_put` hold the same games in the older verb
generation ("put X in/on Y" in place of "move X to Y").
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from string import Template
from typing import Any

_FOLDER = files("envs.alfworld") / "shipped"
_HELP = "\n (:action help :parameters (?a - agent) :precondition () :effect (checked ?a))"
_VERBS = {
    "": {
        "verb_actions": _HELP,
        "arrive": "r",
        "put_command": "move {o} to {r}",
        "put_feedback": "move the {o.name} to the {r.name}",
    },
    "_put": {
        "verb_actions": "",
        "arrive": "lend",
        "put_command": "put {o} in/on {r}",
        "put_feedback": "put the {o.name} in/on the {r.name}",
    },
}
_GOAL_SENTENCES = {
    "pick_and_place_simple": "put some {o} on {r}",
    "look_at_obj_in_light": "look at {o} under the {r}",
    "pick_clean_then_place_in_recep": "put a clean {o} in {r}",
    "pick_heat_then_place_in_recep": "put a hot {o} in {r}",
    "pick_cool_then_place_in_recep": "put a cool {o} in {r}",
    "pick_two_obj_and_place": "put two {o} in {r}",
}
_CHANGES = {
    "pick_clean_then_place_in_recep": "(cleanable ?o) (isClean ?o)",
    "pick_heat_then_place_in_recep": "(heatable ?o) (isHot ?o)",
    "pick_cool_then_place_in_recep": "(coolable ?o) (isCool ?o)",
}
# Receptacles whose ids carry the part that the name of the whole leaves out.
_PART_OF = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}


@cache
def _rooms() -> dict[str, Any]:
    return json.loads((_FOLDER / "rooms.json").read_text())


@cache
def shipped_splits() -> dict[str, tuple[str, ...]]:
    """Return the ids of all shipped games, sorted, by split."""
    rooms = _rooms()["rooms"]
    splits: dict[str, tuple[str, ...]] = {}
    for name, split in _rooms()["splits"].items():
        games = sorted(
            f"{task}-{obj}-None-{target}-{room}/layout_{layout}/game.tw-pddl"
            for room in split["rooms"]
            for task, obj, target in rooms[room]["tasks"]
            for layout in split["layouts"]
        )
        for suffix in _VERBS:
            splits[name + suffix] = tuple(f"{name}{suffix}/{game}" for game in games)
    return splits


def build_shipped_game(task_id: str) -> dict[str, str]:
    """Return the game data (`pddl_domain`, `grammar`, `pddl_problem`) of a shipped game.

    Args:
        task_id: An id listed by `shipped_splits()`.
    """
    split, folder, layout, _ = task_id.split("/")
    task, obj, _, target, room = folder.split("-")
    words = dict(_VERBS["_put" if split.endswith("_put") else ""])
    words["goal"] = _GOAL_SENTENCES[task].format(o=obj.lower(), r=target.lower())
    return {
        "pddl_domain": _fill("domain.pddl", words),
        "grammar": _fill("grammar.twl2", words),
        "pddl_problem": _problem(task, obj, target, room, layout),
    }


def _fill(name: str, words: dict[str, str]) -> str:
    return Template((_FOLDER / name).read_text()).substitute(words)


def _problem(task: str, obj: str, target: str, room: str, layout: str) -> str:
    rules, here = _rooms(), _rooms()["rooms"][room]
    places = [f"loc_bar_{number:02}" for number in range(1, len(here["places"]) + 1)]
    facts: list[str] = []
    receptacles: dict[str, tuple[str, str]] = {}  # id -> (type, location)
    for place, kinds in zip(places, here["places"], strict=True):
        for kind in kinds:
            number = sum(other == kind for other, _ in receptacles.values()) + 1
            whole = _PART_OF.get(kind, kind)
            name = f"{whole}_bar_{number:02}" + (f"_bar_{kind}" if whole != kind else "")
            receptacles[name] = (kind, place)
            facts += [f"receptacleType {name} {kind}Type", f"receptacleAtLocation {name} {place}"]
            facts += [f"openable {name}"] if kind in rules["openable"] else []
    objects: dict[str, str] = {}
    for kind, copies in here["objects"].items():
        for number in range(1, copies + 1):
            name = f"{kind}_bar_{number:02}"
            objects[name] = kind
            choices = [
                receptacle
                for receptacle, (rtype, _) in receptacles.items()
                if kind in rules["contains"][rtype] and not (kind == obj and rtype == target)
            ]
            home = choices[_draw(f"{room} {task} {obj} {target} {layout} {name}", len(choices))]
            facts += [f"objectType {name} {kind}Type", f"inReceptacle {name} {home}"]
            facts += [f"objectAtLocation {name} {receptacles[home][1]}"]
            facts += [] if kind in rules["toggleable"] else [f"pickupable {name}"]
            for trait in _TRAITS:
                facts += [f"{trait} {name}"] if kind in rules[trait] else []
    for kind in here["fixed"]:
        objects[f"{kind}_bar_01"] = kind
        facts += [
            f"objectType {kind}_bar_01 {kind}Type",
            f"objectAtLocation {kind}_bar_01 {places[0]}",
        ]
    facts += [
        f"canContain {rtype}Type {otype}Type"
        for rtype in sorted({rtype for rtype, _ in receptacles.values()})
        for otype in rules["contains"][rtype]
    ]
    facts.append(f"atLocation agent1 {places[-1]}")
    # Rules name these types outright, so every problem declares them.
    otypes = sorted({"Knife", "ButterKnife", *objects.values(), *_all_object_kinds()})
    rtypes = sorted({"SinkBasin", "Microwave", "Fridge", *rules["contains"]})
    declared = [
        *((name, "object") for name in objects),
        *((name, "receptacle") for name in receptacles),
        *((name, "location") for name in places),
        *((f"{kind}Type", "otype") for kind in otypes),
        *((f"{kind}Type", "rtype") for kind in rtypes),
    ]
    return "\n".join(
        [
            f"(define (problem {room}_{task}_{layout})",
            "(:domain alfred)",
            "(:objects agent1 - agent",
            *(f"  {name} - {kind}" for name, kind in declared),
            ")",
            "(:init",
            *(f"  ({fact})" for fact in facts),
            ")",
            f"(:goal {_goal(task, obj, target)})",
            ")",
        ]
    )


_TRAITS = (
    "cleanable",
    "heatable",
    "coolable",
    "sliceable",
    "toggleable",
    "isReceptacleObject",
)


@cache
def _all_object_kinds() -> frozenset[str]:
    return frozenset(kind for kinds in _rooms()["contains"].values() for kind in kinds)


def _draw(key: str, choices: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % choices


def _goal(task: str, obj: str, target: str) -> str:
    if task == "look_at_obj_in_light":
        return (
            "(and (exists (?lamp - object ?r - receptacle ?a - agent ?l - location)"
            f" (and (objectType ?lamp {target}Type) (toggleable ?lamp) (isToggled ?lamp)"
            " (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?lamp ?r)))"
            " (exists (?o - object ?a - agent)"
            f" (and (objectType ?o {obj}Type) (holds ?a ?o))))"
        )
    if task == "pick_two_obj_and_place":
        return (
            "(exists (?r - receptacle ?o1 - object ?o2 - object)"
            f" (and (not (= ?o1 ?o2)) (receptacleType ?r {target}Type)"
            f" (objectType ?o1 {obj}Type) (objectType ?o2 {obj}Type)"
            " (inReceptacle ?o1 ?r) (inReceptacle ?o2 ?r)))"
        )
    return (
        f"(exists (?r - receptacle ?o - object) (and (objectType ?o {obj}Type)"
        f" (receptacleType ?r {target}Type) {_CHANGES.get(task, '')} (inReceptacle ?o ?r)))"
    )
