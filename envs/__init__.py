"""Text environments: plain `gymnasium.Env` whose observations and actions are strings.

Importing this package registers every single-agent environment of `envs.catalog` with gymnasium,
so `gymnasium.make("envs:rllib_gigpo/KeyDoor-v0")` works without a separate import.
"""

import gymnasium

from envs.catalog import ENVIRONMENTS

for _name, _entry in ENVIRONMENTS.items():
    if not _entry.multi_agent:
        gymnasium.register(
            id=f"rllib_gigpo/{_name}-v0", entry_point=_entry.env, kwargs=dict(_entry.kwargs)
        )
