"""The files of a checkpoint folder: tensors, the manifest that lists them, and how the folder gets its name.

    checkpoints/
      step_00001000/    model.safetensors, ema.safetensors, optimizer.safetensors, ..., meta.json, manifest.json
      latest            -> step_00001000

A folder is staged, flushed and renamed into place when it is whole, and loses its name before it is deleted
(`durable`). One process at a time writes into a folder of checkpoints (the lock of the run sees to that); any number
may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mmldlm import durable
from mmldlm.errors import UserError
from mmldlm.json_lines import from_plain
from mmldlm.types import Piece
from mmldlm.untrusted import misfit

MANIFEST = "manifest.json"
FORMAT = 1
CHECKPOINT = "checkpoint"
LATEST = "latest"
_MOST_BYTES = 64 * 2**20
_STEP = re.compile(r"step_\d+")
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
SUFFIX = ".safetensors"
PIECES = "pieces"
"""Note of a file that holds rows of tensors: name -> the first row and the shape of the whole."""


logger = logging.getLogger(__name__)


class DamagedError(UserError):
    """A published folder is not what its manifest says; `file` and `reason` say where."""

    def __init__(self, file: Path, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason


@dataclass(frozen=True)
class Entry:
    """One file, by its path below the folder. Files of a group are read as one: a rank may write its own."""

    name: str
    group: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What was published, and as which in turn."""

    kind: str
    step: int
    sequence: int
    """Counts publications; after a rollback a smaller step can be the newer one."""
    files: list[Entry]
    format: int = FORMAT


def entry(name: str, group: str, written: durable.Written) -> Entry:
    return Entry(name, group, written.size, written.sha256)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    durable.write_file(folder / MANIFEST, [_serialize(asdict(manifest))])


def _serialize(body: dict[str, Any]) -> bytes:
    text = json.dumps(body, indent=1)
    check = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": check}, indent=1).encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder, or DamagedError."""
    path = folder / MANIFEST
    try:
        with open(path, "rb") as file:
            content = file.read(_MOST_BYTES)
        body = json.loads(content)["manifest"]
    except FileNotFoundError:
        raise DamagedError(path, "is missing") from None
    except OSError as error:
        raise DamagedError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        raise DamagedError(path, "is torn or damaged") from None
    return _parse(path, content, body)


def _parse(path: Path, content: bytes, body: Any) -> Manifest:
    if isinstance(body, dict) and isinstance(body.get("format"), int) and body["format"] > FORMAT:
        raise DamagedError(
            path, f"has format {body['format']}, this version reads up to {FORMAT}; update mmldlm"
        )
    try:
        is_own = _serialize(body) == content
    except (TypeError, ValueError, RecursionError):
        is_own = False
    if not is_own:
        raise DamagedError(path, "differs from its own checksum")
    if misfit(Manifest, body, "manifest"):
        raise DamagedError(path, "is not a manifest")
    manifest: Manifest = from_plain(Manifest, body)
    if any(Path(file.name).is_absolute() or ".." in Path(file.name).parts for file in manifest.files):
        raise DamagedError(path, "is not a manifest")
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """A quick look: every file is there and as long as it should be."""
    for file in manifest.files:
        path = folder / file.name
        try:
            size = path.stat().st_size
        except OSError:
            raise DamagedError(path, "is missing") from None
        if size != file.size:
            raise DamagedError(path, f"has {size} bytes, the manifest says {file.size}")


def check_file(folder: Path, file: Entry) -> Path:
    """Read the whole file and compare it with its checksum; the path when it is good."""
    path = folder / file.name
    try:
        digest = durable.read_digest(path)
    except OSError as error:
        raise DamagedError(path, f"cannot be read: {error.strerror}") from error
    if digest.sha256 != file.sha256:
        raise DamagedError(path, "differs from its checksum in the manifest")
    return path


@dataclass
class FileLayout:
    """Where each tensor lies in the data part of the file, in writing order."""

    stored: dict[str, torch.Tensor] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    size: int = 0

    def header(self, metadata: Mapping[str, str]) -> bytes:
        """Length, then JSON, padded so that the data part is aligned to 8 bytes."""
        notes = dict(metadata) | ({"aliases": json.dumps(self.aliases)} if self.aliases else {})
        entries: dict[str, object] = {"__metadata__": notes} if notes else {}
        entries |= {name: self._entry(name) for name in self.stored}
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _entry(self, name: str) -> dict[str, object]:
        tensor, start = self.stored[name], self.offsets[name]
        span = [start, start + tensor.nbytes]
        return {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}


