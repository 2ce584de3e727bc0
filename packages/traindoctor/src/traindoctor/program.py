"""What the program is called in messages that name a command; another program may have these commands as its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_NAME = ContextVar("program", default="traindoctor")


def program() -> str:
    """The words before the name of a command, such as traindoctor."""
    return _NAME.get()


@contextmanager
def called(name: str) -> Iterator[None]:
    """Inside, messages name the commands of this program."""
    token = _NAME.set(name)
    try:
        yield
    finally:
        _NAME.reset(token)
