"""Where alerts go besides the screen: a file, a command, a webhook.

Commands and webhooks run in a thread of their own with a bounded queue: whatever they do, the watching goes on. The
address of a webhook is a secret; messages name its host only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from runwatch.alerts import Change
from runwatch.catalogue import LEVELS
from runwatch.errors import UserError
from runwatch.words import change_line

FORMATS = ("auto", "json", "slack", "discord")
TIMEOUT_SECONDS = 30.0
logger = logging.getLogger(__name__)

Message = dict[str, Any]


def message_of(run: str, change: Change, at: float) -> Message:
    """What is sent: the run, what happened, and the whole alert."""
    alert = change.alert.as_dict()
    return {"run": run, "what": change.what, "at": at, "text": change_line(run, change.what, alert), **alert}


class AlertFile:
    """`alerts.jsonl`. What it holds already is not written again when the same log is read again."""

    def __init__(self, path: Path) -> None:
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UserError(f"--alerts {path}: cannot be written; give a file in a folder that exists")
        self._known = {_key(message) for message in _messages_in(path)}
        try:
            self._file = path.open("a", encoding="utf-8", errors="replace")
        except OSError as error:
            raise UserError(f"--alerts {path}: {error.strerror}; give a file you may write to") from error

    def send(self, message: Message) -> None:
        """Append one line of JSON."""
        if _key(message) not in self._known:
            self._known.add(_key(message))
            self._file.write(json.dumps(message, ensure_ascii=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _messages_in(path: Path) -> Iterator[Message]:
    """What an earlier session wrote; a torn line is skipped."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                content = json.loads(line)
                if isinstance(content, dict):
                    yield content


def _key(message: Message) -> tuple[Any, ...]:
    steps = message.get("first_step"), message.get("resolved_step")
    count = message.get("count") if message.get("what") == "still" else None
    return (
        message.get("run"),
        message.get("what"),
        message.get("code"),
        message.get("subject"),
        *steps,
        count,
    )


class Background:
    """Delivers messages one after the other in a thread; full or slow, it drops and says so."""

    def __init__(self, name: str, deliver: Callable[[Message], None], *, tries: int = 3) -> None:
        self._name, self._deliver, self._tries = name, deliver, tries
        self._queue: queue.Queue[Message | None] = queue.Queue(maxsize=100)
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Hand over; never waits."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            logger.warning("%s: too slow, an alert was not sent: %s", self._name, message["text"])

    def _work(self) -> None:
        while (message := self._queue.get()) is not None:
            for attempt in range(self._tries):
                try:
                    self._deliver(message)
                    break
                except Exception as error:
                    logger.warning("%s: try %d failed: %s", self._name, attempt + 1, describe(error))
                    time.sleep(0.2 * 4**attempt if attempt + 1 < self._tries else 0)

    def close(self) -> None:
        """Deliver what waits, but not forever."""
        until = time.monotonic() + TIMEOUT_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=TIMEOUT_SECONDS)
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._thread.is_alive():
            logger.warning("%s: did not answer in time, the last alerts may not have been sent", self._name)


class CommandError(Exception):
    """A command of the user ended with an error; what it said may be repeated."""


def describe(error: Exception) -> str:
    """What went wrong, without the address: its path is the secret."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError):
        return f"no answer ({error.reason})"
    return str(error) if isinstance(error, CommandError) else type(error).__name__


def command_sink(words: list[str]) -> Background:
    """Run a command for each alert: JSON on its stdin, the main fields as MONITOR_... variables."""
    if not words:
        raise UserError("--command: is empty; give a program and its arguments")

    def deliver(message: Message) -> None:
        fields = {f"MONITOR_{key.upper()}": str(value) for key, value in message.items()}
        done = subprocess.run(
            words, input=json.dumps(message).encode(), env={**os.environ, **fields}, timeout=TIMEOUT_SECONDS,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
        if done.returncode:
            raise CommandError(
                f"exit code {done.returncode}: {done.stderr[-200:].decode('utf-8', 'replace').strip()}"
            )

    return Background(f"command {words[0]}", deliver, tries=1)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the secret elsewhere."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def webhook_sink(address: str, kind: str) -> Background:
    """POST each alert; Slack and Discord get a text, others the whole message as JSON."""
    host = _host_of(address)
    kind = _kind_of(host) if kind == "auto" else kind
    opener = urllib.request.build_opener(_NoRedirect)

    def deliver(message: Message) -> None:
        body = json.dumps(webhook_body(kind, message), allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "runwatch"}
        request = urllib.request.Request(address, data=body, headers=headers, method="POST")
        with opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
            answer.read(1024)

    return Background(f"webhook at {host}", deliver)


def _host_of(address: str) -> str:
    """The one part of an address that may be told; what is wrong with the rest is told without repeating it."""
    try:
        parts = urllib.parse.urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError:
        raise UserError("--webhook: the host or port of the address is not valid; check it") from None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError("--webhook: an address that begins with https:// or http:// is needed")
    if "@" in parts.netloc or not re.fullmatch(r"[!-~]+", address):
        raise UserError(
            "--webhook: the address may hold no user name, no spaces and only ASCII; encode it as %XX"
        )
    return host


def _kind_of(host: str) -> str:
    if host.endswith("slack.com"):
        return "slack"
    return "discord" if host.endswith(("discord.com", "discordapp.com")) else "json"


def webhook_body(kind: str, message: Message) -> Message:
    """The message as the service wants it; nobody is mentioned by a line of a log."""
    text = f"{message['text']}\n{message['advice']}" if message["what"] != "resolved" else message["text"]
    if kind == "slack":
        escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": escaped[:3000]}
    if kind == "discord":
        return {"content": text[:1900], "allowed_mentions": {"parse": []}}
    return message


def is_wanted(change: Change, least: str) -> bool:
    """Whether an alert is grave enough to be sent."""
    return LEVELS.index(change.alert.level) >= LEVELS.index(least)
