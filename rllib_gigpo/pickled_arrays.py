"""NumPy's arrays and scalars in pickles of strangers, made of checked parts.

NumPy's own `ndarray` and `dtype` must not be called from a forged pickle: arrays of objects over
given bytes, or a dtype whose flags are set by `BUILD`, are pointers of the forger's choice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

# One number or one fixed text: NumPy reads "i8,O" as fields, and "O" is a pointer.
_PLAIN_DTYPE = re.compile(r"[<>=|]?[biufcSU]\d{1,9}")


class PickledDtype:
    """Stands for a dtype; `plain` is the dtype, if it is one of numbers or of fixed text.

    Args:
        spec: NumPy's short name, such as "f4".
    """

    def __init__(self, spec: Any, *_: Any):
        self._spec = spec
        self._order: Any = "="

    def __setstate__(self, state: Any) -> None:
        """Take the order of bytes out of NumPy's state, and nothing else."""
        self._order = state[1] if state[1] in ("<", ">") else "="

    @property
    def plain(self) -> np.dtype:
        """The dtype.

        Raises:
            ValueError: It is one of objects, of fields, of several numbers or of nothing.
        """
        if not isinstance(self._spec, str) or not _PLAIN_DTYPE.fullmatch(self._spec):
            raise ValueError(f"an array of {self._spec!r}")
        found = np.dtype(self._spec).newbyteorder(self._order)
        if found.itemsize == 0:  # so that any number of them has no bytes
            raise ValueError(f"an array of {self._spec!r}")
        return found


class PickledArray(np.ndarray):
    """An array that takes its state once, and only of numbers or fixed text."""

    __slots__ = ("_is_made",)

    def __setstate__(self, state: Any) -> None:
        """Take NumPy's state: version, shape, dtype, whether in Fortran's order, bytes."""
        version, shape, dtype, is_fortran, raw = state
        if hasattr(self, "_is_made") or not isinstance(raw, bytes):
            raise ValueError("an array made in an unknown way")
        plain: Any = (version, _shape(shape), _plain(dtype), bool(is_fortran), raw)
        super().__setstate__(plain)
        self._is_made = True


class _ArrayType:
    """Stands for `numpy.ndarray` itself, which is only ever named."""


def _empty(*_: Any) -> PickledArray:
    return np.empty(0, np.int8).view(PickledArray)


def _of_buffer(buffer: Any, dtype: Any, shape: Any, order: Any, *_: Any) -> np.ndarray:
    found = np.frombuffer(_bytes(buffer), dtype=_plain(dtype))
    return found.reshape(_shape(shape), order="F" if order == "F" else "C")


def _scalar(dtype: Any, raw: Any) -> Any:
    return np.frombuffer(_bytes(raw), dtype=_plain(dtype), count=1)[0]


def _plain(dtype: Any) -> np.dtype:
    if not isinstance(dtype, PickledDtype):
        raise ValueError(f"an array of {type(dtype).__name__}")
    return dtype.plain


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in shape)


def _bytes(buffer: Any) -> bytes:
    if not isinstance(buffer, bytes | bytearray):
        raise ValueError(f"the content of an array in {type(buffer).__name__}")
    return bytes(buffer)


_NUMPY: dict[str, dict[str, Callable[..., Any]]] = {
    "numpy": {"dtype": PickledDtype, "ndarray": _ArrayType},
    **{
        f"numpy.{core}.{module}": names
        for core in ("_core", "core")
        for module, names in (
            ("multiarray", {"_reconstruct": _empty, "scalar": _scalar}),
            ("numeric", {"_frombuffer": _of_buffer}),
        )
    },
}


def stand_in(module: str, name: str) -> Callable[..., Any] | None:
    """Return what a name of NumPy's in a pickle stands for here, or None for any other name."""
    return _NUMPY.get(module, {}).get(name)
