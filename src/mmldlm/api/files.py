"""Files of documents in, files of samples out: parts are read, sampled and written one after the other.

In: `.txt` (one text per line), `.jsonl` (objects with text, latent, infill) or `.npy` (latents).
Out: `.jsonl` or `.npy`. Until it is complete, an output has a temporary name that follows from the request; the same
request continues where an earlier one stopped. With an accelerator two parts are in work at a time: while the device
samples one, the host reads, tokenizes, packs and writes the others.
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm import durable
from mmldlm.api.model import Model
from mmldlm.errors import TextError, UserError
from mmldlm.sampling.decode import Progress
from mmldlm.sampling.pack import content_ids
from mmldlm.untrusted import map_array

KINDS = (".txt", ".jsonl", ".npy")
FIELDS = ("text", "latent", "infill")
PART, LARGE_PART = 512, 8192
"""Documents that are in memory at a time; an accelerator needs more of them to be busy."""
_LATENTS_AT_ONCE = 2**24
"""Numbers; parts of larger latents are smaller."""
IN_WORK = 2
"""Parts at a time, with an accelerator."""


@dataclass(frozen=True)
class Inputs:
    """Documents that a user names, as far as they are known."""

    texts: list[str] | None = None
    latents: np.ndarray | None = None
    """(n, S, C) in the encoder's own space."""
    infill: list[str] | None = None
    """Texts with blanks."""
    document_ids: np.ndarray | None = None
    """(n,) ids of documents of a pair store."""
    lengths: np.ndarray | None = None
    """(n,) tokens of documents of a pair store."""
    lines: list[int] | None = None
    """(n,) numbers of the lines of a file that hold the documents."""

    @property
    def ids(self) -> np.ndarray:
        """(n,) uint64: of the store, or hashes of the texts, or of the latents."""
        if self.document_ids is not None:
            return self.document_ids
        contents = self.texts if self.texts is not None else self.latents
        return content_ids(self.infill or [] if contents is None else contents)

    def __len__(self) -> int:
        return len(self.texts or self.infill or ()) if self.latents is None else len(self.latents)


def read_latents(path: Path, shape: tuple[int, int], *, mapped: bool = False) -> np.ndarray:
    """(n, S, C) from a `.npy` file, which may hold (n, C) for one slot; left on the disk if mapped."""
    try:
        array = map_array(path)
    except FileNotFoundError as error:
        raise UserError(f"{path}: there is no such file") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as an array ({error}); save it with numpy.save") from error
    if array.ndim == 2 and shape[0] == 1:
        array = array[:, None, :]
    if array.ndim != 3 or array.shape[1:] != shape or array.dtype.kind not in "fiu":
        raise UserError(
            f"{path}: holds {array.dtype} of shape {array.shape}; this model needs numbers of shape "
            f"(n, {shape[0]}, {shape[1]}), from the encoder it was trained with"
        )
    if not len(array):
        raise UserError(f"{path}: holds no latent")
    return array if mapped else np.ascontiguousarray(array, np.float32)


