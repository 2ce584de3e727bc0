"""A real browser for tests: Chromium without a window, driven through its debugging port."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-port=0", "--mute-audio",
    "--hide-scrollbars", "--remote-allow-origins=*",
]  # fmt: skip
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
WAIT = 120.0


class Browser:
    """One page; `problems` are errors of its scripts and files that it did not get."""

    def __init__(self, folder: Path) -> None:
        if CHROMIUM is None:
            pytest.skip("no chromium on this machine")
        websocket = pytest.importorskip("websocket")
        self.problems: list[str] = []
        self._number = 0
        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port = self._port(folder / "DevToolsActivePort")
            pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=WAIT))
            address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
            self._socket = websocket.create_connection(address, timeout=WAIT)
            for part in ("Page", "Runtime", "Log"):
                self.call(f"{part}.enable")
        except BaseException:
            self._process.kill()
            raise

    def _port(self, file: Path) -> str:
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            if file.exists() and (lines := file.read_text().split()):
                return lines[0]
            time.sleep(0.1)
        raise TimeoutError("Chromium did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """One command of the debugging protocol, and its answer."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": values}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        values = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"].get("exception", {}).get("description")))
        elif event["method"] == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.problems.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")

    def open(self, address: str, size: str = "desktop", *, dark: bool = False) -> None:
        """Open a page in a window of this size, in light or dark colours."""
        self._width, height = SIZES[size]
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=self._width, height=height, deviceScaleFactor=1, mobile=size == "phone",
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait_for("document.readyState == 'complete' && location.href != 'about:blank'")

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + WAIT
        while not self.ask(script):
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {script}\n{self.ask('document.body.innerText')}")
            time.sleep(0.1)

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return (
            int(self.ask("document.documentElement.scrollWidth")) - self._width
        )  # a phone widens its window

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 4000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
