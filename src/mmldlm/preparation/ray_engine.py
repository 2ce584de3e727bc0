"""Encoding on the workers of a Ray cluster, one process per GPU: `mmldlm prepare --engine ray`.

The caller reads and cuts the text, which is cheap and decides order and duplicates, and writes the shards. A worker
gets the documents of a shard and returns their latents, so the store is the same as without Ray. At most two shards per
worker are on their way: whoever is slower holds up the others instead of filling the memory. A worker that dies is
started again by Ray and gets its shards again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from types import TracebackType
from typing import Any, Self

import numpy as np

from mmldlm.errors import UserError
from mmldlm.preparation.encoders import AnyEncoder, load_encoder

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


@dataclass(frozen=True)
class EncoderOptions:
    """What a worker needs to load the same encoder as the caller."""

    encoder: AnyEncoder
    prompt: str
    normalize: bool | None
    dimension: int | None
    device: str
    batch_size: int | None

    def load(self) -> Any:
        """The encoder, ready for use."""
        return load_encoder(
            self.encoder, lambda: "A text.", prompt=self.prompt, normalize=self.normalize, dimension=self.dimension,
            device=self.device, batch_size=self.batch_size,
        )  # fmt: skip


class Worker:
    """One process that holds the encoder."""

    def __init__(self, options: EncoderOptions) -> None:
        self._encoder = options.load()

    def encode(self, texts: list[str], tokens: list[np.ndarray] | None) -> tuple[np.ndarray, int]:
        """Latents (N, S, C) of the texts, and how many of these the encoder truncated."""
        tokenized = self._encoder.tokenize(texts, tokens)
        return self._encoder.embed(tokenized), tokenized.num_truncated


class RayEncoders:
    """The workers, for as long as the `with` lasts."""

    def __init__(self, options: RayOptions, encoder: EncoderOptions, note: Callable[[str], None]) -> None:
        self._options, self._encoder, self._note = options, encoder, note
        self._workers: list[Any] = []

    @property
    def most_waiting(self) -> int:
        """Shards that may be on their way."""
        return SHARDS_PER_WORKER * len(self._workers)

    def __enter__(self) -> Self:
        ray = _start(self._options)
        count, resources = self._size(ray)
        worker = ray.remote(max_restarts=-1, max_task_retries=-1, **resources)(Worker)
        self._workers = [worker.remote(self._encoder) for _ in range(count)]
        self._turn, self._ray = cycle(self._workers), ray
        self._note(f"Ray: {count} workers with {_words(resources)} each")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            self._ray.kill(worker)
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


def _start(options: RayOptions) -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError("engine=ray: Ray is not installed; run: pip install 'mmldlm[ray]'") from error
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
    return ray


def _words(resources: dict[str, float]) -> str:
    return " and ".join(f"{value:g} {name.removeprefix('num_')}" for name, value in resources.items())
