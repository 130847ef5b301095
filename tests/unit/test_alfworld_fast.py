"""The fast engine on a game small enough to know every answer."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.alfworld.fast.compile import CompiledGame
from envs.alfworld.fast.expert import Expert, find_plan
from envs.alfworld.fast.expressions import evaluate
from envs.alfworld.fast.facts import Facts, Join, Types
from envs.alfworld.fast.grammar import Matches, Symbol, Value, parse_grammar, parse_text
from envs.alfworld.fast.names import entity_names
from envs.alfworld.fast.operators import Group, Operator
from envs.alfworld.fast.pddl import Literal, parse_domain, parse_problem
from envs.alfworld.fast.queries import Query
from envs.alfworld.fast.text import TextCompiler, render
from envs.alfworld.shipped_games import build_shipped_game, shipped_splits

# A drawer below a shelf (one place), a sink, a table; the agent starts away from all three.
PROBLEM = """
(define (problem small) (:domain alfred)
 (:objects agent1 - agent
   Drawer_bar_1 Shelf_bar_1 Sink_bar_1_bar_SinkBasin - receptacle
   Mug_bar_1 Mug_bar_2 Tomato_bar_1 Knife_bar_1 DeskLamp_bar_1 - object
   loc_bar_1 loc_bar_2 loc_bar_3 - location
   MugType TomatoType KnifeType ButterKnifeType DeskLampType - otype
   DrawerType ShelfType SinkBasinType MicrowaveType FridgeType - rtype)
 (:init
   (atLocation agent1 loc_bar_3)
   (receptacleAtLocation Drawer_bar_1 loc_bar_1) (receptacleAtLocation Shelf_bar_1 loc_bar_1)
   (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_2)
   (receptacleType Drawer_bar_1 DrawerType) (receptacleType Shelf_bar_1 ShelfType)
   (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
   (openable Drawer_bar_1)
   (objectType Mug_bar_1 MugType) (objectType Mug_bar_2 MugType)
   (objectType Tomato_bar_1 TomatoType) (objectType Knife_bar_1 KnifeType)
   (objectType DeskLamp_bar_1 DeskLampType)
   (pickupable Mug_bar_1) (pickupable Mug_bar_2) (pickupable Tomato_bar_1) (pickupable Knife_bar_1)
   (isReceptacleObject Mug_bar_1) (isReceptacleObject Mug_bar_2)
   (cleanable Knife_bar_1) (cleanable Mug_bar_1) (sliceable Tomato_bar_1)
   (toggleable DeskLamp_bar_1)
   (inReceptacle Mug_bar_1 Drawer_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
   (inReceptacle Mug_bar_2 Shelf_bar_1) (objectAtLocation Mug_bar_2 loc_bar_1)
   (inReceptacle DeskLamp_bar_1 Shelf_bar_1) (objectAtLocation DeskLamp_bar_1 loc_bar_1)
   (inReceptacle Tomato_bar_1 Sink_bar_1_bar_SinkBasin) (objectAtLocation Tomato_bar_1 loc_bar_2)
   (inReceptacle Knife_bar_1 Sink_bar_1_bar_SinkBasin) (objectAtLocation Knife_bar_1 loc_bar_2)
   (canContain DrawerType MugType) (canContain ShelfType MugType)
   (canContain DrawerType KnifeType) (canContain SinkBasinType TomatoType))
 (:goal (exists (?o - object ?r - receptacle)
   (and (objectType ?o MugType) (receptacleType ?r DrawerType) (isClean ?o) (inReceptacle ?o ?r)))))
"""
MOVE = "train/pick_and_place_simple-KeyChain-None-Safe-Bedroom/layout_1/game.tw-pddl"
PUT = MOVE.replace("train/", "train_put/")


class Play:
    """One episode of the small game."""

    def __init__(self, task_id: str = MOVE, problem: str = PROBLEM):
        self.game = CompiledGame({**build_shipped_game(task_id), "pddl_problem": problem})
        self.state = self.game.initial

    def do(self, command: str) -> str | None:
        operator = self.game.operator(self.state, command)
        if operator is None:
            return None
        self.state = operator.apply(self.state)
        return self.game.feedback(operator, self.state)

    def commands(self, *left_out: str) -> list[str]:
        always = {"help", "inventory", "look", *left_out}
        return [command for command in self.game.admissible(self.state) if command not in always]


def test_start_names_receptacles_in_the_order_of_facts():
    play = Play()
    # Facts sort by id: drawer, shelf, sink; the basin is named by its part of the sink.
    assert play.game.intro == (
        "-= Welcome to TextWorld, ALFRED! =-\n\n"
        "You are in the middle of a room. Looking quickly around you, you see a drawer 1,"
        " a shelf 1, and a sinkbasin 1.\n\n"
        "Your task is to: put some keychain on safe."
    )
    assert play.commands() == ["go to drawer 1", "go to shelf 1", "go to sinkbasin 1"]
    # As in the reference, a later look tells only what stands where the agent is.
    assert play.do("look") == (
        "You are in the middle of a room. Looking quickly around you, you see nothing."
    )


def test_going_somewhere_leaves_out_all_that_stands_there():
    play = Play()
    assert play.do("go to drawer 1") == "You arrive at drawer 1. The drawer 1 is closed."
    # Drawer and shelf share the place, so neither can be gone to, and both can be examined.
    assert play.commands() == [
        "examine drawer 1",
        "examine shelf 1",
        "go to sinkbasin 1",
        "open drawer 1",
        "take mug 1 from shelf 1",
        "use desklamp 1",
    ]


def test_names_count_down_in_the_order_of_ids():
    assert entity_names(["Mug_bar_1", "Mug_bar_2", "Sink_bar_7_bar_Sinkbasin", "agent1"]) == {
        "Mug_bar_1": "Mug 2",
        "Mug_bar_2": "Mug 1",
        "Sink_bar_7_bar_Sinkbasin": "Sinkbasin 1",
        "agent1": "agent1 ",
    }


def test_containers_open_close_and_hide_what_they_hold():
    play = Play()
    play.do("go to shelf 1")
    assert play.do("take mug 2 from drawer 1") is None
    assert play.do("open drawer 1") == (
        "You open the drawer 1. The drawer 1 is open. In it, you see a mug 2."
    )
    assert "open drawer 1" not in play.commands()
    assert play.do("take mug 2 from drawer 1") == "You pick up the mug 2 from the drawer 1."
    assert play.do("close drawer 1") == "You close the drawer 1."
    assert "move mug 2 to drawer 1" not in play.commands()
    assert "move mug 2 to shelf 1" in play.commands()


def test_only_the_held_thing_can_be_examined():
    play = Play()
    play.do("go to sinkbasin 1")
    assert not any(c in play.commands() for c in ("examine knife 1", "examine tomato 1"))
    play.do("take knife 1 from sinkbasin 1")
    assert play.do("examine knife 1") == "There's nothing special about knife 1."
    assert play.do("clean knife 1 with sinkbasin 1") == (
        "You clean the knife 1 using the sinkbasin 1."
    )
    assert play.do("examine knife 1") == "This is a clean knife 1."
    assert play.do("slice tomato 1 with knife 1") == "You sliced the tomato 1 with the knife 1."
    assert play.do("inventory") == "You are carrying: a knife 1."


def test_what_left_one_receptacle_for_another_of_its_place_lies_next_to_it():
    play = Play()
    play.do("go to shelf 1")
    assert play.do("look") == (
        "You are facing the drawer 1, and shelf 1. Next to it, you see nothing."
    )
    play.do("open drawer 1")
    play.do("take mug 1 from shelf 1")
    assert play.do("move mug 1 to drawer 1") == "You move the mug 1 to the drawer 1."
    # It is at the place and not in the shelf: the grammar asks no more than that.
    assert play.do("look") == (
        "You are facing the drawer 1, and shelf 1. Next to it, you see a mug 1."
    )
    play.do("take mug 1 from drawer 1")
    play.do("move mug 1 to shelf 1")
    # Not in the drawer any more, so it still lies next to it.
    assert play.do("look") == (
        "You are facing the drawer 1, and shelf 1. Next to it, you see a mug 1."
    )


def test_older_verbs_put_and_arrive_at_numbered_places():
    play = Play(PUT)
    # loc_bar_1 is the first of three ids, so it counts down from 3.
    assert play.do("go to shelf 1") == (
        "You arrive at loc 3. On the shelf 1, you see a desklamp 1, and a mug 1."
    )
    play.do("take mug 1 from shelf 1")
    assert play.do("put mug 1 in/on shelf 1") == "You put the mug 1 in/on the shelf 1."
    assert play.do("help") is None


def test_lamps_toggle_and_stay_toggled():
    play = Play()
    play.do("go to shelf 1")
    assert play.do("use desklamp 1") == "You turn on the desklamp 1."
    # Texts ask whether it was ever toggled, so the second use reads like the first.
    assert play.do("use desklamp 1") == "You turn on the desklamp 1."


def test_goal_needs_a_clean_mug_and_the_plan_is_shortest():
    play = Play()
    # mug_bar_1 (named mug 2) is the only cleanable mug. It lies in the closed drawer:
    # go, open, take, go, clean, go, move = 7 commands.
    plan = find_plan(play.game, play.state)
    assert plan == [
        "go to drawer 1",
        "open drawer 1",
        "take mug 2 from drawer 1",
        "go to sinkbasin 1",
        "clean mug 2 with sinkbasin 1",
        "go to drawer 1",
        "move mug 2 to drawer 1",
    ]
    for command in plan:
        assert not play.game.is_won(play.state)
        assert play.do(command) is not None
    assert play.game.is_won(play.state)


def test_expert_frees_its_hands_first():
    play = Play()
    expert = Expert(play.game)
    played = ["go to sinkbasin 1", "take knife 1 from sinkbasin 1", "dance"]
    for command in played:
        play.do(command)
    while not play.game.is_won(play.state):
        played.append(expert.next_command(played))
        play.do(played[-1])
    # The knife fits the drawer alone: go, open, move, take, go, clean, go, move.
    assert len(played) == 3 + 8
    with pytest.raises(RuntimeError, match="the goal holds already"):
        expert.next_command(played)


def test_expert_says_when_the_goal_is_out_of_reach():
    play = Play(problem=PROBLEM.replace("(cleanable Mug_bar_1)", ""))
    with pytest.raises(RuntimeError, match="out of reach"):
        Expert(play.game).next_command([])


def test_a_thing_that_nothing_can_hold_is_a_dead_end():
    play = Play(problem=PROBLEM.replace("(canContain DrawerType KnifeType)", ""))
    played = ["go to sinkbasin 1", "take knife 1 from sinkbasin 1"]
    assert find_plan(play.game, play.state)
    with pytest.raises(RuntimeError, match="out of reach"):
        Expert(play.game).next_command(played)


def test_episodes_share_nothing_but_the_game():
    one, two = Play(), Play()
    two.game = one.game
    one.do("go to shelf 1")
    assert two.state == two.game.initial
    assert two.commands() == ["go to drawer 1", "go to shelf 1", "go to sinkbasin 1"]


class Halfway:
    """Holds up the first thread that comes by, until it may go on."""

    def __init__(self):
        self.reached, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.go_on.wait(20)

    def meanwhile(self, first: Callable[[], Any], second: Callable[[], Any]) -> list:
        """What both return, the second called while the first is held up."""
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(first)
            assert self.reached.wait(20)
            other = threads.submit(second)
            time.sleep(0.05)  # a second one that need not wait is done by now
            self.go_on.set()
            return [one.result(20), other.result(20)]


def holding_a_mug(*then: str) -> Play:
    play = Play()
    for command in ("go to drawer 1", "open drawer 1", "take mug 2 from drawer 1", *then):
        assert play.do(command)
    return play


def test_a_thread_waits_for_what_another_is_grounding():
    here, there = holding_a_mug(), holding_a_mug("go to sinkbasin 1")
    expected = [play.commands() for play in (here, there)]
    halfway = Halfway()

    class Groups(dict):
        def __setitem__(self, key, group) -> None:
            super().__setitem__(key, group)
            if key[1] is not None:  # what a held thing allows, place by place
                halfway()

    shared = Play().game
    shared._groups = Groups()
    assert expected == halfway.meanwhile(
        lambda: [c for c in shared.admissible(here.state) if c in expected[0]],
        lambda: [c for c in shared.admissible(there.state) if c in expected[1]],
    )


def test_a_thread_never_reads_half_a_table_of_commands():
    play = Play()
    play.do("go to drawer 1")
    first, *_, last = play.commands()
    groups = play.game.scene(play.state).groups
    (group,) = [g for g in groups if g.find(play.state, first)]
    expected = [group.find(play.state, command) for command in (first, last)]
    halfway = Halfway()

    class Operators(list):
        def __reversed__(self):
            for operator in super().__reversed__():
                yield operator
                halfway()

    new = Group(Operators(group.operators))

    def found() -> list[Operator | None]:
        return [new.find(play.state, command) for command in (first, last)]

    assert None not in expected
    assert halfway.meanwhile(found, found) == [expected, expected]


DOMAIN = """(define (domain d) (:types big - object small - big)
 (:predicates (p ?x) (q ?x))
 (:action Act ; a comment (with parentheses
  :parameters (?x - small)
  :precondition (and (p ?x) (or (q ?x) (exists (?y - big) (not (p ?y)))))
  :effect (and (q ?x) (when (p ?x) (not (p ?x))) (increase (total-cost) 1))))"""


def test_conditions_become_disjunctions_of_conjunctions():
    action = parse_domain(DOMAIN).actions["act"]
    assert action.parameters == (("?x", "small"),)
    first, second = action.precondition
    p, q = Literal(True, "p", ("?x",)), Literal(True, "q", ("?x",))
    assert first.literals == (p, q)
    ((renamed, kind),) = second.types
    assert kind == "big"
    assert renamed.startswith("?y")
    assert renamed != "?y"
    assert second.literals == (p, Literal(False, "p", (renamed,)))
    assert [effect.literal for effect in action.effects] == [q, p._replace(positive=False)]
    assert action.effects[1].condition[0].literals == (p,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(define (domain d)", "1 not closed"),
        ("(domain d)", "must start with"),
        (DOMAIN.replace("exists", "forall"), "'forall' are not supported"),
        (DOMAIN.replace("(q ?x) (exists", "(q (p ?x)) (exists"), "expected a PDDL atom"),
    ],
)
def test_broken_domains_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_domain(text)


def test_problem_keeps_types_and_leaves_numbers_out():
    problem = parse_problem(
        "(define (problem p) (:domain d) (:objects a B - small c)"
        " (:init (= (total-cost) 0) (p a) (q b c)) (:goal (and (p c))))"
    )
    assert problem.types == {"a": "small", "b": "small", "c": "object"}
    assert problem.init == (("p", ("a",)), ("q", ("b", "c")))


ENTITIES = {"a": "x", "b": "x", "c": "y"}
VARIABLES = ("?1", "?2", "?3")
facts = st.sets(
    st.one_of(
        st.tuples(st.just("p"), st.tuples(st.sampled_from("abc"))),
        st.tuples(st.just("r"), st.tuples(st.sampled_from("abc"), st.sampled_from("abc"))),
    )
)
terms = st.sampled_from([*VARIABLES, "a", "c"])
literals = st.one_of(
    st.builds(Literal, st.booleans(), st.just("p"), st.tuples(terms)),
    st.builds(
        Literal,
        st.booleans(),
        st.sampled_from(["r", "="]),
        st.tuples(terms, terms).filter(lambda pair: pair[0] != pair[1]),
    ),
)


@settings(max_examples=300, deadline=None)
@given(facts, st.lists(literals, max_size=4), st.sampled_from(["x", "y", "object"]), st.booleans())
def test_join_equals_trying_everything(known, conjunction, kind, is_given):
    kinds = {"?1": kind, "?2": "object", "?3": "x"}
    join_given = ("?2",) if is_given else ()
    join = Join(conjunction, kinds, join_given, Facts(known), Types(ENTITIES, {}))
    pick = join.picker(VARIABLES)
    found = [pick(row) for value in ("a", "b", "c") for row in join.run((value,) * is_given)]
    found = found if is_given else found[: len(found) // 3]

    def holds(literal, binding):
        args = tuple(binding.get(arg, arg) for arg in literal.args)
        truth = (
            args[0] == args[1] if literal.predicate == "=" else (literal.predicate, args) in known
        )
        return truth == literal.positive

    expected = {
        values
        for values in itertools.product("abc", repeat=3)
        if all(
            kinds[variable] in ("object", ENTITIES[value])
            for variable, value in zip(VARIABLES, values, strict=True)
        )
        and all(holds(lit, dict(zip(VARIABLES, values, strict=True))) for lit in conjunction)
    }
    assert set(found) == expected
    assert len(found) == len(expected)


def test_query_matches_are_sorted_and_never_reuse_an_entity():
    known = Facts([("r", ("b", "a")), ("r", ("a", "c")), ("r", ("a", "b")), ("r", ("c", "c"))])
    bits = {"r": {("a", "b"): 0, ("a", "c"): 1, ("b", "a"): 2}}
    types = Types(ENTITIES, {})
    query = Query("r(m:object, n:object) & r(k:object, m:object)", (), known, types, bits)
    # (m, n) then k: r(a,c) with r(b,a) gives k = b; r(b,a) with r(a,b) would give k = a = n, and
    # r(a,b) with r(b,a) would give k = b = n.
    assert query.new == [("m", "object"), ("n", "object"), ("k", "object")]
    assert query.matches({}) == [(0b110, ("a", "c", "b"))]
    context = {("z", "x"): "b"}
    query = Query("r(m:object, n:object)", tuple(context), known, types, bits)
    assert query.matches(context) == [(0b10, ("a", "c"))]


def test_query_matches_come_in_the_order_of_the_first_atom():
    known = Facts(
        [("r", ("a", "c")), ("r", ("b", "a")), ("r", ("c", "b")), ("p", ("a",)), ("p", ("c",))]
    )
    query = Query("r(m:object, n:object) & p(n:object)", (), known, Types(ENTITIES, {}), {})
    # p has fewer facts, so a join by p would find n = a before n = c.
    assert query.matches({}) == [(0, ("a", "c")), (0, ("b", "a"))]


def test_texts_remember_what_they_depend_on():
    grammar = parse_grammar(
        'grammar :: """{"list_separator": [{"rhs": ", "}], "list_empty": [{"rhs": "none"}],'
        ' "list_last_separator": [{"rhs": ", and "}]}""";'
    )
    known = Facts([("p", ("a",)), ("p", ("b",)), ("p", ("c",))])
    names, bits = {"a": "A", "b": "B", "c": "C"}, {"p": {("a",): 0, ("b",): 1, ("c",): 2}}
    texts = TextCompiler(grammar, known, bits, Types(ENTITIES, {}), names)
    listing = "[{m.name | p(m:object)}]"
    assert render(texts.compile(listing, {}), 0b111) == "A, B, and C"
    # A placeholder that the text does not name still keeps its entity out of the list.
    assert render(texts.compile(listing, {("z", "y"): "c"}), 0b111) == "A, and B"
    assert render(texts.compile(listing, {("z", "y"): "c"}), 0b101) == "A"
    assert render(texts.compile(listing, {("m", "object"): "b"}), 0b101) == "none"


def test_texts_split_into_their_parts():
    assert parse_text("\n a {o.name} [{#b(r)# | p(r:x)}] #c#.\\n") == (
        "a ",
        Matches(Value("o.name"), "", False),
        " ",
        Matches(Symbol("b(r)"), "p(r:x)", True),
        " ",
        Symbol("c"),
        ".\n",
    )
    # The reference stops at a character without meaning; ALFWorld's grammar has one such rule.
    assert parse_text("{o.name})} lost") == (Matches(Value("o.name"), "", False), ")")


def test_grammar_reads_actions_and_blocks():
    grammar = parse_grammar(
        '# comment "\ngrammar :: """{"a": [{"condition": "p(x)", "rhs": "A"}, {"rhs": "B"}]}""";\n'
        'action Go { template :: "go {r}"; feedback :: "#a#";\n'
        ' grammar :: """\n  {"b": [{"rhs": "C"}]}\n """; }'
    )
    assert grammar.commands == {"go": ("go {r}", "#a#")}
    assert grammar.rules == {"a": (("p(x)", "A"), ("", "B")), "b": (("", "C"),)}
    with pytest.raises(ValueError, match=r"cannot read the \.twl2 text"):
        parse_grammar("action Go ?")


def test_expressions_read_names_and_refuse_code():
    entities, names = {"o": "mug_bar_1"}, {"mug_bar_1": "mug 1"}
    assert evaluate("o.indefinite + ' ' + o.name", entities, names) == "a mug 1"
    assert evaluate("o.name or o.id", entities, names) == "mug 1"
    assert evaluate("o", entities, names) == "mug 1"
    with pytest.raises(ValueError, match="is not supported"):
        evaluate("__import__('os')", entities, names)


def test_unknown_symbols_are_named():
    data = build_shipped_game(shipped_splits()["train"][0])
    data["grammar"] = data["grammar"].replace('"list_empty": [', '"list_nothing": [')
    with pytest.raises(ValueError, match="no rule for 'list_empty'"):
        CompiledGame({**data, "pddl_problem": PROBLEM})
