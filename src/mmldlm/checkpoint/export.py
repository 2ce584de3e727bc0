"""Weights for use: one folder that is enough to sample, on any machine, without the pair store.

    export/
      model.safetensors   the weights; settings, data description and versions are in its metadata
      config.json         the same description, for people
      tokenizer/          the tokenizer's own files
      manifest.json       sizes and checksums

Weights of 8 bit are stored as `NAME` (int8, -127 to 127) and `NAME.scale` (fp16, one per row of the matrix): NAME times
scale. Vectors and numbers keep their type: they are few, and their errors would not average out.

`model.safetensors` decides; a `config.json` that differs from it is rejected, because an edit there has no effect.

A run folder carries the same description from its first step (`data.json`, `tokenizer/`), so that its checkpoints can
be used without the pair store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from mmldlm import durable
from mmldlm.checkpoint.files import (
    MANIFEST,
    Entry,
    Manifest,
    check_file,
    entry,
    plan,
    read_manifest,
    read_notes,
    read_tensors,
    stream,
    write_manifest,
)
from mmldlm.config import Config, DataConfig, DistributedConfig, ModelConfig
from mmldlm.config.recipe import config_to_dict
from mmldlm.corruption.joint import Corruption
from mmldlm.data.format import too_large, unfit_normalizer
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.json_lines import dump_exact, load_exact
from mmldlm.model.denoiser import Denoiser
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import versions
from mmldlm.types import DataShape
from mmldlm.untrusted import misfit

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = "tokenizer"
KIND = "export"
_MARK, _DATA_FORMAT, _FILES, _CHECKSUM = "mmldlm", "data-1", "files", "checksum"
_SCALE, _LEVELS = ".scale", 127
_FORMATS = {"fp32": "export-1", "fp16": "export-1", "int8": "export-2"}
"""Stored precision -> format. Versions that do not know 8-bit weights reject export-2."""
_SIZES = tuple(item.name for item in fields(DataShape))
_DESCRIBED = ("config", "data", "versions")
_TOKENIZER_FILES = frozenset({".json", ".txt", ".model", ".tiktoken", ".jinja", ".vocab"})


class DataDescription(TypedDict):
    """What made the data, as exports and run folders carry it; arrays are kept bit by bit."""

    fingerprint: str
    content: NotRequired[str]
    vocab_size: int
    num_slots: int
    num_channels: int
    max_length: int
    normalizer: Any
    tokenizer: NotRequired[dict[str, Any] | None]
    encoder: NotRequired[dict[str, Any] | None]
    step: NotRequired[int | None]


def data_shape(data: Mapping[str, Any]) -> DataShape:
    """The sizes that a description gives the network."""
    return DataShape(*(data[name] for name in _SIZES))


def unfit_data(data: Any) -> str | None:
    """What is wrong with a description of data, as one clause."""
    if problem := misfit(DataDescription, data, "the description of its data"):
        return problem
    return too_large({name: data[name] for name in _SIZES}) or unfit_normalizer(
        data["normalizer"], data["num_slots"], data["num_channels"]
    )


@dataclass
class Export:
    """A trained denoiser and all that is needed to use it."""

    weights: dict[str, Tensor]
    config: dict[str, Any]
    """The settings of the run."""
    data: dict[str, Any]
    """What made the data: fingerprint, sizes, normaliser, tokenizer, encoder. Arrays are kept bit by bit."""
    tokenizer_path: Path | None = None
    """File or folder of the tokenizer; after reading, the folder inside the export."""
    versions: dict[str, str] = field(default_factory=dict)


def write_export(folder: Path, export: Export, precision: str = "fp32") -> None:
    """Publish an export under `folder`; an older export of that name is replaced, nothing else is.

    `precision` of the stored weights: fp32, fp16, or int8 with a scale for each row.
    """
    _check_target(folder)
    weights = packed(export.weights, precision)
    with durable.staged_folder(folder) as staging:
        files = _write_files(staging, export, weights, _FORMATS[precision])
        write_manifest(staging, Manifest(KIND, 0, 0, list(files)))


def _check_target(folder: Path) -> None:
    if folder.is_dir() and (not any(folder.iterdir()) or (folder / WEIGHTS).is_file()):
        return
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{folder}: exists and is not an export; choose a new folder")


def _write_files(staging: Path, export: Export, weights: Mapping[str, Tensor], kind: str) -> Iterator[Entry]:
    config = dict(export.config)
    if "distributed" in config:  # how a run was spread over machines is no property of its weights
        config["distributed"] = asdict(DistributedConfig())
    described = {
        _MARK: kind,
        "config": config,
        "data": export.data,
        "versions": export.versions or {name: versions()[name] for name in ("mmldlm", "torch", "python")},
    }
    notes = {key: dump_exact(value).decode("utf-8") for key, value in described.items()}
    yield _put(staging, WEIGHTS, stream(plan(weights), notes | {"format": "pt"}))
    yield _put(staging, CONFIG, [dump_exact(described, indent=2) + b"\n"])
    for source in _tokenizer_files(export.tokenizer_path):
        yield _put(staging, f"{TOKENIZER}/{source.name}", [source.read_bytes()])


def _put(staging: Path, name: str, chunks: Any) -> Entry:
    (staging / name).parent.mkdir(exist_ok=True)
    written = durable.write_file(staging / name, chunks)
    durable.flush_folder((staging / name).parent)
    return entry(name, KIND, written)


def _tokenizer_files(path: Path | None) -> list[Path]:
    """The tokenizer alone, also when it lies in the folder of a whole model."""
    if path is None:
        return []
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    chosen = [file for file in files if file.is_file() and file.suffix in _TOKENIZER_FILES]
    if not chosen:
        raise UserError(f"{path}: holds no tokenizer; a file like tokenizer.json is needed")
    return chosen


def read_export(folder: Path) -> Export:
    """Read an export back. Checksums are compared where the manifest came along with the files."""
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{folder}: is not an export, {WEIGHTS} is missing; make one with 'mmldlm export'")
    if (folder / MANIFEST).exists():
        for file in read_manifest(folder).files:
            if file.name != CONFIG:
                check_file(folder, file)
    try:
        stored, notes = read_tensors(path)
        config, data, made_with = (load_exact(notes.get(key, "null")) for key in _DESCRIBED)
        weights = unpacked(stored)
    except (ValueError, OSError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise UserError(f"{path}: is damaged or not an export ({str(error)[:300]}); copy it again") from error
    known = sorted(set(_FORMATS.values()))
    if notes.get(_MARK, "").strip('"') not in known or not all(
        isinstance(part, dict) for part in (config, data, made_with)
    ):
        raise UserError(
            f"{path}: is not an export of this version ({', '.join(known)}); make one with 'mmldlm export'"
        )
    _check_twin(folder / CONFIG, notes)
    tokenizer = folder / TOKENIZER
    return Export(weights, config, data, tokenizer if tokenizer.is_dir() else None, made_with)


def _check_twin(path: Path, notes: dict[str, str]) -> None:
    if not path.exists():
        return
    try:
        twin = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it, {WEIGHTS} holds the same") from error
    if twin != {key: json.loads(notes[key]) for key in (_MARK, *_DESCRIBED) if key in notes}:
        raise UserError(
            f"{path}: differs from what {WEIGHTS} says; delete it, or export again with other settings"
        )


def exported_step(folder: Path) -> int | None:
    """The step whose weights an export holds; None where there is no readable export."""
    try:
        step = load_exact(read_notes(folder / WEIGHTS)["data"])["step"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def describe_data(store: PairStore) -> dict[str, Any]:
    """What made the data, as exports and run folders carry it."""
    manifest = store.manifest
    return {
        "fingerprint": store.fingerprint,
        "content": store.content,
        **asdict(store.shape),
        "normalizer": manifest.normalizer,
        "tokenizer": manifest.tokenizer,
        "encoder": manifest.encoder,
    }


def make_export(weights: Mapping[str, Tensor], config: Config, store: PairStore, step: int) -> Export:
    """Bundle weights with settings, data description and tokenizer."""
    return Export(
        weights={name: tensor.detach() for name, tensor in weights.items()},
        config=config_to_dict(config),
        data=describe_data(store) | {"step": step},
        tokenizer_path=store.tokenizer_path(),
    )


def export_of_parts(denoiser: Denoiser, store: PairStore, corruption: Corruption, step: int) -> Export:
    """The same for a network that no run has trained; settings of training that nobody knows are the defaults."""
    _require_same_data(denoiser, store, corruption)
    config = Config(
        name="own-loop", data=DataConfig(store=str(store.path.absolute())), corruption=corruption.config,
        model=ModelConfig(**asdict(denoiser.config)),
    )  # fmt: skip
    export = make_export(denoiser.state_dict(), config, store, step)
    export.data["max_length"] = denoiser.shape.max_length
    return export


def _require_same_data(denoiser: Denoiser, store: PairStore, corruption: Corruption) -> None:
    """Reject a network and a forward process that were made for other data."""
    for name, value, kind in (
        ("denoiser", denoiser, Denoiser), ("store", store, PairStore), ("corruption", corruption, Corruption),
    ):  # fmt: skip
        if not isinstance(value, kind):
            raise UserError(f"{name}: is a {type(value).__name__}; a {kind.__name__} is needed")
    known = store.shape
    for name in ("vocab_size", "num_slots", "num_channels"):
        if (built := getattr(denoiser.shape, name)) != getattr(known, name):
            raise UserError(
                f"denoiser: built with {name}={built}, and {store.path} has {getattr(known, name)}; pass the pair "
                "store of the training, or build the network with store.shape"
            )
    if corruption.vocab_size != known.vocab_size:
        raise UserError(
            f"corruption: made with vocab_size={corruption.vocab_size}, and {store.path} has {known.vocab_size}; "
            "give it store.shape.vocab_size"
        )


def write_description(run: RunFolder, store: PairStore) -> None:
    """Make a run folder independent of its pair store: data description and tokenizer; nothing if they are there."""
    tokenizer = store.tokenizer_path()
    files = {path.name: durable.read_digest(path).sha256 for path in _tokenizer_files(tokenizer)}
    described = describe_data(store) | {_FILES: files}
    content = dump_exact({_MARK: _DATA_FORMAT, **described, _CHECKSUM: _digest(described)}, indent=1) + b"\n"
    present = run.data.is_file() and run.data.read_bytes() == content
    if present and (tokenizer is None or run.tokenizer.is_dir()):
        return
    if tokenizer is not None:
        with durable.staged_folder(run.tokenizer) as staging:
            for source in _tokenizer_files(tokenizer):
                durable.write_file(staging / source.name, [source.read_bytes()])
    durable.replace_file(run.data, content)


def _digest(described: dict[str, Any]) -> str:
    return hashlib.sha256(dump_exact(described)).hexdigest()


def read_description(run: RunFolder) -> tuple[dict[str, Any], Path | None]:
    """What `write_description` wrote, and the tokenizer's folder."""
    try:
        described = load_exact(run.data.read_bytes())
        if not isinstance(described, dict) or described.pop(_MARK, None) != _DATA_FORMAT:
            raise ValueError("another format")
        if described.pop(_CHECKSUM, None) != _digest(described):
            raise ValueError("its checksum differs")
        if problem := unfit_data(described):
            raise ValueError(problem)
        _check_tokenizer(run.tokenizer, described.pop(_FILES, {}))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename}: is missing; restore it from a backup") from error
    except (ValueError, OSError, TypeError) as error:
        raise UserError(f"{run.data}: cannot be used ({error}); restore it from a backup") from error
    return described, run.tokenizer if run.tokenizer.is_dir() else None


