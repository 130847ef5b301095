"""Python files and modules that a command line names."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType


def import_place(place: str) -> ModuleType:
    """Import a module by its name, or a file as if it were one.

    Args:
        place: `package.module`, or a path that ends in `.py`; what lies beside the file, and where
            the command was called, can be imported by it.

    Raises:
        ValueError: There is no such module or file.
    """
    if not place.endswith(".py"):
        # A console script does not look where it was called.
        _look_in(Path.cwd())
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"there is no module {place!r} ({error}): name a file, such as my_run.py, or an "
                "installed module"
            ) from error
    path = Path(place).absolute()
    if not path.is_file():
        raise ValueError(f"there is no file {place!r}: name one, such as my_run.py")
    _look_in(Path.cwd())
    _look_in(path.parent)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Classes of the file are found by their module's name when they are pickled.
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def import_places(places: Iterable[str]) -> None:
    """Import modules and files for what they register.

    Raises:
        ValueError: One of them is not there.
    """
    for place in places:
        import_place(place)


def folders_of(places: Iterable[str]) -> list[str]:
    """Return the folders of the files among the places, where their neighbours lie."""
    return [str(Path(place).absolute().parent) for place in places if place.endswith(".py")]


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
