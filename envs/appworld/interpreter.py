"""The few Python statements that the shipped world understands; nothing else is ever carried out.

Assignments to a name, expressions of literals, names and indices, and calls of
`print`, `len`, `str` and `apis.<app>.<api>(name=value)`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

Call = Callable[[str, str, dict[str, Any]], Any]

_FUNCTIONS: dict[str, Callable[..., Any]] = {"len": len, "str": str}


class UnsupportedCodeError(Exception):
    """Code beyond the small language of the shipped world; the agent reads it as an answer."""


class Shell:
    """Runs code and keeps its names until the next.

    Args:
        call: Calls an API: app, api, arguments.
    """

    def __init__(self, call: Call):
        self._call = call
        self._names: dict[str, Any] = {}
        self._printed: list[str] = []

    def run(self, code: str) -> str:
        """Run code and return what AppWorld's shell would say of it."""
        self._printed = []
        try:
            statements = ast.parse(code.strip()).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return f"Execution failed. Traceback:\nSyntax error in line:\nMessage: {error}"
        if not statements:
            return "No code available to execute."
        try:
            for statement in statements:
                self._do(statement)
        except Exception as error:  # of any kind: the code's author reads it
            return f"Execution failed. Traceback:\n{type(error).__name__}: {error}"
        return "\n".join(self._printed) or "Execution successful."

    def _do(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Expr):
            self._value(statement.value)
        elif (
            isinstance(statement, ast.Assign)
            and len(statement.targets) == 1
            and isinstance(statement.targets[0], ast.Name)
        ):
            self._names[statement.targets[0].id] = self._value(statement.value)
        else:
            raise UnsupportedCodeError(f"the shipped world has no {type(statement).__name__}")

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            if node.id not in self._names:
                raise NameError(f"name {node.id!r} is not defined")
            return self._names[node.id]
        if isinstance(node, ast.Subscript):
            return self._value(node.value)[self._value(node.slice)]
        if isinstance(node, ast.Call):
            return self._called(node)
        raise UnsupportedCodeError(f"the shipped world has no {type(node).__name__}")

    def _called(self, node: ast.Call) -> Any:
        given = {word.arg: self._value(word.value) for word in node.keywords if word.arg}
        placed = [self._value(argument) for argument in node.args]
        path = ast.unparse(node.func).split(".")
        if path[0] == "apis" and len(path) == 3 and not placed:
            return self._call(path[1], path[2], given)
        if path == ["print"]:
            self._printed.append(" ".join(map(str, placed)))
            return None
        if len(path) == 1 and path[0] in _FUNCTIONS:
            return _FUNCTIONS[path[0]](*placed)
        raise NameError(f"{ast.unparse(node.func)!r} is not a function of the shipped world")
