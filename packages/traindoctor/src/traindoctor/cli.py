"""`traindoctor`: audit training code, fix what is safe, take it back.

Exit codes as ruff's: 0 clean or done, 1 findings (or files that could not be restored), 2 wrong usage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from traindoctor import __version__, machine_cli
from traindoctor.errors import UserError
from traindoctor.program import program

if TYPE_CHECKING:
    from traindoctor.engine import Report
    from traindoctor.options import Options

CLOSED_PIPE = 128 + 13
"""The exit code of a program that SIGPIPE ended."""

app = typer.Typer(
    help="Check PyTorch training code: find faults, apply safe fixes, undo them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
)

PathArgument = Annotated[Path, typer.Argument(help="Folder or file.")]
PathsArgument = Annotated[
    list[Path] | None,
    typer.Argument(help="Files and folders to audit; - reads one file from standard input."),
]
Select = Annotated[
    list[str] | None, typer.Option("--select", help="Codes, names or prefixes to look for (DDP,OPT001).")
]
Ignore = Annotated[list[str] | None, typer.Option("--ignore", help="Codes, names or prefixes to leave out.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", help="Paths or patterns to skip.")]
MinSeverity = Annotated[str | None, typer.Option("--min-severity", help="error, warning or info.")]
External = Annotated[
    bool | None,
    typer.Option("--external/--no-external", help="Ask shellcheck and torchfix where they are installed."),
]
Gitignore = Annotated[
    bool | None,
    typer.Option("--respect-gitignore/--no-respect-gitignore", help="Leave out what git ignores."),
]
StdinName = Annotated[
    Path | None, typer.Option("--stdin-filename", help="The name of the file that comes from standard input.")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Neither read nor write the cache.")]
CacheFolder = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Where results are kept (default: the user's cache folder)."),
]


def _version(value: bool) -> None:
    if value:
        typer.echo(f"traindoctor {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Check PyTorch training code: find faults, apply safe fixes, undo them."""


@dataclass(frozen=True)
class _Input:
    """What is audited: paths, and the content of a file that comes from standard input."""

    paths: list[Path]
    stdin: bytes | None = None

    @property
    def root(self) -> Path:
        """The path that settings are looked up for, and where the journal lies."""
        from traindoctor.discovery import discover_all

        return self.paths[0] if len(self.paths) == 1 else discover_all(self.paths)[0]


def _input(paths: list[Path] | None, stdin_filename: Path | None) -> _Input:
    given = paths or [Path(".")]
    if Path("-") not in given:
        if stdin_filename is not None and paths:
            raise UserError(f"--stdin-filename {stdin_filename}: give - as the path, or leave the option out")
        if stdin_filename is None:
            return _Input(given)
    if len(given) > 1 or stdin_filename is None:
        raise UserError(
            "-: one file comes from standard input; name it with --stdin-filename, without other paths"
        )
    return _Input([stdin_filename], sys.stdin.buffer.read())


def _audit(source: _Input, options: Options, no_cache: bool = True, cache_dir: Path | None = None) -> Report:
    from traindoctor.cache import Cache, default_folder
    from traindoctor.engine import audit

    if source.stdin is not None:
        return audit(source.paths, options, overlay={source.paths[0].name: source.stdin})
    cache = None if no_cache else Cache(cache_dir or default_folder(), source.root)
    report = audit(source.paths, options, cache=cache)
    if cache is not None:
        cache.save()
    return report


def _uses_colour(choice: str) -> bool:
    if choice not in ("auto", "always", "never"):
        raise UserError(f"--color {choice!r}: allowed are auto, always, never")
    return choice == "always" or (
        choice == "auto"
        and sys.stdout.isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )


