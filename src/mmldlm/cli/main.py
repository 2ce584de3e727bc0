"""The `mmldlm` command: registers the subcommands and turns errors into exit codes.

Nothing heavy is imported here, so `mmldlm --help` answers at once. Exit codes: 0 done, 2 a mistake that the
user can correct, 130 interrupted by Ctrl-C, 75 stopped in order by a scheduler's signal: start the same command again,
76 a training step hung; subcommands may define more.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated

import typer

from mmldlm import __version__
from mmldlm.cli import (
    benchmark,
    data,
    demo,
    doctor,
    evaluate,
    export,
    migrate,
    monitor,
    prepare,
    sample,
    train,
)
from mmldlm.errors import Interrupted, UserError

app = typer.Typer(
    name="mmldlm",
    help="Train language models that diffuse text and its latent (a sentence embedding) together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("prepare")(prepare.prepare)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("sample")(sample.sample)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.add_typer(doctor.app, name="doctor")
app.command("migrate")(migrate.migrate)
app.command("monitor", cls=monitor.MonitorCommand)(monitor.monitor)
app.command("benchmark")(benchmark.benchmark)
app.command("demo")(demo.demo)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"mmldlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Train language models that diffuse text and its latent (a sentence embedding) together."""


def main() -> None:
    """Run the command line; never show a traceback for a user's mistake."""
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except Interrupted as stop:
        _fail(str(stop), stop.exit_code)
    except SystemExit as leaving:
        if leaving.code == 130:
            _fail("interrupted; run the same command to go on", 130)
        raise
    except OSError as error:
        if error.errno == errno.ENOSPC:
            where = f" while writing {error.filename}" if error.filename else ""
            _fail(f"no space left on the disk{where}; free some space and run the same command again", 2)
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            _fail(f"{error.filename}: {error.strerror}; choose a folder you may write to", 2)
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            _fail(f"{error.filename}: {error.strerror}; choose another file or folder", 2)
        raise


def _fail(message: str, code: int) -> None:
    sys.stdout.flush()
    label = "mmldlm: error" if code == 2 else "mmldlm"
    print(f"{label}: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
