"""Small games, made by TextWorld itself."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from tests.missing import skip_or_fail

_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def two_games() -> Path:
    """Compile a game of two steps and one of one, once in this process; return their folder."""
    try:
        import textworld
        from textworld.generator import compile_game, make_game
    except ImportError as error:
        skip_or_fail(f"TextWorld is not installed: {error}")
        raise
    for seed, quest_length in ((1, 2), (2, 1)):
        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length = 2, 3, quest_length
        options.seeds = seed
        options.path = f"{_FOLDER.name}/game_{seed}.z8"
        compile_game(make_game(options), options)
    return Path(_FOLDER.name)
