"""`mmldlm` without a command: what is in this folder, and what one can do next."""

from __future__ import annotations

from pathlib import Path

import typer


def show() -> None:
    """Print the next steps, from what the working directory holds."""
    stores = sorted(path.parent for path in Path("data").glob("*/manifest.json"))
    runs = sorted(path.parent for path in Path("saved").glob("*/events.jsonl"))
    rows: list[tuple[str, str]] = []
    if runs:
        run = max(runs, key=lambda folder: folder.stat().st_mtime)
        rows += [
            ("mmldlm runs", f"the {len(runs)} runs in saved/: state, step, figures"),
            (f'mmldlm decode {run} --text "A sentence."', "its embedding, decoded into text"),
            (f"mmldlm eval {run}", "figures on held-out text, as a report"),
        ]
    if stores:
        rows.append(
            (f"mmldlm train --recipe laptop data.store={stores[0]}", "train on a prepared pair store")
        )
    rows += [
        ("mmldlm prepare --input YOUR.txt --out data/mine", "turn your text into a pair store"),
        ("mmldlm demo", "prepare, train and evaluate on the built-in text, in minutes"),
        ("mmldlm --help", "all commands"),
    ]
    width = max(len(command) for command, _ in rows)
    typer.echo("What you can do next:\n")
    for command, purpose in rows:
        typer.echo(f"  {command:<{width}}  {purpose}")