class InputFile:
    """The documents of a file, in order; the file is read twice, once to count."""

    def __init__(self, path: Path, shape: tuple[int, int]) -> None:
        self.path, self.shape = path, shape
        if path.suffix not in KINDS:
            raise UserError(f"{path}: the name of an input file ends in {', '.join(KINDS)}")
        self._array = read_latents(path, shape, mapped=True) if path.suffix == ".npy" else None
        try:
            self.num_documents = sum(1 for _ in self._lines()) if self._array is None else len(self._array)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error
        if not self.num_documents:
            raise UserError(f"{path}: holds no document")

    def identity(self) -> list[Any]:
        """Changes when the file does."""
        status = self.path.stat()
        return [str(self.path.resolve()), status.st_size, status.st_mtime_ns]

    def large_part(self) -> int:
        """Documents of a part that fills an accelerator."""
        return min(LARGE_PART, max(PART, _LATENTS_AT_ONCE // (self.shape[0] * self.shape[1])))

    def parts(self, skip: int = 0, size: int | None = None) -> Iterator[Inputs]:
        """The documents after the first ones, `size` at a time."""
        size = size or PART
        if self._array is not None:
            for start in range(skip, len(self._array), size):
                rows = np.array(self._array[start : start + size], np.float32)
                bad = np.flatnonzero(~np.isfinite(rows).all(axis=(1, 2)))
                if len(bad):
                    raise UserError(
                        f"{self.path}: the latent at index {start + bad[0]} contains NaN or infinity"
                    )
                yield Inputs(latents=rows)
            return
        waiting: list[tuple[int, str]] = []
        for place, numbered in enumerate(self._lines()):
            if place < skip:
                continue
            waiting.append(numbered)
            if len(waiting) == size:
                yield self._inputs(waiting)
                waiting = []
        if waiting:
            yield self._inputs(waiting)

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Lines that are not empty, with their numbers from 1."""
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"{self.path}: line {number} is not UTF-8; save the file as UTF-8"
                    ) from error
                if text:
                    yield number, text

    def _inputs(self, lines: list[tuple[int, str]]) -> Inputs:
        numbers = [number for number, _ in lines]
        if self.path.suffix == ".txt":
            return Inputs(texts=[line for _, line in lines], lines=numbers)
        records = [self._record(number, line) for number, line in lines]
        kind = sorted(records[0].keys() & set(FIELDS))
        for (number, _), record in zip(lines, records, strict=True):
            if not kind or sorted(record.keys() & set(FIELDS)) != kind:
                fields = ", ".join(FIELDS)
                needed = f"{', '.join(kind)}, as line {lines[0][0]} does, and no other" if kind else "one"
                raise UserError(f"{self.path}: line {number} must hold {needed} of the fields {fields}")
        inputs = Inputs(
            texts=self._texts(lines, records, "text") if "text" in kind else None,
            infill=self._texts(lines, records, "infill") if "infill" in kind else None,
            lines=numbers,
        )
        return replace(inputs, latents=self._latents(lines, records)) if "latent" in kind else inputs

    def _record(self, number: int, line: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(f"{self.path}: line {number} is not a JSON object")
        return record

    def _texts(self, lines: list[tuple[int, str]], records: list[dict[str, Any]], name: str) -> list[str]:
        for (number, _), record in zip(lines, records, strict=True):
            if not isinstance(record[name], str):
                raise UserError(f"{self.path}: line {number}: {name} is not a text")
        return [record[name] for record in records]

    def _latents(self, lines: list[tuple[int, str]], records: list[dict[str, Any]]) -> np.ndarray:
        latents = np.empty((len(records), *self.shape), np.float32)
        for row, (number, _), record in zip(latents, lines, records, strict=True):
            try:
                row[:] = np.asarray(record["latent"], np.float32).reshape(self.shape)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"{self.path}: line {number}: latent is not a list of {self.shape[0]} x {self.shape[1]} numbers"
                ) from error
            if not np.isfinite(row).all():
                raise UserError(f"{self.path}: line {number}: latent contains NaN or infinity")
        return latents


class PartFile:
    """An output that gets its name when it is complete; the same request continues what it left unfinished."""

    def __init__(self, path: Path, request: Sequence[Any]) -> None:
        digest = hashlib.sha256(json.dumps(request, sort_keys=True, default=str).encode()).hexdigest()
        self.path = path
        self.part = path.with_name(f".{path.name}.{digest[:12]}.part")
        self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.num_done, self._size = self._complete()
        os.ftruncate(self._fd, self._size)

    def _complete(self) -> tuple[int, int]:
        """How many documents are written in full, and the bytes up to there."""
        raise NotImplementedError

    def _append(self, content: bytes) -> None:
        """All bytes, or none if something interrupts."""
        rest = memoryview(content)
        try:
            with durable.naming(self.path):
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
        except BaseException:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += len(content)

    def finish(self) -> None:
        """Flush the file to the disk and give it its name."""
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = -1
        durable.publish(self.part, self.path)

    def close(self) -> None:
        """Leave what is written for the next time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if not self.num_done and not self._size:
                self.part.unlink(missing_ok=True)


class LineFile(PartFile):
    """Records, one JSON object per line."""

    def _complete(self) -> tuple[int, int]:
        count = size = 0
        with open(self.part, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    count, size = count + 1, size + len(line)
        return count, size

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        self._append("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())


class ArrayFile(PartFile):
    """Latents of a known number of documents as `.npy`."""

    def __init__(self, path: Path, request: Sequence[Any], shape: tuple[int, int, int]) -> None:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
        self._header, self._row_bytes = header.getvalue(), 4 * shape[1] * shape[2]
        super().__init__(path, request)
        if not self._size:
            self._append(self._header)

    def _complete(self) -> tuple[int, int]:
        content = os.fstat(self._fd).st_size - len(self._header)
        if content < 0:
            return 0, 0
        count = content // self._row_bytes
        return count, len(self._header) + count * self._row_bytes

    def write(self, latents: np.ndarray) -> None:
        self._append(np.ascontiguousarray(latents, "<f4").tobytes())

    def close(self) -> None:
        """A header alone is nothing to continue from."""
        if self._size == len(self._header):
            self._size = 0
        super().close()


Act = Callable[[Inputs, Progress], Sequence[dict[str, Any]] | np.ndarray]
"""What is done with some documents: records for a `.jsonl` file, or latents (n, S, C) for a `.npy` file."""


def process_file(
    model: Model, source: Path, out: Path, act: Act, request: Sequence[Any], progress: Progress | None = None
) -> tuple[int, int]:
    """Number of documents in the file, and how many of them an earlier call with the same `request` had done."""
    durable.require_writable(out)
    if out.exists() and source.exists() and out.samefile(source):
        raise UserError(f"{out}: is the file that is read; name another one to write")
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

    def act_on_lines(inputs: Inputs, progress: Progress) -> Sequence[dict[str, Any]] | np.ndarray:
        try:
            return act(inputs, progress)
        except TextError as error:  # it counts the texts of this part
            if inputs.lines is None:
                raise
            raise UserError(f"{source}: line {inputs.lines[error.index]}: text{error.problem}") from error

    try:
        for size, result in _results(parts, act_on_lines, lambda share: report(done + share, total), on_cpu):  # noqa: B023
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
