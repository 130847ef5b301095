"""Search: the rules of an episode, what info reports, seeds, the expert, pickling."""

import hashlib
import json
import pickle
import random

import pytest
from gymnasium.error import ResetNeeded

from envs.search.actions import parse_tool_call
from envs.search.env import INVALID_ACTION, Search
from envs.search.passages import NO_PASSAGES, Hit, Passage
from envs.search.questions import load_questions
from envs.search.retrievers import BM25Retriever, RetrieverError
from envs.search.rows import Question
from envs.search.sharing import _build
from envs.search.world import generated_world
from tests.child import run_python
from tests.shared_data import shared_data

BRIDGE = Question(
    "Who painted the Amber Clock?",
    ("Ada Morlind", "Ada B. Morlind"),
    "7",
    "own",
    ("The Amber Clock",),
)


class Shelf:
    """A retriever that knows three queries."""

    passages = {  # noqa: RUF012
        "amber clock": [Passage("0", "The Amber Clock", "By Ada Morlind."), Passage("1", "B", "b")],
        "old portrait": [Passage("0", "The Amber Clock", "By Ada Morlind.")],
        "morlind": [Passage("2", "Ada Morlind", "A painter.")],
    }

    def __init__(self):
        self.asked = []
        self.error = None

    def retrieve(self, queries, topk):
        if self.error is not None:
            raise self.error
        self.asked.append((list(queries), topk))
        return [[Hit(p, 1.0) for p in self.passages.get(q, [])][:topk] for q in queries]


@pytest.fixture
def env():
    return Search(split="all", questions=[BRIDGE], retriever=Shelf())


def test_a_reset_asks_the_question(env):
    observation, info = env.reset(seed=0)
    assert observation == "Who painted the Amber Clock?"
    assert info == {
        "task": "Who painted the Amber Clock?",
        "task_id": "own:7",
        "data_source": "own",
        "task_type": "own",
        "anchor": "Who painted the Amber Clock?",
        "won": False,
        "tool_calls": 0,
        "repeated_query_share": 0.0,
    }


def test_a_search_shows_passages_and_an_answer_ends_the_episode(env):
    env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step("<search>amber clock</search>")
    passages = 'Doc 1 (Title: "The Amber Clock") By Ada Morlind.\nDoc 2 (Title: "B") b'
    assert (observation, reward, terminated, truncated) == (passages, 0.0, False, False)
    assert info["anchor"] == passages
    assert (info["is_action_valid"], info["won"], info["tool_calls"]) == (True, False, 1)
    _, reward, terminated, truncated, info = env.step("<answer>the ada b morlind!</answer>")
    assert (reward, terminated, truncated, info["won"]) == (1.0, True, False, True)
    assert info["tool_calls"] == 1
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step("<search>x</search>")
    assert env.reset(seed=0)[1]["tool_calls"] == 0, "the next episode starts afresh"


def test_a_wrong_answer_ends_the_episode_without_reward(env):
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("<answer>Morlind</answer>")
    assert (reward, terminated, truncated, info["won"]) == (0.0, True, False, False)
    assert info["is_action_valid"] is True


def test_the_fourth_turn_is_the_last(env):
    env.reset(seed=0)
    for _ in range(3):
        assert env.step("<search>morlind</search>")[2:4] == (False, False)
    assert env.step("<search>morlind</search>")[2:4] == (False, True)
    with pytest.raises(ResetNeeded):
        env.step("<answer>Ada Morlind</answer>")
    env.reset(seed=0)
    for _ in range(3):
        env.step("<search>morlind</search>")
    _, reward, terminated, truncated, _ = env.step("<answer>Ada Morlind</answer>")
    assert (reward, terminated, truncated) == (1.0, True, False), "the last turn counts too"


def test_an_invalid_action_costs_a_turn_and_no_search(env):
    env.reset(seed=0)
    for turn, action in enumerate(["Ada Morlind", "<search>a</search><search>b</search>", ""]):
        observation, reward, terminated, truncated, info = env.step(action)
        assert (observation, reward, terminated, truncated) == (INVALID_ACTION, 0.0, False, False)
        assert (info["is_action_valid"], info["tool_calls"]) == (False, 0), turn
    assert env.step("nonsense")[3] is True
    assert env.retriever.asked == []


def test_repeated_queries_are_counted_after_normalisation(env):
    env.reset(seed=0)
    shares = [
        env.step(f"<search>{query}</search>")[4]["repeated_query_share"]
        for query in ("amber clock", "The  Amber clock?", "morlind", "amber CLOCK")
    ]
    # Of 1, 2, 3, 4 searches, 0, 1, 1, 2 had been asked before.
    assert shares == [0.0, 1 / 2, 1 / 3, 2 / 4]


