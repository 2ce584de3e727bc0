"""A file in and a file out: documents come in parts, and lines are written as they are made.

In: `.txt` (a text a line), `.jsonl` (objects with text, latent, infill) or `.npy` (raw latents).
Out: `.jsonl`. Until it is whole it has another name, made from what was asked; the same command goes on from there.
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm import durable
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.errors import UserError
from mmldlm.sampling.checks import check_latents
from mmldlm.sampling.sources import Given, given_infill, given_texts, load_latents, make_ids

KINDS = (".txt", ".jsonl", ".npy")
PART = 512
"""Documents that are in memory at a time."""


class InputFile:
    """The documents of a file, in order; the file is read twice, once to count."""

    def __init__(self, model: LoadedModel, path: Path) -> None:
        self.model, self.path = model, path
        if path.suffix not in KINDS:
            raise UserError(f"--in {path}: the name of the file ends in {', '.join(KINDS)}")
        self._array = load_latents(model, path, "--in", mapped=True) if path.suffix == ".npy" else None
        try:
            self.num_documents = sum(1 for _ in self._lines()) if self._array is None else len(self._array)
        except OSError as error:
            raise UserError(f"--in {path}: cannot be read ({error.strerror or error})") from error
        if not self.num_documents:
            raise UserError(f"--in {path}: holds no document")

    def identity(self) -> list[Any]:
        """Changes when the file does."""
        found = self.path.stat()
        return [str(self.path.resolve()), found.st_size, found.st_mtime_ns]

    def parts(self, skip: int) -> Iterator[Given]:
        """The documents after the first ones, some at a time."""
        if self._array is not None:
            for start in range(skip, len(self._array), PART):
                yield self._given_latents(np.array(self._array[start : start + PART]))
            return
        waiting: list[tuple[int, str]] = []
        for place, numbered in enumerate(self._lines()):
            if place < skip:
                continue
            waiting.append(numbered)
            if len(waiting) == PART:
                yield self._given_lines(waiting)
                waiting = []
        if waiting:
            yield self._given_lines(waiting)

    def _lines(self) -> Iterator[tuple[int, str]]:
        """Lines that are not empty, with their numbers from 1."""
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise UserError(
                        f"--in {self.path}: line {number} is no UTF-8; save the file in that encoding"
                    ) from error
                if text:
                    yield number, text

    def _given_latents(self, array: np.ndarray) -> Given:
        try:
            latents = check_latents(self.model, array)
        except UserError as error:
            raise UserError(f"--in {self.path}: {error}") from error
        return Given(None, None, latents, make_ids([row.tobytes() for row in latents]))

    def _given_lines(self, lines: list[tuple[int, str]]) -> Given:
        if self.path.suffix == ".txt":
            return given_texts(self.model, [line for _, line in lines], f"--in {self.path}")
        records = [self._record(number, line) for number, line in lines]
        kinds = [{"text", "latent", "infill"} & record.keys() for record in records]
        for (number, _), kind in zip(lines, kinds, strict=True):
            if not kind or kind != kinds[0]:
                told = ", ".join(sorted(kinds[0])) or "one of text, latent, infill"
                raise UserError(
                    f"--in {self.path}: line {number} does not hold {told}, and nothing else of these"
                )
        return self._given_records(lines, records, kinds[0])

    def _given_records(
        self, lines: list[tuple[int, str]], records: list[dict[str, Any]], kind: set[str]
    ) -> Given:
        for name in kind - {"latent"}:
            for (number, _), record in zip(lines, records, strict=True):
                if not isinstance(record[name], str):
                    raise UserError(f"--in {self.path}: line {number}: {name} is no text")
        latents = self._latents(lines, records) if "latent" in kind else None
        where = f"--in {self.path}"
        if "text" in kind:
            found = given_texts(self.model, [record["text"] for record in records], where)
            given = found if latents is None else found.with_latents(latents)
        elif latents is not None:
            given = Given(None, None, latents, make_ids([row.tobytes() for row in latents]))
        else:
            given = None
        if "infill" in kind:
            return given_infill(self.model, [record["infill"] for record in records], given)
        assert given is not None
        return given

    def _record(self, number: int, line: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise UserError(f"--in {self.path}: line {number} is no JSON object")
        return record

    def _latents(self, lines: list[tuple[int, str]], records: list[dict[str, Any]]) -> np.ndarray:
        shape = (self.model.denoiser.shape.num_slots, self.model.denoiser.shape.num_channels)
        found = np.empty((len(records), *shape), np.float32)
        for row, (number, _), record in zip(found, lines, records, strict=True):
            try:
                row[:] = np.asarray(record["latent"], np.float32).reshape(shape)
            except (ValueError, TypeError) as error:
                raise UserError(
                    f"--in {self.path}: line {number}: latent is no list of {shape[0]} x {shape[1]} numbers"
                ) from error
            if not np.isfinite(row).all():
                raise UserError(f"--in {self.path}: line {number}: latent holds NaN or infinity")
        return found


class LineFile:
    """A file of records that gets its name when it is whole; what the same command left unfinished is gone on with."""

    def __init__(self, path: Path, asked: list[Any]) -> None:
        digest = hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
        self.path = path
        self.part = path.with_name(f".{path.name}.{digest[:12]}.part")
        self._fd = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.num_lines, self._size = self._whole_lines()
        os.ftruncate(self._fd, self._size)

    def _whole_lines(self) -> tuple[int, int]:
        count = size = 0
        with open(self.part, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    count, size = count + 1, size + len(line)
        return count, size

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append whole lines: all of them, or none if something comes between."""
        content = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
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
        """Make the lines durable and give the file its name."""
        os.fsync(self._fd)
        self.close()
        os.replace(self.part, self.path)
        durable.flush_folder(self.path.parent)

    def close(self) -> None:
        """Leave the lines for the next time."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if not self._size and self.part.exists():
                self.part.unlink()
