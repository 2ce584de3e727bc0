"""The short way through a sentence-transformers model: texts are tokenized all at once, by all cores, into flat arrays.

`SentenceTransformer.encode` tokenizes batch by batch in Python, and a GPU waits meanwhile. Models may treat texts in
ways of their own, so this way is taken only where it gives the same latents for some texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer

_PROBE = ["A first sentence, of some length.", "Two", "the THIRD: über-long 123 words; " * 40]
_TOLERANCE = 1e-3
"""Of a latent's norm; what batches of other sizes may change in half precision."""


@dataclass(frozen=True)
class TokenTable:
    """Tokens of many texts, one after the other."""

    ids: np.ndarray
    type_ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def padded(self, values: np.ndarray, rows: np.ndarray, fill: int) -> np.ndarray:
        """(n, longest) of these texts, filled up on the right."""
        lengths = self.lengths[rows]
        found = np.full((len(rows), max(1, int(lengths.max()))), fill, np.int64)
        place = np.arange(found.shape[1]) < lengths[:, None]
        found[place] = values[
            np.repeat(self.starts[rows] - np.concatenate([[0], lengths.cumsum()[:-1]]), lengths)
            + np.arange(lengths.sum())
        ]
        return found


class Direct:
    """Tokenizer and network of a model, without what lies between them."""

    def __init__(self, model: SentenceTransformer, tokenizer: Tokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.names = tuple(model.tokenizer.model_input_names)
        self.pad = model.tokenizer.pad_token_id

    def tokenize(self, texts: list[str]) -> TokenTable:
        """All texts, each cut to what the model takes."""
        found = self.tokenizer.encode_batch_fast(texts)
        lengths = np.array([len(one) for one in found], np.int64)
        ids, types = (
            np.fromiter(
                chain.from_iterable(getattr(one, name) for one in found), np.int64, int(lengths.sum())
            )
            for name in ("ids", "type_ids")
        )
        return TokenTable(ids, types, np.concatenate([[0], lengths.cumsum()[:-1]]), lengths)

    def embed(self, table: TokenTable, rows: np.ndarray) -> np.ndarray:
        """Latents (n, C) of these texts, float32."""
        import torch

        places = np.arange(max(1, int(table.lengths[rows].max()))) < table.lengths[rows, None]
        known = {
            "input_ids": lambda: table.padded(table.ids, rows, self.pad),
            "token_type_ids": lambda: table.padded(table.type_ids, rows, 0),
            "attention_mask": lambda: places.astype(np.int64),
        }
        inputs = {
            name: torch.from_numpy(known[name]()).to(self.model.device, non_blocking=True)
            for name in self.names
        }
        with torch.inference_mode():
            found: np.ndarray = self.model(inputs)["sentence_embedding"].float().cpu().numpy()
        return found


def direct_way(model: SentenceTransformer, prompt: str) -> Direct | None:
    """The short way, if it leads to the same latents; else None."""
    try:
        direct = _build(model)
        if direct is None:
            return None
        texts = [prompt + text for text in _PROBE]
        ours = direct.embed(direct.tokenize(texts), np.arange(len(texts)))
        theirs = model.encode(_PROBE, prompt=prompt or None, show_progress_bar=False, convert_to_numpy=True)
    except Exception:  # a model of another kind may fail anywhere; its own way remains
        return None
    if ours.shape != theirs.shape:
        return None
    near = np.linalg.norm(ours - theirs, axis=1) <= _TOLERANCE * np.linalg.norm(theirs, axis=1)
    return direct if near.all() else None


def _build(model: SentenceTransformer) -> Direct | None:
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    names = {"input_ids", "token_type_ids", "attention_mask"}
    if backend is None or model.tokenizer.pad_token_id is None or model.tokenizer.padding_side != "right":
        return None
    if not {"input_ids", "attention_mask"} <= set(model.tokenizer.model_input_names) <= names:
        return None
    from tokenizers import Tokenizer

    plain = Tokenizer.from_str(backend.to_str())
    plain.no_padding()
    plain.no_truncation()
    if model.max_seq_length is not None:
        plain.enable_truncation(model.max_seq_length)
    return Direct(model, plain)
