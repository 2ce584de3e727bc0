"""`mmldlm validate`: is the optimised path right, and faster, on this machine? The checklist of the users' plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmldlm.cli.terminal import ProgressBar


def validate(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe that comes with the package, or a YAML file.")
    ],
    settings: Annotated[list[str] | None, typer.Argument(help="section.key=value, any number.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each path; 1,000 by default, at least 10.", show_default=False),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="10,000 steps.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="New folder for runs and result; validations/<date-time>.")
    ] = None,
) -> None:
    """Train the plain and the optimised path of a recipe, resume it, run it on two ranks; ticks and crosses.

    Exit code 1: a check failed.
    """
    from mmldlm.benchmark.validation import LONG, RESULT, STEPS, validate
    from mmldlm.cli.benchmark import terminated_as_interrupted
    from mmldlm.errors import Interrupted, UserError

    if long and steps is not None:
        raise UserError(f"--long: has no use together with --steps {steps}; leave one of them out")
    wanted = LONG if long else STEPS if steps is None else steps
    with ProgressBar("validate", unit="steps") as bar, terminated_as_interrupted():
        result = validate(recipe, overrides=list(settings or []), steps=wanted, out=out, progress=bar)
    for check in result.checks:
        typer.echo(check.line())
    if result.partial:
        raise Interrupted(f"stopped before the last check; what is known is in {result.folder / RESULT}")
    failed = sum(check.passed is False for check in result.checks)
    outcome = f"{failed} of {len(result.checks)} checks failed" if failed else "no check failed"
    typer.echo(f"{outcome}; figures: {result.folder / RESULT}")
    if failed:
        raise typer.Exit(1)
