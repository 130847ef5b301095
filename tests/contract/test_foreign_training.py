"""Training on adapted environments, named by a string alone."""

import pytest

from rllib_gigpo import GiGPOConfig
from tests.dial_worlds import ROWS
from tests.tiny_runs import SHAPE

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.mark.parametrize(
    ("name", "env_config"),
    [
        ("gym:FrozenLake-v1", {"horizon": 3}),
        ("trl:tests.dial_worlds:DialEnv", {"horizon": 3, "rows": ROWS, "won_reward": 1.0}),
    ],
)
def test_an_iteration_runs_with_runners_in_other_processes(name, env_config):
    config = (
        GiGPOConfig()
        .environment(name, env_config=env_config)
        .llm(model="tiny", options=SHAPE, max_prompt_tokens=600, max_response_tokens=8)
        .env_runners(num_env_runners=1)
        .training(num_groups=2, group_size=2, kl_coeff=0.0, minibatch_size=None)
    )
    algorithm = config.build_algo()
    found = algorithm.train()["env_runners"]
    algorithm.stop()
    assert found["num_episodes"] == 4
    assert found["success_rate"] == 0.0
    # A model that knows nothing yet writes no valid action in 8 tokens.
    assert found["valid_action_rate"] < 1.0
    assert found["episode_len_mean"] <= 3
