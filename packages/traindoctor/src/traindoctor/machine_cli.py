"""Commands about this machine and a model of the user: `preflight`, `env`, `probe`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def preflight(
    folder: Annotated[Path, typer.Argument(help="Folder that the run will write to.")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
) -> None:
    """Look at this machine before a run. Exit 1 when something would stop it."""
    import json
    from dataclasses import asdict

    from traindoctor.preflight import run_preflight

    checks = run_preflight(folder)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for check_ in checks:
            remedy = f"  ({check_.remedy})" if check_.remedy else ""
            typer.echo(f"{check_.status:<4}  {check_.name:<14} {check_.detail}{remedy}")
    raise typer.Exit(1 if any(check_.status == "fail" for check_ in checks) else 0)


def env() -> None:
    """Print a redacted block to paste into a bug report."""
    from traindoctor.environment import describe_environment

    typer.echo(describe_environment())


def probe(
    target: Annotated[
        str, typer.Argument(help="module:function that returns (module, function giving the loss).")
    ],
    graph_breaks: Annotated[bool, typer.Option(help="Also trace with torch.compile's front end.")] = True,
) -> None:
    """Run one forward and backward and list parameters without gradient, host syncs, graph breaks, odd types.

    The function may return a third value: names of parameters that are meant to get no gradient. Needs torch.
    """
    from traindoctor.probe import load_target
    from traindoctor.probe import probe as run_probe

    module, loss, unused = load_target(target)
    report = run_probe(target, module, loss, graph_breaks=graph_breaks, unused=unused)
    typer.echo(f"{report.name}: loss {report.loss:.4f} ({report.loss_dtype})")
    for title, entries in (
        ("without gradient", report.without_gradient),
        ("gradient is all zeros", report.zero_gradient),
        ("gradient is not finite", report.nonfinite_gradient),
        *([("unused, as declared", report.unused)] if unused else []),
        ("declared unused, but there is a gradient", report.wrongly_declared),
        ("host syncs", [f"{place} x{count}" for place, count in report.syncs.items()]),
        ("graph breaks", report.graph_breaks or []),
        ("types", report.dtypes),
    ):
        typer.echo(f"  {title}: {len(entries) or 'none'}")
        for entry in entries[:40]:
            typer.echo(f"    {entry}")
    raise typer.Exit(1 if report.problems else 0)
