"""What a user gives to a sampler: texts, texts with blanks, a file of latents, or pairs of a store.

Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from mmldlm import randomness
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.sampling.blanks import parse_blanks
from mmldlm.sampling.checks import check_latents


@dataclass(frozen=True)
class Given:
    """Some documents, as far as they are known. Ids come from the content, so that order does not matter."""

    texts: list[str] | None
    tokens: list[np.ndarray] | None
    latents: np.ndarray | None
    """(n, S, C) raw, as the encoder makes them."""
    ids: np.ndarray
    """(n,) uint64"""
    blanks: list[np.ndarray] | None = None
    """Token ids of texts with blanks, which are to be filled in."""
    asked: list[str] | None = None
    """The texts with blanks as they were written."""

    @property
    def lengths(self) -> np.ndarray | None:
        """(n,) tokens of each text, where there are texts."""
        return None if self.tokens is None else np.array([len(tokens) for tokens in self.tokens])

    def with_latents(self, latents: np.ndarray) -> Given:
        """The same documents with raw latents."""
        return replace(self, latents=latents)


def given_texts(model: LoadedModel, texts: list[str], where: str = "--text") -> Given:
    """Texts from the command line or a file; `where` is what a message calls it."""
    tokenizer = require_tokenizer(model, where)
    tokens = [np.array(ids, dtype=np.int64) for ids in tokenizer.encode_batch(texts)]
    for text, ids in zip(texts, tokens, strict=True):
        if not len(ids):
            raise UserError(f"{where} {text!r}: is empty, it holds no token")
    return Given(texts, tokens, None, make_ids([text.encode() for text in texts]))


def given_infill(model: LoadedModel, asked: list[str], condition: Given | None) -> Given:
    """Texts with blanks, alone or each with its condition; one of either goes with all of the other."""
    tokenizer = require_tokenizer(model, "--infill")
    if (
        condition is not None
        and 1 not in (len(asked), len(condition.ids))
        and len(asked) != len(condition.ids)
    ):
        raise UserError(
            f"--infill: {len(asked)} texts with blanks and {len(condition.ids)} latents; "
            "give as many of both, or one of either"
        )
    num = max(len(asked), 0 if condition is None else len(condition.ids))
    asked = asked * num if len(asked) == 1 else asked
    blanks = [parse_blanks(tokenizer, text, model.corruption.text.mask_id) for text in asked]
    ids = make_ids([text.encode() for text in asked])
    if condition is None:
        return Given(None, None, None, ids, blanks, asked)
    rows = np.zeros(num, np.int64) if len(condition.ids) == 1 else np.arange(num)
    texts, tokens, latents = condition.texts, condition.tokens, condition.latents
    return Given(
        None if texts is None else [texts[row] for row in rows],
        None if tokens is None else [tokens[row] for row in rows],
        None if latents is None else latents[rows],
        randomness.make_key(ids, condition.ids[rows]),
        blanks,
        asked,
    )


def given_latents(model: LoadedModel, path: Path, where: str = "--latents") -> Given:
    """Raw latents from a .npy file: (n, S, C), or (n, C) where the model has one slot."""
    try:
        latents = check_latents(model, load_latents(model, path, where))
    except UserError as error:
        told = str(error)
        raise UserError(told if told.startswith(where) else f"{where} {path}: {told}") from error
    return Given(None, None, latents, make_ids([row.tobytes() for row in latents]))


def load_latents(model: LoadedModel, path: Path, where: str, *, mapped: bool = False) -> np.ndarray:
    """The array of a .npy file, with a slot axis where the model has one slot; left on the disk if mapped."""
    try:
        array = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"{where} {path}: there is no such file") from error
    except OSError as error:
        raise UserError(f"{where} {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"{where} {path}: cannot be read as an array; save it with numpy.save") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"{where} {path}: holds several arrays; save one with numpy.save")
    if array.ndim == 0 or len(array) == 0:
        raise UserError(f"{where} {path}: holds no latent; give an array of shape (n, slots, channels)")
    if array.ndim == 2 and model.denoiser.shape.num_slots == 1:
        return array[:, None, :]
    return array


def between(first: np.ndarray, second: np.ndarray, num_points: int) -> np.ndarray:
    """(num_points, S, C) raw latents from one (S, C) to the other, both included, on the arc between their directions.

    The length goes evenly from the one to the other. Opposite directions have no arc of their own: then it is a line.
    """
    share = np.linspace(0.0, 1.0, num_points)[:, None]
    a, b = first.reshape(-1).astype(np.float64), second.reshape(-1).astype(np.float64)
    size_a, size_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    angle = np.arccos(np.clip(a @ b / max(size_a * size_b, 1e-30), -1.0, 1.0))
    if np.sin(angle) < 1e-6:
        points = (1 - share) * a + share * b
    else:
        arc = (np.sin((1 - share) * angle) * a / size_a + np.sin(share * angle) * b / size_b) / np.sin(angle)
        points = arc * ((1 - share) * size_a + share * size_b)
    return points.reshape(num_points, *first.shape).astype(np.float32)


def given_split(model: LoadedModel, store: PairStore, split_name: str, count: int) -> Given:
    """The first pairs of a split of a store that suits the model."""
    split = store.split(split_name)
    if not len(split):
        raise UserError(
            f"--from-split {split_name}: this split of {store.path} holds no pair; choose another one"
        )
    indices = np.arange(min(count, len(split)))
    documents = split.read(indices)
    tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    texts = split.read_texts(indices)
    from_tokens = texts_of(model, tokens)
    shown = [stored or decoded for stored, decoded in zip(texts, from_tokens, strict=True)]
    return Given(shown, tokens, documents.latents, documents.ids.astype(np.uint64))


def open_store(model: LoadedModel, named: Path | None) -> PairStore:
    """The pair store that is named, or else that of the run, if it was made as the model's data was."""
    opened = PairStore.open_of_run(model.config.data.store, named)
    if opened.fingerprint != model.fingerprint:
        raise UserError(
            f"--data {opened.path}: was made with another tokenizer or encoder than the model's data "
            f"({opened.fingerprint[:12]} instead of {model.fingerprint[:12]}); use a store made as the run's was"
        )
    return opened


def require_tokenizer(model: LoadedModel, where: str) -> Tokenizer:
    """The tokenizer that came with the model, or an error about what needs it."""
    tokenizer = model_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"{where}: this model carries no tokenizer; use --latents or --from-split")
    return tokenizer


def model_tokenizer(model: LoadedModel) -> Tokenizer | None:
    """The tokenizer that came with the model."""
    return None if model.tokenizer_path is None else _tokenizer(str(model.tokenizer_path))


@lru_cache(maxsize=1)
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.load(path)


def texts_of(model: LoadedModel, tokens: list[np.ndarray]) -> list[str]:
    """Texts of token ids; the ids themselves, where the model carries no tokenizer."""
    tokenizer = model_tokenizer(model)
    if tokenizer is None:
        return [" ".join(str(token) for token in text) for text in tokens]
    return tokenizer.decode_batch([text.tolist() for text in tokens])


def make_ids(contents: list[bytes]) -> np.ndarray:
    """(n,) uint64 ids that follow from the content."""
    digests = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
