"""Episodes played by people, experts and models, with exactly the rollouts' prompts and rules.

The rollouts (`rllib_gigpo.rollout`) play; what usually is a tokenizer and an engine is a desk at
which a player reads the prompt as text and answers with text.
"""

from rllib_gigpo.playing.desk import Asked, Player
from rllib_gigpo.playing.play import Played, play
from rllib_gigpo.playing.players import ModelPlayer, Person, ScriptedPlayer
from rllib_gigpo.playing.replay import RecordedEpisode, ReplayError, load_episode, replay

__all__ = [
    "Asked",
    "ModelPlayer",
    "Person",
    "Played",
    "Player",
    "RecordedEpisode",
    "ReplayError",
    "ScriptedPlayer",
    "load_episode",
    "play",
    "replay",
]
