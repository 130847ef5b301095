"""The console script, in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from rllib_gigpo_cli import app


def run(*arguments: str, typed: str | None = None) -> Result:
    """Run `rllib-gigpo` with arguments, and with what is typed."""
    return CliRunner().invoke(app, arguments, input=typed)
