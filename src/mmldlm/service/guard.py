"""What keeps one client from disturbing the others: limits on size and time of a request, and an orderly stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import signal
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
"""A connection that does not send the head of a request within this time is closed."""
_MOST_FILES = 65536


class Guard:
    """ASGI: reads the whole body, up to a size and within a time, before the application sees the request, and cancels
    the application when its client has gone."""

    def __init__(self, app: Any, *, most_bytes: int, seconds: float) -> None:
        self.app, self.most_bytes, self.seconds = app, most_bytes, seconds

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.seconds):
                body = await self._body(scope, receive)
        except TimeoutError:
            await _reject(send, 408, f"the request was not complete after {self.seconds:g} s")
            return
        if body is None:
            await _reject(
                send, 413, f"the body is larger than {self.most_bytes:,} bytes; send less at a time"
            )
            return
        read = answered = False

        async def replay() -> Any:
            nonlocal read
            if read:
                return await receive()
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def answer(message: Any) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        work = asyncio.ensure_future(self.app(scope, replay, answer))
        end = asyncio.ensure_future(receive())  # of the answer, or of the connection
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if answered or work.done():
                await work
        finally:
            end.cancel()
            work.cancel()

    async def _body(self, scope: Any, receive: Any) -> bytes | None:
        """None where it is too large."""
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.most_bytes:
            return None
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > self.most_bytes:
                return None
        return b"".join(parts)


async def _reject(send: Any, status: int, message: str) -> None:
    content = json.dumps({"error": message}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


class Protocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose request does not begin, or whose head does not end, in time."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _watch(self) -> None:
        waits = self.conn.their_state is h11.IDLE
        if waits and self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)
        elif not waits and self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server(uvicorn.Server):
    """uvicorn that ends with code 0 when a signal stops it in good order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and Ctrl-C: take no more requests, answer those that are there, end."""
        before = {
            number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run_server(app: Any, host: str, port: int, *, stop_seconds: float) -> None:
    """Serve until a signal."""
    _raise_file_limit()
    config = uvicorn.Config(
        app, host=host, port=port, http=Protocol, log_level="warning", access_log=False, server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=max(1, round(stop_seconds)),
    )  # fmt: skip
    Server(config).run()


def _raise_file_limit() -> None:
    """Many slow clients must not use up the file descriptors of those that are quick."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
