"""The command as a function, for tests that need no process of its own."""

import signal

import pytest
import typer
from runwatch.cli import MonitorCommand, monitor
from typer.testing import CliRunner


def pytest_configure() -> None:
    """Tests press Ctrl-C, which must work also in a background job of a script, where it is ignored and inherited."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def call():
    """Run the command with some words; the result has exit_code, stdout and exception."""
    app = typer.Typer(rich_markup_mode=None)
    app.command(cls=MonitorCommand)(monitor)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])
