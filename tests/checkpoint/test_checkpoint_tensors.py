"""Tensors come back bit by bit from a file that any safetensors reader can open."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmldlm import durable
from mmldlm.checkpoint.files import DTYPES, plan, read_tensors, stream
from mmldlm.checkpoint.save import HostCopy


def write(
    path: Path, tensors: dict[str, torch.Tensor], notes: dict[str, str] | None = None
) -> durable.Written:
    return durable.write_file(path, stream(plan(tensors), notes or {}))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def awkward_tensors() -> dict[str, torch.Tensor]:
    """All types with random bits (so NaN with payload too), no dimension, nothing inside, holes in memory."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(0, 256, (96,), dtype=torch.uint8, generator=generator)
    tensors = {f"{dtype}": bits.clone().view(dtype) for dtype in DTYPES if dtype != torch.bool}
    grid = torch.randn(6, 8, generator=generator)
    return tensors | {
        "bool": bits > 128,
        "scalar": torch.tensor(3.25, dtype=torch.bfloat16),
        "count": torch.tensor(2**62 + 1),
        "empty": torch.empty(0, 4),
        "transposed": grid.T,
        "strided": grid[::2, 1::3],
        "expanded": torch.tensor([1.5]).expand(5),
        "ünïcode name": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def test_every_type_and_shape_comes_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    write(tmp_path / "x.safetensors", tensors, {"note": "hello"})
    found, notes = read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    assert notes == {"note": "hello"}


def test_the_official_reader_agrees(tmp_path: Path) -> None:
    tensors = awkward_tensors()
    write(tmp_path / "x.safetensors", tensors)
    found = load_file(tmp_path / "x.safetensors")
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    written = write(tmp_path / "x.safetensors", {"embed": weight, "head": weight, "row": weight[3]})
    found, _ = read_tensors(tmp_path / "x.safetensors")
    assert written.size < 1.2 * weight.nbytes
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert torch.equal(found["embed"], weight)
    assert torch.equal(found["row"], weight[3])


def test_the_checksum_taken_while_writing_is_that_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "CHUNK", 100)
    path = tmp_path / "x.safetensors"
    written = write(path, {"a": torch.randn(1000)})
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert written == durable.read_digest(path)
    assert written.size == path.stat().st_size


def test_host_copy_equals_the_tensors_over_slab_borders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmldlm.checkpoint.save.SLAB", 4096)
    tensors = awkward_tensors() | {"large": torch.randn(5000)}
    memory = HostCopy()
    for round_idx in range(3):
        images = memory.take({"a": tensors, "b": {"x": torch.arange(7)}})
        memory.finish()
        for image in images:
            durable.write_file(tmp_path / f"{image.group}{round_idx}", image.chunks())
        found, _ = read_tensors(tmp_path / f"a{round_idx}")
        assert all(same_bits(found[name], tensors[name]) for name in tensors)
        assert torch.equal(read_tensors(tmp_path / f"b{round_idx}")[0]["x"], torch.arange(7))
    assert memory.nbytes < sum(t.nbytes for t in tensors.values()) + 2 * 4096


def test_every_tensor_is_aligned_to_its_type_and_a_group_may_be_empty(tmp_path: Path) -> None:
    layout = plan(awkward_tensors())
    assert all(layout.offsets[name] % tensor.element_size() == 0 for name, tensor in layout.stored.items())
    assert (len(layout.header({"a": "bcd"})) - 8) % 8 == 0
    write(tmp_path / "x.safetensors", {})
    assert read_tensors(tmp_path / "x.safetensors") == ({}, {})


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(TypeError, match="tensor waves"):
        plan({"waves": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(TypeError, match="tensor thin"):
        plan({"thin": torch.eye(3).to_sparse()})


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\xff" * 64, (2**40).to_bytes(8, "little") + b"{}"])
def test_rubbish_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError):
        read_tensors(tmp_path / "x")
