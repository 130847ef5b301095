"""Episodes played by people, experts and models, and recorded ones played on."""

import io
import random

import pytest

from envs.key_door import KeyDoor
from rllib_gigpo.agent import AgentProfile, ChatTemplate, LastSteps
from rllib_gigpo.agent.profiles.key_door import profile
from rllib_gigpo.games import Game
from rllib_gigpo.playing import Person, ReplayError, ScriptedPlayer, load_episode, play, replay
from rllib_gigpo.playing.play import WatchError
from rllib_gigpo.playing.players import ModelPlayer, Quit
from rllib_gigpo.playing.screen import Screen, answered, printable
from rllib_gigpo.recording.folder import RunFolder, write_bytes, write_json, write_lines
from rllib_gigpo.recording.rollout_rows import parquet_of, rollouts_of
from rllib_gigpo.scripted import expert, play_episode, random_legal
from rllib_gigpo.stepping import EnvFailure
from tests.fakes import Countdown
from tests.recorded import iteration_of
from tests.stage import Stage, task, words

REMEMBERS = AgentProfile(
    ChatTemplate("{history} : {observation}", system="go {step}"), memory=LastSteps(2)
)


def typed(*lines: str):
    left = iter(lines)

    def ask(prompt: str) -> str:
        try:
            return next(left)
        except StopIteration as error:
            raise EOFError from error

    return ask


class TestPlay:
    def test_prompts_are_those_of_a_rollout(self):
        stage = Stage("<action> down </action>", profile=REMEMBERS)
        stage.play(task(start=3))
        shown = []
        person = Person(REMEMBERS, shown.append, typed("down", "down", "down"))
        played = play(Countdown(), REMEMBERS, person, options={"start": 3}, seed=10)
        as_tokens = [stage.encoder.tokenize(asked.messages).ids for asked in shown]
        assert [words(ids) for ids in as_tokens] == stage.prompts()
        assert (played.total, played.verdict["won"]) == (1.0, True)

    def test_the_expert_wins_and_outcomes_are_told(self):
        told = []
        player = ScriptedPlayer(expert, profile())
        played = play(
            KeyDoor(), profile(), player, seed=3, watch=lambda *facts: told.append(facts[:4])
        )
        scripted = play_episode(Game(KeyDoor(), "x"), profile(), expert, random.Random(0), seed=3)
        assert played.total == 1.0
        assert [facts[0] for facts in told] == list(range(scripted.length + 1))
        actions = [next(iter(facts[1].values())) for facts in told[1:]]
        assert actions == [step.action for step in scripted.steps]
        assert told[-1][3] == {"agent": 1.0}

    def test_a_person_may_write_the_whole_response(self):
        answers = typed("<action> down </action> nonsense", "down down", "/quit")
        person = Person(REMEMBERS, lambda asked: None, answers)
        seen = []
        with pytest.raises(Quit):
            play(Countdown(), REMEMBERS, person, options={"start": 9},
                 watch=lambda turn, actions, *_: seen.append(dict(actions)))  # fmt: skip
        assert seen == [{}, {"agent": "down"}, {"agent": "down down"}]

    def test_the_end_of_the_input_ends_the_game(self):
        with pytest.raises(Quit):
            play(Countdown(), REMEMBERS, Person(REMEMBERS, lambda asked: None, typed()))

    def test_a_limit_truncates(self):
        player = ScriptedPlayer(random_legal, profile())
        played = play(KeyDoor(), profile(), player, max_steps=2)
        assert (played.episode.env_steps(), played.episode.is_truncated) == (2, True)

    def test_a_watch_can_end_it(self):
        def stop(turn, *facts):
            if turn == 2:
                raise WatchError("enough")

        with pytest.raises(WatchError, match="enough"):
            play(KeyDoor(), profile(), ScriptedPlayer(expert, profile()), seed=3, watch=stop)

    def test_a_failing_environment_is_named(self):
        class Broken(KeyDoor):
            def step(self, action):
                raise ZeroDivisionError("broken")

        with pytest.raises(EnvFailure, match="environment 'B' raised ZeroDivisionError"):
            play(Broken(), profile(), ScriptedPlayer(expert, profile()), name="B")

    def test_a_model_plays(self):
        player = ModelPlayer(
            "tiny", "KeyDoor", {}, profile(), seed=1, max_prompt_tokens=64, max_response_tokens=6
        )
        first = play(KeyDoor(), profile(), player, seed=3, max_steps=3)
        again = play(KeyDoor(), profile(), player, seed=3, max_steps=3)
        answers = [response for _, response in first.asked]
        assert len(answers) == 3
        assert answers == [response for _, response in again.asked]


class TestScreen:
    def test_control_characters_cannot_steer_the_terminal(self):
        assert printable("a\x1b[2Jb\x9b\u202ec\nd") == "a\\x1b[2Jb\\x9b\\u202ec\nd"

    def test_shows_prompts_responses_and_the_end(self):
        stream = io.StringIO()
        screen = Screen(stream)
        player = answered(screen, ScriptedPlayer(expert, profile()))
        played = play(KeyDoor(), profile(), player, seed=3, watch=screen.outcome)
        screen.end(played)
        text = stream.getvalue()
        for asked, response in played.asked:
            assert asked.messages[0]["content"] in text
            assert f"[response]\n{response}" in text
        assert "reward 1\n" in text
        assert text.endswith(f"after {len(played.asked)} steps: return 1, won\n")


