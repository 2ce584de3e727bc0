"""Options of commands as tables: a row for each, written once; a command names those that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

Texts = list[str] | None
_OF_ROWS = {
    "run": "RUN", "recipe": "RECIPE", "settings": "SETTING", "sweep": "SETTING", "plan": "PLAN",
    "store": "STORE", "data": "STORE", "split": "SPLIT", "from_split": "SPLIT",
    "folder": "FOLDER", "log_dir": "FOLDER", "run_folder": "FOLDER",
    "length": "N", "nnodes": "N", "timeout": "SECONDS", "memory_limit": "SIZE", "lengths": "MIN:MAX",
    "against": "TEXT", "prompt": "TEXT", "host": "HOST", "rdzv_endpoint": "HOST:PORT", "ray_address": "HOST:PORT",
    "arm": "ARM", "only": "ARM", "baseline": "ARM", "sbatch": "OPTION", "old": "OLD", "old_repo": "OLD",
}  # fmt: skip
"""Row -> what help calls its value: one word for one thing in all commands."""
_OF_KINDS = {int: "N", float: "X", str: "NAME", Path: "FILE", list[str]: "TEXT", list[Path]: "FILE"}
"""Kind of a value -> the same for all other rows."""


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


def grouped(panel: str, rows: Mapping[str, Word]) -> dict[str, Word]:
    """Options that help lists under a heading."""
    for word in rows.values():
        get_args(word.annotation)[1].rich_help_panel = panel
    return dict(rows)


def _name_value(row: str, word: Word) -> None:
    """What help calls the value of a row that does not say it, and the name of an option; a flag needs neither."""
    kind, info = get_args(word.annotation)
    kinds = (kind, *get_args(kind))  # int | None is an int
    if info.metavar is None and bool not in kinds:
        info.metavar = _OF_ROWS.get(row) or next(_OF_KINDS[each] for each in kinds if each in _OF_KINDS)
    if isinstance(info, OptionInfo) and info.default is ... and not info.param_decls and bool not in kinds:
        info.param_decls = (f"--{row.replace('_', '-')}",)  # Typer 0.27 would call it as its value


def takes(
    table: Mapping[str, Word], names: str | None = None
) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """A command that takes these rows of a table, all by default; its function gets all of their values, by name.

    Called from Python, what is left out has its default.
    """

    def wrap(function: Callable[[Any], None]) -> Callable[..., None]:
        words = {name: table[name] for name in (table if names is None else names.split())}
        for name, word in words.items():
            _name_value(name, word)

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
