"""Values that no protocol expects."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
# More nesting than a recursive reader has stack for.
DEEP = b"[" * 100_000
