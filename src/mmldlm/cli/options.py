"""Options of commands as tables: a row for each, written once; a command names those that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import typer

Texts = list[str] | None


@dataclass(frozen=True)
class Word:
    """An option or an argument."""

    annotation: Any
    default: Any


def option(kind: Any, default: Any, help: str, *names: str, panel: str | None = None, **more: Any) -> Word:
    """An option; without `names` it is called as its row, with - for _."""
    return Word(Annotated[kind, typer.Option(*names, help=help, rich_help_panel=panel, **more)], default)


def argument(kind: Any, default: Any, help: str, **more: Any) -> Word:
    """An argument; the default `...` makes it required."""
    return Word(Annotated[kind, typer.Argument(help=help, **more)], default)


def takes(
    table: Mapping[str, Word], names: str | None = None
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """A command that takes these rows of a table, all by default; its function gets all of their values, by name.

    Called from Python, what is left out has its default.
    """

    def wrap(function: Callable[[Any], None]) -> Callable[..., None]:
        words = {name: table[name] for name in (table if names is None else names.split())}

        def command(**values: Any) -> None:
            function(SimpleNamespace(**{name: word.default for name, word in words.items()} | values))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=word.annotation,
                default=inspect.Parameter.empty if word.default is ... else word.default,
            )
            for name, word in words.items()
        ])  # fmt: skip
        return command

    return wrap


def chosen(words: Any, names: str) -> dict[str, Any]:
    """Those of these options that are set."""
    return {name: getattr(words, name) for name in names.split() if getattr(words, name) is not None}
