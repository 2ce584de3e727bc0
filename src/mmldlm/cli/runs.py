"""`mmldlm runs`: the runs of a folder with their state."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("saved"),
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List runs: training, finished, stopped (run the same command to resume) or failed."""
    import json

    from rich.console import Console

    from mmldlm.api.runs import list_runs
    from mmldlm.tables import folding_table

    listed = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([run.to_json() for run in listed], indent=1))
        return
    if not listed:
        typer.echo(f"{folder}: no runs yet; 'mmldlm train --recipe NAME' starts one")
        return
    table = folding_table("run", "state", "step", "metric", "updated", title=f"runs in {folder}")
    for run in listed:
        steps = f"{run.step:,} of {run.steps:,}" if run.steps is not None else f"{run.step:,}"
        metric = "" if run.headline is None else "{} {:.4f}".format(*run.headline)
        updated = "" if run.updated_at is None else f"{run.updated_at:%Y-%m-%d %H:%M}"
        table.add_row(run.name, run.state, steps, metric, updated)
    Console().print(table)
