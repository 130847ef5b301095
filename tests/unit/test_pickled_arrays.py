"""Arrays in pickles of strangers: what NumPy writes is read, what is forged is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rllib_gigpo import safe_pickle
from tests.child import call

_DTYPES = ["?", "i1", "<i4", ">i8", "u2", "<f2", "f4", ">f8", "c8", "S3", "<U4"]


def read_back(value: Any, protocol: int, folder) -> Any:
    path = folder / f"{protocol}.pkl"
    path.write_bytes(pickle.dumps(value, protocol))
    return safe_pickle.read(path)


@given(
    array=st.sampled_from(_DTYPES).flatmap(
        lambda dtype: arrays.arrays(np.dtype(dtype), arrays.array_shapes(min_dims=0, min_side=0))
    ),
    in_fortran_order=st.booleans(),
    protocol=st.integers(3, 5),
)
def test_plain_arrays_are_read(array, in_fortran_order, protocol, tmp_path_factory):
    array = np.asfortranarray(array) if in_fortran_order else array
    folder = tmp_path_factory.getbasetemp()
    told = {"twice": [array, array]}
    expected = pickle.loads(pickle.dumps(told, protocol))["twice"]
    for one, other in zip(read_back(told, protocol, folder)["twice"], expected, strict=True):
        assert (one.dtype, one.flags.f_contiguous) == (other.dtype, other.flags.f_contiguous)
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("protocol", [3, 5])
def test_scalars_are_read(protocol, tmp_path):
    scalars = [np.float32(0.5), np.int64(-3), np.bool_(True), np.float64("inf")]
    assert read_back(scalars, protocol, tmp_path) == scalars


class Call:
    """A pickle that calls a function, with a state for what it returns."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None):
        self.told = (function, arguments, state)

    def __reduce__(self):
        return self.told


def _array(dtype: Any, raw: Any) -> Call:
    from numpy._core.multiarray import _reconstruct

    return Call(_reconstruct, np.ndarray, (0,), b"b", state=(1, (1,), dtype, False, raw))


FORGED = {
    "objects over bytes": Call(np.ndarray, (1,), np.dtype("O"), b"ABCDEF\0\0"),
    "objects": _array(np.dtype("O"), b"ABCDEF\0\0"),
    "a list": _array(np.dtype("O"), [1]),
    "fields": _array(np.dtype([("a", "O")]), b"ABCDEF\0\0"),
    # 63: all of NumPy's flags of dtypes of objects.
    "flags of objects": _array(
        Call(np.dtype, "f8", False, True, state=(3, "<", None, None, None, -1, -1, 63)),
        b"ABCDEF\0\0",
    ),
}


def outcomes(folder: str) -> dict[str, str]:
    """What becomes of each pickle; in a process of its own, which a pointer would end."""
    found = {}
    for path in sorted(Path(folder).iterdir()):
        try:
            value = safe_pickle.read(path)["again"]
        except safe_pickle.UntrustedPickleError:
            found[path.stem] = "refused"
        else:
            found[path.stem] = str(getattr(value, "dtype", type(value).__name__))
    return found


def test_a_forged_array_is_no_pointer(tmp_path):
    for name, forged in FORGED.items():
        told = pickle.dumps({"set": [forged], "again": forged})
        (tmp_path / f"{name}.pkl").write_bytes(told)
    assert call(outcomes, tmp_path) == {
        "objects over bytes": "refused",
        "objects": "refused",
        "a list": "refused",
        "fields": "refused",
        "flags of objects": "float64",  # its own flags, whatever the pickle says
    }


def test_an_array_is_made_once(tmp_path):
    raw = pickle.dumps(np.arange(3.0), 4)
    head, state = raw.rindex(b"b."), raw[raw.index(b"(K\x01K\x03") :]
    # The same state a second time.
    path = tmp_path / "twice.pkl"
    path.write_bytes(raw[: head + 1] + state)
    with pytest.raises((safe_pickle.UntrustedPickleError, pickle.UnpicklingError)):
        safe_pickle.read(path)
