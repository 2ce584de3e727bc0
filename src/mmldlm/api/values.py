"""What goes into a `Model`, what comes out, and what turns texts, tokens and latents into each other.

Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmldlm.checkpoint.load import RUNS, LoadedModel, is_model
from mmldlm.data.tokenizer import Tokenizer, split_texts
from mmldlm.errors import TextError, UserError, first_line
from mmldlm.preparation.encoders import AnyEncoder, open_encoder
from mmldlm.reports import counted

logger = logging.getLogger(__name__)
Texts = str | Sequence[str]
Latents = np.ndarray | Tensor | Sequence[Any]
"""(n, S, C), or (n, C) for a model with one slot; in the encoder's own space."""
Lengths = int | Sequence[int] | np.ndarray
Ids = Sequence[int] | np.ndarray | Tensor
_BUILTIN = re.compile(r"builtin:([a-z0-9_]+)")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
EMPTY = "is empty; it holds no token"
HALF_CHARACTER = "holds half of a surrogate pair, which is no character; decode it again"
NO_BLANK = "holds no blank; write ____ for a token, ____{3} for three"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FEW_TEXTS = 64
"""For fewer, looking up new words in the table of words takes longer than it saves."""
FARTHEST = 1e6
"""Standard deviations of training that a latent may be away from the mean; the network overflows beyond."""
MOST_SHOWN, LONGEST_SHOWN = 5, 40
"""Unknown words that a warning shows, and characters of each."""
MOST_TOKENS = 10_000
"""Of one text or blank; more are a slip of the finger, and attention would fill the memory."""


@dataclass(frozen=True)
class Check:
    """How well a decoded text agrees with its latent, and what finding it cost."""

    cosine: float
    """Between the latent of the text, read back, and the one that was decoded."""
    first_cosine: float
    """That of the first candidate, before any round."""
    passes: int
    """Passes of the network for all candidates and rounds."""
    num_encoded: int
    """Texts that were turned back into latents."""
    num_accepted: int
    """Rounds that improved the text."""


class SampledText(str):
    """A text that a model sampled: a `str` that also knows its token ids and, after a self-check, how good it is."""

    tokens: np.ndarray
    check: Check | None

    def __new__(cls, text: str, tokens: np.ndarray, check: Check | None = None) -> SampledText:
        """The text, its token ids, and the result of the self-check where there was one."""
        sampled = super().__new__(cls, text)
        sampled.tokens, sampled.check = tokens, check
        return sampled


@dataclass(frozen=True)
class Pairs:
    """Texts and their latents."""

    texts: list[SampledText]
    latents: Any
    """(n, S, C) in the encoder's own space."""

    def __repr__(self) -> str:
        shown = ", ".join(repr(str(text)[:40]) for text in self.texts[:3])
        more = ", ..." if len(self.texts) > 3 else ""
        return f"Pairs({len(self.texts)}: [{shown}{more}], latents {tuple(self.latents.shape)})"


@dataclass(frozen=True)
class Neighbour:
    """A document near a latent."""

    index: int
    """Its place among those that were searched."""
    cosine: float
    text: str | None
    """None where only latents were searched, or the store keeps no texts."""


def latents_array(values: Latents, shape: tuple[int, int], name: str = "latents") -> np.ndarray:
    """float32 (n, S, C) on the host, or a `UserError` that names the argument."""
    array = _array(values, name)
    if array.dtype.kind not in "fiu" and array.size:
        remedy = "; model.encode(texts) makes latents of texts" if array.dtype.kind == "U" else ""
        raise UserError(f"{name}: values of type {array.dtype}; numbers are needed{remedy}")
    if array.ndim == 2 and shape[0] == 1:
        array = array[:, None, :]
    if array.size == 0 and len(array) == 0:
        return np.empty((0, *shape), np.float32)
    if array.ndim != 3 or array.shape[1:] != shape:
        flat = f" or (n, {shape[1]})" if shape[0] == 1 else ""
        is_one = array.shape == shape or (shape[0] == 1 and array.shape == shape[1:])
        remedy = f"this is one latent: pass [{name}]" if is_one else "use the encoder it was trained with"
        raise UserError(
            f"{name} of shape {np.shape(values)}: this model needs (n, {shape[0]}, {shape[1]}){flat}, which is "
            f"{shape[0]} {'slot' if shape[0] == 1 else 'slots'} of {shape[1]} channels; {remedy}"
        )
    with np.errstate(over="ignore"):  # numbers too large for float32 become infinite and are rejected as such
        array = np.ascontiguousarray(array, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(array).all(axis=(1, 2)))
    if len(bad):
        raise UserError(
            f"{name}: {len(bad)} of {len(array)} contain NaN or infinity, the first at index {bad[0]}"
        )
    return array


