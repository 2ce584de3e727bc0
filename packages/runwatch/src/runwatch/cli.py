"""The command: watch training runs, report what is wrong and what to do.

    runwatch LOG...          also: python -m runwatch, mmldlm monitor

Exit codes: 0 nothing of the level --fail-on or worse was found, 1 something was, 2 wrong usage, 3 a log that cannot be
judged because no loss was read from it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from runwatch.errors import UserError

if TYPE_CHECKING:
    from runwatch.session import Session, Sink

WEBHOOK_VARIABLE = "RUNWATCH_WEBHOOK"


def monitor(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Logs, folders of logs or of torchrun's rank logs, run folders of MM-LDLM, or patterns.",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(help="Seconds between two reads of the log.")] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Read the logs once, report and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per read instead of a screen.")
    ] = False,
    fail_on: Annotated[
        str,
        typer.Option(help="Exit with 1 if anything at this level or above was found: info, warn or error."),
    ] = "error",
    serve: Annotated[
        str | None,
        typer.Option(metavar="[HOST:PORT]", help="Serve a live page. The default address is 127.0.0.1:8377."),
    ] = None,
    alerts: Annotated[
        Path | None, typer.Option(help="Append alerts to this file, one JSON object per line.")
    ] = None,
    command: Annotated[
        str | None, typer.Option(help="Run this command for each alert. It gets the alert as JSON on stdin.")
    ] = None,
    webhook: Annotated[
        str | None,
        typer.Option(help=f"Post alerts to this address. It is safer to set it in {WEBHOOK_VARIABLE}."),
    ] = None,
    webhook_format: Annotated[
        str, typer.Option(help="Format of the posts: auto, json, slack or discord.")
    ] = "auto",
    report: Annotated[
        Path | None,
        typer.Option(help="Write report.html, report.md and report.json to this folder at the end."),
    ] = None,
    notify: Annotated[
        str, typer.Option(help="Lowest level of alerts that are sent: info, warn or error.")
    ] = "warn",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a threshold. May be repeated."),
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="YAML file with thresholds.")] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="ROLE=NAME",
            help="Name a number of the log, such as loss=step_loss. May be repeated.",
        ),
    ] = None,
    color: Annotated[
        bool | None,
        typer.Option(
            "--color/--no-color", help="Use colours. The default is to use them only in a terminal."
        ),
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="CODE", help="Explain a code (or all, or settings) and exit."),
    ] = None,
) -> None:
    """Watch training runs, live or afterwards, and report what is wrong, since when and what to do.

    Exit codes: 0 nothing at the level of --fail-on or above was found, 1 something was found, 2 wrong usage, 3 a log
    cannot be judged because no loss was read.
    """
    from runwatch.catalogue import LEVELS
    from runwatch.names import parse_mapping
    from runwatch.pages import explain as explained
    from runwatch.session import Session
    from runwatch.settings import load_settings
    from runwatch.sources import find_runs, folders_of

    if explain is not None:
        typer.echo(explained(explain))
        return
    _check_choice("--fail-on", fail_on, LEVELS)
    _check_choice("--notify", notify, LEVELS)
    if not 0.1 <= interval <= 86400:
        raise UserError(f"--interval {interval:g}: allowed are 0.1 to 86400 seconds")
    if report is not None and report.exists() and not report.is_dir():
        raise UserError(
            f"--report {report}: is a file; give a folder for report.html, report.md and report.json"
        )
    chosen, mapped = load_settings(set_ or (), settings), parse_mapping(map_ or [])
    sources = find_runs(paths or [])
    for source in sources if once else ():
        if not source.path.exists():
            raise UserError(
                f"{source.path}: does not exist; --once needs a file to read. Omit --once to wait for the file"
            )
    sinks = _sinks(alerts, command, webhook or os.environ.get(WEBHOOK_VARIABLE), webhook_format)
    session = Session(
        sources, chosen, sinks=sinks, notify=notify, mapped=mapped, folders=folders_of(paths or [])
    )
    with contextlib.closing(session), _stoppable(), _closed_pipe():
        if once:
            session.look(live=False)
        elif serve is not None:
            _serve(session, interval, serve)
        else:
            _follow(session, interval, as_json, color)
        if once or not as_json:
            _show_end(session, as_json)
        if report is not None:
            _write_report(session, report)
    worst = session.worst()
    if worst is not None and LEVELS.index(worst) >= LEVELS.index(fail_on):
        raise typer.Exit(1)
    if session.cannot_judge():
        raise typer.Exit(3)


def main() -> None:
    """Run the command line; a user's mistake is one line on stderr and exit code 2."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name="runwatch", cls=MonitorCommand)(monitor)
    try:
        raise SystemExit(app(standalone_mode=False) or 0)
    except UserError as error:
        print(f"runwatch: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except Exception as error:  # of click, which typer brings along under a name of its own
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message().rstrip(".")
        print(f"runwatch: error: {message}; 'runwatch --help' lists the options", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:
        _silence_stdout()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


class MonitorCommand(TyperCommand):
    """Lets --serve stand alone: an address is only taken where one follows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        filled: list[str] = []
        for idx, word in enumerate(args):
            filled.append(word)
            following = args[idx + 1] if idx + 1 < len(args) else ""
            if word == "--serve" and not re.fullmatch(r"[\w.\-\[\]:]*:\d+|\d{1,5}", following):
                filled.append("127.0.0.1:8377")
        return super().parse_args(ctx, filled)


def _check_choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} {value}: allowed are {', '.join(allowed)}")


def _sinks(alerts: Path | None, command: str | None, webhook: str | None, kind: str) -> list[Sink]:
    import shlex
    import shutil

    from runwatch.sinks import FORMATS, AlertFile, command_sink, webhook_sink

    _check_choice("--webhook-format", kind, FORMATS)
    sinks: list[Sink] = [AlertFile(alerts)] if alerts is not None else []
    if command is not None:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise UserError(f"--command {command}: {error}; check the quotes") from error
        if words and shutil.which(words[0]) is None:
            raise UserError(f"--command {command}: there is no program {words[0]}")
        sinks.append(command_sink(words))
    if webhook:
        sinks.append(webhook_sink(webhook, kind))
    return sinks


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM ends the watching in order, as Ctrl-C does."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _closed_pipe() -> Iterator[None]:
    """A reader that has seen enough (`| head`) ends the watching, but changes nothing about what was found."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()


def _silence_stdout() -> None:
    """Nobody reads it any more; what it still holds must not fail when Python ends."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _follow(session: Session, interval: float, as_json: bool, color: bool | None) -> None:
    """Look again and again until all runs have ended; Ctrl-C ends it too."""
    from rich.console import Console

    console = Console(no_color=None if color is None else not color, force_terminal=color or None)
    with contextlib.suppress(KeyboardInterrupt):
        if as_json:
            _follow_json(session, interval)
        elif console.is_terminal and sys.stdout.isatty():
            _follow_screen(session, interval, console)
        else:
            _follow_plain(session, interval)


def _follow_json(session: Session, interval: float) -> None:
    import json

    while True:
        session.look(live=True)
        print(json.dumps(session.state(), ensure_ascii=False, allow_nan=False), flush=True)
        if session.ended():
            return
        time.sleep(interval)


def _follow_plain(session: Session, interval: float) -> None:
    """For pipes and files: a line for each change, and one for each run now and then."""
    from runwatch.words import change_line, status_line

    while True:
        for run, change in session.look(live=True):
            print(change_line(run.source.name, change.what, change.alert.as_dict()), flush=True)
        for state in session.state()["runs"]:
            print(status_line(state), flush=True)
        if session.ended():
            return
        time.sleep(interval)


def _follow_screen(session: Session, interval: float, console: Any) -> None:
    from rich.live import Live

    from runwatch.screen import render

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            session.look(live=True)
            until = time.monotonic() + interval
            while True:  # the clock on the screen goes on between two looks, and a new window size is seen
                live.update(render(session.state(curves=True), *console.size), refresh=True)
                if session.ended() or time.monotonic() >= until:
                    break
                time.sleep(min(1.0, max(0.0, until - time.monotonic())))
            if session.ended():
                return


def _serve(session: Session, interval: float, address: str) -> None:
    """Look and publish until somebody stops it; a run that has ended stays on the page."""
    from runwatch.server import PageServer
    from runwatch.words import change_line

    page = PageServer(address, interval=interval)
    open_to_all = "" if page.is_local else " (anybody who reaches this address can read it)"
    typer.echo(f"watching {len(session.runs)} runs at {page.url}{open_to_all}; Ctrl-C ends it", err=True)
    with contextlib.closing(page), contextlib.suppress(KeyboardInterrupt):
        while True:
            for run, change in session.look(live=True):
                print(change_line(run.source.name, change.what, change.alert.as_dict()), flush=True)
            page.publish(session.state(curves=True))
            time.sleep(interval)


def _show_end(session: Session, as_json: bool) -> None:
    import json

    from runwatch.words import plain_text

    state = session.state()
    typer.echo(json.dumps(state, ensure_ascii=False, allow_nan=False) if as_json else plain_text(state))


def _write_report(session: Session, folder: Path) -> None:
    from runwatch.report import write_report

    for path in write_report(session.state(curves=True), folder):
        typer.echo(str(path), err=True)
