"""The command as a function, for tests that need no process of its own."""

import pytest
import typer
from runwatch.cli import MonitorCommand, monitor
from typer.testing import CliRunner


@pytest.fixture
def call():
    """Run the command with some words; the result has exit_code, stdout and exception."""
    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=MonitorCommand)(monitor)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])
