"""`mmldlm` without a command: what is in this folder, and what one can do next."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import typer


def program() -> str:
    """How this program is called from here: its name where the shell finds it, else its path."""
    called = Path(sys.argv[0])
    if called.name != "mmldlm":
        return "python -m mmldlm"
    found = shutil.which("mmldlm")
    if found and Path(found).samefile(called):
        return "mmldlm"
    return os.path.relpath(called)


def show() -> None:
    """Print the next steps, from what the working directory holds."""
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
