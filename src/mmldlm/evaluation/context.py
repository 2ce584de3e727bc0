"""What the parts of an evaluation share: the model, the chosen documents, the outside tools, notes and quantities.

Which documents are chosen is a function of the seed and the split, not of the model. Shapes: n documents, K draws per
document, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import EvaluationConfig
from mmldlm.corruption.times import sees_latents
from mmldlm.data.store import Documents, PairStore, Split
from mmldlm.data.tokenizer import quiet_hub
from mmldlm.errors import UserError, first_line
from mmldlm.evaluation.results import HELD_OUT, DocumentSet
from mmldlm.layout import packed_layout
from mmldlm.sampling.decode import Progress as SamplingProgress
from mmldlm.sampling.decode import encode_tokens
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import document_keys
from mmldlm.statistics import Estimate, Quantity
from mmldlm.types import PackedBatch

DecodeText = Callable[[Sequence[Any]], list[str]]
EncodeText = Callable[[list[str]], np.ndarray]
Tokenize = Callable[[Sequence[str]], list[list[int]]]
Progress = Callable[[str, int, int], None]
"""Called with the name of a part, how much of it is done, and how much there is."""

# First word after the seed in every key of the evaluation, so that no two of its parts share numbers.
CHOICE, STRANGERS, BOUND, DECODE = 101, 102, 104, 105
ENCODE, LATENT_BOUND, GENERATE, SPLITS = 106, 107, 108, 110
_REFERENCE_BATCH = 16


@dataclass(frozen=True)
class Selection:
    """The chosen documents of a split, in random order, so that the first few are a fair sample too."""

    split: Split
    positions: np.ndarray
    """(n,) where they are in the split."""
    documents: Documents
    num_too_long: int
    """Documents of the split with more tokens than the model was trained for; none of them is chosen."""

    @cached_property
    def texts(self) -> list[str | None]:
        """(n,) the texts as they were before the tokenizer; None where the store holds none."""
        return self.split.read_texts(self.positions)


def select_documents(model: LoadedModel, store: PairStore, split: str, count: int, seed: int) -> Selection:
    """`count` documents of a split (0: all) that the model can take."""
    require_same_fingerprint(model, store)
    held_out = store.split(split)
    fitting = np.flatnonzero(held_out.lengths <= model.denoiser.shape.max_length)
    num_too_long = len(held_out) - len(fitting)
    if len(fitting) < 2:
        longest = f"more than {model.denoiser.shape.max_length} tokens, the longest text of its training"
        too_long = f" ({num_too_long} have {longest})" if num_too_long else ""
        remedy = "prepare shorter or more texts" if num_too_long else "prepare more text"
        raise UserError(
            f"{store.path}: split {split!r} has {len(fitting)} documents that this model can take{too_long}; an "
            f"evaluation needs at least 2; {remedy}, or choose another split"
        )
    positions = fitting[choose(max(count, 2) if count else 0, len(fitting), seed)]
    return Selection(held_out, positions, held_out.read(positions), num_too_long)


def require_same_fingerprint(model: LoadedModel, store: PairStore) -> None:
    """Reject a store whose tokenizer, encoder or shape is not that of the model."""
    if model.fingerprint != store.fingerprint:
        raise UserError(
            f"{store.path}: this pair store has the fingerprint {store.fingerprint[:12]}, but the model was trained on "
            f"{model.fingerprint[:12]} (another tokenizer or encoder); use the store it was trained on, or one "
            "prepared in the same way"
        )


def choose(count: int, size: int, seed: int) -> np.ndarray:
    """`count` different positions of `size`, in random order; 0 means all."""
    count = min(count, size) or size
    return randomness.permute(np.arange(count), size, randomness.make_key(seed, CHOICE))


def strangers(count: int, seed: int) -> np.ndarray:
    """For each document another one: (count,) a permutation without a fixed point, from 2 documents on.

    The documents are put on a circle in random order, and each one gets its neighbour.
    """
    assert count >= 2, "one document has no stranger"
    circle = randomness.permute(np.arange(count), count, randomness.make_key(seed, STRANGERS))
    partner = np.empty(count, dtype=np.int64)
    partner[circle] = np.roll(circle, -1)
    return partner


@dataclass(frozen=True)
class Pairs:
    """Some documents, true or generated."""

    tokens: list[np.ndarray]
    latents: np.ndarray
    """(n, S, C) raw, as an encoder makes them."""
    texts: list[str] | None
    """The tokens as text, so that true and decoded texts went through the tokenizer; None without one."""
    ids: np.ndarray

    @classmethod
    def of(cls, documents: Documents, decode_text: DecodeText | None) -> Pairs:
        """The documents of a store."""
        tokens = documents.split_tokens()
        return cls(tokens, documents.latents, decode_text(tokens) if decode_text else None, documents.ids)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(tokens) for tokens in self.tokens])


class Draws:
    """K noisy draws of each of n documents, cut into packs; a subclass says which time each draw has."""

    def __init__(
        self, tokens: list[np.ndarray], lengths: np.ndarray, latents: np.ndarray, keys: np.ndarray
    ) -> None:
        """tokens and lengths of the n documents, latents (n, S, C) normalised, keys (n, K)."""
        self.tokens, self.lengths, self.latents = tokens, lengths, latents
        self.owner = np.repeat(np.arange(len(lengths)), keys.shape[1])
        self.keys = keys.reshape(-1)

    def packs(self, batch_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
        """Draws of each pack, with how many are done after it."""
        yield from pack_rows(self.lengths[self.owner], batch_tokens)

    def batch(self, rows: np.ndarray) -> PackedBatch:
        """The documents of these draws, clean."""
        owner = self.owner[rows]
        return PackedBatch(
            tokens=torch.from_numpy(np.concatenate([self.tokens[document] for document in owner])),
            latents=torch.from_numpy(self.latents[owner]),
            layout=packed_layout(self.lengths[owner], self.latents.shape[1]),
            positions=owner,
            keys=self.keys[rows],
        )


def pack_rows(lengths: np.ndarray, batch_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Cut consecutive documents into packs of at most `batch_tokens` tokens (at least one document each)."""
    start, ends = 0, np.cumsum(lengths)
    while start < len(lengths):
        used = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, used + batch_tokens, side="right")), start + 1)
        yield stop, np.arange(start, stop)
        start = stop


