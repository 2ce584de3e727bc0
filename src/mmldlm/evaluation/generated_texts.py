"""Measures of sets of documents: variety of texts, distances of latents and lengths, copies of the training data.

Shapes: n and m documents, d dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mmldlm.data.store import Split
from mmldlm.data.tokenizer import first_line, quiet_hub
from mmldlm.errors import UserError
from mmldlm.statistics import Estimate, jackknife_estimate

MOST_SELF_BLEU = 200
"""Texts that self-BLEU compares with each other; its cost grows with their square."""
_BATCH = 16
_DOCUMENTS_AT_ONCE = 4096
_END = np.array([2**32 - 1], dtype="<u4").tobytes()


def ngrams(tokens: Sequence[int] | np.ndarray, order: int) -> list[tuple[int, ...]]:
    """All sequences of `order` tokens."""
    row = [int(token) for token in tokens]
    return list(zip(*(row[start:] for start in range(order)), strict=False))


def distinct(texts: Sequence[np.ndarray], order: int) -> Estimate:
    """Different n-grams over all n-grams of all texts together.

    Its interval is by jackknife: in a bootstrap sample texts occur twice, which alone would make it smaller.
    """
    counts = [Counter(ngrams(text, order)) for text in texts]
    whole: Counter[tuple[int, ...]] = Counter()
    owners: Counter[tuple[int, ...]] = Counter()
    for count in counts:
        whole.update(count)
        owners.update(count.keys())
    totals = np.array([count.total() for count in counts], dtype=np.float64)
    # what leaves with a text are the n-grams that no other text has
    alone = np.array([sum(owners[gram] == 1 for gram in count) for count in counts], dtype=np.float64)
    if totals.sum() == 0:
        return jackknife_estimate(float("nan"), np.empty(0))
    rest = totals.sum() - totals
    left_out = (len(whole) - alone)[rest > 0] / rest[rest > 0]
    share = jackknife_estimate(float(len(whole) / totals.sum()), left_out)
    return replace(share, low=max(share.low, 0.0), high=min(share.high, 1.0))  # nan stays nan


def repeats(texts: Sequence[np.ndarray], order: int) -> tuple[np.ndarray, np.ndarray]:
    """(n,) n-grams that occurred in the same text before, and (n,) all n-grams of the text."""
    grams = [ngrams(text, order) for text in texts]
    totals = np.array([len(one) for one in grams], dtype=np.float64)
    return totals - np.array([len(set(one)) for one in grams]), totals


def self_bleu(texts: Sequence[str]) -> np.ndarray:
    """(n,) BLEU of each text against all others as references; 100: it is made of pieces of them."""
    from sacrebleu.metrics.bleu import BLEU

    bleu, chosen = BLEU(effective_order=True), list(texts[:MOST_SELF_BLEU])
    return np.array(
        [bleu.sentence_score(text, chosen[:idx] + chosen[idx + 1 :]).score for idx, text in enumerate(chosen)]
    )


def frechet_distance(left: np.ndarray, right: np.ndarray) -> float:
    """|mean - mean|^2 + tr(A + B - 2 (AB)^(1/2)) of the covariances A, B of (n, d) and (m, d).

    With A = aa' and B = bb', the trace of the root of AB is the sum of the singular values of a'b; so nothing is
    squared, and few documents cost little in many dimensions.
    """
    first, second = _root(left), _root(right)
    shared = np.linalg.svd(first.T @ second, compute_uv=False).sum()
    apart = ((left.mean(0, dtype=np.float64) - right.mean(0, dtype=np.float64)) ** 2).sum()
    return float(apart + (first**2).sum() + (second**2).sum() - 2.0 * shared)


def _root(values: np.ndarray) -> np.ndarray:
    """(d, min(n, d)) a factor of the covariance."""
    centred = (values - values.mean(0, dtype=np.float64)).T / np.sqrt(len(values) - 1)
    if centred.shape[1] <= centred.shape[0]:
        return centred
    triangle: np.ndarray = np.linalg.qr(centred.T)[1]
    return triangle.T


def main_directions(values: np.ndarray, count: int) -> np.ndarray:
    """(d, count) the directions in which (n, d) varies most; all, where there are no more."""
    _, _, axes = np.linalg.svd(values - values.mean(0, dtype=np.float64), full_matrices=False)
    return axes[:count].T


def find_verbatim(
    texts: Sequence[np.ndarray], split: Split, progress: Callable[[int, int], None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(n,) whether each text (token ids) is a whole document of the split, and whether it is part of one."""
    needles = [text.astype("<u4").tobytes() for text in texts]
    whole, inside = np.zeros(len(texts), dtype=bool), np.zeros(len(texts), dtype=bool)
    for start in range(0, len(split), _DOCUMENTS_AT_ONCE):
        stop = min(start + _DOCUMENTS_AT_ONCE, len(split))
        documents = split.read(np.arange(start, stop))
        pieces = np.split(documents.tokens.astype("<u4"), np.cumsum(documents.lengths)[:-1])
        hay = _END + _END.join(piece.tobytes() for piece in pieces) + _END
        for idx, needle in enumerate(needles):
            whole[idx] |= _contains(hay, _END + needle + _END)
            inside[idx] |= whole[idx] or _contains(hay, needle)
        if progress is not None:
            progress(stop, len(split))
    return whole, inside


