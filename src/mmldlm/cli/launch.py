"""`mmldlm launch`: a command on several GPUs, nodes or CPU processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def launch(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- COMMAND...", help="What every rank runs, such as: -- train --recipe small"
        ),
    ],
    nnodes: Annotated[str | None, typer.Option(help="Nodes, N or MIN:MAX; default: SLURM's, else 1.")] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this node; default: one per GPU, without GPUs 1.")
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(help="HOST:PORT where nodes meet; default: SLURM's first node, or a free port."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Number of this node; default: as nodes arrive.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Restarts of all ranks after a failure of one.")
    ] = 0,
    log_dir: Annotated[Path, typer.Option(help="Folder for output and errors of each rank.")] = Path(
        "train_logs"
    ),
) -> None:
    """Run a command on several ranks: torchrun with everything filled in that the machine and SLURM tell.

    Exit code: that of the rank that failed first; 75 and 130 after an orderly stop.
    """
    from mmldlm.launch.ranks import plan_launch, run_ranks

    plan = plan_launch(
        os.environ, nnodes=nnodes, nproc_per_node=nproc_per_node, rdzv_endpoint=rdzv_endpoint, node_rank=node_rank,
        max_restarts=max_restarts, log_dir=log_dir,
    )  # fmt: skip
    typer.echo(plan.describe(), err=True)
    outcome = run_ranks(plan, words)
    if outcome.message:
        typer.echo(f"mmldlm launch: {outcome.message}", err=True)
    raise typer.Exit(outcome.code)
