"""`mmldlm migrate`: bring a checkout of the MM-LDLM research code over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def migrate(
    old_repo: Annotated[
        Path,
        typer.Argument(help="Checkout of the MM-LDLM research code, or a YAML file of it; only read."),
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the recipes and migration.md; none: print.")
    ] = None,
) -> None:
    """Translate settings, data layout, command lines and environment; report what changes in behaviour and why."""
    from mmldlm.errors import UserError
    from mmldlm.migrate.report import report_text, write_migration
    from mmldlm.migrate.repository import examine_repository

    migration = examine_repository(old_repo)
    if out is None:
        typer.echo(report_text(migration))
        return
    if old_repo.is_dir() and old_repo.resolve() in (out.resolve(), *out.resolve().parents):
        raise UserError(
            f"--out {out}: lies inside the old checkout, which is left as it is; choose another folder"
        )
    for path in write_migration(migration, out):
        typer.echo(str(path))
    typer.echo(
        f"next: read {out / 'migration.md'}; make the pair store that the head of a recipe names, then mmldlm train "
        f"--recipe {out / 'recipes'}/..."
    )
