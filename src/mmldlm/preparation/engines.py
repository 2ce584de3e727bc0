"""What works at the same time: a thread that reads ahead, one that writes behind, and the workers of a Ray cluster.

Tokenizers, networks and files leave Python free while they work, so the stages need not wait for each other. An error
in a stage comes out where the caller takes or gives the next item, as if all were done in one go.

With `--engine ray` the caller reads and cuts the text, which is cheap and decides order and duplicates, and writes the
shards. A worker gets the documents of a shard and returns their latents, so the store is the same as without Ray. At
most two shards per worker are on their way: whoever is slower holds up the others instead of filling the memory. A
worker that dies is started again by Ray and gets its shards again.
"""

from __future__ import annotations

import gc
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np

from mmldlm.errors import UserError
from mmldlm.preparation.encoders import AnyEncoder, load_encoder

T = TypeVar("T")
TURN_SECONDS = 1e-4
"""How long a thread may keep Python for itself. A network gives it away at each of its operations, and would wait
fifty times as long for each with the usual value."""
GARBAGE_OBJECTS = 100_000
"""New objects after which Python looks for garbage in circles. There is none among documents, and with the usual 700
a third of the reading thread's time goes into the search."""
LEAVE_SECONDS = 10.0
"""A stage that does not end by then, as one that waits for a network, is left behind; it cannot hold up the process."""


class StoppedError(Exception):
    """The work is no longer wanted."""


@dataclass(frozen=True)
class _End:
    """The last thing that comes, with what went wrong."""

    error: BaseException | None


