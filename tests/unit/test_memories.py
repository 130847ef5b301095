"""Key events, running summaries, passages, skills, and several of them within a prompt's limit."""

import copy
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_gigpo.agent import (
    Action,
    AgentProfile,
    ChatTemplate,
    Joined,
    KeyEvents,
    Knowledge,
    LastSteps,
    NoMemory,
    Passages,
    PromptContext,
    RunningSummary,
    Skill,
    Skills,
    SummaryParser,
    TagParser,
)
from rllib_gigpo.encoding import PromptEncoder, PromptTooLongError
from rllib_gigpo.games import Game
from rllib_gigpo.scripted import play_episode
from tests.fakes import ByteTokenizer, Countdown
from tests.stage import Stage, task

# Key events --------------------------------------------------------------------------------------


def test_events_of_the_environment_stay_with_their_steps():
    memory = KeyEvents()
    for event in (None, "key found", None, "key found", "door open"):
        memory.add("room", "go", {} if event is None else {"event": event})
    # The second "key found", at step 4, is known already.
    assert memory.render() == ("Key events:\n- step 2: key found\n- step 5: door open", 2)
    assert memory.render(1) == ("Key events:\n- step 5: door open", 1)
    assert memory.render(2) == memory.render(7) == ("", 0)


def test_events_of_ones_own_see_observation_action_and_answer():
    memory = KeyEvents(lambda seen, done, info: f"{seen}/{done}" if info.get("won") else None)
    memory.add("a", "b", {"won": False})
    memory.add("c", "d", {"won": True})
    assert memory.render() == ("Key events:\n- step 2: c/d", 1)


def test_the_oldest_event_gives_way_beyond_the_limit():
    memory = KeyEvents(limit=2)
    for number in range(5):
        memory.add("", "", {"event": f"e{number}"})
    assert memory.render()[0] == "Key events:\n- step 4: e3\n- step 5: e4"


# Summaries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "action"),
    [
        (
            "<think>t</think><summary> two\n mugs </summary><action>look</action>",
            Action("look", True, "two mugs"),
        ),
        ("<action>look</action>", Action("look", True, "")),
        # An action inside the summary is no action; of two summaries the last counts.
        (
            "<summary>a</summary><summary><action>eat</action></summary><action>look</action>",
            Action("look", True, "<action>eat</action>"),
        ),
        ("<summary>open <summary>closed</summary>", Action("<summary>open", False, "closed")),
        ("<summary>never closed <action>look</action>", Action("look", True, "")),
        ("<summary>s</summary>", Action("", False, "s")),
    ],
)
def test_a_summary_is_taken_out_of_the_response(response, action):
    assert SummaryParser()(response) == action


def test_a_required_summary_that_lacks_makes_the_step_invalid():
    parser = SummaryParser(TagParser(), is_required=True)
    assert parser("<action>look</action>") == Action("look", False)
    assert parser("<summary> </summary><action>look</action>") == Action("look", False)
    assert parser("<summary>s</summary><action>look</action>") == Action("look", True, "s")


@given(st.lists(st.sampled_from(["<summary>", "</summary>", "<action>", "</action>", "x", "\n"])))
def test_no_response_breaks_the_summary_parser(pieces):
    action = SummaryParser()("".join(pieces))
    assert "</summary>" not in action.note
    assert "<summary>" not in action.note


def test_the_latest_summary_is_shown_and_stays():
    memory = RunningSummary(max_chars=6)
    assert memory.render() == ("", 0)
    memory.add("", "", {"note": "first"})
    memory.add("", "", {})
    assert memory.render() == ("Your summary so far: first", 1)
    memory.add("", "", {"note": "a longer one"})
    assert memory.render() == ("Your summary so far: a long", 1)
    assert memory.render(1) == ("", 0)


# Passages ----------------------------------------------------------------------------------------


