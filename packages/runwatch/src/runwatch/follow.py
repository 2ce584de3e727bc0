"""Lines of a file that is being written: not there yet, cut off, replaced, half a line at its end.

The file is only ever opened for reading, a piece at a time, so memory stays bounded and the run is never disturbed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

CHUNK = 2**20
LONGEST_LINE = 2**20


class Lines(list[str]):
    """Lines, and the bytes of the file that they are, if those are plain and none was left out."""

    content: memoryview | None = None


class FileFollower:
    """Reads what is new in a file each time it is asked."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        self.restarts = 0
        """How often the file was cut off or replaced; readers then forget what they knew."""
        self.changed_at: float | None = None
        """When the file was last written to."""
        self._fd = -1
        self._identity: tuple[int, int] | None = None
        self._rest = b""
        self._skipping = False
        self._seen = b""
        """The last that was read; it is still there unless the file was cut."""

    def lines(self) -> Iterator[str]:
        """New whole lines; a carriage return ends one too, as progress bars do."""
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[Lines]:
        """The same lines, as many at a time as one piece of the file holds."""
        for chunk in self._chunks():
            if b"\n" in chunk or b"\r" in chunk:
                yield self._lines(chunk)
            else:
                self._rest += chunk
            if len(self._rest) > LONGEST_LINE:
                self._rest, self._skipping = b"", True

    def _lines(self, chunk: bytes) -> Lines:
        """The lines that end in a piece of the file."""
        data = (self._rest + chunk).replace(b"\r", b"\n")
        end = data.rfind(b"\n")
        self._rest, whole = data[end + 1 :], memoryview(data)[:end]
        text = str(whole, "utf-8", "replace")
        split = text.split("\n")
        lines = Lines([line for line in split[self._skipping :] if 0 < len(line) < LONGEST_LINE])
        if len(lines) == len(split) and text.isascii():
            lines.content = whole
        self._skipping = False
        return lines

    def last_words(self) -> str:
        """A last line without its end, for a file that nobody writes to any more."""
        rest, self._rest = self._rest, b""
        return rest.decode("utf-8", "replace") if not self._skipping else ""

    def _chunks(self) -> Iterator[bytes]:
        if self._replaced():
            yield from self._read()  # what the old file still had
            yield b"\n"
            self.close()
            self._start_over()
        if self._open():
            if self._was_cut():
                self._start_over()
            yield from self._read()

    def _start_over(self) -> None:
        self.position, self._rest, self._skipping, self._seen = 0, b"", False, b""
        self.restarts += 1

    def _was_cut(self) -> bool:
        """Whether the file is shorter than it was, or was in between: then it holds something else where we stopped."""
        try:
            return os.pread(self._fd, len(self._seen), self.position - len(self._seen)) != self._seen
        except OSError:
            return False

    def _replaced(self) -> bool:
        """Whether another file has this name now (rotation, or a log that was cut in one stroke)."""
        if self._fd < 0:
            return False
        try:
            status = os.stat(self.path)
        except OSError:
            return False  # away for the moment: go on with the one we hold
        return (status.st_dev, status.st_ino) != self._identity

    def _open(self) -> bool:
        if self._fd >= 0:
            return True
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return False
        status = os.fstat(self._fd)
        self._identity = (status.st_dev, status.st_ino)
        return True

    def _read(self) -> Iterator[bytes]:
        while True:
            try:
                chunk = os.pread(self._fd, CHUNK, self.position)
            except OSError:
                return
            if not chunk:
                self.changed_at = os.fstat(self._fd).st_mtime
                return
            self.position += len(chunk)
            self._seen = (self._seen + chunk[-64:])[-64:]
            yield chunk

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
