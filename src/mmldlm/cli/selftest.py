"""`mmldlm selftest`: is this machine, or this cluster, ready for a run?"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def selftest(
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks to start here; default: one per GPU, else 2.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="Pair store that all ranks must be able to read.")
    ] = None,
    run_folder: Annotated[Path, typer.Option(help="Folder whose disk is tested.")] = Path("saved"),
) -> None:
    """Test rendezvous, exchange between ranks, clocks, versions, devices, store and disk. Exit code 1: a check failed.

    Several nodes: mmldlm launch --nnodes 2 --rdzv-endpoint HOST:29500 -- selftest
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _test_rank(store, run_folder)
        return
    import torch

    from mmldlm.launch.ranks import plan_launch, run_ranks

    gpus = torch.cuda.device_count()
    plan = plan_launch({}, nproc_per_node=nproc or gpus or 2)
    words = ["selftest", "--run-folder", str(run_folder), *(["--store", str(store)] if store else [])]
    outcome = run_ranks(plan, words, quiet=True)
    if outcome.code not in (0, 1):
        typer.echo(f"✗ rendezvous: {outcome.message}")
    raise typer.Exit(1 if outcome.code else 0)


def _test_rank(store: Path | None, run_folder: Path) -> None:
    from mmldlm.distributed.launch import start_ranks
    from mmldlm.launch.selftest import check_gpus, check_ranks, selftest_config

    with start_ranks(selftest_config()) as ranks:
        checks = [check_gpus(ranks.local_world_size), *check_ranks(ranks, store, run_folder)]
        if ranks.main:
            typer.echo("\n".join(check.line() for check in checks))
            failed = sum(not check.passed for check in checks)
            typer.echo(
                f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
            )
        passed = all(check.passed for check in checks)
    sys.exit(0 if passed else 1)