def test_scores_are_those_of_bm25():
    passages = Passages(["red mug", "red red car park", "green"], k1=1.0, b=0.5)
    # N = 3, mean length (2 + 4 + 1) / 3 = 7/3. "red" stands in n = 2: idf = ln(1 + 1.5 / 2.5).
    # Text 1: tf 1, length 2: 1 * 2 / (1 + 1 * (0.5 + 0.5 * 2 * 3/7)) = 2 / (1.5 + 3/7).
    # Text 2: tf 2, length 4: 2 * 2 / (2 + 0.5 + 0.5 * 4 * 3/7) = 4 / (2.5 + 6/7).
    idf = math.log(1.6)
    weights = dict(passages._weights["red"])
    assert weights == pytest.approx(
        {0: idf * 2 / (1.5 + 3 / 7), 1: idf * 4 / (2.5 + 6 / 7)}, rel=1e-12
    )
    # 0.4874 and 0.5600: the second text is first.
    assert passages.search("RED!", 5) == ["red red car park", "red mug"]
    assert passages.search("red mug", 1) == ["red mug"]
    assert passages.search("blue", 5) == []


def test_equal_passages_keep_their_order():
    passages = Passages(["mug one", "mug two", "mug six"])
    assert passages.search("mug", 2) == ["mug one", "mug two"]


def test_an_index_is_shared_by_the_episodes_and_pickles():
    memory = Knowledge(Passages(["mug one"]))
    assert copy.deepcopy(memory).passages is memory.passages
    assert pickle.loads(pickle.dumps(memory)).passages.search("mug", 1) == ["mug one"]


def test_knowledge_follows_the_observation():
    memory = Knowledge(Passages(["mugs are cups", "cars drive", "cups and mugs and mugs"]), k=2)
    memory.look("find cars", "two mugs")
    assert memory.render() == (
        "What is known of this:\n[1] cups and mugs and mugs\n[2] mugs are cups",
        2,
    )
    assert memory.render(1) == ("What is known of this:\n[1] cups and mugs and mugs", 1)
    assert memory.render(2) == ("", 0)
    memory.look("find cars", "nothing")
    assert memory.render() == ("", 0)


def test_knowledge_may_follow_the_task_too():
    memory = Knowledge(Passages(["mugs are cups", "cars drive"]), with_task=True)
    memory.look("find cars", "nothing")
    assert memory.render()[0].endswith("[1] cars drive")


# Skills ------------------------------------------------------------------------------------------


