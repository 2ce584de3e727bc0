"""`python -m mmldlm` without the seconds that its libraries take to import: forks of a process that has them.

`Popen` and `run` are those of `subprocess`. A command of `sys.executable` with `-m` or `-c` becomes a fork of a server
that has imported torch, other libraries and ours, but not the command line. It has its own id, session, folder,
environment and pipes, and leaves as an interpreter does. What it starts in turn is started in the same way, unless
COLD_CHILDREN is set there. Any other command is started as usual. Not for tests of the start itself, nor where the
caller asks the system about its children; `alive` knows words and environment, `/proc` does not.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
LIBRARIES = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.run",
    "numpy", "pandas", "pyarrow", "omegaconf", "tokenizers", "safetensors.torch", "typer", "rich.live", "rich.progress",
    "rich.table", "jinja2", "scipy.stats", "filelock", "yaml", "pydantic.main", "asyncio",
    "mmldlm.api.train", "mmldlm.api.evaluate", "mmldlm.api.model",
)  # fmt: skip
PLAIN = subprocess.Popen
ADDRESS: Path | None = None
"""Where the server listens; set in its forks."""


class Popen(PLAIN):  # type: ignore[type-arg]
    """`subprocess.Popen`, which asks the server for a fork where it can."""

    _server: socket.socket | None = None

    def _execute_child(self, *words: Any) -> None:
        start = inspect.signature(PLAIN._execute_child).bind(self, *words).arguments  # type: ignore[attr-defined]
        command = start["args"]
        plain = isinstance(command, str) or command[0] != sys.executable or "COLD_CHILDREN" in os.environ
        plain = plain or start["preexec_fn"] is not None or bool(start["pass_fds"])
        options = [] if plain else [word for word in command[1:3] if word in ("-u", "-m", "-c")]
        if not options or options[-1] == "-u":
            super()._execute_child(*words)  # type: ignore[misc]
            return
        request = {
            "kind": options[-1],
            "words": [str(word) for word in command[1 + len(options) :]],
            "folder": str(start["cwd"] or os.getcwd()),
            "environment": dict(os.environ if start["env"] is None else start["env"]),
            "unbuffered": "-u" in options,
            "parent": os.getpid(),
            "session": start["start_new_session"],
        }
        pipes = [start[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(str(ADDRESS or _address()))
        data = json.dumps(request).encode()
        streams = [own if pipe == -1 else pipe for own, pipe in enumerate(pipes)]
        socket.send_fds(self._server, [struct.pack("q", len(data))], streams)
        self._server.sendall(data)
        self.pid = _number(self._server)
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(start[name] for name in names))  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._server is None:
            return super()._try_wait(wait_flags)  # type: ignore[misc]
        if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        status = _number(self._server)
        self._server.close()
        return self.pid, status

    def _internal_poll(self, *words: Any, **options: Any) -> int | None:
        if self._server is None:
            return super()._internal_poll(*words, **options)  # type: ignore[misc]
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode


def run(*words: Any, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with the class above."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return subprocess.run(*words, **options)


def alive() -> dict[int, dict[str, Any]]:
    """Process id -> `words`, `environment` and `parent` of everything that was started here and has not ended."""
    found = {}
    for path in (ADDRESS or _address()).parent.glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            found[int(path.stem)] = json.loads(path.read_text())
    return found


def _number(connection: socket.socket) -> int:
    data = connection.recv(8, socket.MSG_WAITALL)
    assert len(data) == 8, "the server of warm processes is gone"
    return struct.unpack("q", data)[0]


@functools.cache
def _address() -> Path:
    """The server of this process, which ends with it."""
    path = Path(tempfile.mkdtemp(prefix="warm-")) / "socket"
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    server = PLAIN(
        [sys.executable, "-m", "tests.warm", str(path)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    assert server.stdout.read(1) == b"!", "the server of warm processes did not start"
    _address.__dict__["server"] = server  # its stdin stays open
    return path


def serve(path: Path) -> dict[str, Any]:
    """Fork for each request until nobody is left to make one; returns in a fork, with what it shall run."""
    global ADDRESS
    ADDRESS = path
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    listening.listen(64)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and they end this
    signal.signal(signal.SIGCHLD, _reap)
    os.write(1, b"!")
    while True:
        ready, _, _ = select.select([listening, 0], [], [])
        if 0 in ready:
            shutil.rmtree(path.parent)
            os._exit(0)
        connection, _ = listening.accept()
        if os.fork() == 0:
            listening.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupt)
            return _become(connection)
        connection.close()


def _reap(*_: Any) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(connection: socket.socket) -> dict[str, Any]:
    """What was asked for, in a child; its parent passes the exit status on."""
    header, streams, _, _ = socket.recv_fds(connection, 8, 3)
    data = connection.recv(struct.unpack("q", header)[0], socket.MSG_WAITALL)
    request = json.loads(data)
    assert ADDRESS is not None
    if pid := os.fork():
        for stream in (*streams, 0, 1, 2):
            os.close(stream)
        _, status = os.waitpid(pid, 0)
        ADDRESS.with_name(f"{pid}.json").unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # nobody asks
            connection.sendall(struct.pack("q", status))
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _open_streams(unbuffered=request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.path[0] = request["folder"]
    ADDRESS.with_name(f"{os.getpid()}.json").write_bytes(data)
    connection.sendall(struct.pack("q", os.getpid()))
    connection.close()
    for stream in set(streams) - {0, 1, 2}:
        os.close(stream)
    return request


def _open_streams(*, unbuffered: bool) -> None:
    """stdin, stdout and stderr as a new interpreter has them."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # type: ignore[misc]  # noqa: SIM115
    for number, name, errors in ((1, "stdout", None), (2, "stderr", "backslashreplace")):
        stream = io.TextIOWrapper(
            open(number, "wb", 0 if unbuffered else -1, closefd=False),  # noqa: SIM115
            errors=errors, line_buffering=number == 2 or os.isatty(number), write_through=unbuffered,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(request: dict[str, Any]) -> None:
    """As the words after `python` would."""
    first, *words = request["words"]
    if request["kind"] == "-c":
        sys.argv = ["-c", *words]
        exec(compile(first, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *words]
        runpy.run_module(first, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from tests import warm  # the class that others import, not the one of this program

    subprocess.Popen = warm.Popen  # type: ignore[misc]
    for library in LIBRARIES:
        importlib.import_module(library)
    warm._run(warm.serve(Path(sys.argv[1])))
