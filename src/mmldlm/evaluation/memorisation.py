"""Is a generated text found word for word in the training data?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mmldlm.data.store import Split

_DOCUMENTS_AT_ONCE = 4096
_END = np.array([2**32 - 1], dtype="<u4").tobytes()


def find_verbatim(
    texts: Sequence[np.ndarray], split: Split, progress: Callable[[int, int], None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) whether each text (token ids) is a whole document of the split, and whether it stands inside one."""
    needles = [text.astype("<u4").tobytes() for text in texts]
    whole, inside = np.zeros(len(texts), dtype=bool), np.zeros(len(texts), dtype=bool)
    for start in range(0, len(split), _DOCUMENTS_AT_ONCE):
        stop = min(start + _DOCUMENTS_AT_ONCE, len(split))
        documents = split.read(np.arange(start, stop))
        pieces = np.split(documents.tokens.astype("<u4"), np.cumsum(documents.lengths)[:-1])
        hay = _END + _END.join(piece.tobytes() for piece in pieces) + _END
        for idx, needle in enumerate(needles):
            whole[idx] |= _holds(hay, _END + needle + _END)
            inside[idx] |= whole[idx] or _holds(hay, needle)
        if progress is not None:
            progress(stop, len(split))
    return whole, inside


def _holds(hay: bytes, needle: bytes) -> bool:
    """Whether the numbers of the needle stand in the hay; a match across the bytes of two numbers is none."""
    place = hay.find(needle)
    while place % 4 and place >= 0:
        place = hay.find(needle, place + 1)
    return place >= 0
