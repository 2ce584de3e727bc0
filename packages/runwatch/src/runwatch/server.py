"""A local page for `--serve`: read-only, loopback unless told otherwise, three static files and the state as JSON."""

from __future__ import annotations

import http.server
import ipaddress
import json
import re
import socket
import threading
from typing import Any

from runwatch.errors import UserError
from runwatch.page import HTML, SCRIPT
from runwatch.style import STYLE
from runwatch.svg import curve_svg

DEFAULT_ADDRESS = "127.0.0.1:8377"
_FILES = {
    "/": (HTML.encode(), "text/html; charset=utf-8"),
    "/app.js": (SCRIPT.encode(), "text/javascript; charset=utf-8"),
    "/style.css": (STYLE.encode(), "text/css; charset=utf-8"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, PORT or HOST."""
    match = re.fullmatch(
        r"(?:(?P<host>\[[0-9a-fA-F:]+\]|[\w.\-]*[A-Za-z.\-][\w.\-]*):?)?(?P<port>\d+)?", text
    )
    host, port = DEFAULT_ADDRESS.split(":")
    if not text or match is None or int(match["port"] or port) > 65535:
        raise UserError(
            f"--serve {text}: give HOST:PORT, such as {DEFAULT_ADDRESS}; the port is at most 65535"
        )
    return (match["host"] or host).strip("[]"), int(match["port"] or port)


MOST_CLIENTS = 32
"""More at a time are turned away, so that slow ones cannot use the monitor up."""


def with_charts(state: dict[str, Any]) -> dict[str, Any]:
    """The state with its pictures: one for each curve, and for each value all runs in one."""
    runs = []
    for run in state["runs"]:
        charts = {
            name: svg
            for name, curve in run.get("curves", {}).items()
            if (svg := curve_svg(name, [curve], run["alerts"], run["rate_kind"]))
        }
        runs.append({**run, "charts": charts})
    names = {name for run in runs for name in run.get("curves", {})}
    overlays = {}
    for name in sorted(names) if len(runs) > 1 else ():
        held = [run for run in runs if name in run["curves"]]
        curves = [run["curves"][name] for run in held]
        sizes = {"wide": (1100, 240), "narrow": (340, 190)}
        overlays[name] = {
            size: curve_svg(name, curves, (), held[0]["rate_kind"], width=width, height=height)
            for size, (width, height) in sizes.items()
        }
    return {**state, "runs": runs, "overlays": overlays}


class PageServer:
    """Serves the newest published state from a thread of its own."""

    def __init__(self, address: str, *, interval: float) -> None:
        host, port = parse_address(address)
        self.interval, self.state = interval, b"{}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        kind = type("_Server", (_CappedServer,), {"address_family": family, "daemon_threads": True})
        handler = type("_BoundHandler", (_Handler,), {"page": self})
        try:
            self.server: http.server.ThreadingHTTPServer = kind((host, port), handler)
        except (OSError, UnicodeError) as error:
            raise UserError(f"--serve {address}: {error}; choose another address or port") from error
        self.is_local = _is_loopback(host)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.server.server_address[1]}/"
        threading.Thread(target=self.server.serve_forever, name="page", daemon=True).start()

    def publish(self, state: dict[str, Any]) -> None:
        """Replace what the page shows."""
        content = {**with_charts(state), "interval": self.interval}
        self.state = json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _CappedServer(http.server.ThreadingHTTPServer):
    """A thread for each client, but not for every one that asks."""

    def __init__(self, *args: Any, **more: Any) -> None:
        self._places = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*args, **more)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is nobody's news."""


class _Handler(http.server.BaseHTTPRequestHandler):
    page: PageServer
    server_version, sys_version, timeout = "runwatch", "", 20

    def do_GET(self) -> None:
        if not self._trusted():
            self._answer(403, b"this page is served under its own address only\n", "text/plain")
            return
        path = self.path.partition("?")[0]
        if path == "/api/state":
            self._answer(200, self.page.state, "application/json")
        elif path in _FILES:
            self._answer(200, *_FILES[path])
        else:
            self._answer(404, b"there is no such page\n", "text/plain")

    def _trusted(self) -> bool:
        """Behind a loopback address only loopback names are ours; a stranger's name that leads here is not."""
        name = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        return not self.page.is_local or _is_loopback(name)

    def _answer(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        for key, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are nobody's news."""
