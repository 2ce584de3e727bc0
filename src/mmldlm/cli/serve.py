"""`mmldlm serve` and `mmldlm ui`: a trained model behind HTTP, and a page to try it."""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import replace
from typing import Any

import typer

from mmldlm.cli.options import argument, option, takes
from mmldlm.cli.records import RUN_HELP
from mmldlm.errors import UserError

TOKEN, LEAST_TOKEN = "MMLDLM_TOKEN", 16
LOOPBACK = ("127.0.0.1", "localhost", "::1")

SERVE = {
    "run": argument(str, ..., RUN_HELP),
    "host": option(
        str, "127.0.0.1", f"Address to listen on; other than loopback needs {TOKEN} in the environment."
    ),
    "port": option(int, 8000, "Port to listen on.", min=0, max=65535),
    "timeout": option(float, 60.0, "Seconds in which a request is answered.", min=1, max=3600),
    "device": option(str, "auto", "auto, cpu, cuda, ..."),
}


@takes(SERVE)
def serve(words: Any) -> None:
    """Serve a trained model over HTTP: /encode, /decode, /generate, /infill, /health, /metrics, /openapi.json."""
    host, port = words.host, words.port
    token = _check("fastapi", "serve", host, port)
    from mmldlm.api.model import load
    from mmldlm.service.app import Limits, create_app
    from mmldlm.service.guard import run_server

    model, limits = load(words.run, words.device), Limits(answer_seconds=words.timeout)
    app = create_app(model, limits, token=token, local=host in LOOPBACK and not token)
    typer.echo(
        f"{model!r}\nlistening on {_address(host, port)}   schema: /openapi.json   Ctrl-C stops", err=True
    )
    run_server(app, host, port, stop_seconds=words.timeout)
    typer.echo("stopped", err=True)


@takes(SERVE | {"port": replace(SERVE["port"], default=7860)}, "run host port device")
def ui(words: Any) -> None:
    """Open a local page to try a trained model: there and back, between two sentences, blanks, paraphrases."""
    host, port = words.host, words.port
    token = _check("gradio", "ui", host, port)
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    from mmldlm.api.model import load
    from mmldlm.service.page import launch_page

    model = load(words.run, words.device)
    typer.echo(f"{model!r}\nopen {_address(host, port)} in a browser   Ctrl-C stops", err=True)
    launch_page(model, host, port, token=token)


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _check(package: str, extra: str, host: str, port: int) -> str:
    """The token, once the package and the address are seen to be usable."""
    token = require_token(host)
    require_free(host, port)
    if importlib.util.find_spec(package) is None:
        raise UserError(f"the package {package} is not installed; run: pip install 'mmldlm[{extra}]'")
    return token


def require_token(host: str) -> str:
    """The token of the environment; without one only this machine may be listened to."""
    token = os.environ.get(TOKEN, "")
    if host not in LOOPBACK and len(token) < LEAST_TOKEN:
        present = f"; it has {len(token)}" if token else ""
        raise UserError(
            f"--host {host}: others could reach the service; set the environment variable {TOKEN} to a secret of at "
            f"least {LEAST_TOKEN} characters{present}, or listen on 127.0.0.1"
        )
    return token


def require_free(host: str, port: int) -> None:
    """Say before the model is loaded that the port is taken or the address is not one of this machine."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; choose another") from error