def _array(values: Any, name: str) -> np.ndarray:
    """An array, or a `UserError` that names the argument."""
    try:
        if isinstance(values, Tensor):
            values = values.detach().cpu()
            return (values.float() if values.is_floating_point() else values).numpy()  # numpy has no bfloat16
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise UserError(f"{name}: not an array of numbers ({error})") from error


def one_latent(value: Latents, shape: tuple[int, int], name: str) -> np.ndarray:
    """(1, S, C) from a single latent: (S, C), (1, S, C), or (C,) for a model with one slot."""
    if not isinstance(value, np.ndarray | Tensor):
        value = _array(value, name)
    if value.ndim == 1 or (value.ndim == 2 and tuple(value.shape) == shape):
        value = value[None]
    array = latents_array(value, shape, name)
    if len(array) != 1:
        raise UserError(f"{name}: {len(array)} latents; exactly one is needed")
    return array


def one_each(latents: Latents, texts: Sequence[str], shape: tuple[int, int]) -> np.ndarray:
    """(n, S, C), one latent per text."""
    array = latents_array(latents, shape)
    if len(array) != len(texts):
        raise UserError(f"latents: {len(array)} for {counted(len(texts), 'text')}; give one per text")
    return array


def like(array: np.ndarray, example: Any) -> Any:
    """The array as a tensor where the example is one, on its device."""
    return torch.from_numpy(array).to(example.device) if isinstance(example, Tensor) else array


def text_list(texts: Texts, name: str = "texts") -> list[str]:
    """The texts; a single one becomes a list of one."""
    if not isinstance(texts, Iterable):
        raise UserError(f"{name}={texts!r}: a str or a list of them is needed")
    if isinstance(texts, Mapping) or hasattr(texts, "columns"):  # whose names would be taken for texts
        raise UserError(f"{name}: is a {type(texts).__name__}; give the texts in it, such as {name}['text']")
    listed = [texts] if isinstance(texts, str) else list(texts)
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise TextError(name, index, f": is a {type(text).__name__}; a str is needed")
        if not text.strip():
            raise TextError(name, index, f": {EMPTY}")
        if not text.isascii() and _HALF_CHARACTER.search(text):
            raise TextError(name, index, f": {HALF_CHARACTER}")
    return listed


def lengths_array(lengths: Lengths | None, count: int) -> np.ndarray | None:
    """(n,) int64 from one number for all or one per document; None stays None."""
    if lengths is None:
        return None
    array = np.asarray(lengths.cpu()) if isinstance(lengths, Tensor) else _array(lengths, "lengths")
    if array.shape == (0,):
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or array.ndim > 1 or ((array < 1) | (array > MOST_TOKENS)).any():
        raise UserError(f"lengths={lengths!r}: whole numbers from 1 to {MOST_TOKENS} are needed")
    if array.ndim == 1 and len(array) != count:
        raise UserError(
            f"lengths: {counted(len(array), 'number')} for {counted(count, 'document')}; give one, or one per document"
        )
    return np.broadcast_to(array, (count,)).astype(np.int64)


def source_ids(ids: Any, count: int) -> np.ndarray:
    """(n,) numbers that make the randomness of each document its own."""
    array = np.asarray(ids.cpu()) if isinstance(ids, Tensor) else _array(ids, "ids")
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise UserError(
            f"ids: {array.dtype} of shape {array.shape}; {count} whole numbers are needed, one per document"
        )
    return array


def require_at_least(name: str, value: int, low: int) -> None:
    """Reject a count that is too small."""
    if not isinstance(value, int | np.integer) or value < low:
        raise UserError(f"{name}={value!r}: a whole number of at least {low} is needed")