def _check_tokenizer(folder: Path, files: Any) -> None:
    for name, sha256 in files.items() if isinstance(files, dict) else ():
        if durable.read_digest(folder / Path(name).name).sha256 != sha256:
            raise ValueError(f"{folder / Path(name).name} differs from its checksum")


def packed(weights: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    """The weights as they are stored; `unpacked` is the way back."""
    if precision not in _FORMATS:
        raise UserError(f"precision={precision!r}: allowed are {', '.join(_FORMATS)}")
    if precision == "fp32":
        return dict(weights)
    stored: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        stored |= _half(name, tensor) if precision == "fp16" else _rows(name, tensor)
    return stored


def _half(name: str, tensor: Tensor) -> dict[str, Tensor]:
    half = tensor.half() if tensor.is_floating_point() else tensor
    if not half.isfinite().all():
        raise UserError(f"precision='fp16': {name} has values that half precision cannot hold; use fp32")
    return {name: half}


def _rows(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if not tensor.is_floating_point() or tensor.ndim < 2:
        return {name: tensor}
    rows = tensor.float().flatten(1)
    scale = rows.abs().amax(1).div(_LEVELS).clamp(min=torch.finfo(torch.float16).tiny).half()
    if not scale.isfinite().all():
        raise UserError(f"precision='int8': {name} has values that it cannot hold; use fp32")
    whole = (rows / scale.float()[:, None]).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
    return {name: whole.view(tensor.shape), name + _SCALE: scale}


def unpacked(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """fp32 weights of what `packed` returned; fp32 stays as it is. KeyError where a scale is missing."""
    scales = {name + _SCALE for name, tensor in stored.items() if tensor.dtype == torch.int8}
    return {name: _plain(name, tensor, stored) for name, tensor in stored.items() if name not in scales}


def _plain(name: str, tensor: Tensor, stored: Mapping[str, Tensor]) -> Tensor:
    if tensor.dtype == torch.int8:
        scale = stored[name + _SCALE].float()
        return tensor.float() * scale.view(-1, *(1,) * (tensor.ndim - 1))
    return tensor.float() if tensor.dtype == torch.float16 else tensor
