"""A file of documents through a model into a file of samples, part by part, continued where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm import durable
from mmldlm.api.model import Model
from mmldlm.sampling.decode import Progress
from mmldlm.sampling.stream import ArrayFile, InputFile, Inputs, LineFile

Act = Callable[[Inputs, Progress], Sequence[dict[str, Any]] | np.ndarray]
"""What is done with some documents: records for a `.jsonl` file, or latents (n, S, C) for a `.npy` file."""


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
    try:
        for inputs in documents.parts(skip=done):
            start, size = done, len(inputs)
            output.write(act(inputs, lambda part, whole: report(start + size * part // whole, total)))  # type: ignore[arg-type] # noqa: B023
            done += size
            report(done, total)
        output.finish()
    finally:
        output.close()
    return total, earlier