@pytest.fixture
def recorded(tmp_path):
    """Three random steps of KeyDoor at seed 3, in both file formats."""
    player = ScriptedPlayer(random_legal, profile(), seed=5)
    played = play(KeyDoor(), profile(), player, seed=3, max_steps=3)
    answers = [response for _, response in played.asked]
    rollouts = rollouts_of(iteration_of([played.episode]), lambda ids: answers[ids[0]], None)
    folder = RunFolder(tmp_path)
    write_lines(folder.rollout_file(1), rollouts.rows)
    write_bytes(folder.rollout_file(1, "parquet"), parquet_of(rollouts))
    write_json(folder.run, {"env": "KeyDoor", "env_config": {}})
    return folder


class TestReplay:
    @pytest.mark.parametrize("kind", ["jsonl", "parquet"])
    def test_goes_on_from_the_state_that_was_recorded(self, kind, recorded):
        episode = load_episode(recorded.rollout_file(1, kind))
        assert (episode.seed, episode.length, episode.run["env"]) == (3, 3, "KeyDoor")
        asked = []

        def player(one):
            asked.append(one)
            return ScriptedPlayer(expert, profile())(one)

        played = replay(episode, KeyDoor(), profile(), player, start=2)
        assert [one.turn for one in asked] == list(range(2, played.episode.env_steps()))
        assert asked[0].context.observation == episode.rows[2]["observation"]
        actions = played.episode.extra_model_outputs["action_text"]
        assert list(actions[:2]) == [row["action"] for row in episode.rows[:2]]
        assert played.total == 1.0

    def test_recorded_actions_count_however_they_were_written(self, recorded):
        episode = load_episode(recorded.rollout_file(1))
        odd = {"response": "<|end|>", "format_valid": False}
        episode = type(episode)(tuple({**row, **odd} for row in episode.rows), episode.run)
        played = replay(episode, KeyDoor(), profile(), ScriptedPlayer(expert, profile()), start=3)
        extras = played.episode.extra_model_outputs
        assert list(extras["action_text"][:3]) == [row["action"] for row in episode.rows]
        assert list(extras["format_is_valid"][:4]) == [False, False, False, True]

    @pytest.mark.parametrize(
        ("change", "step", "what"),
        [
            ({"observation": "elsewhere"}, 1, "step 1: the recorded observation is 'elsewhere'"),
            ({"reward": 0.5}, 1, "step 1: the recorded reward is 0.5, and the environment gave"),
            ({"picture": "0" * 32}, 0, "step 0: the recorded picture is"),
        ],
    )
    def test_another_environment_is_noticed(self, change, step, what, recorded):
        episode = load_episode(recorded.rollout_file(1))
        rows = [{**row, **(change if row["turn"] == step else {})} for row in episode.rows]
        episode = type(episode)(tuple(rows), {})
        player = ScriptedPlayer(expert, profile())
        with pytest.raises(ReplayError, match=what):
            replay(episode, KeyDoor(), profile(), player, start=3)

    def test_only_what_is_re_created_is_compared(self, recorded):
        episode = load_episode(recorded.rollout_file(1))
        rows = [*episode.rows[:2], {**episode.rows[2], "observation": "elsewhere"}]
        player = ScriptedPlayer(expert, profile())
        played = replay(type(episode)(tuple(rows), {}), KeyDoor(), profile(), player, start=1)
        assert played.total == 1.0

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"group": 7}, "no member 0 of group 7: it has .group, member. .0, 0."),
            ({"path": "none.jsonl"}, "is no file"),
            ({"path": "run.json"}, "expected a .jsonl or .parquet file"),
        ],
    )
    def test_says_what_is_wrong_with_the_file(self, change, sentence, recorded):
        path = recorded.path / change.pop("path", "rollouts/000001.jsonl")
        with pytest.raises(ValueError, match=sentence):
            load_episode(path, **change)

    def test_a_stranger_s_file_is_checked(self, recorded):
        path = recorded.rollout_file(1)
        write_lines(path, [{"group": 0, "member": 0, "turn": "x"}])
        with pytest.raises(ValueError, match="'turn' of a row is 'x'"):
            load_episode(path)
        recorded.rollout_file(1, "parquet").write_bytes(b"not parquet")
        with pytest.raises(ValueError, match="is no Parquet file"):
            load_episode(recorded.rollout_file(1, "parquet"))

    def test_a_step_beyond_the_end_is_refused(self, recorded):
        episode = load_episode(recorded.rollout_file(1))
        with pytest.raises(ValueError, match=r"step 4 is not in the episode.* 3 steps"):
            replay(episode, KeyDoor(), profile(), ScriptedPlayer(expert, profile()), start=4)
