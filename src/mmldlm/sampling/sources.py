"""What a user gives to a sampler: texts, a file of latents, or pairs of a store.

Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
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

    @property
    def lengths(self) -> np.ndarray | None:
        """(n,) tokens of each text, where there are texts."""
        return None if self.tokens is None else np.array([len(tokens) for tokens in self.tokens])


def given_texts(model: LoadedModel, texts: list[str]) -> Given:
    """Texts from the command line."""
    tokenizer = model_tokenizer(model)
    if tokenizer is None:
        raise UserError("--text: this model carries no tokenizer; use --latents or --from-split")
    tokens = [np.array(ids, dtype=np.int64) for ids in tokenizer.encode_batch(texts)]
    for text, ids in zip(texts, tokens, strict=True):
        if not len(ids):
            raise UserError(f"--text {text!r}: is empty, it holds no token")
    return Given(texts, tokens, None, _ids([text.encode() for text in texts]))


def given_latents(model: LoadedModel, path: Path) -> Given:
    """Raw latents from a .npy file: (n, S, C), or (n, C) where the model has one slot."""
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError as error:
        raise UserError(f"--latents {path}: there is no such file") from error
    except OSError as error:
        raise UserError(f"--latents {path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, EOFError) as error:
        raise UserError(f"--latents {path}: cannot be read as an array; save it with numpy.save") from error
    if not isinstance(array, np.ndarray):
        raise UserError(f"--latents {path}: holds several arrays; save one with numpy.save")
    if array.ndim == 0 or len(array) == 0:
        raise UserError(f"--latents {path}: holds no latent; give an array of shape (n, slots, channels)")
    if array.ndim == 2 and model.denoiser.shape.num_slots == 1:
        array = array[:, None, :]
    try:
        latents = check_latents(model, array)
    except UserError as error:
        raise UserError(f"--latents {path}: {error}") from error
    return Given(None, None, latents, _ids([row.tobytes() for row in latents]))


def given_split(model: LoadedModel, store: Path, split_name: str, count: int) -> Given:
    """The first pairs of a split of the store that the model was trained on."""
    opened = PairStore.open(store)
    if opened.fingerprint != model.fingerprint:
        raise UserError(
            f"--data {store}: was made with another tokenizer or encoder than the model's data "
            f"({opened.fingerprint[:12]} instead of {model.fingerprint[:12]}); use a store made as the run's was"
        )
    split = opened.split(split_name)
    if not len(split):
        raise UserError(f"--from-split {split_name}: this split of {store} holds no pair; choose another one")
    indices = np.arange(min(count, len(split)))
    documents = split.read(indices)
    tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    texts = split.read_texts(indices)
    from_tokens = texts_of(model, tokens)
    shown = [stored or decoded for stored, decoded in zip(texts, from_tokens, strict=True)]
    return Given(shown, tokens, documents.latents, documents.ids.astype(np.uint64))


def model_tokenizer(model: LoadedModel) -> Tokenizer | None:
    """The tokenizer that came with the model."""
    return None if model.tokenizer_path is None else Tokenizer.load(model.tokenizer_path)


def texts_of(model: LoadedModel, tokens: list[np.ndarray]) -> list[str]:
    """Texts of token ids; the ids themselves, where the model carries no tokenizer."""
    tokenizer = model_tokenizer(model)
    if tokenizer is None:
        return [" ".join(str(token) for token in text) for text in tokens]
    return tokenizer.decode_batch([text.tolist() for text in tokens])


def _ids(contents: list[bytes]) -> np.ndarray:
    digests = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)