def test_nothing_found_is_said(env):
    env.reset(seed=0)
    assert env.step("<search>zebra</search>")[0] == NO_PASSAGES


def test_topk_reaches_the_retriever():
    env = Search(split="all", questions=[BRIDGE], retriever=Shelf(), topk=1)
    env.reset(seed=0)
    assert "Doc 2" not in env.step("<search>amber clock</search>")[0]
    assert env.retriever.asked == [(["amber clock"], 1)]


def test_an_outage_raises_and_the_turn_can_be_tried_again(env):
    env.reset(seed=0)
    env.retriever.error = RetrieverError("all down")
    with pytest.raises(RetrieverError, match="all down"):
        env.step("<search>amber clock</search>")
    env.retriever.error = None
    info = env.step("<search>amber clock</search>")[4]
    assert (info["tool_calls"], info["repeated_query_share"]) == (1, 0.0)
    for _ in range(2):
        assert env.step("<search>x</search>")[3] is False
    assert env.step("<search>x</search>")[3] is True, "the failed try cost no turn"


def test_seeds_enumerate_the_questions_of_the_split():
    for split in ("train", "test"):
        env = Search(split=split)
        n = len(env.questions)
        assert env.questions == load_questions(["generated"], split)
        ids = [env.reset(seed=seed)[1]["task_id"] for seed in range(n)]
        assert len(set(ids)) == n, "seeds 0 ... n-1 ask every question once"
        assert env.reset(seed=n + 3)[1]["task_id"] == ids[3]
        assert env.reset(seed=2**63 + 5)[1]["task_id"] == ids[(2**63 + 5) % n]


def test_train_and_test_share_no_question():
    train, test = ({q.question for q in Search(split=s).questions} for s in ("train", "test"))
    assert not train & test
    assert (len(train), len(test)) == (1465, 338)


def test_resets_without_a_seed_follow_the_last_seed():
    env = Search()
    sequences = []
    for _ in range(2):
        env.reset(seed=11)
        sequences.append([env.reset()[1]["task_id"] for _ in range(6)])
    assert sequences[0] == sequences[1]
    assert len(set(sequences[0])) > 3


def play_expert(env, seed):
    """Return the last info, the answer given, and all the text that was seen before it."""
    observation, _ = env.reset(seed=seed)
    seen = ""
    while True:
        action = env.expert_action()
        observation, reward, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            return reward, info, action, seen
        seen += observation


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_expert_solves_100_tasks_with_what_it_has_read(split):
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    env = Search(split=split)
    for seed in range(100):
        reward, info, action, seen = play_expert(env, seed)
        assert reward == 1.0, info["task"]
        assert info["won"] is True
        assert info["tool_calls"] == {"one_hop": 1, "two_hop": 2}[info["data_source"]]
        assert info["repeated_query_share"] == 0.0
        answer = action.removeprefix("<answer>").removesuffix("</answer>")
        assert answer in seen, "an expert that answers from memory would teach to guess"


def test_the_expert_works_from_any_state_and_within_the_horizon(env):
    env.reset(seed=0)
    env.step("<search>old portrait</search>")  # has brought up the supporting title
    assert env.expert_action() == "<answer>Ada Morlind</answer>"
    env.reset(seed=0)
    assert env.expert_action() == "<search>The Amber Clock</search>"
    env.step("<search>The amber clock</search>")  # the shelf does not know it: do not ask again
    assert env.expert_action() == "<answer>Ada Morlind</answer>"
    env.reset(seed=0)
    for _ in range(3):
        env.step("nonsense")
    assert env.expert_action() == "<answer>Ada Morlind</answer>", "the last turn is for the answer"
    short = Search(split="all", questions=[BRIDGE], retriever=Shelf(), horizon=1)
    with pytest.raises(ResetNeeded):
        short.expert_action()
    short.reset(seed=0)
    assert short.expert_action() == "<answer>Ada Morlind</answer>"


def test_random_actions_are_tool_calls_from_the_words_of_the_question(env):
    env.reset(seed=0)
    rng = random.Random(0)
    calls = [parse_tool_call(env.random_action(rng)) for _ in range(200)]
    words = {"Who", "painted", "the", "Amber", "Clock"}
    assert all(set(call.text.split()) <= words for call in calls)
    answers = sum(call.kind == "answer" for call in calls)
    assert 30 <= answers <= 70, "one in four: 50 expected, a standard deviation is 6"
    assert len({call.text for call in calls if call.kind == "search"}) > 20


def test_no_expert_without_supporting_titles():
    env = Search(split="all", questions=[BRIDGE._replace(supporting_titles=())], retriever=Shelf())
    env.reset(seed=0)
    with pytest.raises(ValueError, match="own:7 names no supporting titles"):
        env.expert_action()


