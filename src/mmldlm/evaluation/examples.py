"""Decoded texts beside the true ones, with what differs."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

from mmldlm.evaluation.inversion import Decoded, Truth

NUM_EXAMPLES = 12


def collect_examples(
    truth: Truth, given: Sequence[Decoded], modelled: Sequence[Decoded]
) -> list[dict[str, Any]]:
    """The first documents, not the best: decoded in fewest and most steps, and with the model's length."""
    chosen = {_name(decoded, "given"): decoded for decoded in (given[0], given[-1])}
    chosen |= {_name(decoded, "modelled"): decoded for decoded in modelled[-1:]}
    return [
        {
            "true": _text(truth.texts, truth.tokens, idx),
            "decoded": {name: _one(decoded, idx) for name, decoded in chosen.items()},
        }
        for idx in range(min(NUM_EXAMPLES, len(truth.tokens)))
    ]


def _name(decoded: Decoded, length: str) -> str:
    count = decoded.num_sampling_steps
    return f"{count} {'step' if count == 1 else 'steps'}, length {length}"


def _one(decoded: Decoded, idx: int) -> dict[str, Any]:
    return {
        "text": _text(decoded.texts, decoded.tokens, idx),
        "token_accuracy": float(decoded.accuracy[idx]),
        "reencoded_cosine": None if decoded.cosine is None else float(decoded.cosine[idx]),
    }


def _text(texts: list[str] | None, tokens: Sequence[Any], idx: int) -> str:
    return texts[idx] if texts is not None else " ".join(str(int(token)) for token in tokens[idx])


def mark_differences(true: str, found: str) -> list[tuple[str, bool]]:
    """The found text in pieces, each with whether it stands in the true text in that order; by words."""
    words = found.split()
    matcher = SequenceMatcher(
        None, [w.lower() for w in true.split()], [w.lower() for w in words], autojunk=False
    )
    pieces: list[tuple[str, bool]] = []
    for kind, _, _, start, stop in matcher.get_opcodes():
        if start < stop:
            pieces.append((" ".join(words[start:stop]), kind == "equal"))
    return pieces