@app.command(short_help="Report what costs speed, memory, safety or hours.")
def check(
    paths: PathsArgument = None,
    select: Select = None,
    ignore: Ignore = None,
    exclude: Exclude = None,
    min_severity: MinSeverity = None,
    output_format: Annotated[
        str, typer.Option("--output-format", help="text, json, sarif, github, gitlab or junit.")
    ] = "text",
    external: External = None,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Count findings per rule instead.")
    ] = False,
    stdin_filename: StdinName = None,
    respect_gitignore: Gitignore = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", help="Leave out the findings that this file knows.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option("--write-baseline", help="Write all findings to this file and exit with 0.")
    ] = None,
    add_ignore: Annotated[
        str | None,
        typer.Option("--add-ignore", help="Write an ignore comment with this reason at every finding."),
    ] = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit with 0 even if there are findings.")
    ] = False,
    color: Annotated[str, typer.Option("--color", help="auto, always or never.")] = "auto",
    no_cache: NoCache = False,
    cache_dir: CacheFolder = None,
) -> None:
    """Report what costs speed, memory, safety or hours; changes nothing unless --add-ignore is given."""
    from traindoctor import suppression
    from traindoctor.options import load_options
    from traindoctor.output import FORMATS, counted, render, statistics_table

    if output_format not in FORMATS:
        raise UserError(f"--output-format {output_format!r}: allowed are {', '.join(FORMATS)}")
    colour, source = _uses_colour(color), _input(paths, stdin_filename)
    options = load_options(
        source.root,
        select=select or (),
        ignore=ignore or (),
        exclude=exclude or (),
        min_severity=min_severity,
        external=external,
        respect_gitignore=respect_gitignore,
    )
    report = _audit(source, options, no_cache, cache_dir)
    if baseline is not None:
        report = suppression.without_baseline(report, baseline)
    if write_baseline is not None:
        suppression.write_baseline(report, write_baseline)
        typer.echo(f"{write_baseline}: {counted(len(report.findings), 'finding')}")
        return
    if add_ignore is not None:
        _add_ignores(source, report, options, add_ignore)
        return
    by_rule = statistics and output_format == "text"
    rendered = statistics_table(report) if by_rule else render(report, output_format, colour=colour)
    if rendered:
        typer.echo(rendered, color=colour or None)
    raise typer.Exit(1 if report.findings and not exit_zero else 0)


def _add_ignores(source: _Input, report: Report, options: Options, reason: str) -> None:
    from traindoctor import suppression, transactions
    from traindoctor.output import counted

    if source.stdin is not None or not reason.strip():
        raise UserError("--add-ignore needs a reason and files on the disk")
    changes, left = suppression.ignore_changes(report, options, reason.strip())
    for finding in left:
        typer.echo(f"{finding.path}:{finding.where}: {finding.code} has no place for a comment", err=True)
    if changes:
        done = transactions.apply(source.root, changes)
        typer.echo(f"{counted(sum(len(c.fixed) for c in changes), 'finding')} ignored, transaction {done.id}")
        typer.echo(f"undo with: {program()} undo {shlex.quote(str(source.root))}")
    raise typer.Exit(1 if left else 0)


@app.command()
def fix(
    paths: PathsArgument = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show the changes, write nothing (the default).")
    ] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the changes, with a journal for undo.")
    ] = False,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Also fixes that may change what the program does.")
    ] = False,
    select: Select = None,
    ignore: Ignore = None,
    exclude: Exclude = None,
    min_severity: MinSeverity = None,
    stdin_filename: StdinName = None,
    respect_gitignore: Gitignore = None,
) -> None:
    """Show or apply fixes. Exit 1 with --diff when something would change."""
    from traindoctor import transactions
    from traindoctor.fixing import plan
    from traindoctor.options import load_options
    from traindoctor.output import changed_codes, fixes_in

    if diff and apply:
        raise UserError("--diff and --apply exclude each other: the first shows, the second writes")
    source = _input(paths, stdin_filename)
    options = load_options(
        source.root,
        select=select or (),
        ignore=ignore or (),
        exclude=exclude or (),
        min_severity=min_severity,
        external=False,
        respect_gitignore=respect_gitignore,
    )
    if apply and source.stdin is None:
        for interrupted in transactions.recover(source.root):
            typer.echo(f"rolled back the interrupted transaction {interrupted.transaction.id}", err=True)
    report = _audit(source, options)
    changes = plan(report, options, unsafe=unsafe, stdin=source.stdin)
    num_more = 0 if unsafe else sum(f.fix is not None and not f.fix.safe for f in report.findings)
    more = f"; {num_more} more with --unsafe, which may change what the program does" if num_more else ""
    for change in changes:
        for finding, problem in change.refused:
            typer.echo(f"{change.path}:{finding.where}: {finding.code} not fixed: {problem}", err=True)
    changes = [change for change in changes if change.after != change.before]
    if source.stdin is not None and not diff:
        sys.stdout.buffer.write(changes[0].after if changes else source.stdin)
        return
    if not apply:
        for change in changes:
            typer.echo(change.diff(), nl=False)
        typer.echo(
            (f"{fixes_in(changes)}; nothing was written" if changes else "nothing to fix") + more, err=True
        )
        raise typer.Exit(1 if changes else 0)
    if not changes:
        typer.echo(f"nothing to fix{more}")
        return
    done = transactions.apply(source.root, changes)
    for change in changes:
        typer.echo(f"{change.path}: {changed_codes(change.fixed)}")
    typer.echo(f"{fixes_in(changes)}, transaction {done.id}")
    typer.echo(f"undo with: {program()} undo {shlex.quote(str(source.root))}")


