"""A file of documents through a model into a file of samples, part by part, continued where it stopped.

With an accelerator two parts are in work at a time: while the device samples one, the host reads, tokenizes, packs and
writes the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm import durable
from mmldlm.api.model import Model
from mmldlm.sampling.decode import Progress
from mmldlm.sampling.stream import ArrayFile, InputFile, Inputs, LineFile

Act = Callable[[Inputs, Progress], Sequence[dict[str, Any]] | np.ndarray]
"""What is done with some documents: records for a `.jsonl` file, or latents (n, S, C) for a `.npy` file."""
IN_WORK = 2
"""Parts at a time, with an accelerator."""


def process_file(
    model: Model, source: Path, out: Path, act: Act, request: Sequence[Any], progress: Progress | None = None
) -> tuple[int, int]:
    """Number of documents in the file, and how many of them an earlier call with the same `request` had done."""
    durable.require_writable(out)
    documents = InputFile(source, (model.num_slots, model.num_channels))
    total = documents.num_documents
    identity = [str(Path(model.source).resolve()), model.step, *request, documents.identity()]
    output: ArrayFile | LineFile
    if out.suffix == ".npy":
        output = ArrayFile(out, identity, (total, model.num_slots, model.num_channels))
    else:
        output = LineFile(out, identity)
    earlier = done = output.num_done
    report = progress or (lambda done, total: None)
    on_cpu = model.device.type == "cpu"
    parts = documents.parts(skip=done, size=None if on_cpu else documents.large_part())
    try:
        for size, result in _results(parts, act, lambda share: report(done + share, total), on_cpu):  # noqa: B023
            output.write(result)  # type: ignore[arg-type]
            done += size
            report(done, total)
        output.finish()
    finally:
        output.close()
    return total, earlier


def _results(
    parts: Iterable[Inputs], act: Act, report: Callable[[int], None], one_by_one: bool
) -> Iterator[tuple[int, Sequence[dict[str, Any]] | np.ndarray]]:
    """Size and result of each part, in their order. `report` gets the documents done of the present one."""
    if one_by_one:
        for inputs in parts:
            size = len(inputs)
            yield size, act(inputs, lambda part, whole: report(size * part // whole))  # noqa: B023
        return
    waiting: deque[tuple[int, Future[Any]]] = deque()
    with ThreadPoolExecutor(IN_WORK) as pool:
        try:
            for inputs in parts:
                waiting.append((len(inputs), pool.submit(act, inputs, lambda part, whole: None)))
                if len(waiting) > IN_WORK:
                    size, future = waiting.popleft()
                    yield size, future.result()
            for size, future in waiting:
                yield size, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
