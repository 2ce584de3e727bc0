"""`mmldlm runs` lists runs, `mmldlm export` writes the weights of one, and `mmldlm` alone shows what to do next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import typer

from mmldlm.cli.options import argument, option, takes
from mmldlm.cli.records import RUN_HELP

RUNS = {
    "folder": argument(Path, Path("saved"), "Folder that holds runs."),
    "as_json": option(bool, False, "Machine-readable.", "--json"),
}
EXPORT = {
    "run": argument(str, ..., f"{RUN_HELP} The last two need --out."),
    "out": option(Path | None, None, "Target folder; default: export in the run's folder.", metavar="FOLDER"),
    "ema": option(bool, True, "Averaged weights, or those of the last step.", "--ema/--no-ema"),
    "precision": option(str, "fp32", "Of the stored weights: fp32, fp16, or int8 (a scale for each row)."),
}


@takes(RUNS)
def runs(words: Any) -> None:
    """List runs: training, finished, stopped (run the same command to resume) or failed."""
    import json

    from rich.console import Console

    from mmldlm.api.runs import list_runs
    from mmldlm.reports import folding_table

    listed = list_runs(words.folder)
    if words.as_json:
        typer.echo(json.dumps([run.to_json() for run in listed], indent=1))
        return
    if not listed:
        typer.echo(f"{words.folder}: no runs yet; 'mmldlm train --recipe NAME' starts one")
        return
    table = folding_table("run", "state", "step", "metric", "updated", title=f"runs in {words.folder}")
    for run in listed:
        steps = f"{run.step:,} of {run.steps:,}" if run.steps is not None else f"{run.step:,}"
        metric = "" if run.headline is None else "{} {:.4f}".format(*run.headline)
        updated = "" if run.updated_at is None else f"{run.updated_at:%Y-%m-%d %H:%M}"
        table.add_row(run.name, run.state, steps, metric, updated)
    Console().print(table)


@takes(EXPORT)
def export(words: Any) -> None:
    """Write the weights of a run's newest checkpoint with all that is needed to use them."""
    from mmldlm.api.runs import export_run

    target, step = export_run(words.run, words.out, averaged=words.ema, precision=words.precision)
    typer.echo(f"step {step} of {words.run} exported to {target}")


def program() -> str:
    """How this program is called from here: its name where the shell finds it, else its path."""
    called = Path(sys.argv[0])
    if called.name != "mmldlm":
        return "python -m mmldlm"
    known = shutil.which("mmldlm")
    if known and Path(known).samefile(called):
        return "mmldlm"
    return os.path.relpath(called)


def show_next_steps() -> None:
    """Print what one can do next, from what the working directory holds."""
    stores = sorted(path.parent for path in Path("data").glob("*/manifest.json"))
    runs = sorted(path.parent for path in Path("saved").glob("*/events.jsonl"))
    rows: list[tuple[str, str]] = []
    mmldlm = program()
    if runs:
        run = max(runs, key=lambda folder: folder.stat().st_mtime)
        rows += [
            (f"{mmldlm} runs", f"the {len(runs)} runs in saved/: state, step, figures"),
            (f'{mmldlm} decode {run} --text "A sentence."', "its embedding, decoded into text"),
            (f"{mmldlm} eval {run}", "figures on held-out text, as a report"),
        ]
    if stores:
        rows.append(
            (f"{mmldlm} train --recipe laptop data.store={stores[0]}", "train on a prepared pair store")
        )
    rows += [
        (f"{mmldlm} prepare YOUR.txt --out data/mine", "turn your text into a pair store"),
        (f"{mmldlm} demo", "prepare, train and evaluate on the built-in text, in minutes"),
        (f"{mmldlm} --help", "all commands"),
    ]
    width = max(len(command) for command, _ in rows)
    typer.echo("What you can do next:\n")
    for command, purpose in rows:
        typer.echo(f"  {command:<{width}}  {purpose}")
