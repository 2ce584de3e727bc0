"""A copy of the state in host memory that is written to the disk while training goes on.

The bytes are laid out as in the file, over slabs of memory that are allocated once and used again for every
checkpoint, so memory stays flat. With a GPU the slabs are page-locked and the copies are queued on the
current stream: later updates wait for them on the device, and the host waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mmldlm.checkpoint.tensor_file import Layout, as_bytes, plan

SLAB = 64 * 2**20
"""A power of two: page-locked allocations are rounded up to one."""
_PAGE = 4096

logger = logging.getLogger(__name__)


@dataclass
class Image:
    """One file in host memory."""

    group: str
    header: bytes
    views: list[memoryview]

    def chunks(self) -> Iterator[bytes | memoryview]:
        yield self.header
        yield from self.views


class HostCopy:
    """Reusable host memory for one snapshot at a time."""

    def __init__(self) -> None:
        self._slabs: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event] = []

    @property
    def nbytes(self) -> int:
        return sum(slab.numel() for slab in self._slabs)

    def take(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> list[Image]:
        """Copy all groups; call `finish` before the bytes are read. Replaces what was taken before."""
        layouts = {group: plan(named) for group, named in tensors.items()}
        devices = {tensor.device for layout in layouts.values() for tensor in layout.stored.values()}
        on_gpu = [device for device in devices if device.type == "cuda"]
        self._reserve(sum(layout.size for layout in layouts.values()), pinned=bool(on_gpu))
        images, position = [], 0
        for group, layout in layouts.items():
            images.append(Image(group, layout.header({"group": group}), self._views(position, layout.size)))
            self._fill(position, layout)
            position += layout.size
        self._events = [_mark(device) for device in on_gpu]
        return images

    def finish(self) -> None:
        """Wait until the queued copies have arrived."""
        for event in self._events:
            event.synchronize()
        self._events = []

    def _reserve(self, size: int, *, pinned: bool) -> None:
        while (missing := size - self.nbytes) > 0:
            self._slabs.append(_allocate(min(SLAB, -(-missing // _PAGE) * _PAGE), pinned=pinned))

    def _parts(self, start: int, size: int) -> Iterator[torch.Tensor]:
        """The pieces of slabs that hold bytes [start, start + size)."""
        for slab in self._slabs:
            if size <= 0:
                return
            if start < slab.numel():
                part = slab[start : start + size]
                size -= part.numel()
                yield part
            start = max(0, start - slab.numel())

    def _views(self, start: int, size: int) -> list[memoryview]:
        return [part.numpy().data for part in self._parts(start, size)]

    @torch.no_grad()
    def _fill(self, start: int, layout: Layout) -> None:
        for name, tensor in layout.stored.items():
            source, done = as_bytes(tensor), 0
            for part in self._parts(start + layout.offsets[name], tensor.nbytes):
                part.copy_(source[done : done + part.numel()], non_blocking=source.is_cuda)
                done += part.numel()


def _allocate(size: int, *, pinned: bool) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        if not pinned:
            raise MemoryError(f"{size} bytes of host memory for a checkpoint: {error}") from error
        logger.warning("no page-locked memory for checkpoints (%s); copies will be slower", error)
        return _allocate(size, pinned=False)


def _mark(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
