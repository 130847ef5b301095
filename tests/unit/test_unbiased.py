"""The episode advantage without std is an unbiased baseline (GiGPO App. C), shown by enumeration.

A three-state MDP with a stochastic reward and trajectories of one to three steps is small enough to
list every group of N trajectories with its probability. The expected policy gradient of the sampled
groups must then equal (N - 1) / N times the exact gradient of the expected return.
"""

from itertools import product

import numpy as np
import pytest

from rllib_gigpo.advantages import StepTable, gigpo

# Every trajectory as (state, action) steps, its return, and the chance of its reward.
# State 0: action 1 ends with reward 1 or 4; action 0 leads to state 1. State 1: action 0 ends with
# reward 3; action 1 leads to state 2. State 2: action 0 ends with 0, action 1 with 5.
TRAJECTORIES = (
    ([(0, 1)], 1.0, 0.5),
    ([(0, 1)], 4.0, 0.5),
    ([(0, 0), (1, 0)], 3.0, 1.0),
    ([(0, 0), (1, 1), (2, 0)], 0.0, 1.0),
    ([(0, 0), (1, 1), (2, 1)], 5.0, 1.0),
)
LOGITS = np.array([[0.3, -0.2], [-0.5, 0.4], [0.1, 0.7]])


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Probability of each trajectory under the softmax policy [5]."""
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return np.array(
        [chance * np.prod([policy[step] for step in steps]) for steps, _, chance in TRAJECTORIES]
    )


def score(step: tuple[int, int]) -> np.ndarray:
    """Gradient of log pi(action | state) by the logits [3, 2]."""
    state, action = step
    policy = np.exp(LOGITS[state]) / np.exp(LOGITS[state]).sum()
    gradient = np.zeros_like(LOGITS)
    gradient[state] = -policy
    gradient[state, action] += 1.0
    return gradient


def exact_gradient() -> np.ndarray:
    """Gradient of the expected return by central differences of its closed form [3, 2]."""
    returns = np.array([value for _, value, _ in TRAJECTORIES])
    gradient = np.zeros_like(LOGITS)
    for entry in np.ndindex(*LOGITS.shape):
        shift = np.zeros_like(LOGITS)
        shift[entry] = 1e-5
        up, down = probabilities(LOGITS + shift), probabilities(LOGITS - shift)
        gradient[entry] = (up - down) @ returns / 2e-5
    return gradient


def expected_gradient(group_size: int, **settings) -> np.ndarray:
    """Mean over all groups of 1/N sum_i sum_t A_i grad log pi(a_t | s_t) [3, 2]."""
    rows, chances = [], []
    for group, members in enumerate(product(range(len(TRAJECTORIES)), repeat=group_size)):
        chances.append(np.prod(probabilities(LOGITS)[list(members)]))
        for place, member in enumerate(members):
            steps, value, _ = TRAJECTORIES[member]
            for t, step in enumerate(steps):
                reward = value if t == len(steps) - 1 else 0.0
                rows.append((group, group * group_size + place, t, step[0], reward, step))
    group, episode, t, state, reward, steps = zip(*rows, strict=True)
    agent, valid = np.zeros(len(rows), dtype=int), np.ones(len(rows), dtype=bool)
    columns = [np.array(column) for column in (group, episode, t, state, reward)]
    table = StepTable(*columns[:2], agent, *columns[2:], valid)
    gains = gigpo(table, omega=0.0, **settings).total
    weight = np.array(chances)[columns[0]] * gains / group_size
    return np.einsum("n,nsa->sa", weight, np.array([score(step) for step in steps]))


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_mean_over_episodes_gives_the_exact_gradient_up_to_n_minus_one_over_n(group_size):
    expected = (group_size - 1) / group_size * exact_gradient()
    assert expected_gradient(group_size, f_norm="none") == pytest.approx(expected, abs=1e-8)


def test_mean_over_steps_turns_the_gradient():
    # Its baseline depends on the sampled lengths, so no factor brings it back to the gradient.
    exact = exact_gradient()
    biased = expected_gradient(3, f_norm="none", group_mean_over="steps")
    cosine = (exact * biased).sum() / np.linalg.norm(exact) / np.linalg.norm(biased)
    assert cosine < 0.999


def test_probabilities_of_the_toy_sum_to_one():
    assert probabilities(LOGITS).sum() == pytest.approx(1.0)