def _contains(hay: bytes, needle: bytes) -> bool:
    """Whether the tokens of the needle are in the hay; a match across the bytes of two tokens does not count."""
    place = hay.find(needle)
    while place % 4 and place >= 0:
        place = hay.find(needle, place + 1)
    return place >= 0


@dataclass(frozen=True)
class TextCosts:
    """What some texts cost."""

    nats: np.ndarray
    """(n,)"""
    num_tokens: np.ndarray
    """(n,) tokens of the reference model that were scored."""
    num_cut: int
    """Texts longer than the model can read; the rest of them is left out."""


@dataclass(frozen=True)
class ReferenceLM:
    """A causal language model of others with its tokenizer, by folder or name on the Hugging Face Hub.

    Local files are preferred, and no code that comes with a model is ever run.
    """

    name: str
    model: Any
    tokenizer: Any
    device: torch.device

    @classmethod
    def load(cls, name: str, device: torch.device) -> ReferenceLM:
        """From a folder, the cache of the Hub, or the Hub itself."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        quiet_hub()
        failure: Exception | None = None
        for local in (True, False):
            options = {"local_files_only": local, "trust_remote_code": False}
            try:
                tokenizer = AutoTokenizer.from_pretrained(name, **options)
                model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
            except Exception as error:  # network, Hub, parsing: every library under it has its own
                failure = error
                continue
            return cls(name, model.to(device).eval().requires_grad_(False), tokenizer, device)
        assert failure is not None
        raise UserError(
            f"reference_lm={name}: no causal language model can be loaded from there ({first_line(failure)}); "
            "name a folder written by save_pretrained, or a name on the Hugging Face Hub"
        ) from failure

    @property
    def start(self) -> int | None:
        """The token before the first one, which lets that one be scored too; None where the model has none."""
        tokens = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        return next((token for token in tokens if token is not None), None)

    @property
    def longest(self) -> int:
        """Tokens that the model can read at once."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1024)

    @torch.inference_mode()
    def score(self, texts: list[str]) -> TextCosts:
        """Nats of every token given those before it, in batches padded on the right."""
        head = [] if self.start is None else [self.start]
        rows = [head + self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        cut = sum(len(row) > self.longest for row in rows)
        rows = [row[: self.longest] for row in rows]
        nats = np.zeros(len(rows))
        order = np.argsort([len(row) for row in rows], kind="stable")
        for start in range(0, len(rows), _BATCH):
            chosen = order[start : start + _BATCH]
            nats[chosen] = self._score([rows[idx] for idx in chosen])
        counts = np.array([max(len(row) - 1, 0) for row in rows])
        return TextCosts(nats, counts, cut)

    def _score(self, rows: list[list[int]]) -> np.ndarray:
        size = max(len(row) for row in rows)
        if size < 2:
            return np.zeros(len(rows))
        tokens = torch.zeros((len(rows), size), dtype=torch.int64)
        real = torch.zeros((len(rows), size), dtype=torch.int64)
        for idx, row in enumerate(rows):
            tokens[idx, : len(row)] = torch.tensor(row, dtype=torch.int64)
            real[idx, : len(row)] = 1
        tokens, real = tokens.to(self.device), real.to(self.device)
        logits = self.model(input_ids=tokens, attention_mask=real).logits[:, :-1].float()
        costs = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * real[:, 1:]
        return costs.double().sum(1).cpu().numpy()
