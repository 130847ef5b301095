"""What a check found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

State = Literal["ok", "FAULT", "note"]


class Finding(NamedTuple):
    """One thing that was looked at.

    Attributes:
        part: Which part of the run: "settings", "environment", ...
        state: "ok", "FAULT" (the run would fail or be wrong), or "note" (worth a look).
        text: One sentence; of a fault, with the cure.
    """

    part: str
    state: State
    text: str


def is_sound(findings: Sequence[Finding]) -> bool:
    """Whether nothing is at fault."""
    return all(finding.state != "FAULT" for finding in findings)


def findings_text(findings: Sequence[Finding]) -> str:
    """Return findings as lines of text."""
    return "\n".join(f"{f.state:<6} {f.part:<12} {f.text}" for f in findings)