def test_skills_are_chosen_by_the_task_in_the_librarys_order():
    library = [Skill("a", "do a", "mug|cup"), Skill("b", "do b"), Skill("c", "do c", "MUG")]
    memory = Skills(library, k=2)
    memory.look("Find a Mug.", "")
    assert memory.render() == ("Skills for this task:\n- a: do a\n- b: do b", 2)
    assert memory.render(1) == ("Skills for this task:\n- a: do a", 1)
    memory.look("Find a car.", "a mug")
    assert memory.render() == ("Skills for this task:\n- b: do b", 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyEvents(limit=0), r"KeyEvents\(limit=0\)"),
        (lambda: RunningSummary(max_chars=0), r"RunningSummary\(max_chars=0\)"),
        (lambda: Passages([]), r"Passages\(\) got no text"),
        (lambda: Knowledge(Passages(["a"]), k=0), r"Knowledge\(k=0\)"),
        (lambda: Skills([], k=0), r"Skills\(k=0\)"),
        (lambda: Skills([Skill("x", "y", "(")]), r"the skill 'x' has when='\('"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Several together --------------------------------------------------------------------------------


def joined() -> Joined:
    return Joined(
        Skills([Skill("s1", "hint"), Skill("s2", "hint")]),
        Knowledge(Passages(["room one", "room two"]), k=2),
        KeyEvents(),
        NoMemory(),
        RunningSummary(max_chars=40),
        LastSteps(2),
    )


def test_the_last_memory_gives_way_first():
    memory = Joined(KeyEvents(), LastSteps(2))
    for number in (1, 2, 3):
        memory.add(f"o{number}", f"a{number}", {"event": f"e{number}"})
    text, entries = memory.render()
    assert entries == 5
    assert text.startswith("Key events:\n- step 1: e1\n- step 2: e2\n- step 3: e3\n[Obs")
    assert memory.render(1)[0].endswith("e3\n[Observation 3: 'o3', Action 3: 'a3']")
    assert memory.render(3) == ("Key events:\n- step 2: e2\n- step 3: e3", 2)
    assert memory.render(5) == memory.render(9) == ("", 0)


@given(
    steps=st.lists(
        st.tuples(st.text("ab \n", max_size=8), st.booleans(), st.text("cd ", max_size=60)),
        max_size=12,
    ),
    observation=st.sampled_from(["", "room", "a room and one more room two"]),
)
def test_every_drop_shows_one_entry_less_and_less_text(steps, observation):
    memory = joined()
    for number, (seen, is_event, note) in enumerate(steps):
        event = {"event": f"event {number}"} if is_event else {}
        memory.add(seen, "act", {**event, **({"note": note} if note else {})})
    memory.look("task", observation)
    text, entries = memory.render()
    for drop in range(1, entries + 1):
        shorter, fewer = memory.render(drop)
        assert fewer == entries - drop
        assert len(shorter) < len(text)
        text = shorter
    assert text == ""


@given(
    limit=st.integers(30, 400),
    events=st.lists(st.text("xyz ", min_size=1, max_size=50), max_size=6),
    notes=st.lists(st.text("no ", min_size=1, max_size=50), max_size=3),
    observation=st.text("rom ", max_size=30),
    on_long_prompt=st.sampled_from(["error", "shorten_observation"]),
)
def test_no_prompt_is_over_its_limit(limit, events, notes, observation, on_long_prompt):
    profile = AgentProfile(ChatTemplate(user="{task} {history} {observation}"))
    encoder = PromptEncoder(ByteTokenizer(), profile, limit, on_long_prompt)
    memory = joined()
    for event in events:
        memory.add("seen", "done", {"event": event})
    for note in notes:
        memory.add("seen", "done", {"note": note})
    context = PromptContext(task="a task", observation=observation)
    bare = len(PromptEncoder(ByteTokenizer(), profile, 10_000).encode(context, NoMemory()).ids)
    if bare > limit and on_long_prompt == "error":
        with pytest.raises(PromptTooLongError):
            encoder.encode(context, memory)
        return
    ids = encoder.encode(context, memory).ids
    assert ids.dtype == np.int32
    assert len(ids) <= limit
    # Nothing is dropped without need: the next longer prompt would not have fitted.
    if len(ids) > bare:
        _, entries = memory.render()
        longer = [
            len(encoder.tokenize(profile.prompt(filled(context, memory, drop))).ids)
            for drop in range(entries + 1)
        ]
        assert len(ids) == next(length for length in longer if length <= limit)


def filled(context: PromptContext, memory: Joined, drop: int) -> PromptContext:
    history, shown = memory.render(drop)
    return PromptContext(context.task, context.observation, history, shown)


def test_memory_needs_no_more_room_in_long_episodes():
    memory, sizes = joined(), []
    for step in range(500):
        memory.add(
            f"room {step:03d}", "act", {"event": f"event {step:03d}", "note": f"{step:050d}"}
        )
        memory.look("task", "room")
        sizes.append(len(pickle.dumps(memory)))
    # From step 299 on every number takes as many bytes.
    assert sizes[499] == sizes[299]


class Noted:
    """Shows its last note, and how far it has looked."""

    def __init__(self):
        self.note = ""

    def add(self, observation, action, info):
        self.note = info.get("note", "")

    def look(self, task, observation):
        self.seen = observation.removeprefix("left ")

    def render(self, drop=0):
        return f"{self.note} {self.seen}", 1


def test_in_rollouts_notes_reach_the_memory_and_it_looks_before_each_prompt():
    def parse(response: str) -> Action:
        return Action("down", True, note="wait" if response.startswith("jump") else "")

    replies = iter(["jump", "jump", "down", "down"])
    profile = AgentProfile(ChatTemplate("to {history}"), memory=Noted(), parser=parse)
    stage = Stage(reply=lambda request: next(replies), profile=profile)
    stage.play(task(start=4))
    # The note of a step stands in the next prompt; the observation is looked at in its own.
    assert stage.prompts() == [
        "<user> to 4 <assistant>",
        "<user> to wait 3 <assistant>",
        "<user> to wait 2 <assistant>",
        "<user> to 1 <assistant>",
    ]


def test_scripted_play_lets_memories_look_before_the_first_prompt():
    profile = AgentProfile(
        ChatTemplate(user="{history}"), memory=Skills([Skill("s", "hint", when=".*")])
    )
    episode = play_episode(
        Game(Countdown(), "Countdown"), profile, lambda *_: "down", None, seed=0, max_steps=1
    )
    assert episode.steps[0].context.history == "Skills for this task:\n- s: hint"
