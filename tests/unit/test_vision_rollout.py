"""Pictures from the environment to the learner's rows."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest

from envs.gym_cards.number_line import NumberLine
from rllib_gigpo.agent import AgentProfile, ChatTemplate
from rllib_gigpo.encoding import PromptEncoder
from rllib_gigpo.engines.base import Sampling
from rllib_gigpo.games import Game
from rllib_gigpo.grouping import exact_anchors
from rllib_gigpo.models import load_tokenizer
from rllib_gigpo.observations import state_key
from rllib_gigpo.record import record
from rllib_gigpo.rollout import play_groups
from rllib_gigpo.rollout_types import GroupTask, RolloutSettings
from rllib_gigpo.rows import MinibatchPlan, RowData, episodes_to_batch
from rllib_gigpo.state_keys import perceptual_key
from rllib_gigpo.stepping import Stepper, StepSettings
from rllib_gigpo.vision.sight import load_sight
from tests.fakes import ScriptedEngine
from tests.picture_envs import PROFILE, Lamp, play
from tests.vision_models import build_folder

SIZE = 16 * 16 * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = str(build_folder(tmp_path_factory.mktemp("qwen"), "qwen2_vl"))
    return load_tokenizer(folder), load_sight(folder)


def lights(images) -> list[int]:
    return [int(placed.picture.pixels[0, 0, 0]) // 60 for placed in images]


def test_requests_show_the_picture_and_those_of_the_history(model):
    _, requests = play(model, size=1)
    # The environment draws into one array: what was shown is what was there at that step.
    assert [lights(request.images) for request in requests] == [[0], [0, 1], [1, 2]]
    for request in requests:
        tokens = model[0].convert_ids_to_tokens(request.prompt_ids.tolist())
        assert tokens.count("<|image_pad|>") == len(request.images)


def test_text_beside_a_picture_is_shown_with_it(model):
    _, (first, *_) = play(model, size=1, with_text=True)
    words = model[0].decode(first.prompt_ids.tolist())
    assert words.startswith("<user> now <|vision_start|>")
    assert words.endswith("red box <assistant>")
    assert len(first.images) == 1


@pytest.mark.parametrize("with_text", [False, True])
def test_rows_carry_their_pictures_and_equal_states_meet(model, with_text):
    episodes, _ = play(model, groups=2, with_text=with_text)
    anchors = []

    def exact(keys, group, agent):
        anchors.extend(keys)
        return exact_anchors(keys)

    batch = episodes_to_batch(episodes, exact)
    rows = dict(batch.policy_batches["default_policy"].items())
    assert [lights(images) for images in rows["images"]] == [[0], [0, 1], [1, 2]] * 4
    assert rows["anchor"].tolist() == [0, 1, 2] * 4
    grey = [np.full((16, 16, 3), 60 * light, dtype=np.uint8) for light in range(3)]
    shown = [{"text": "a red box", "image": array} if with_text else array for array in grey]
    assert anchors == [state_key(observation) for observation in shown] * 4


def test_a_batch_carries_each_distinct_picture_once(model):
    # Two rollouts, as of two EnvRunners, whose pictures are objects of their own.
    episodes = [e for _ in range(2) for e in pickle.loads(pickle.dumps(play(model, size=6)[0]))]
    for number, episode in enumerate(episodes):
        episode.custom_data["member"] = number
    batch = episodes_to_batch(episodes, lambda keys, group, agent: exact_anchors(keys))
    rows = dict(batch.policy_batches["default_policy"].items())
    held = {id(placed.picture) for images in rows["images"] for placed in images}
    assert len(held) == 3
    # 12 episodes of 3 steps show 60 pictures; three are sent.
    sent = len(pickle.dumps(rows["images"]))
    assert 3 * SIZE < sent < 4 * SIZE + 60 * 100
    assert all(
        placed.picture.pixels.dtype == np.uint8 for images in rows["images"] for placed in images
    )


def test_learners_get_the_pictures_of_their_own_rows(model):
    episodes, _ = play(model, size=4)
    batch = episodes_to_batch(episodes, lambda keys, group, agent: exact_anchors(keys))
    shards = RowData(batch, MinibatchPlan(None, 1, 0)).shard(2)
    for learner, (data, _) in enumerate(shards):
        assert data.batch is not None
        rows = dict(data.batch.policy_batches["default_policy"].items())  # pyright: ignore
        for owner, images, prompt in zip(
            rows["learner"], rows["images"], rows["prompt_ids"], strict=True
        ):
            assert (images is None) == (prompt is None) == (owner != learner)


def test_an_anchor_may_be_a_perceptual_key(model):
    profile = AgentProfile(
        prompt=PROFILE.prompt, anchor=lambda seen, info: perceptual_key(seen, size=2)
    )
    episodes, _ = play(model, profile=profile, size=1)
    # The lamp has no edges: to a difference hash every brightness looks alike.
    batch = episodes_to_batch(episodes, lambda keys, group, agent: exact_anchors(keys))
    assert batch.policy_batches["default_policy"]["anchor"].tolist() == [0, 0, 0]


def test_rows_without_pictures_have_no_such_column(model):
    class Spoken(Lamp):
        def _seen(self):
            return f"now {self.light}"

    tokenizer, sight = model
    engine = ScriptedEngine(tokenizer, lambda request: "<action> left </action>")
    rollout = asyncio.run(
        play_groups(
            [GroupTask(0, env_seed=0, size=1)],
            engine=engine,  # pyright: ignore[reportArgumentType]
            profile=PROFILE,
            encoder=PromptEncoder(tokenizer, PROFILE, 200, sight=sight),
            acquire=lambda: Game(Spoken(), "lamp"),
            release=lambda game: None,
            stepper=Stepper(StepSettings()),
            settings=RolloutSettings(Sampling(max_tokens=8), seed=0),
        )
    )
    batch = episodes_to_batch(rollout.episodes, lambda keys, *_: exact_anchors(keys))
    assert "images" not in batch.policy_batches["default_policy"]


def test_recordings_show_what_the_policy_will_see(model):
    profile = AgentProfile(prompt=ChatTemplate(user="{observation}"), respond="{action}")
    examples = record(lambda: NumberLine(view="rgb"), profile, episodes=3)
    for example in examples:
        ((name, picture),) = example.pictures.items()
        assert example.messages == [{"role": "user", "content": picture.mark}]
        assert picture.name == name
        assert picture.pixels.shape == (300, 300, 3)
    # Equal pictures of different episodes are one object.
    held = [picture for example in examples for picture in example.pictures.values()]
    assert len({id(picture) for picture in held}) == len({picture.key for picture in held})
