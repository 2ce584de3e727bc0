"""`mmldlm migrate` brings a checkout of the research code over; `mmldlm doctor` audits anybody's training code.

`doctor` has the commands of traindoctor, and `config` for recipes and settings of the research code.
"""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import Any

import typer
from traindoctor import cli as traindoctor
from traindoctor.program import called

from mmldlm.cli.options import argument, option, takes
from mmldlm.cli.terminal import Command, PlainHelp

MIGRATE = {
    "old_repo": argument(
        Path, ..., "Checkout of the MM-LDLM research code, or a YAML file of it; only read."
    ),
    "out": option(
        Path | None, None, "Folder for the recipes and migration.md; none: print.", "--out", "-o", metavar="FOLDER"
    ),
}  # fmt: skip
CONFIG = {
    "file": argument(Path, ..., "A recipe of ours, or a YAML settings file of the research code."),
    "write": option(Path | None, None, "Write the translated recipe to this file.", "--write"),
}


@takes(MIGRATE)
def migrate(words: Any) -> None:
    """Translate settings, data layout, command lines and environment; report what changes in behaviour and why."""
    from mmldlm.errors import UserError
    from mmldlm.migrate.report import report_text, write_migration
    from mmldlm.migrate.repository import examine_repository
    from mmldlm.migrate.translation import check_recipe

    old_repo, out = words.old_repo, words.out
    migration = examine_repository(old_repo)
    if out is None:
        typer.echo(report_text(migration))
        return
    if old_repo.is_dir() and old_repo.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(
            f"--out {out}: lies inside the old checkout, which is left as it is; choose another folder"
        )
    report, *recipes = write_migration(migration, out)
    typer.echo(str(report))
    for path, translation in zip(recipes, migration.translations, strict=True):
        problems = check_recipe(translation.recipe)
        typer.echo(f"{path}: has to be corrected first: {'; '.join(problems)}" if problems else str(path))
    typer.echo(
        f"next: read {out / 'migration.md'}; make the pair store that the head of a recipe names, then mmldlm train "
        f"--recipe {shlex.quote(str(out / 'recipes'))}/..."
    )


app = typer.Typer(
    help="Audit anybody's training code: find faults, fix what is safe, undo it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class DoctorCommand(PlainHelp):
    """A command of traindoctor, whose messages name ours."""

    def invoke(self, ctx: Any) -> Any:
        with called("mmldlm doctor"):
            return super().invoke(ctx)


for info in traindoctor.app.registered_commands:
    app.registered_commands.append(copy.copy(info))
    app.registered_commands[-1].cls = DoctorCommand


@app.command(cls=Command, short_help="Examine a recipe or an old YAML of settings.")
@takes(CONFIG)
def config(words: Any) -> None:
    """Examine settings: unread keys, contradictions, translation to a recipe. Exit 1 when something is wrong."""
    from mmldlm.errors import UserError
    from mmldlm.migrate.report import examine_settings

    file, write = words.file, words.write
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