def test_pickling_stores_names_not_data():
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    env = Search()
    env.reset(seed=3)
    first = env.step(env.expert_action())[0]
    data = pickle.dumps(env)
    assert len(pickle.dumps(env.questions)) > 100_000
    assert len(data) < 10_000
    copy = pickle.loads(data)
    assert copy.retriever is env.retriever, "one index per process"
    action = env.expert_action()
    assert copy.expert_action() == action
    assert copy.step(action) == env.step(action)
    assert first not in (copy.reset(seed=4)[0], "")


def test_environments_share_one_index_per_process(monkeypatch):
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    built = []
    original = BM25Retriever.__init__
    monkeypatch.setattr(
        BM25Retriever, "__init__", lambda *a, **kw: (built.append(1), original(*a, **kw))[1]
    )
    _build.cache_clear()
    for seed in range(5):
        env = Search()
        env.reset(seed=seed)
        env.step("<search>river</search>")
    assert len(built) == 1


def test_the_same_episode_in_every_process():
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    code = """
import hashlib, json
from envs.search import Search
env, log = Search(split="test"), []
for seed in (0, 7, 2**40 + 1):
    log.append(env.reset(seed=seed))
    log.append(env.step("<search>the river by the old town</search>"))
    while not (log[-1][2] or log[-1][3]):
        log.append(env.step(env.expert_action()))
print(hashlib.sha256(json.dumps(log).encode()).hexdigest())
"""
    digests = {
        run_python("-c", code, env={"PYTHONHASHSEED": seed}).stdout.strip() for seed in ("1", "2")
    }
    assert len(digests) == 1
    env = Search(split="test")
    log: list = []
    for seed in (0, 7, 2**40 + 1):
        log.append(env.reset(seed=seed))
        log.append(env.step("<search>the river by the old town</search>"))
        while not (log[-1][2] or log[-1][3]):
            log.append(env.step(env.expert_action()))
    assert digests == {hashlib.sha256(json.dumps(log).encode()).hexdigest()}


def test_questions_with_their_own_passages(tmp_path):
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    row = {
        "id": "1",
        "question": "Who painted the Amber Clock",
        "golden_answers": ["Ada Morlind"],
        "supporting_titles": ["The Amber Clock"],
        "passages": [
            {"title": "The Amber Clock", "text": "A portrait by Ada Morlind."},
            {"title": "Hen", "text": "A bird."},
        ],
    }
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps(row))
    env = Search(split="all", questions=str(path))
    reward, info, _, seen = play_expert(env, 0)
    assert (reward, info["task_id"]) == (1.0, "own:1")
    assert seen == 'Doc 1 (Title: "The Amber Clock") A portrait by Ada Morlind.'


def test_wrong_arguments_are_explained():
    with pytest.raises(ValueError, match="split must be one of"):
        Search(split="dev")  # type: ignore[arg-type]
    for wrong in ({"topk": 0}, {"horizon": 0}):
        with pytest.raises(ValueError, match="topk and horizon must be at least 1"):
            Search(**wrong)
    with pytest.raises(FileNotFoundError, match="no questions at"):
        Search(questions="none.jsonl")
    with pytest.raises(ValueError, match="'bm25', 'dense' or a URL"):
        Search(retriever="bm42").retriever  # noqa: B018
    sides = []
    for split in ("train", "test"):
        try:
            sides.append(len(Search(split=split, questions=[BRIDGE], retriever=Shelf()).questions))
        except ValueError as error:
            assert "none of the 1 questions given falls in split" in str(error)  # noqa: PT017
    assert sides == [1], "a lone question is on one side only"


def test_generated_answers_are_not_in_the_questions():
    for question in generated_world().questions:
        assert question.golden_answers[0] not in question.question


@pytest.mark.parametrize(
    "name", ["hotpotqa_train100_passages.jsonl", "musique_train100_passages.jsonl"]
)
def test_the_expert_solves_real_multi_hop_questions(name):
    pytest.importorskip("bm25s", reason="needs the extra [search]")
    env = Search(
        split="all",
        questions=str(shared_data(f"searchqa/{name}")),
        corpus=str(shared_data("searchqa/corpus_hotpot_musique.jsonl")),
    )
    found = 0
    for seed in range(100):
        reward, info, _, seen = play_expert(env, seed)
        assert reward == 1.0, info["task"]
        titles = env.questions[seed].supporting_titles
        found += all(f'(Title: "{title}")' in seen for title in titles[: env.horizon - 1])
    assert found >= 90, "searching for a title must bring up its passage"
