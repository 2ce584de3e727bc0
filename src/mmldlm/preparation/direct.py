"""The direct way through a sentence-transformers model: texts are tokenized all at once, on all cores, as flat arrays.

`SentenceTransformer.encode` tokenizes batch by batch in Python, and a GPU waits meanwhile. Models may treat texts in
ways of their own, so the direct way is used only where it gives the same latents for some texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from mmldlm.data.shard import ranges

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

_PROBE = ["A first sentence, of some length.", "Two", "the THIRD: über-long 123 words; " * 40]
_TOLERANCE = 1e-3
"""Of a latent's norm; what batches of other sizes may change in half precision."""


@dataclass(frozen=True)
class TokenTable:
    """Tokens of many texts as the network gets them, one after the other."""

    ids: np.ndarray
    type_ids: np.ndarray
    lengths: np.ndarray
    full_lengths: np.ndarray
    """Before they were cut to what the model takes."""

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each text begins."""
        return self.lengths.cumsum() - self.lengths

    def padded(self, rows: np.ndarray, pad: int) -> dict[str, np.ndarray]:
        """The network's inputs (n, longest) for these texts, filled up on the right."""
        lengths = self.lengths[rows]
        places = np.arange(max(1, int(lengths.max()))) < lengths[:, None]
        positions = ranges(self.starts[rows], lengths)
        inputs = {"attention_mask": places.astype(np.int64)}
        for name, values, fill in (("input_ids", self.ids, pad), ("token_type_ids", self.type_ids, 0)):
            inputs[name] = np.full(places.shape, fill, np.int64)
            inputs[name][places] = values[positions]
        return inputs


@dataclass(frozen=True)
class Frame:
    """The special tokens that a model puts before and after a text."""

    before: np.ndarray
    after: np.ndarray
    max_tokens: int | None

    @property
    def num_tokens(self) -> int:
        return len(self.before) + len(self.after)

    def around(self, token_lists: Sequence[np.ndarray]) -> TokenTable:
        """The table of texts whose plain tokens are known already."""
        plain = np.fromiter(map(len, token_lists), np.int64, len(token_lists))
        kept = plain if self.max_tokens is None else np.minimum(plain, self.max_tokens - self.num_tokens)
        lengths = kept + self.num_tokens
        starts = lengths.cumsum() - lengths
        ids = np.empty(int(lengths.sum()), np.int64)
        for place, token in enumerate(self.before):
            ids[starts + place] = token
        for place, token in enumerate(self.after):
            ids[starts + len(self.before) + kept + place] = token
        flat = np.concatenate(token_lists)
        ids[ranges(starts + len(self.before), kept)] = flat[ranges(plain.cumsum() - plain, kept)]
        return TokenTable(ids, np.zeros_like(ids), lengths, plain + self.num_tokens)


class Direct:
    """Tokenizer and network of a model, without what lies between them."""

    def __init__(self, model: SentenceTransformer, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.names = tuple(model.tokenizer.model_input_names)
        self.pad = model.tokenizer.pad_token_id
        self.max_tokens = model.max_seq_length
        self._cutting = plain_copy(tokenizer)
        if self.max_tokens is not None:
            self._cutting.enable_truncation(self.max_tokens)
        self.frame = _find_frame(self)

    def tokenize(self, texts: list[str]) -> TokenTable:
        """All texts, each cut to what the model takes."""
        encodings = self.tokenizer.encode_batch_fast(texts)
        full_lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        if self.max_tokens is not None:
            for row in np.flatnonzero(full_lengths > self.max_tokens):
                encodings[row] = self._cutting.encode(texts[row])
        lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
        ids, types = (
            np.fromiter(
                chain.from_iterable(getattr(one, name) for one in encodings), np.int64, int(lengths.sum())
            )
            for name in ("ids", "type_ids")
        )
        return TokenTable(ids, types, lengths, full_lengths)

    def embed(self, table: TokenTable, rows: np.ndarray) -> torch.Tensor:
        """Latents (n, C) of these texts, float32, on the model's device, which may still be computing them."""
        import torch

        padded = table.padded(rows, self.pad)
        inputs = {name: self._sent(torch.from_numpy(padded[name])) for name in self.names}
        with torch.inference_mode():
            latents: torch.Tensor = self.model(inputs)["sentence_embedding"].float()
        return latents

    def _sent(self, values: torch.Tensor) -> torch.Tensor:
        """To the device; from pinned memory, so that the host need not wait for the work before it."""
        if self.model.device.type == "cuda":
            values = values.pin_memory()
        return values.to(self.model.device, non_blocking=True)


def direct_way(model: SentenceTransformer, prompt: str) -> Direct | None:
    """The direct way, if it gives the same latents; else None."""
    try:
        direct = _build(model)
        if direct is None:
            return None
        texts = [prompt + text for text in _PROBE]
        ours = direct.embed(direct.tokenize(texts), np.arange(len(texts))).cpu().numpy()
        theirs = model.encode(_PROBE, prompt=prompt or None, show_progress_bar=False, convert_to_numpy=True)
    except Exception:  # a model of another kind may fail anywhere; its own `encode` remains
        return None
    if ours.shape != theirs.shape:
        return None
    near = np.linalg.norm(ours - theirs, axis=1) <= _TOLERANCE * np.linalg.norm(theirs, axis=1)
    return direct if near.all() else None


def _build(model: SentenceTransformer) -> Direct | None:
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    names = {"input_ids", "token_type_ids", "attention_mask"}
    if backend is None or model.tokenizer.pad_token_id is None:
        return None
    if (model.tokenizer.padding_side, model.tokenizer.truncation_side) != ("right", "right"):
        return None
    if not {"input_ids", "attention_mask"} <= set(model.tokenizer.model_input_names) <= names:
        return None
    return Direct(model, plain_copy(backend))


def plain_copy(backend: Tokenizer) -> Tokenizer:
    """The same tokenizer, but it neither fills up nor cuts."""
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(backend.to_str())
    plain.no_padding()
    plain.no_truncation()
    return plain


def _find_frame(direct: Direct) -> Frame | None:
    """What the model puts around a text; None if it does more than that to its tokens."""
    plain = [
        np.array(one.ids, np.int64)
        for one in direct.tokenizer.encode_batch_fast(_PROBE, add_special_tokens=False)
    ]
    whole = np.array(direct.tokenizer.encode(_PROBE[0]).ids, np.int64)
    added = len(whole) - len(plain[0])
    if added < 0 or (direct.max_tokens is not None and direct.max_tokens <= added):
        return None
    expected = direct.tokenize(_PROBE)
    for num_before in range(added + 1):
        frame = Frame(whole[:num_before], whole[num_before + len(plain[0]) :], direct.max_tokens)
        table = frame.around(plain)
        if all(
            np.array_equal(getattr(table, name), getattr(expected, name))
            for name in ("ids", "type_ids", "lengths", "full_lengths")
        ):
            return frame
    return None