def require_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Reject a word that is not among the allowed ones."""
    if value not in allowed:
        raise UserError(f"{name}={value!r}: allowed are {', '.join(allowed)}")


def local_folder(source: Any) -> Path:
    """The folder that a source names; one on the Hub is downloaded first.

    builtin:NAME is the model in the folder `export` of the installed package mmldlm_NAME.
    """
    if not isinstance(source, str | os.PathLike):
        raise UserError(f"source={source!r}: give a folder, a name on the Hugging Face Hub, or a run")
    if isinstance(source, str) and (builtin := _BUILTIN.fullmatch(source)):
        return _packaged(f"mmldlm_{builtin[1]}", source) / "export"
    path = Path(source).expanduser()
    if not isinstance(source, str) or not _HUB_NAME.fullmatch(source) or _is_local(path):
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source))
    except Exception as error:  # network, Hub, name: every library below has its own errors
        raise UserError(
            f"{source}: there is no such folder here, and the Hugging Face Hub does not provide it "
            f"({first_line(error)})"
        ) from error


def store_folder(store: Any, name: str) -> Path:
    """The folder of a pair store that an argument names."""
    if not isinstance(store, str | os.PathLike):
        raise UserError(
            f"{name}: is a {type(store).__name__}; give the folder of a pair store, or a PairStore (mmldlm.prepare "
            "makes one of texts)"
        )
    return Path(store)


def _packaged(package: str, name: str) -> Path:
    """The folder of an installed package that carries a model."""
    try:
        return Path(str(files(package)))
    except ModuleNotFoundError as error:
        raise UserError(
            f"{name}: no package {package} is installed; install it (builtin:wordnet is packages/mmldlm-wordnet of "
            "the repository), or train a model and load its run or export"
        ) from error


def _is_local(path: Path) -> bool:
    """Whether a name is taken as a folder here, or as a run below `saved`; also one that is misspelt beside others."""
    beside = path.parent if path.parent != Path() else RUNS
    return path.exists() or (RUNS / path).exists() or any(map(is_model, beside.glob("*")))


def is_texts(values: Any) -> bool:
    """Whether these are texts, not latents."""
    return isinstance(values, str) or (
        isinstance(values, Sequence) and bool(values) and all(isinstance(value, str) for value in values)
    )


def matched(texts: list[str], latents: np.ndarray) -> tuple[list[str], np.ndarray]:
    """As many texts as latents: one of either goes with all of the other."""
    if 1 not in (len(texts), len(latents)):
        raise UserError(
            f"latents: {len(latents)} for {counted(len(texts), 'text')} with blanks; give as many of both, or "
            "one of either"
        )
    num = len(texts) if len(latents) == 1 else len(latents)
    return texts * num if len(texts) == 1 else texts, np.repeat(
        latents, num if len(latents) == 1 else 1, axis=0
    )


def parse_blanks(tokenizer: Tokenizer, text: str, mask_id: int) -> np.ndarray:
    """Token ids of a text, with the mask's id in its blanks.

    A run of four or more underscores, or the tokenizer's own mask word such as [MASK], stands for one token; with a
    number in braces behind it, for so many. A space before a blank belongs to what is filled in, as tokenizers of the
    GPT kind see it.
    """
    tokens: list[int] = []
    end = 0
    for blank in _pattern(tokenizer).finditer(text):
        count = _blank_size(blank)
        if not 1 <= count <= MOST_TOKENS:
            raise UserError(f"{text!r}: a blank of {blank['count']} tokens; allowed are 1 to {MOST_TOKENS}")
        tokens += _ids(tokenizer, text[end : blank.start()].rstrip()) + [mask_id] * count
        end = blank.end()
    if end == 0:
        raise UserError(f"{text!r}: {NO_BLANK}")
    return np.array(tokens + _ids(tokenizer, text[end:]), dtype=np.int64)


def blank_tokens(tokenizer: Tokenizer, text: str) -> int:
    """Tokens in all blanks of a text together."""
    return sum(map(_blank_size, _pattern(tokenizer).finditer(text)))


def _blank_size(blank: re.Match[str]) -> int:
    return int((blank["count"] or "1")[:9])  # more digits than that are too many tokens, and slow to read


def without_blanks(tokenizer: Tokenizer, text: str) -> str:
    """The words around the blanks."""
    return _pattern(tokenizer).sub(" ", text)


def blank_marks(tokenizer: Tokenizer) -> str:
    """What stands for a blank, as a regular expression: underscores, or the tokenizer's own mask word."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    words = [re.escape(token.content) for token in added if token.special and "mask" in token.content.lower()]
    return "|".join(["_{4,}", *words])


def _pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
    return re.compile(rf"(?:{blank_marks(tokenizer)})(?:\{{(?P<count>\d+)\}})?")


def _ids(tokenizer: Tokenizer, piece: str) -> list[int]:
    return tokenizer.encode_batch([piece])[0] if piece.strip() else []


