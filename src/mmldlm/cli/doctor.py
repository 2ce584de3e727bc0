"""`mmldlm doctor`: the commands of traindoctor, and `config` for recipes and settings of the research code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from traindoctor import cli as traindoctor

app = typer.Typer(
    help="Audit anybody's training code: find faults, fix what is safe, undo it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.registered_commands += traindoctor.app.registered_commands


@app.command(short_help="Examine a recipe or an old YAML of settings.")
def config(
    file: Annotated[
        Path, typer.Argument(help="A recipe of ours, or a YAML settings file of the research code.")
    ],
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the translated recipe to this file.")
    ] = None,
) -> None:
    """Examine settings: unread keys, contradictions, translation to a recipe. Exit 1 when something is wrong."""
    from mmldlm.errors import UserError
    from mmldlm.migrate.report import examine_settings

    report = examine_settings(file)
    if report.kind == "ours":
        if write is not None:
            raise UserError(f"--write: {file} is a recipe of ours already; there is nothing to translate")
        for problem in report.problems:
            typer.echo(f"{file}: {problem}")
        if not report.problems:
            typer.echo(f"{file}: a valid recipe")
    else:
        typer.echo(f"{file}: settings of the MM-LDLM research code")
        for line in report.lines:
            typer.echo(line)
        if write is None:
            typer.echo("\nrecipe:\n" + (report.recipe or ""))
        else:
            write.write_text(report.recipe or "", "utf-8")
            typer.echo(f"recipe written to {write}; its head names the command that makes the pair store")
    raise typer.Exit(1 if report.problems else 0)
