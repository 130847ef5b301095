"""Small games, made by TextWorld itself."""

from __future__ import annotations

from pathlib import Path

from tests.missing import skip_or_fail


def two_games(folder: Path) -> Path:
    """Compile a game of one step and one of two; return the folder."""
    try:
        import textworld
        from textworld.generator import compile_game, make_game
    except ImportError as error:
        skip_or_fail(f"TextWorld is not installed: {error}")
    for seed, quest_length in ((1, 2), (2, 1)):
        options = textworld.GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length = 2, 3, quest_length
        options.seeds = seed
        options.path = str(folder / f"game_{seed}.z8")
        compile_game(make_game(options), options)
    return folder
