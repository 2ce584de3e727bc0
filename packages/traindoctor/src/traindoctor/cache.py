"""Results of files that have not changed, kept in the user's cache folder and never inside a checked project.

They are pickles, which a stranger's repository must not be able to provide. Anything that may change a result is part
of the key: the version and the code of the rules, Python, the chosen rules, the path, the size and time of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from traindoctor import __version__
from traindoctor.discovery import Found
from traindoctor.examination import FileResult

_RECENT_SECONDS = 2.0
"""A file written less than this before it was read may change again within the resolution of its time stamp."""


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/traindoctor`, or `~/.cache/traindoctor`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "traindoctor"


@lru_cache(maxsize=1)
def _code_digest() -> str:
    """One name for the code that makes the results."""
    found = hashlib.blake2b(f"{__version__} {sys.version}".encode(), digest_size=16)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


class Cache:
    """The results of one root; a cache that cannot be read or written counts as empty."""

    def __init__(self, folder: Path, root: Path) -> None:
        name = hashlib.blake2b(str(root.resolve()).encode(), digest_size=12).hexdigest()
        self._file = folder / f"{name}.pickle"
        self._changed = False
        self._entries: dict[tuple[str, str, str], tuple[tuple[int, int], FileResult]] = {}
        with contextlib.suppress(Exception):
            stamp, entries = pickle.loads(self._file.read_bytes())
            if stamp == _code_digest():
                self._entries = entries
        self._used: set[Any] = set()

    def get(self, found: Found, codes: frozenset[str], place: str) -> FileResult | None:
        """The result of a file that has not changed since."""
        key = self._key(found, codes, place)
        stamp, result = self._entries.get(key, (None, None))
        if result is None or stamp != _stamp(found.absolute):
            return None
        self._used.add(key)
        return result

    def put(self, found: Found, codes: frozenset[str], place: str, result: FileResult) -> None:
        """Remember the result of a file."""
        stamp = _stamp(found.absolute)
        if stamp is not None:
            key = self._key(found, codes, place)
            self._entries[key] = (stamp, result)
            self._used.add(key)
            self._changed = True

    def save(self) -> None:
        """Write the results that were used, in one step; files that are gone are forgotten."""
        if not self._changed:
            return
        kept = {key: self._entries[key] for key in self._used}
        with contextlib.suppress(OSError, pickle.PicklingError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as handle:
                handle.write(pickle.dumps((_code_digest(), kept), protocol=5))
            os.replace(handle.name, self._file)

    @staticmethod
    def _key(found: Found, codes: frozenset[str], place: str) -> tuple[str, str, str]:
        chosen = hashlib.blake2b(" ".join(sorted(codes)).encode(), digest_size=8).hexdigest()
        return found.relative, place, chosen


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    if time.time() - status.st_mtime < _RECENT_SECONDS:
        return None
    return status.st_mtime_ns, status.st_size
