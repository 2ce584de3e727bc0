"""`mmldlm export`: weights for use from the newest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="Folder of the run, or its name below saved.")],
    out: Annotated[
        Path | None, typer.Option(help="Target folder; default: export in the run's folder.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The pair store of a run from before run folders described their data, if it has moved."
        ),
    ] = None,
    ema: Annotated[
        bool, typer.Option("--ema/--no-ema", help="Averaged weights, or those of the last step.")
    ] = True,
) -> None:
    """Write the weights of a run's newest checkpoint with all that is needed to use them."""
    from mmldlm.api.runs import export_run

    target, step = export_run(run, out, averaged=ema, store=data)
    typer.echo(f"step {step} of {run} exported to {target}")
