"""The `mmldlm` command: registers the subcommands and turns errors into exit codes.

Nothing heavy is imported here, so `mmldlm --help` answers at once. Exit codes: 0 done, 2 a mistake that the
user can correct, 130 interrupted by Ctrl-C, 75 stopped in order by a scheduler's signal: start the same command again,
76 a training step hung, 141 the reader of the output has closed the pipe; subcommands may define more.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import time
import traceback
from typing import Annotated, Any, NoReturn

from mmldlm import __version__

try:
    import typer
    from runwatch import cli as monitor
    from runwatch.errors import UserError as WatchError
    from traindoctor.errors import UserError as DoctorError
    from typer.core import TyperCommand

    from mmldlm.cli import (
        ablate,
        benchmark,
        data,
        demo,
        evaluate,
        launch,
        migrate,
        prepare,
        runs,
        sampling,
        serve,
        train,
    )
    from mmldlm.cli.terminal import Command, PlainHelp, SectionedGroup
    from mmldlm.errors import Interrupted, UserError
    from mmldlm.untrusted import printable
except KeyboardInterrupt:  # Ctrl-C while the program is being loaded, before main() could catch it
    print("mmldlm: interrupted; run the same command to go on", file=sys.stderr)
    raise SystemExit(130) from None


class MonitorCommand(PlainHelp, monitor.MonitorCommand):
    """The monitor of runwatch with help like ours."""


CLOSED_PIPE = 128 + 13
"""Exit code of a tool that was ended by SIGPIPE, as shells report it."""

app = typer.Typer(
    name="mmldlm",
    cls=SectionedGroup,
    help="Train language models that diffuse text and its latent (a sentence embedding) together.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # words in [brackets] are shown as they are, and lines keep their width in a pipe
)
_DATA, _TRAIN, _USE, _JUDGE, _TOOLS = "Data", "Training", "A trained model", "Figures", "Tools"


def _add(
    name: str, function: Any, panel: str, summary: str, cls: type[TyperCommand] = Command, **settings: bool
) -> None:
    app.command(name, cls=cls, short_help=summary, rich_help_panel=panel, context_settings=settings)(function)


_add("prepare", prepare.prepare, _DATA, "Turn text into a pair store.")
app.add_typer(data.app, name="data", rich_help_panel=_DATA)
_add("train", train.train, _TRAIN, "Train a recipe, or continue a run.")
_add(
    "launch", launch.launch, _TRAIN, "Run a command on several GPUs or nodes.",
    allow_interspersed_args=False,  # options after the command of the ranks are its own
)  # fmt: skip
_add("selftest", launch.selftest, _TRAIN, "Test GPUs, network, store and disk before a run.")
_add("runs", runs.runs, _TRAIN, "List runs: state, step, metric.")
_add("encode", sampling.encode, _USE, "Text to latents.")
_add("decode", sampling.decode, _USE, "Latents to text.")
_add("generate", sampling.generate, _USE, "Texts and latents from nothing.")
_add("infill", sampling.infill, _USE, "Fill the blanks of a text.")
_add("interpolate", sampling.interpolate, _USE, "Texts between two texts.")
_add("paraphrase", sampling.paraphrase, _USE, "Texts near a text.")
_add("serve", serve.serve, _USE, "Serve a trained model over HTTP.")
_add("ui", serve.ui, _USE, "A local page to try a trained model.")
_add("export", runs.export, _USE, "Write the weights of a run for use.")
_add("eval", evaluate.evaluate, _JUDGE, "Measure a trained model on held-out pairs.")
_add("compare", evaluate.compare, _JUDGE, "Compare the evaluations of two runs or more.")
_add("benchmark", benchmark.benchmark, _JUDGE, "Measure what the speed-ups gain here.")
_add("validate", benchmark.validate, _JUDGE, "Check a recipe here: plain path against optimised one.")
_add("ablate", ablate.ablate, _JUDGE, "Which settings help: several seeds, one table.")
app.command("ablate-run", hidden=True)(ablate.ablate_run)
_add(
    "monitor",
    monitor.monitor,
    _TOOLS,
    "Watch training runs: what is wrong, what to do.",
    MonitorCommand,
)
app.add_typer(
    migrate.app, name="doctor", short_help="Find and fix problems in training code.", rich_help_panel=_TOOLS
)
_add("migrate", migrate.migrate, _TOOLS, "Move from the research code.")
_add("demo", demo.demo, _TOOLS, "All of it in minutes on the built-in text.")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"mmldlm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language models that diffuse text and its latent (a sentence embedding) together."""
    if context.invoked_subcommand is None:
        runs.show_next_steps()


def main() -> None:
    """Run the command line; never show a traceback for a user's mistake."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may lack characters of a text
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except (UserError, WatchError, DoctorError) as error:
        _fail(str(error), 2, type(error).__name__)
    except Interrupted as stop:
        _fail(str(stop), stop.exit_code)
    except SystemExit as leaving:
        if leaving.code == 130:
            _fail("interrupted; run the same command to go on", 130)
        if isinstance(leaving.__context__, BrokenPipeError):
            _leave_closed_pipe()
        if usage := getattr(leaving.__context__, "format_message", None):
            _record_failure(usage(), 2)
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
        _record_failure(f"{type(error).__name__}: {error}", 1, traceback.format_exc())
        raise
    except Exception as error:
        _record_failure(f"{type(error).__name__}: {error}", 1, traceback.format_exc())
        raise


def _leave_closed_pipe() -> NoReturn:
    """The reader of our output has closed the pipe, as in `... | head -1`: exit silently, as SIGPIPE would."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what they still hold must not fail when Python ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(silence, stream.fileno())
    raise SystemExit(CLOSED_PIPE)


def _record_failure(message: str, code: int, stack: str | None = None, kind: str = "") -> None:
    """Why this rank ends, in the file that torchrun's agent reads to find the first failure of all."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    details = {"kind": kind, "py_callstack": stack or message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": {"message": message, "errorCode": code, "extraInfo": details}}, file)


def _fail(message: str, code: int, kind: str = "") -> None:
    _record_failure(message, code, kind=kind)
    sys.stdout.flush()
    label = "mmldlm: error" if code == 2 else "mmldlm"
    rank = os.environ.get("RANK", "0")
    if rank != "0":
        label += f" on rank {rank}"
    if rank == "0" or code == 2:  # all ranks leave together when told to, and one says so
        print(f"{label}: {printable(message)}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
