"""Pickles of strangers, read without running anything of theirs.

RLlib's checkpoints are pickles, and unpickling calls whatever a pickle names. Here a name stands
for itself only if it is on a short list: plain containers, and the dataclasses and functions of
agents in this package. Arrays of NumPy are made of checked parts (`rllib_gigpo.pickled_arrays`).
Every other name becomes an `Unknown`, which does nothing and imports nothing, so that what is
wanted can be read from between things that are not.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from rllib_gigpo.pickled_arrays import stand_in

_PLAIN = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict"},
    "envs.spaces": {"TextSpace"},
    "rllib_gigpo.lora": {"LoRASettings"},
    "rllib_gigpo.models.spec": {"ModelSpec"},
}
# What is defined here may be named and called: none of it does more than compute.
_AGENTS = "rllib_gigpo.agent."


class UntrustedPickleError(ValueError):
    """A pickle holds, where it matters, what only its own code could rebuild."""


class Unknown:
    """Stands for an object of a name that is not on the list."""

    name = "?"

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Take anything."""
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        """Take any state, and keep none of it."""

    def append(self, item: Any) -> None:
        """Take an item, as of a list."""

    def extend(self, items: Any) -> None:
        """Take items, as of a list."""

    def add(self, item: Any) -> None:
        """Take an item, as of a set."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Take an entry, as of a dict."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Give another one."""
        return type(self)()


# Python's reader that is written in Python: that in C does not ask before it sets a state.
_Reader: Any = pickle._Unpickler  # pyright: ignore[reportAttributeAccessIssue]


class _Unpickler(_Reader):
    """Makes objects of known names alone, and changes none that was there before."""

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict(_Reader.dispatch)

    def load_build(self) -> None:
        """Set the state of an object that the pickle has made; classes and functions have none."""
        made = self.stack[-2]
        if callable(made) and hasattr(made, "__qualname__"):
            raise UntrustedPickleError(f"it changes {made.__qualname__} for the whole process")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """Return what a name on the list stands for, and a kind of `Unknown` for any other."""
        if (ours := stand_in(module, name)) is not None:
            return ours
        if name in _PLAIN.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module.startswith(_AGENTS) and name.isidentifier():
            try:
                found = getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError):
                found = None
            is_made = isinstance(found, type) or inspect.isfunction(found)
            # An instance would be the process's own, to be changed by what follows in the pickle.
            if is_made and found.__module__ == module:
                return found
        return type("Unknown", (Unknown,), {"name": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        """Stand for what is kept elsewhere."""
        return Unknown()


def read(path: Path) -> Any:
    """Read a pickle; names that are not on the list give `Unknown`s.

    Raises:
        UntrustedPickleError: It cannot be read without its own code.
        EOFError: It is cut off.
        pickle.UnpicklingError: It is no pickle.
    """
    with path.open("rb") as file:
        try:
            return _Unpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError):
            raise  # no file, or half of one
        except Exception as error:
            raise UntrustedPickleError(
                f"{str(path)!r} cannot be read without running code in it "
                f"({type(error).__name__}: {error})"
            ) from error


def check_known(what: str, value: Any) -> None:
    """Make sure that nothing unknown is in a value.

    Raises:
        UntrustedPickleError: Something is; its name is told.
    """
    for name in _unknown(value, set()):
        raise UntrustedPickleError(f"{what} is made of {name}, which is not of this package")


def _unknown(value: Any, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Unknown) or (isinstance(value, type) and issubclass(value, Unknown)):
        yield value.name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _unknown(key, seen)
            yield from _unknown(inner, seen)
    elif isinstance(value, list | tuple | set | frozenset):
        for inner in value:
            yield from _unknown(inner, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _unknown(vars(value), seen)


def checked_again(value: Any) -> Any:
    """Return a dataclass made anew of its fields, so that it checks them as when it was made."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value)
    return value