def plan(tensors: Mapping[str, torch.Tensor]) -> FileLayout:
    """Order the tensors so that each is aligned to its own type: wide types first, then by name."""
    layout, first = FileLayout(), dict[tuple, str]()
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        _check(name, tensor)
        owner = first.setdefault(_identity(tensor), name) if tensor.numel() else name
        if owner != name:
            layout.aliases[name] = owner
            continue
        layout.stored[name], layout.offsets[name] = tensor, layout.size
        layout.size += tensor.nbytes
    return layout


def _check(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise TypeError(f"tensor {name} ({tensor.dtype}, {tensor.layout}, {tensor.device}) cannot be saved")
    if name == "__metadata__":
        raise TypeError("a tensor cannot be called __metadata__ in a safetensors file")


def _identity(tensor: torch.Tensor) -> tuple:
    memory = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*memory, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_neg())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The values as a flat uint8 tensor on the same device; a copy only if the memory is not contiguous."""
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def stream(layout: FileLayout, metadata: Mapping[str, str]) -> Iterable[bytes | memoryview]:
    """The whole file, from tensors that stay as they are while it is written."""
    yield layout.header(metadata)
    for tensor in layout.stored.values():
        if tensor.numel():
            yield as_bytes(tensor).cpu().numpy().data


@contextlib.contextmanager
def _opened(*paths: Path) -> Iterator[list[Any]]:
    """Safetensors files; ValueError when one is none."""
    try:
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
    except (SafetensorError, AttributeError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"not a readable safetensors file: {str(error)[:300]}") from error


def read_notes(path: Path) -> dict[str, str]:
    """Metadata of a safetensors file, without its tensors; ValueError when it is not one."""
    with _opened(path) as (file,):
        return dict(file.metadata() or {})


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; ValueError when it is not one."""
    with _opened(path) as (file,):
        notes = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        aliases = json.loads(notes.pop("aliases", "{}"))
        return tensors | {name: tensors[owner] for name, owner in aliases.items()}, notes


def piece_of(name: str, pieces: Mapping[str, Piece]) -> Piece | None:
    """The rows that a rank holds of a parameter, or of what an optimizer keeps for it (`exp_avg.<parameter>`)."""
    return pieces.get(name) or pieces.get(name.partition(".")[2])


