"""A safetensors file planned before it is written: header, order of the bytes, tensors that share memory.

Bytes are then streamed to the disk and hashed on the way, without a second copy in memory. Any safetensors
reader can open the result. A tensor under two names (tied weights) is stored once; the header's `aliases`
names the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
SUFFIX = ".safetensors"


@dataclass
class Layout:
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


def plan(tensors: Mapping[str, torch.Tensor]) -> Layout:
    """Order the tensors so that each is aligned to its own type: wide types first, then by name."""
    layout, first = Layout(), dict[tuple, str]()
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


def stream(layout: Layout, metadata: Mapping[str, str]) -> Iterable[bytes | memoryview]:
    """The whole file, from tensors that stay as they are while it is written."""
    yield layout.header(metadata)
    for tensor in layout.stored.values():
        if tensor.numel():
            yield as_bytes(tensor).cpu().numpy().data


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file; ValueError when it is not one."""
    try:
        with safe_open(path, framework="pt") as file:
            notes = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        aliases = json.loads(notes.pop("aliases", "{}"))
        return tensors | {name: tensors[owner] for name, owner in aliases.items()}, notes
    except (SafetensorError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a readable safetensors file: {error}") from error
