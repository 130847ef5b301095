"""The proof after each sync: an engine that does not serve the learner's weights is found out."""

import numpy as np
import pytest

from rllib_gigpo.engines.base import Completion
from rllib_gigpo.weight_sync import check_probe, probe_request


def answer(logps: list[float], version: int = 3) -> Completion:
    return Completion(
        np.arange(len(logps), dtype=np.int32), np.array(logps, np.float32), "length", version
    )


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


def test_an_old_version_is_no_match_whatever_it_says():
    with pytest.raises(RuntimeError, match="serves weight version 2, expected 3"):
        check_probe(answer([-1.0], version=2), np.array([-1.0]), version=3, tolerance=1.0)


def test_every_engine_is_asked():
    groups = [probe_request("default_policy", group, 0.7).group_id for group in range(3)]
    assert groups == [0, 1, 2]
    assert probe_request("default_policy", 0, 0.7).sampling.temperature == 0.7