class Ahead(Generic[T]):
    """Takes items from an iterable in a thread of its own, at most `size` of them before they are wanted."""

    def __init__(self, items: Iterable[T], size: int, stop: threading.Event) -> None:
        self._items, self._stop = items, stop
        self._ready: queue.Queue[T | _End] = queue.Queue(size)
        self._thread = threading.Thread(target=self._run, name="prepare-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Have the thread stop; whoever makes the items may look at `stop` to be quicker."""
        self._stop.set()
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Empty):
                self._ready.get(timeout=0.02)  # the thread may wait for room

    def __iter__(self) -> Iterator[T]:
        while not isinstance(item := self._ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._items:
                self._ready.put(item)
                if self._stop.is_set():
                    break
        except BaseException as raised:  # whatever it is, the caller gets it
            error = raised
        self._ready.put(_End(error))


def until(stop: threading.Event, items: Iterable[T]) -> Iterator[T]:
    """The items, for as long as they are wanted."""
    for item in items:
        if stop.is_set():
            raise StoppedError
        yield item


class Behind:
    """Does jobs in a thread of its own, in their order, one at a time; on leaving, the last one is finished."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare-behind")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if error_type is None:
            self.wait()

    def do(self, job: Callable[[], None]) -> None:
        """Begin a job once the one before is done; raises what went wrong with that."""
        self.wait()
        self._last = self._pool.submit(job)

    def wait(self) -> None:
        """Until the last job is done; raises what went wrong with it."""
        if self._last is not None:
            self._last.result()


@contextmanager
def many_documents() -> Iterator[None]:
    """Python set up for threads that make many objects: short turns, and few searches for garbage."""
    turn, thresholds = sys.getswitchinterval(), gc.get_threshold()
    try:
        sys.setswitchinterval(min(turn, TURN_SECONDS))
        if thresholds[0]:  # else somebody has switched it off
            gc.set_threshold(max(thresholds[0], GARBAGE_OBJECTS), *thresholds[1:])
        yield
    finally:
        sys.setswitchinterval(turn)
        gc.set_threshold(*thresholds)


SHARDS_PER_WORKER = 2
"""On their way to a worker or back, at most."""
STORE_BYTES = 512 * 2**20
"""Shared memory of a local Ray, for shards on their way."""


@dataclass(frozen=True)
class RayOptions:
    """Where and how wide the encoding runs."""

    address: str | None = None
    """Of a cluster that is running: `auto`, HOST:PORT or ray://HOST:PORT; None: a local one for this run."""
    workers: int | None = None
    """None: one per GPU of the cluster, without GPUs one per two CPUs."""


class Worker:
    """One process that holds the encoder."""

    def __init__(self, encoder: AnyEncoder, how: dict[str, Any]) -> None:
        """`how`: the keywords of `load_encoder`."""
        self._encoder = load_encoder(encoder, lambda: "A text.", **how)

    def encode(self, texts: list[str], tokens: list[np.ndarray] | None) -> tuple[np.ndarray, int]:
        """Latents (N, S, C) of the texts, and how many of these the encoder truncated."""
        tokenized = self._encoder.tokenize(texts, tokens)
        return self._encoder.embed(tokenized), tokenized.num_truncated


class RayEncoders:
    """The workers, for as long as the `with` lasts."""

    def __init__(
        self, options: RayOptions, encoder: AnyEncoder, how: dict[str, Any], note: Callable[[str], None]
    ) -> None:
        self._options, self._encoder, self._note = options, (encoder, how), note
        self._workers: list[Any] = []

    @property
    def most_waiting(self) -> int:
        """Shards that may be on their way."""
        return SHARDS_PER_WORKER * len(self._workers)

    def __enter__(self) -> Self:
        self._ray, self._own = _start(self._options)
        try:
            count, resources = self._size(self._ray)
        except UserError:
            self.__exit__(None, None, None)
            raise
        worker = self._ray.remote(max_restarts=-1, max_task_retries=-1, **resources)(Worker)
        self._workers = [worker.remote(*self._encoder) for _ in range(count)]
        self._turn = cycle(self._workers)
        self._note(f"Ray: {count} workers with {_words(resources)} each")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
        if self._own:
            self._ray.shutdown()

    def send(self, texts: list[str], tokens: list[np.ndarray] | None) -> Any:
        """Begin to encode a shard on the next worker."""
        return next(self._turn).encode.remote(texts, tokens)

    def receive(self, sent: Any) -> tuple[np.ndarray, int]:
        """What came back for a shard; an error of the encoder is raised here."""
        try:
            latents, truncated = self._ray.get(sent)
        except self._ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise UserError(f"a Ray worker failed: {cause}") from error
        except self._ray.exceptions.RayActorError as error:
            raise UserError(
                f"a Ray worker cannot be started ({str(error).strip().splitlines()[-1][:200]}); is mmldlm installed on "
                "all nodes?"
            ) from error
        return latents, truncated

    def _size(self, ray: Any) -> tuple[int, dict[str, float]]:
        """How many workers, and what each of them holds."""
        have = ray.cluster_resources()
        gpus, cpus = int(have.get("GPU", 0)), int(have.get("CPU", 1))
        count = self._options.workers or gpus or max(1, cpus // 2)
        if gpus >= count:
            return count, {"num_gpus": 1, "num_cpus": 1}
        if count > cpus:
            raise UserError(
                f"workers={count}: the cluster has {cpus} CPUs and {gpus} GPUs; use at most {max(cpus, gpus)}"
            )
        return count, {"num_cpus": cpus // count}


def _start(options: RayOptions) -> tuple[Any, bool]:
    """Ray, and whether it was started here; one that this process has joined already is used as it is."""
    try:
        import ray
    except ImportError as error:
        raise UserError("engine=ray: Ray is not installed; run: pip install 'mmldlm[ray]'") from error
    if ray.is_initialized():
        return ray, False
    local: dict[str, Any] = (
        {} if options.address else {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    )
    try:
        ray.init(
            address=options.address or "local", logging_level=logging.ERROR, log_to_driver=False, **local
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"ray_address={options.address}: no Ray cluster answers ({str(error).strip().splitlines()[0][:160]}); "
            "start one with 'ray start --head', or leave the address out"
        ) from error
    return ray, True


def _words(resources: dict[str, float]) -> str:
    return " and ".join(f"{value:g} {name.removeprefix('num_')}" for name, value in resources.items())
