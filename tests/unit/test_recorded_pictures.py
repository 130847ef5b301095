"""Pictures beside texts in a run folder: in its rows, in the report, and played again."""

from __future__ import annotations

import numpy as np
import pytest

from rllib_gigpo.models import load_tokenizer
from rllib_gigpo.observations import state_key
from rllib_gigpo.playing import ReplayError, load_episode, replay
from rllib_gigpo.recording.folder import RunFolder, read_lines
from rllib_gigpo.recording.recorder import write_rollouts
from rllib_gigpo.recording.rollout_rows import rollouts_of
from rllib_gigpo.report import write_report
from rllib_gigpo.vision.sight import load_sight
from tests.browser import browser
from tests.picture_envs import PROFILE, Lamp, play
from tests.recorded import iteration_of, write_run
from tests.vision_models import build_folder


def digest(light: int) -> str:
    return state_key(np.full((16, 16, 3), 60 * light, dtype=np.uint8)).hex()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> RunFolder:
    """Two episodes of a lamp that shows a text beside its picture."""
    path = str(build_folder(tmp_path_factory.mktemp("qwen"), "qwen2_vl"))
    model = load_tokenizer(path), load_sight(path)
    episodes, _ = play(model, size=2, with_text=True)
    folder = write_run(tmp_path_factory.mktemp("run"), iterations=1)
    rows = rollouts_of(iteration_of(episodes), lambda ids: str(model[0].decode(ids.tolist())), None)
    write_rollouts(folder, 1, rows)
    return folder


def test_rows_hold_text_and_picture_to_the_end(recorded: RunFolder):
    rows = read_lines(recorded.rollout_file(1))[:3]
    assert [row["observation"] for row in rows] == ["a red box"] * 3
    assert [row["picture"] for row in rows] == [digest(0), digest(1), digest(2)]
    # Each prompt shows the step before, too.
    assert [row["prompt_pictures"].split() for row in rows] == [
        [digest(0)],
        [digest(0), digest(1)],
        [digest(1), digest(2)],
    ]
    assert [row["last_observation"] for row in rows] == [None, None, "a red box"]
    assert [row["last_picture"] for row in rows] == [None, None, digest(3)]
    kept = {path.stem for path in recorded.pictures.iterdir()}
    assert kept == {digest(light) for light in range(4)}


@pytest.mark.timeout(300)
def test_the_explorer_shows_both(recorded: RunFolder):
    with browser() as page:
        page.open(write_report(recorded.path).as_uri())
        # Light 0, 1 and 2: states told apart by their pictures, since their texts are equal.
        thumbs = "[...document.querySelectorAll('.anchors img')].map((e) => e.naturalWidth).join()"
        page.wait(f"{thumbs} === '16,16,16'")
        states = "[...document.querySelectorAll('.anchors .state')].map((e) => e.textContent)"
        assert page.js(states) == ["a red box"] * 3
        state = "document.querySelector('.columns > .card:nth-child(2)')"
        page.wait(f"{state}.querySelector('img.seen').naturalWidth === 16")
        assert page.js(f"{state}.querySelector('pre').textContent") == "a red box"
        page.js("document.querySelector('[data-open=\"0:2\"]').click()")
        page.wait("document.querySelectorAll('#viewer img').length === 3")
        ending = "document.querySelector('#viewer .ending')"
        page.wait(f"{ending}.querySelector('img').naturalWidth === 16")
        assert page.js(f"{ending}.querySelector('pre').textContent") == "a red box"


def test_it_is_played_again_up_to_a_step(recorded: RunFolder):
    episode = load_episode(recorded.rollout_file(1), group=0, member=1)
    asked = []

    def player(one):
        asked.append(one)
        return "<action> left </action>"

    played = replay(episode, Lamp(with_text=True), PROFILE, player, start=1)
    assert [one.turn for one in asked] == [1, 2]
    assert digest(1) in asked[0].context.observation
    assert digest(0) in asked[0].context.history
    assert set(asked[0].context.pictures) >= {digest(0), digest(1)}
    assert played.total == 3.0
    with pytest.raises(ReplayError, match=f"step 1: the recorded picture is '{digest(1)}'"):
        replay(episode, Lamp(with_text=True, brightness=50), PROFILE, player, start=1)
