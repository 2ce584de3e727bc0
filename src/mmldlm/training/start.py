"""The start of a run: how long each part of it takes, and modules that are imported while others are at work."""

from __future__ import annotations

import importlib
import logging
import threading
import time

from mmldlm.runtime import Runtime

log = logging.getLogger(__name__)


class StartClock:
    """Seconds from the command to the first step, by part."""

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


def import_ahead(runtime: Runtime) -> threading.Thread:
    """Begin to import, in another thread, what the first step needs.

    Whoever needs one of our kernels sooner waits for it. The modules of the compiler import each other in circles,
    which two threads must not do at once: join the thread before anything is compiled.
    """
    names = [f"mmldlm.model.kernels.{name}" for name in ("tiles", "add_norm", "gather_qkv", "score")]
    names = names if runtime.fused else []
    names += ["torch._dynamo", "torch._inductor.compile_fx"] if runtime.compile else []

    def load() -> None:
        for name in names:
            importlib.import_module(name)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    thread.start()
    return thread
