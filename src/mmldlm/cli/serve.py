"""`mmldlm serve` and `mmldlm ui`: a trained model behind HTTP, and a page to try it."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from mmldlm.cli.records import RUN_HELP
from mmldlm.errors import UserError

TOKEN = "MMLDLM_TOKEN"
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Run = Annotated[str, typer.Argument(help=RUN_HELP)]
Host = Annotated[
    str, typer.Option(help=f"Address to listen on; other than loopback needs {TOKEN} in the environment.")
]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")]


def serve(
    run: Run,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds in which a request is answered.")
    ] = 60.0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Serve a trained model over HTTP: /encode, /decode, /generate, /infill, /health, /metrics, /openapi.json."""
    token = require_token(host)
    require_free(host, port)
    _require_extra("fastapi", "serve")
    from mmldlm.api.model import load
    from mmldlm.service.app import Limits, create_app
    from mmldlm.service.guard import run_server

    model = load(run, device)
    app = create_app(model, Limits(answer_seconds=timeout), token=token, local=host in LOOPBACK and not token)
    typer.echo(
        f"{model!r}\nlistening on http://{host}:{port}   schema: /openapi.json   Ctrl-C stops", err=True
    )
    run_server(app, host, port, stop_seconds=timeout)
    typer.echo("stopped", err=True)


def ui(
    run: Run,
    host: Host = "127.0.0.1",
    port: Port = 7860,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
) -> None:
    """Open a local page to try a trained model: there and back, between two sentences, blanks, paraphrases."""
    token = require_token(host)
    require_free(host, port)
    _require_extra("gradio", "ui")
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    from mmldlm.api.model import load
    from mmldlm.service.page import launch_page

    model = load(run, device)
    typer.echo(f"{model!r}\nopen http://{host}:{port} in a browser   Ctrl-C stops", err=True)
    launch_page(model, host, port, token=token)


def require_token(host: str) -> str:
    """The token of the environment; without one only this machine may be listened to."""
    token = os.environ.get(TOKEN, "")
    if host not in LOOPBACK and len(token) < 16:
        raise UserError(
            f"--host {host}: others could reach the service; set the environment variable {TOKEN} to a secret of at "
            "least 16 characters, or listen on 127.0.0.1"
        )
    return token


def require_free(host: str, port: int) -> None:
    """Say before the model is loaded that the port is taken or the address is not one of this machine."""
    import socket

    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}; choose another") from error


def _require_extra(package: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise UserError(f"the package {package} is not installed; run: pip install 'mmldlm[{extra}]'")