@dataclass
class Context:
    """One evaluation under way."""

    model: LoadedModel
    config: EvaluationConfig
    selection: Selection
    seed: int
    progress: Progress
    decode_text: DecodeText | None
    """Token ids to text; None without a tokenizer."""
    encode: EncodeText | None
    """The encoder that made the latents; None where it is not used."""
    notes: list[str] = field(default_factory=list)
    ids: dict[str, list[int]] = field(default_factory=dict)
    """Documents of each set."""
    quantities: dict[str, dict[str, Quantity]] = field(default_factory=dict)
    """Quantities of each set by name."""

    def __post_init__(self) -> None:
        self.active = self.model.trained
        self.decodes = self.active.text and sees_latents(self.model.config.corruption)
        self.can_encode = self.encode is not None and self.decode_text is not None
        self.ids[HELD_OUT] = self.selection.documents.ids.tolist()

    def record(self, name: str, quantity: Quantity, about: str = HELD_OUT) -> Estimate:
        """Keep a quantity for comparisons and return its estimate.

        It is about the first documents of its set, as many as it has values.
        """
        self.quantities.setdefault(about, {})[name] = quantity
        return quantity.estimate(self.seed)

    def documents(self) -> dict[str, DocumentSet]:
        """Values of single documents, for comparisons."""
        return {
            about: DocumentSet(self.ids[about], quantities) for about, quantities in self.quantities.items()
        }

    def own_latents(
        self, tokens: list[np.ndarray], ids: np.ndarray, progress: SamplingProgress | None = None
    ) -> np.ndarray:
        """Raw latents (n, S, C) that the model itself makes of texts."""
        keys = document_keys(int(randomness.make_key(self.seed, ENCODE) >> np.uint64(2)), ids)
        options = SamplingOptions.from_config(
            self.model.config.sampling, batch_tokens=self.config.batch_tokens
        )
        latents = encode_tokens(self.model, tokens, options, keys=keys, progress=progress)
        return self.model.normalizer.denormalize(latents)

    def watch(self, part: str) -> SamplingProgress:
        """The progress of one part."""
        return lambda done, total: self.progress(part, done, total)


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
        for start in range(0, len(rows), _REFERENCE_BATCH):
            chosen = order[start : start + _REFERENCE_BATCH]
            nats[chosen] = self._score([rows[idx] for idx in chosen])
        counts = np.array([max(len(row) - 1, 0) for row in rows])
        return TextCosts(nats, counts, cut)

    def _score(self, rows: list[list[int]]) -> np.ndarray:
        if max(len(row) for row in rows) < 2:
            return np.zeros(len(rows))
        tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(self.device)
        real = pad_sequence([torch.ones(len(row)).long() for row in rows], batch_first=True).to(self.device)
        logits = self.model(input_ids=tokens, attention_mask=real).logits[:, :-1].float()
        costs = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * real[:, 1:]
        return costs.double().sum(1).cpu().numpy()
