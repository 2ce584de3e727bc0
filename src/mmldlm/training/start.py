"""The start of a run: how long each part of it takes, and what is done beside the main thread meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from mmldlm.config import ModelConfig, TrainConfig
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.layers import Kernels
from mmldlm.objective.joint import Objective
from mmldlm.runtime import Runtime
from mmldlm.types import MicroBatch

log = logging.getLogger(__name__)


class StartClock:
    """Seconds from the command to the first step, by part.

    They are those of the main thread: of what is done beside it, only the wait for the rest counts.
    """

    def __init__(self, began: float | None = None) -> None:
        """`began` is a time of `time.perf_counter`; None: now."""
        self._began = self._last = time.perf_counter() if began is None else began
        self.parts: dict[str, float] = {}

    def done(self, part: str) -> None:
        """All since the part before was this one."""
        now = time.perf_counter()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def report(self) -> dict[str, float]:
        """Log the parts, and return them with their sum."""
        fields = {name: round(seconds, 2) for name, seconds in self.parts.items()}
        listed = ", ".join(f"{name} {seconds:.1f}" for name, seconds in fields.items())
        log.info("first step done %.1f s after the start: %s", self._last - self._began, listed)
        return fields | {"total": round(self._last - self._began, 2)}


class Beside(threading.Thread):
    """Work in a thread of its own, on the device and stream of the thread that starts it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        super().__init__(name=name)  # no daemon: a process that ends early waits, or C++ code aborts it
        self._work = work
        self._error: Exception | None = None
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self.start()

    def run(self) -> None:
        """Called by the thread."""
        try:
            with torch.cuda.stream(self._stream):
                self._work()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Until the work is done; an error of it is raised here."""
        self.join()
        if self._error is not None:
            raise self._error

    def wait_or_ignore(self) -> None:
        """Until the work is done; what failed was only meant to save time."""
        self.join()
        if self._error is not None:
            log.info("%s failed, which costs time only: %s", self.name, str(self._error).split("\n")[0])


def import_ahead(config: TrainConfig, runtime: Runtime) -> Beside:
    """Begin to import what the run needs later.

    Whoever needs one of our kernels sooner waits for it. The modules of the compiler import each other in circles,
    which two threads must not do at once: wait before anything is compiled.
    """
    names = [
        f"mmldlm.model.kernels.{name}"
        for name in ("tiles", "add_norm", "gather_qkv", "gelu", "epilogue", "score", "update")
    ]
    names = names if runtime.fused else []
    names += ["torch._dynamo", "torch._inductor.compile_fx"] if runtime.compile else []
    names += ["tokenizers"] if config.valid_samples else []
    names += ["torch.utils.tensorboard"] if "tensorboard" in config.trackers else []

    def load() -> None:
        for name in names:
            importlib.import_module(name)

    return Beside("imports", load)


def one_block(model: ModelConfig, shape: DataShape, device: torch.device) -> Denoiser:
    """A denoiser of one block, all of it on the device, without values."""
    with torch.device(device):
        denoiser = Denoiser(replace(model, depth=1), shape, seed=None)
    return denoiser.to(device)  # buffers are made on the host


def rehearse(
    model: ModelConfig,
    shape: DataShape,
    kernels: Kernels,
    objective: Objective,
    runtime: Runtime,
    batch: MicroBatch,
) -> None:
    """Forward and backward of one block on the device, with weights that are whatever was in its memory.

    What the first step would compile or load there is ready then: our kernels, cuBLAS and the modules of PyTorch.
    """
    denoiser = one_block(model, shape, runtime.device)
    denoiser.kernels = kernels
    with contextlib.ExitStack() as stack:
        if runtime.fused:
            from mmldlm.model.kernels.epilogue import without_measuring

            stack.enter_context(without_measuring())
        with runtime.autocast():
            terms = objective(denoiser, batch.noisy, batch.counts)
        terms.trained.backward()
