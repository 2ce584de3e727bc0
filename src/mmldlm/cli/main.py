"""The `mmldlm` command: registers the subcommands and turns errors into exit codes.

Nothing heavy is imported here, so `mmldlm --help` answers at once. Exit codes: 0 done, 2 a mistake that the
user can correct, 130 interrupted by Ctrl-C, 75 stopped in order by a scheduler's signal: start the same command again,
76 a training step hung, 141 the reader of the output has gone; subcommands may define more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Annotated, NoReturn

from mmldlm import __version__

try:
    import typer
    from runwatch import cli as monitor
    from runwatch.errors import UserError as WatchError
    from traindoctor import cli as doctor
    from traindoctor.errors import UserError as DoctorError

    from mmldlm.cli import (
        ablate,
        ablate_work,
        benchmark,
        data,
        demo,
        evaluate,
        export,
        migrate,
        prepare,
        sample,
        train,
    )
    from mmldlm.cli.sections import SectionedCommand
    from mmldlm.errors import Interrupted, UserError
except KeyboardInterrupt:  # Ctrl-C while the program is being loaded, before main() could catch it
    print("mmldlm: interrupted; run the same command to go on", file=sys.stderr)
    raise SystemExit(130) from None

CLOSED_PIPE = 128 + 13
"""What a shell says of a tool that SIGPIPE ended."""

app = typer.Typer(
    name="mmldlm",
    help="Train language models that diffuse text and its latent (a sentence embedding) together.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # words in [brackets] are shown as they are, and lines keep their width in a pipe
)
app.command("prepare", short_help="Turn text into a pair store.")(prepare.prepare)
app.add_typer(data.app, name="data")
app.command("train", short_help="Train a recipe, or go on with a run.")(train.train)
app.command("sample", cls=SectionedCommand, short_help="Decode, encode, fill in or generate.")(sample.sample)
app.command("eval", short_help="Measure a trained model, or compare results.")(evaluate.evaluate)
app.command("export", short_help="Write the weights of a run for use.")(export.export)
app.command(
    "monitor", cls=monitor.MonitorCommand, short_help="Watch training runs: what is wrong, what to do."
)(monitor.monitor)
app.add_typer(doctor.app, name="doctor", short_help="Find and fix what ails training code.")
app.command("benchmark", cls=SectionedCommand, short_help="Measure what speed-ups are worth here.")(
    benchmark.benchmark
)
app.command("ablate", short_help="Which settings help: trainings with several seeds, one table.")(
    ablate.ablate
)
app.command("ablate-run", hidden=True)(ablate_work.ablate_run)
app.command("migrate", short_help="Bring a checkout of the research code over.")(migrate.migrate)
app.command("demo", short_help="All of it in minutes on the built-in text.")(demo.demo)


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
    except (UserError, WatchError, DoctorError) as error:
        _fail(str(error), 2)
    except Interrupted as stop:
        _fail(str(stop), stop.exit_code)
    except SystemExit as leaving:
        if leaving.code == 130:
            _fail("interrupted; run the same command to go on", 130)
        if isinstance(leaving.__context__, BrokenPipeError):
            _leave_closed_pipe()
        raise
    except MemoryError:
        _fail("the memory of this machine is not enough for what was asked; ask for less at a time", 2)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            where = f" while writing {error.filename}" if error.filename else ""
            _fail(f"no space left on the disk{where}; free some space and run the same command again", 2)
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            _fail(f"{error.filename}: {error.strerror}; choose a folder you may write to", 2)
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP):
            _fail(f"{error.filename}: {error.strerror}; choose another file or folder", 2)
        raise


def _leave_closed_pipe() -> NoReturn:
    """The reader of our output has gone, as in `... | head -1`: end without a word, with the code of a SIGPIPE."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what they still hold must not fail when Python ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(silence, stream.fileno())
    raise SystemExit(CLOSED_PIPE)


def _fail(message: str, code: int) -> None:
    sys.stdout.flush()
    label = "mmldlm: error" if code == 2 else "mmldlm"
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        label += f" on rank {rank}"
    if rank == "0" or code == 2:  # all ranks leave together when told to, and one says so
        print(f"{label}: {message}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
