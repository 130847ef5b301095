"""The probe: what an engine is asked after each sync, and how its answer is judged."""

from pathlib import Path

import numpy as np
import pytest

from rllib_gigpo import GiGPOConfig
from rllib_gigpo.engines.base import Completion
from rllib_gigpo.models import load_tokenizer, materialize
from rllib_gigpo.probe import check_probe, probe_prompt, probe_request
from tests.vision_models import build_folder


def answer(logps: list[float], version: int = 3) -> Completion:
    return Completion(
        np.arange(len(logps), dtype=np.int32), np.array(logps, np.float32), "length", version
    )


def config_of(**llm) -> GiGPOConfig:
    settings = {"model": "tiny", "max_prompt_tokens": 64, "max_response_tokens": 8, **llm}
    return GiGPOConfig().environment("KeyDoor").llm(**settings)


def test_equal_log_probabilities_pass():
    check_probe(answer([-1.0, -2.0]), np.array([-1.0, -2.0]), version=3, tolerance=1e-3)


def test_the_mean_difference_per_token_decides():
    # (0.3 + 0.1) / 2 = 0.2
    check_probe(answer([-1.0, -2.0]), np.array([-1.3, -1.9]), version=3, tolerance=0.21)
    with pytest.raises(RuntimeError, match=r"differ from the learner's by 0\.2 per token"):
        check_probe(answer([-1.0, -2.0]), np.array([-1.3, -1.9]), version=3, tolerance=0.19)


def test_a_nan_is_no_match():
    with pytest.raises(RuntimeError, match="does not serve the learner's weights"):
        check_probe(answer([float("nan")]), np.array([-1.0]), version=3, tolerance=0.3)


def test_a_learner_whose_weights_are_lost_says_so():
    with pytest.raises(RuntimeError, match="its weights hold NaN or too large values"):
        check_probe(answer([-1.0]), np.array([float("nan")]), version=3, tolerance=0.3)


def test_an_old_version_is_no_match_whatever_it_says():
    with pytest.raises(RuntimeError, match="serves weight version 2, expected 3"):
        check_probe(answer([-1.0], version=2), np.array([-1.0]), version=3, tolerance=1.0)


def test_the_probe_is_text_that_the_policy_knows():
    config = config_of()
    ids = probe_prompt(config).ids
    tokenizer = load_tokenizer(materialize(config.model_spec))
    assert 20 < len(ids) <= 64
    assert tokenizer.unk_token_id not in ids
    # The end is kept: there the chat template hands over to the assistant.
    assert tokenizer.decode(ids[-1:]) == "<assistant>"


def test_every_engine_is_asked_within_the_limits():
    config = config_of(max_prompt_tokens=10, max_response_tokens=5, temperature=0.7)
    prompt = probe_prompt(config)
    assert len(prompt.ids) == 10
    requests = [probe_request(config, "default_policy", prompt, group) for group in range(3)]
    assert [request.group_id for request in requests] == [0, 1, 2]
    assert requests[0].sampling.temperature == 0.7
    assert requests[0].sampling.max_tokens == 5


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Path:
    return build_folder(tmp_path_factory.mktemp("idefics"), "idefics3")


def test_the_probe_of_an_image_text_model_shows_a_picture(seeing: Path):
    config = config_of(model=str(seeing), max_prompt_tokens=200)
    prompt = probe_prompt(config)
    (shown,) = prompt.images
    assert shown.picture.pixels.shape == (64, 64, 3)
    request = probe_request(config, "default_policy", prompt, 0)
    assert request.images == prompt.images


def test_the_text_gives_way_to_the_picture_and_the_picture_to_the_limit(seeing: Path):
    # 2 x 2 tiles and the view of the whole, 4 tokens each; 2 markers before each, 1 at the end.
    picture = 5 * (4 + 2) + 1
    shown = [
        probe_prompt(config_of(model=str(seeing), max_prompt_tokens=limit))
        for limit in (200, 60, 40, 35)
    ]
    assert [len(prompt.images) for prompt in shown] == [1, 1, 1, 0]
    whole, some, few, text = (len(prompt.ids) for prompt in shown)
    assert whole > some > few > picture
    assert (some <= 60, few <= 40, text) == (True, True, 35)
