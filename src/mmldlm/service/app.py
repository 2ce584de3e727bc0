"""The HTTP service of a model: encode, decode, generate, infill, with a schema, health and Prometheus metrics.

    POST /encode     {"texts": [...]}                        -> {"latents": [...]}
    POST /decode     {"latents": [...]} or {"texts": [...]}  -> {"texts": [...]}
    POST /generate   {"n": 4}                                -> {"texts": [...], "latents": [...]}
    POST /infill     {"texts": ["a ____ of rope"]}           -> {"texts": [...]}
    GET  /           what the model is     /health     /metrics     /openapi.json

Every error is {"error": "one line"} with a status: 400 not JSON, or another host; 401 token, 408 slow request, 413 too
large, 415 not declared as JSON, 422 wrong values, 503 too many requests, 504 no answer in time.
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from mmldlm import __version__
from mmldlm.api.model import Model
from mmldlm.api.values import blank_tokens
from mmldlm.errors import UserError
from mmldlm.reports import counted
from mmldlm.service.batching import Batcher, BusyError, ClosedError, Compute, Job, Progress
from mmldlm.service.guard import Guard
from mmldlm.service.schema import ANSWERS, Limits, Problem, problem_line, request_types

logger = logging.getLogger(__name__)
OPEN_PATHS = ("/health",)
"""Answered without the token."""
LOCAL_NAMES = ("127.0.0.1", "localhost", "::1")


class Metrics:
    """What Prometheus reads."""

    def __init__(self, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("mmldlm_requests", "Answers", ["path", "status"], registry=self.registry)
        self.seconds = Histogram("mmldlm_request_seconds", "Time to answer", ["path"], registry=self.registry)
        self.documents = Histogram(
            "mmldlm_batch_documents",
            "Documents of a pass",
            buckets=[2**i for i in range(9)],
            registry=self.registry,
        )
        self.passes = Counter("mmldlm_model_seconds", "Time in the model", registry=self.registry)
        gauge = Gauge("mmldlm_waiting_documents", "Documents in the queue", registry=self.registry)
        gauge.set_function(waiting)

    def observe(self, documents: int, seconds: float) -> None:
        """After each pass of the model."""
        self.documents.observe(documents)
        self.passes.inc(seconds)


class Service:
    """The model with its queue; each method answers one kind of request."""

    def __init__(self, model: Model, limits: Limits) -> None:
        self.model, self.limits = model, limits
        self.batcher = Batcher(
            most_documents=limits.batch, most_waiting=limits.waiting,
            observe=lambda documents, seconds: self.metrics.observe(documents, seconds),
        )  # fmt: skip
        self.metrics = Metrics(lambda: self.batcher.num_waiting)

    async def encode(self, body: Any) -> dict[str, Any]:
        """Texts to latents by the model itself."""
        return {"latents": _plain(await self._encode(body.texts, body.model_dump(exclude={"texts"})))}

    async def _encode(self, texts: list[str], options: dict[str, Any]) -> list[Any]:
        def compute(documents: list[Any], progress: Progress) -> Any:
            return self.model.encode(documents, progress=progress, **options)

        return await self._compute("encode", options, texts, compute)

    async def decode(self, body: Any) -> dict[str, Any]:
        """Latents to texts; texts are turned into latents by the model first."""
        if (body.latents is None) == (body.texts is None):
            raise UserError("latents, texts: exactly one of both is needed")
        rows = await self._encode(body.texts, {}) if body.latents is None else body.latents
        lengths = body.lengths if isinstance(body.lengths, list) else [body.lengths] * len(rows)
        if len(lengths) != len(rows):
            raise UserError(
                f"lengths: {counted(len(lengths), 'number')} for {counted(len(rows), 'document')}; give one, or one "
                "per document"
            )
        options = body.model_dump(exclude={"latents", "texts", "lengths"})

        def compute(documents: list[Any], progress: Progress) -> Any:
            latents, wanted = zip(*documents, strict=True)
            counts = None if wanted[0] is None else list(wanted)
            return self.model.decode(self._array(latents), lengths=counts, progress=progress, **options)

        kind = options | {"lengths": body.lengths is None}
        documents = list(zip(rows, lengths, strict=True))
        return {"texts": await self._compute("decode", kind, documents, compute)}

    async def generate(self, body: Any) -> dict[str, Any]:
        """Texts and latents from nothing."""
        options = body.model_dump()

        def compute(documents: list[Any], progress: Progress) -> list[Any]:
            return [self.model.generate(progress=progress, **options)]

        (pairs,) = await self._compute(None, options, [None] * body.n, compute)
        return {"texts": pairs.texts, "latents": _plain(pairs.latents)}

    async def infill(self, body: Any) -> dict[str, Any]:
        """Texts whose blanks are filled in; ____ is one token, ____{3} three."""
        options, rows = (
            body.model_dump(exclude={"texts", "latents"}),
            body.latents or [None] * len(body.texts),
        )
        if len(rows) != len(body.texts):
            raise UserError(f"latents: {len(rows)} for {counted(len(body.texts), 'text')}; give one per text")
        most = self.model.max_length
        for index, text in enumerate(body.texts):
            if (size := blank_tokens(self.model.codec.tokenizer, text)) > most:
                raise UserError(
                    f"texts[{index}]: blanks of {size} tokens; at most {most} are allowed in a text"
                )

        def compute(documents: list[Any], progress: Progress) -> Any:
            texts, latents = zip(*documents, strict=True)
            array = None if latents[0] is None else self._array(latents)
            return self.model.infill(list(texts), array, progress=progress, **options)

        kind = options | {"latents": body.latents is None}
        return {
            "texts": await self._compute("infill", kind, list(zip(body.texts, rows, strict=True)), compute)
        }

    def _array(self, latents: Any) -> np.ndarray:
        shape = (self.model.num_slots, self.model.num_channels)
        return np.stack([np.asarray(latent, np.float64).reshape(shape) for latent in latents])

    async def _compute(
        self, verb: str | None, kind: dict[str, Any], documents: list[Any], compute: Compute
    ) -> list:
        """Through the queue, in time or not at all. `verb` None: never together with others."""
        seconds = self.limits.answer_seconds
        key = None if verb is None else (verb, *sorted(kind.items()))
        job = Job(key, documents, compute, time.monotonic() + seconds)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self.batcher.submit(job))
        finally:
            job.wanted = False


def _plain(latents: Any) -> list[Any]:
    return np.asarray(latents, np.float32).astype(float).tolist()


_STATUS: dict[type[Exception], tuple[int, str]] = {
    BusyError: (503, "too many requests are waiting; try again later"),
    ClosedError: (503, "the service is stopping"),
    TimeoutError: (504, "no answer in time; ask for fewer documents or steps, or try again later"),
}


def create_app(
    model: Model, limits: Limits | None = None, *, token: str = "", local: bool = False
) -> FastAPI:
    """The service as an ASGI application. `local`: only requests that name this machine as their host are answered,
    so that no page on the Internet can reach it through a browser."""
    limits = limits or Limits()
    service = Service(model, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.batcher.close)

    app = FastAPI(
        title="MM-LDLM",
        version=__version__,
        description=f"{model!r}",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    _add_paths(app, service)
    _add_errors(app, (model.num_slots, model.num_channels))
    _add_checks(app, service, token, local)
    app.add_middleware(Guard, most_bytes=limits.bytes, seconds=limits.receive_seconds)
    return app


def _add_paths(app: FastAPI, service: Service) -> None:
    problems: dict[int | str, dict[str, Any]] = {
        status: {"model": Problem} for status in (400, 401, 408, 413, 415, 422, 500, 503, 504)
    }
    for name, kind in request_types(service.model, service.limits).items():
        method = getattr(service, name)
        app.post(
            f"/{name}", response_model=ANSWERS[name], responses=problems, operation_id=name, summary=method.__doc__,
        )(_endpoint(method, kind))  # fmt: skip

    @app.get("/", operation_id="model", summary="What the model is.")
    async def about() -> dict[str, Any]:
        model = service.model
        return {
            "source": model.source, "step": model.step, "modes": list(model.modes), "num_slots": model.num_slots,
            "num_channels": model.num_channels, "max_length": model.max_length, "device": str(model.device),
        }  # fmt: skip

    @app.get("/health", operation_id="health", summary="Whether the service answers.")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", operation_id="metrics", response_class=PlainTextResponse, summary="For Prometheus.")
    async def metrics() -> Response:
        return PlainTextResponse(generate_latest(service.metrics.registry))


def _endpoint(
    method: Callable[[Any], Awaitable[Any]], kind: type[BaseModel]
) -> Callable[..., Awaitable[Any]]:
    async def answer(body: Any) -> Any:
        return await method(body)

    answer.__annotations__ = {"body": kind}  # the type is known only when the model is
    return answer


def _problem(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": message}, status, headers)


def _add_errors(app: FastAPI, shape: tuple[int, int]) -> None:
    """`shape` of the model's latents."""

    @app.exception_handler(UserError)
    async def wrong(request: Request, error: UserError) -> Response:
        return _problem(422, str(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        problems, kind = error.errors(), request.headers.get("content-type", "")
        if not kind.partition(";")[0].strip().endswith("json"):
            return _problem(415, f"content-type={kind!r}: send the header content-type: application/json")
        for part in problems:
            if part["type"] == "json_invalid":
                where = part["loc"][-1]
                return _problem(400, f"body: is not JSON ({part['ctx']['error']} at character {where})")
        return _problem(422, problem_line(problems, error.body, shape))

    @app.exception_handler(HTTPException)
    async def rejected(request: Request, error: HTTPException) -> Response:
        return _problem(error.status_code, str(error.detail), dict(error.headers or {}))

    for kind, (status, message) in _STATUS.items():

        def handler(
            request: Request, error: Exception, status: int = status, message: str = message
        ) -> Response:
            return _problem(status, message, {"retry-after": "1"})

        app.add_exception_handler(kind, handler)


def _add_checks(app: FastAPI, service: Service, token: str, local: bool) -> None:
    """The host, the token, and the count and time of every answer."""
    known = {getattr(route, "path", "") for route in app.routes}

    @app.middleware("http")
    async def check(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        began = time.monotonic()
        offered = request.headers.get("authorization", "").encode()
        host = request.headers.get("host", "")
        host = host[1:].split("]")[0] if host.startswith("[") else host.split(":")[0]
        if local and host not in LOCAL_NAMES:
            names = f"{', '.join(LOCAL_NAMES[:-1])} and {LOCAL_NAMES[-1]}"
            response: Response = _problem(400, f"host={host!r}: requests to {names} are answered, no others")
        elif (
            token
            and request.url.path not in OPEN_PATHS
            and not hmac.compare_digest(offered, f"Bearer {token}".encode())
        ):
            response = _problem(
                401,
                "a token is needed: send the header Authorization: Bearer TOKEN",
                {"www-authenticate": "Bearer"},
            )
        else:
            try:
                response = await call_next(request)
            except Exception:
                logger.exception("%s failed", request.url.path)
                response = _problem(500, "the service failed on this request; its log says why")
        path = request.url.path if request.url.path in known else "other"
        service.metrics.requests.labels(path, str(response.status_code)).inc()
        service.metrics.seconds.labels(path).observe(time.monotonic() - began)
        return response