class Codec:
    """The tokenizer and the encoder of a model; both are loaded when they are first needed."""

    def __init__(self, loaded: LoadedModel, own_encoder: AnyEncoder | None = None) -> None:
        self.loaded, self.own_encoder, shape = loaded, own_encoder, loaded.denoiser.shape
        self.latent_shape, self.max_length = (shape.num_slots, shape.num_channels), shape.max_length

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that came with the model."""
        if self.loaded.tokenizer_path is None:
            raise UserError("this model has no tokenizer, so it takes no texts; pass latents")
        tokenizer, known = Tokenizer.load(self.loaded.tokenizer_path), self.loaded.denoiser.shape.vocab_size
        if tokenizer.vocab_size > known:
            raise UserError(
                f"{self.loaded.tokenizer_path}: has {tokenizer.vocab_size} tokens, and the model knows {known}; "
                "put back the tokenizer that came with the model"
            )
        return tokenizer

    @cached_property
    def encoder(self) -> Any:
        """The encoder that made the training latents, or an object with `encode` that was assigned."""
        return open_encoder(self.loaded.encoder, device=self.loaded.device.type, encoder=self.own_encoder)

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder is known; loading it may still fail."""
        return (
            self.loaded.encoder is not None or self.own_encoder is not None or "encoder" in vars(self)
        )  # `vars` holds a cached property once it was read or assigned

    def tokenize(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text."""
        tokens = [np.array(ids, dtype=np.int64) for ids in self._ids(texts)]
        for index, ids in enumerate(tokens):
            if not len(ids):
                raise TextError("texts", index, f"={texts[index]!r}: holds no token")
        self.note_unknown(texts, tokens)
        return self.note_long(tokens)

    def _ids(self, texts: list[str]) -> Sequence[Any]:
        if len(texts) < FEW_TEXTS:
            return self.tokenizer.encode_batch(texts)
        return split_texts(*self.tokenizer.encode_flat(texts))

    def note_unknown(self, texts: list[str], tokens: Sequence[Any] | None = None) -> None:
        """Warn of words that the tokenizer does not know: to the model they are all the same, and it writes none."""
        if self.loaded.tokenizer_path is None or (unknown := self.tokenizer.unknown_id) is None:
            return
        pairs = zip(texts, self._ids(texts) if tokens is None else tokens, strict=True)
        holding = [text for text, ids in pairs if unknown in ids]
        if not holding:
            return
        words = dict.fromkeys(chain.from_iterable(map(self.tokenizer.unknown_words, holding[:FEW_TEXTS])))
        shown = ", ".join(repr(word[:LONGEST_SHOWN]) for word in list(words)[:MOST_SHOWN])
        more = ", ..." if len(words) > MOST_SHOWN or len(holding) > FEW_TEXTS else ""
        logger.warning(
            f"words that the tokenizer of this model does not know: {shown}{more} (in {len(holding)} of "
            f"{counted(len(texts), 'text')}); the model sees the same unknown token for each and writes none of them"
        )

    def note_long(self, tokens: list[np.ndarray]) -> list[np.ndarray]:
        """The tokens; texts longer than any in training are accepted, with a warning."""
        num_long = sum(len(ids) > self.max_length for ids in tokens)
        if num_long:
            logger.warning(
                f"texts of more than {self.max_length} tokens, the most in training: {num_long} of {len(tokens)}; "
                "results are poorer for them"
            )
        return tokens

    def texts_of(self, tokens: list[np.ndarray]) -> list[str]:
        """Texts of token ids; the ids themselves as words, where the model has no tokenizer."""
        if self.loaded.tokenizer_path is None:
            return [" ".join(str(token) for token in ids) for ids in tokens]
        return self.tokenizer.decode_batch(tokens)

    def embed(self, texts: list[str]) -> np.ndarray:
        """(n, S, C) by the encoder."""
        latents = self.encoder.encode(texts) if texts else []
        return latents_array(latents, self.latent_shape, "output of the encoder")

    def embed_tokens(self, tokens: list[np.ndarray]) -> np.ndarray:
        """(n, S, C) of token ids by the encoder, which reads their texts."""
        return self.embed(self.texts_of(tokens))

    def latents_of(self, values: Texts | Latents, name: str) -> np.ndarray:
        """(n, S, C) of texts, by the encoder, or of latents."""
        if is_texts(values):
            return self.embed(text_list(values, name))  # type: ignore[arg-type]
        return latents_array(values, self.latent_shape, name)  # type: ignore[arg-type]

    def normalized(self, latents: np.ndarray, name: str = "latents") -> np.ndarray:
        """Latents (n, S, C) of the encoder as the network sees them; those of another size are rejected."""
        with np.errstate(over="ignore"):
            normalized = self.loaded.normalizer.normalize(latents)
            sizes = np.sqrt((normalized.astype(np.float64) ** 2).mean((1, 2)))
        far = np.flatnonzero(sizes > FARTHEST)
        if len(far):
            raise UserError(
                f"{name}: {len(far)} of {len(latents)} are {sizes[far[0]]:.0e} standard deviations away from the "
                f"latents of training, the first at index {far[0]}; pass latents of the size that the encoder makes"
            )
        return normalized

    def against(self, against: Texts | Latents | None, guidance: float, count: int) -> np.ndarray | None:
        """(n, S, C) normalised latents that guidance leads away from."""
        if against is None:
            return None
        if guidance == 1.0:
            raise UserError("against: has an effect only with a guidance other than 1, such as guidance=2")
        array = self.latents_of(against, "against")
        if len(array) not in (1, count):
            raise UserError(f"against: {len(array)} latents; 1 or {count} are needed")
        return np.broadcast_to(self.normalized(array, "against"), (count, *self.latent_shape))
