"""`mmldlm launch`: a command on several GPUs, nodes or CPU processes; `mmldlm selftest`: are they ready for a run?"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmldlm.cli.options import Texts, argument, chosen, option, takes

if TYPE_CHECKING:
    from mmldlm.launch.ranks import LaunchPlan


LAUNCH = {
    "words": argument(
        Texts, None, "What every rank runs, such as: -- train --recipe small", metavar="-- COMMAND"
    ),
    "nnodes": option(str | None, None, "Nodes, N or MIN:MAX; default: SLURM's, else 1."),
    "nproc_per_node": option(
        int | None, None, "Ranks on this node; default: one per GPU, without GPUs 1.", min=1
    ),
    "rdzv_endpoint": option(
        str | None, None, "HOST:PORT where nodes meet; default: SLURM's first node, or a free port."
    ),
    "node_rank": option(int | None, None, "Number of this node; default: as nodes arrive.", min=0),
    "max_restarts": option(int, 0, "Restarts of all ranks after a failure of one.", min=0),
    "log_dir": option(Path, Path("train_logs"), "Folder for output and errors of each rank."),
    "from_variables": option(
        bool, False, "Train as scripts/train_qwen_english_l2t_stable.sh: NNODES, L2T_TRAIN_BS, ...", "--from-variables"
    ),
    "dry_run": option(bool, False, "With --from-variables: explain the sizes and stop.", "--dry-run"),
    "slurm": option(
        Path | None, None, "Write a SLURM job file that launches this on --nnodes nodes, and stop."
    ),
    "sbatch": option(
        Texts, None, "With --slurm: more for sbatch, such as time=04:00:00. Repeat for more."
    ),
    "submit": option(bool, False, "With --slurm: hand the job file to sbatch.", "--submit"),
}  # fmt: skip


@takes(LAUNCH)
def launch(given: Any) -> None:
    """Run a command on several ranks: torchrun, with its options taken from the machine and from SLURM.

    Exit code: that of the rank that failed first; 75 and 130 after an orderly stop.
    """
    from mmldlm.durable import require_writable
    from mmldlm.errors import UserError
    from mmldlm.launch.ranks import plan_launch, run_ranks

    words = given.words
    if given.dry_run and not given.from_variables:
        raise UserError("--dry-run belongs to --from-variables; for a run: launch -- train ... --dry-run")
    own = ("slurm", "nnodes", "nproc_per_node", "rdzv_endpoint", "node_rank")
    if given.from_variables and (stated := [name for name in own if getattr(given, name) is not None]):
        raise UserError(
            f"--{stated[0].replace('_', '-')} does not go with --from-variables: NNODES, NPROC_PER_NODE, NODE_RANK, "
            "MASTER_ADDR and MASTER_PORT count there; leave it out"
        )
    if (given.sbatch or given.submit) and given.slurm is None:
        raise UserError("--sbatch and --submit belong to --slurm FILE; add it, or leave them out")
    if given.slurm is not None and (given.rdzv_endpoint or given.node_rank is not None):
        raise UserError(
            "--rdzv-endpoint and --node-rank do not go with --slurm: SLURM names the nodes; leave them out"
        )
    if str(given.slurm).startswith("-"):  # it took the next word for its file
        raise UserError(
            f"--slurm {given.slurm}: the name of the job file is missing, as in --slurm job.sbatch"
        )
    for path in [given.log_dir] + ([given.slurm] if given.slurm else []):
        require_writable(path)
    if given.from_variables:
        plan, words = _plan_from_variables(words or [], given.log_dir, given.max_restarts, given.dry_run)
    elif not words:
        raise UserError(
            "launch: the command of the ranks is missing; write it after --: -- train --recipe small"
        )
    elif given.slurm is not None:
        _write_job(given)
        return
    else:
        asked = "nnodes nproc_per_node rdzv_endpoint node_rank max_restarts log_dir"
        plan = plan_launch(os.environ, **chosen(given, asked))
    typer.echo(plan.describe(), err=True)
    outcome = run_ranks(plan, words)
    if outcome.message:
        typer.echo(f"mmldlm launch: {outcome.message}", err=True)
    raise typer.Exit(outcome.code)


def _plan_from_variables(
    words: list[str], log_dir: Path, max_restarts: int, dry_run: bool
) -> tuple[LaunchPlan, list[str]]:
    """Show the resulting settings, check the machine, and import the store if the variables name one."""
    from mmldlm.config.recipe import load_recipe
    from mmldlm.launch.selftest import check_folder, check_gpus, check_store
    from mmldlm.launch.variables import import_store, read_machine, read_variables

    machine = read_machine()
    run = read_variables(os.environ, machine)
    if run.import_from is not None and not dry_run:
        import_store(run, typer.echo)
        run = read_variables(os.environ, machine)  # the store says how long its documents are
    width = max(len(name) for name, _, _ in run.explained)
    for name, value, where in run.explained:
        typer.echo(f"{name:<{width}}  {value}  ({where})")
    run.words += words
    typer.echo(shlex.join(["mmldlm", *run.command()]))
    load_recipe(run.recipe, run.words)  # a wrong setting is reported before anything is started
    if dry_run:
        raise typer.Exit
    checks = [check_gpus(run.launch.nproc_per_node), check_store(run.store), check_folder("disk", run.run)]
    for check in checks:
        typer.echo(check.line())
    if not all(check.passed for check in checks if check.name != "disk"):
        raise typer.Exit(2)
    run.launch.log_dir, run.launch.max_restarts = log_dir, max_restarts
    return run.launch, run.command()


def _write_job(given: Any) -> None:
    import torch

    from mmldlm.launch.ranks import parse_nodes
    from mmldlm.launch.slurm import Job, job_script, run_of_words, submit

    sbatch, words, path = given.sbatch or [], given.words, given.slurm
    count = given.nproc_per_node or torch.cuda.device_count() or 1
    stated = any(word.lstrip("-").startswith(("gpus", "gres")) for word in sbatch)
    nodes, gpus = parse_nodes(given.nnodes or "1")[1], 0 if stated else count
    job = Job(words, run_of_words(words), nodes, count, gpus, given.max_restarts, given.log_dir, sbatch)
    given.log_dir.mkdir(parents=True, exist_ok=True)  # SLURM opens its output there before the job starts
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(job_script(job, Path.cwd()), "utf-8")
    typer.echo(f"job file: {path}")
    typer.echo(submit(path) if given.submit else f"submit it with: {shlex.join(['sbatch', str(path)])}")


SELFTEST = {
    "nproc": option(int | None, None, "Ranks to start here; default: one per GPU, else 2.", min=1),
    "store": option(Path | None, None, "Pair store that all ranks must be able to read."),
    "run_folder": option(Path, Path("saved"), "Folder whose disk is tested."),
}


@takes(SELFTEST)
def selftest(given: Any) -> None:
    """Test rendezvous, exchange between ranks, clocks, versions, devices, store and disk. Exit code 1: a check failed.

    Several nodes: mmldlm launch --nnodes 2 --rdzv-endpoint HOST:29500 -- selftest
    """
    store, run_folder = given.store, given.run_folder
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _test_rank(store, run_folder)
        return
    import torch

    from mmldlm.launch.ranks import plan_launch, run_ranks

    gpus = torch.cuda.device_count()
    plan = plan_launch({}, nproc_per_node=given.nproc or gpus or 2)
    words = ["selftest", "--run-folder", str(run_folder), *(["--store", str(store)] if store else [])]
    outcome = run_ranks(plan, words, quiet=True)
    if outcome.code not in (0, 1):
        typer.echo(f"✗ rendezvous: {outcome.message}")
    raise typer.Exit(1 if outcome.code else 0)


def _test_rank(store: Path | None, run_folder: Path) -> None:
    from mmldlm.distributed.launch import start_ranks
    from mmldlm.launch.selftest import check_ranks, selftest_config

    with start_ranks(selftest_config()) as ranks:
        checks = check_ranks(ranks, store, run_folder)
        if ranks.main:
            typer.echo("\n".join(check.line() for check in checks))
            failed = sum(not check.passed for check in checks)
            typer.echo(
                f"{failed} of {len(checks)} checks failed" if failed else f"all {len(checks)} checks passed"
            )
        passed = all(check.passed for check in checks)
    sys.exit(0 if passed else 1)
