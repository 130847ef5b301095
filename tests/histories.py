"""Made-up metrics of a run that learns, in which single numbers may go wrong."""

from __future__ import annotations

# A run that learns: returns rise from 0.2 to 0.9, and everything else drifts as it does in such
# runs; groups end alike because they all win.
GOOD = {
    "episode_return_mean": [0.2, 0.3, 0.5, 0.8, 0.9, 0.9],
    "success_rate": [0.2, 0.3, 0.5, 0.8, 0.9, 0.9],
    "valid_action_rate": [0.8, 0.9, 0.95, 1.0, 1.0, 1.0],
    "repeated_response_rate": [0.05, 0.0, 0.0, 0.0, 0.0, 0.0],
    "uniform_group_share": [0.2, 0.1, 0.3, 0.8, 0.95, 1.0],
    "response_cut_rate": [0.1, 0.0, 0.0, 0.0, 0.0, 0.0],
    "response_tokens_mean": [20.0, 18.0, 12.0, 9.0, 6.0, 6.0],
}
LEARNED = {
    "entropy": [1.5, 1.2, 0.8, 0.3, 0.05, 0.02],
    "kl": [0.0, 0.1, 0.3, 0.9, 1.5, 1.6],
    "engine_logp_gap": [1e-6] * 6,
}


def history(count: int = 6, *, first: int = 1, module: str = "default_policy", **changes):
    """The good run, with other values in some columns."""
    played = {name: changes.get(name, column) for name, column in GOOD.items()}
    learned = {name: changes.get(name, column) for name, column in LEARNED.items()}
    return [
        {
            "iteration": first + n,
            "env_runners": {name: column[n] for name, column in played.items()},
            "learners": {
                module: {name: column[n] for name, column in learned.items()},
                "__all_modules__": {"seconds_update": 1.0},
            },
        }
        for n in range(count)
    ]