@app.command(short_help="Restore the files of the last apply.")
def undo(
    path: PathArgument = Path("."),
    transaction: Annotated[
        str | None, typer.Option("--transaction", help="Undo this one instead of the last.")
    ] = None,
) -> None:
    """Restore the files of the last applied transaction, byte for byte. Exit 1 when a file was changed since."""
    from traindoctor import transactions

    result = transactions.undo(path, transaction)
    for restored in result.restored:
        typer.echo(f"restored {restored}")
    for refused, why in result.refused:
        typer.echo(f"not restored {refused}: {why}", err=True)
    typer.echo(
        f"transaction {result.transaction.id}: {len(result.restored)} restored, {len(result.refused)} not restored"
    )
    raise typer.Exit(1 if result.refused else 0)


@app.command()
def history(path: PathArgument = Path(".")) -> None:
    """List the transactions of a folder, oldest first."""
    from traindoctor import transactions
    from traindoctor.output import counted

    known = transactions.history(path)
    if not known:
        typer.echo(f"{path}: no fix was applied here")
    for entry in known:
        codes = sorted({code for record in entry.files for code in record.codes})
        typer.echo(f"{entry.id}  {entry.state:<8}  {counted(len(entry.files), 'file')}  {', '.join(codes)}")
        for record in entry.files:
            typer.echo(f"  {record.path}  {record.before[:12]} -> {record.after[:12]}")


@app.command()
def rule(
    code: Annotated[str | None, typer.Argument(help="Code or name of a rule; none: list all.")] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the pages of all rules into this folder.")
    ] = None,
) -> None:
    """Explain a rule: why, effect, source, remedy."""
    from traindoctor.pages import rule_page, write_pages
    from traindoctor.registry import all_rules, get_rule

    if write is not None:
        typer.echo(f"{write}: {write_pages(write)} pages changed")
        return
    if code is not None:
        typer.echo(rule_page(get_rule(code)), nl=False)
        return
    for declared in all_rules().values():
        mark = {"": "   ", "safe": "[*]"}.get(declared.fix, "[!]")
        typer.echo(f"{declared.code} {mark} {declared.severity.value:<7} {declared.summary}")


app.command()(machine_cli.preflight)
app.command()(machine_cli.env)
app.command(short_help="One forward and backward: what is not as it should be.")(machine_cli.probe)


def main() -> None:
    """Run the command line; a user's mistake is one line and exit code 2, never a traceback."""
    try:
        app()
    except UserError as error:
        _fail(str(error), 2)
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):
            _leave_closed_pipe()
        if leaving.code == 130:
            _fail("interrupted; nothing is half written, run the same command again", 130)
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _fail(f"no space left on the disk while writing {error.filename}; free some space", 2)
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            _fail(f"{error.filename}: {error.strerror}; choose a folder you may write to", 2)
        raise


def _fail(message: str, code: int) -> NoReturn:
    sys.stdout.flush()
    print(f"traindoctor{': error' if code == 2 else ''}: {message}", file=sys.stderr)
    raise SystemExit(code)


def _leave_closed_pipe() -> NoReturn:
    """The reader of the output has gone, as in `traindoctor check | head -1`: exit silently, as SIGPIPE would."""
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):  # what they still hold must not fail when Python ends
        with contextlib.suppress(OSError, ValueError):
            os.dup2(silence, stream.fileno())
    raise SystemExit(CLOSED_PIPE)
