"""`mmldlm doctor`: audit training code, fix what is safe, take it back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Audit training code: find faults, fix what is safe, undo it.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Audit training code: find faults, fix what is safe, undo it."""


@app.command()
def check(path: Annotated[Path, typer.Argument(help="File or folder to audit.")] = Path(".")) -> None:
    """Report files that cannot be parsed."""
    import ast

    broken = 0
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        try:
            ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            typer.echo(f"{file}: {error}")
            broken += 1
    raise typer.Exit(1 if broken else 0)
