"""Plain text tables, for terminals and logs alike."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table of text columns under a title; numbers stand to the right."""
    table = [[str(name) for name in header], *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = [
        all(isinstance(value, int | float) for value in column)
        for column in zip(*rows, strict=True)
    ] or [False] * len(header)
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in table
    ]
    return "\n".join([title, lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)