def read_rows(paths: Sequence[Path], held: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    """Tensors of the files of a group, each of which may hold rows of them; of those that are `held`, only these rows.

    ValueError when a file is not readable, or the files do not hold all rows.
    """
    sources: dict[str, list[tuple[Any, Piece]]] = {}
    with _opened(*paths) as files:
        for file in files:
            for name, piece in _pieces(file).items():
                sources.setdefault(name, []).append((file, piece))
        return {name: _assemble(name, parts, held) for name, parts in sources.items()}


def _pieces(file: Any) -> dict[str, Piece]:
    """What a file holds of each tensor; aliases are not resolved, none of them is divided."""
    noted = json.loads((file.metadata() or {}).get(PIECES, "{}"))
    pieces = {}
    for name in file.keys():  # noqa: SIM118 (not a mapping)
        shape = file.get_slice(name).get_shape()
        start, *whole = noted.get(name, [0, *shape])
        if whole[1:] != shape[1:] or len(whole) != len(shape):
            raise ValueError(f"{name}: rows of shape {shape} do not belong to a tensor of shape {whole}")
        pieces[name] = Piece(start, shape[0] if shape else 1, tuple(whole))
    return pieces


def _assemble(name: str, parts: list[tuple[Any, Piece]], held: Mapping[str, Piece]) -> torch.Tensor:
    parts = sorted(parts, key=lambda part: part[1].start)
    shape, end = parts[0][1].shape, 0
    for _, piece in parts:
        if piece.start != end or piece.shape != shape:
            raise ValueError(f"{name}: rows from {end} on are missing")
        end += piece.rows
    if not shape:
        return parts[0][0].get_tensor(name)  # type: ignore[no-any-return]
    if end != shape[0]:
        raise ValueError(f"{name}: rows from {end} to {shape[0]} are missing")
    wanted = piece_of(name, held)
    if wanted is None or wanted.shape != shape:
        wanted = Piece(0, shape[0], shape)
    first, last = wanted.start, wanted.start + wanted.rows
    rows = []
    for file, piece in parts:
        start, stop = max(first, piece.start), min(last, piece.start + piece.rows)
        if start < stop:
            rows.append(file.get_slice(name)[start - piece.start : stop - piece.start])
    if not rows:
        return parts[0][0].get_slice(name)[:1][:0]  # type: ignore[no-any-return]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def stage(folder: Path, step: int) -> Path:
    """A fresh folder to write a checkpoint into."""
    staging = durable.volatile(folder, "staging", step_name(step))
    staging.mkdir(parents=True)
    return staging


def publish(folder: Path, staging: Path, step: int, files: Iterable[Entry]) -> Path:
    """Make a staged checkpoint the newest one. Its files are on the disk already; returns its final path."""
    write_manifest(staging, Manifest(CHECKPOINT, step, _next_sequence(folder), list(files)))
    durable.flush_folder(staging)
    final = folder / step_name(step)
    durable.swap_in(staging, final)
    point_latest(folder, final.name)
    return final


def point_latest(folder: Path, name: str) -> None:
    """Move `latest` in one stroke: a relative link, or a line of text where links are impossible.

    It is for people, resuming does without it, so trouble here is only a warning.
    """
    try:
        try:
            with durable.staged_file(folder / LATEST) as staged:
                os.symlink(name, staged)
        except (OSError, NotImplementedError):
            durable.replace_file(folder / LATEST, f"{name}\n".encode())
    except OSError as error:
        logger.warning("%s could not be moved to %s: %s", folder / LATEST, name, error)


def read_latest(folder: Path) -> Path | None:
    """The checkpoint that `latest` names, if it exists. For people; resuming looks at the manifests."""
    pointer = folder / LATEST
    try:
        name = os.readlink(pointer) if pointer.is_symlink() else pointer.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return folder / name if _STEP.fullmatch(name) and (folder / name).is_dir() else None


def candidates(folder: Path) -> list[Path]:
    """Folders that should hold a checkpoint: the published ones and those that were put aside."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        return [folder / name for name in names if _STEP.fullmatch(durable.final_name(name))]
    return []


def _whole(path: Path) -> Manifest | None:
    """The manifest, where it and the sizes of the files are right; checksums are compared when a file is read."""
    with contextlib.suppress(DamagedError):
        manifest = read_manifest(path)
        check_sizes(path, manifest)
        return manifest
    return None


def published(folder: Path) -> list[Path]:
    """Checkpoints that look whole, oldest first."""
    whole = {path: manifest for path in candidates(folder) if (manifest := _whole(path)) is not None}
    return sorted(whole, key=lambda path: (whole[path].sequence, whole[path].step, path))


def _next_sequence(folder: Path) -> int:
    newest = 0
    for path in candidates(folder):
        with contextlib.suppress(DamagedError):
            newest = max(newest, read_manifest(path).sequence)
    return newest + 1


Spared = Callable[[Sequence[Path]], Collection[Path]]
"""Of the checkpoints of a folder, oldest first, those that must stay."""


def retire(folder: Path, keep: int, spared: Spared | None = None) -> None:
    """Delete all but the newest `keep` checkpoints and those that are spared; call it when the newest is durable.

    Damaged ones neither count nor go: the user may want to see what can be saved from them.
    """
    try:
        whole = published(folder)
        stay = spared(whole) if spared is not None else ()
        outdated = [path for path in whole[: -max(keep, 1)] if path not in stay]
    except OSError as error:
        logger.warning("%s: old checkpoints stay for now: %s", folder, error)
        return
    for path in outdated:
        durable.discard(path)


def dispensable(folder: Path, spared: Spared | None = None) -> list[Path]:
    """Whole checkpoints that are neither the newest nor spared, oldest first: what a full disk can do without."""
    whole = published(folder)
    stay = spared(whole) if spared is not None else ()
    return [path for path in whole[:-1] if path not in stay]


def clean(folder: Path) -> None:
    """Put a folder of checkpoints in order after a crash, at the start of the process that holds the lock."""
    durable.clean_leftovers(folder, lambda path: _whole(path) is not None)
    newest = published(folder)[-1:]
    if newest and read_latest(folder) != newest[0]:
        point_latest(folder, newest[0].name)
