"""`mmldlm monitor`: watch training runs, say what is wrong and what to do.

Exit codes: 0 nothing of the level --fail-on or worse was found, 1 something was, 2 wrong usage.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmldlm.errors import UserError

if TYPE_CHECKING:
    from mmldlm.diagnostics.monitor.watch import RunWatch


def monitor(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH...",
            help="Run folders, training_log.jsonl files, text logs, folders of torchrun's rank logs, or patterns.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Read what is there, report, leave.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a look on stdout instead of a screen.")
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option(help="Exit with 1 if anything of this level or worse was found: info, warn or error."),
    ] = "error",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a threshold; may be repeated."),
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="YAML file of thresholds.")] = None,
    color: Annotated[
        bool | None,
        typer.Option("--color/--no-color", help="Colours; only in a terminal unless told otherwise."),
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="CODE", help="Print what a code means and leave.")
    ] = None,
) -> None:
    """Watch training runs, ours or anybody's, live or afterwards: what is wrong, since when, what to do."""
    from mmldlm.diagnostics.monitor.catalogue import BY_CODE, LEVELS, page
    from mmldlm.diagnostics.monitor.settings import load_settings
    from mmldlm.diagnostics.monitor.sources import find_runs
    from mmldlm.diagnostics.monitor.watch import RunWatch

    if explain is not None:
        if explain.upper() not in BY_CODE:
            raise UserError(f"--explain {explain}: allowed are {', '.join(BY_CODE)}")
        typer.echo(page(BY_CODE[explain.upper()]))
        return
    if fail_on not in LEVELS:
        raise UserError(f"--fail-on {fail_on}: allowed are {', '.join(LEVELS)}")
    if not 0.1 <= interval <= 86400:
        raise UserError(f"--interval {interval}: allowed are 0.1 to 86400 seconds")
    chosen = load_settings(set_ or (), settings)
    runs = [RunWatch(source, chosen) for source in find_runs(paths or [])]
    try:
        _once(runs, as_json=as_json, color=color)
    finally:
        for run in runs:
            run.close()
    levels = [run.panel.book.worst() for run in runs]
    if any(level is not None and LEVELS.index(level) >= LEVELS.index(fail_on) for level in levels):
        raise typer.Exit(1)


def _once(runs: list[RunWatch], *, as_json: bool, color: bool | None) -> None:
    from mmldlm.diagnostics.monitor.state import whole_state
    from mmldlm.diagnostics.monitor.words import plain_text

    for run in runs:
        run.poll(live=False)
    if as_json:
        typer.echo(json.dumps(whole_state(runs), ensure_ascii=False, allow_nan=False))
    else:
        typer.echo(plain_text(whole_state(runs)))
