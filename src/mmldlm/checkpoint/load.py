"""Read a checkpoint, or a whole model: from an export folder, or from a run in whatever state it is.

Every byte is compared with the manifest before it is used. A torn or damaged checkpoint is skipped with a message that
names the file and the reason, and the one before it is used.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmldlm.checkpoint.export import (
    WEIGHTS,
    Export,
    data_shape,
    exported_step,
    read_description,
    read_export,
    unfit_data,
)
from mmldlm.checkpoint.files import (
    CHECKPOINT,
    SUFFIX,
    DamagedError,
    Manifest,
    candidates,
    check_file,
    check_sizes,
    published,
    read_manifest,
    read_rows,
    read_tensors,
)
from mmldlm.checkpoint.state import META, META_GROUP, Snapshot, load_weights, require_fit
from mmldlm.config import Config, leaves_condition_out, resolve_model
from mmldlm.config.recipe import config_from_dict, config_to_dict
from mmldlm.corruption.joint import Corruption
from mmldlm.corruption.times import modes_of_run, sees_latents
from mmldlm.data.format import fingerprint
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.durable import in_parallel
from mmldlm.errors import UserError, first_line
from mmldlm.json_lines import load_exact
from mmldlm.latents import Normalizer
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.layers import Kernels
from mmldlm.objective.joint import Active
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import (
    TILE_WIDTHS,
    autocast,
    flash_runs,
    kernels_run_on,
    plain_attention,
    sampling_precision,
)
from mmldlm.types import Piece

RUNS = Path("saved")
"""Where runs are unless the user names another folder."""

logger = logging.getLogger(__name__)


def load_latest(
    folder: Path,
    *,
    report: Callable[[str], None],
    groups: Collection[str] | None = None,
    held: Mapping[str, Piece] | None = None,
) -> Snapshot | None:
    """The newest checkpoint that is whole; None when there has never been one. For `held` see `load_checkpoint`.

    `report` gets a line for each one that is passed over. When there are checkpoints and all are damaged,
    that is an error: starting from the beginning without a word would look like a resumed run.
    """
    for _ in range(3):  # a run that trains meanwhile may delete what was listed
        listed = candidates(folder)
        passed: list[str] = []
        for path in _newest_first(listed, passed):
            try:
                snapshot = load_checkpoint(path, groups=groups, held=held)
            except DamagedError as error:
                passed.append(str(error))
                continue
            _report(passed, f"{path} is used instead", report)
            return snapshot
        if candidates(folder) == listed:
            break
    if not listed:
        return None
    raise UserError(
        f"{folder}: no checkpoint can be used ({'; '.join(passed)}); "
        "restore one from a backup, or move this folder away to start from the beginning"
    )


def _report(passed: list[str], remedy: str, report: Callable[[str], None]) -> None:
    for message in passed:
        report(f"{message}; {remedy}")


def _newest_first(paths: list[Path], passed: list[str]) -> list[Path]:
    readable: list[tuple[int, int, Path]] = []
    for path in paths:
        try:
            manifest = read_manifest(path)
            readable.append((manifest.sequence, manifest.step, path))
        except DamagedError as error:
            passed.append(str(error))
    return [path for _, _, path in sorted(readable, reverse=True)]


def load_checkpoint(
    path: Path, *, groups: Collection[str] | None = None, held: Mapping[str, Piece] | None = None
) -> Snapshot:
    """One checkpoint, checked while it is read, whether one process wrote it or many.

    `groups` limits what is read (weights without the optimizer, say); one that was never saved is simply
    not there. `held` are the rows of parameters that this rank wants; None: all of them.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; a folder like checkpoints/step_00001000 is needed")
    manifest = read_manifest(path)
    if manifest.kind != CHECKPOINT:
        raise DamagedError(path, f"holds a {manifest.kind}, not a checkpoint")
    check_sizes(path, manifest)
    tensors = _read_groups(path, manifest, groups, held or {})
    return Snapshot(manifest.step, tensors, _read_meta(path, manifest))


def _read_groups(
    path: Path, manifest: Manifest, groups: Collection[str] | None, held: Mapping[str, Piece]
) -> dict[str, dict[str, Tensor]]:
    wanted = [
        file
        for file in manifest.files
        if file.name.endswith(SUFFIX) and (groups is None or file.group in groups)
    ]
    checked = in_parallel([partial(check_file, path, file) for file in wanted])
    by_group: dict[str, list[Path]] = {}
    for file, good in zip(wanted, checked, strict=True):
        by_group.setdefault(file.group, []).append(good)
    tensors: dict[str, dict[str, Tensor]] = {}
    for group, files in by_group.items():
        try:
            whole = len(files) == 1 and not held
            tensors[group] = read_tensors(files[0])[0] if whole else read_rows(files, held)
        except (ValueError, OSError) as error:
            raise DamagedError(files[0], str(error)) from error
    return tensors


def _read_meta(path: Path, manifest: Manifest) -> dict:
    for file in manifest.files:
        if file.group == META_GROUP:
            try:
                meta = load_exact(check_file(path, file).read_bytes())
                if not isinstance(meta, dict):
                    raise ValueError("it is not a mapping")
                return meta
            except DamagedError:
                raise
            except (ValueError, OSError) as error:
                raise DamagedError(path / file.name, f"is damaged: {error}") from error
    raise DamagedError(path / META, "is missing")


@dataclass(frozen=True)
class Trained:
    """What a model was trained for."""

    text: bool
    latent: bool
    length: bool
    with_latents: bool
    """Texts beside latents."""
    without_latents: bool
    """Texts beside pure noise."""
    without_condition: bool
    """Predictions that guidance can compare with."""

    @classmethod
    def of(cls, config: Config, *, length_modelled: bool) -> Trained:
        """From the settings of its run."""
        corruption = config.corruption
        active, weights = (
            Active.of(corruption, config.objective, length_modelled=length_modelled),
            modes_of_run(corruption),
        )
        return cls(
            **vars(active),
            with_latents=sees_latents(corruption),
            without_latents=weights.joint > 0 or (weights.l2t > 0 and corruption.condition_dropout > 0),
            without_condition=leaves_condition_out(corruption),
        )


@dataclass
class LoadedModel:
    """Weights, settings and what the data was made with. Latents inside are normalised."""

    denoiser: Denoiser
    config: Config
    corruption: Corruption
    device: torch.device
    fingerprint: str
    normalizer: Normalizer
    encoder: dict[str, Any] | None
    tokenizer_path: Path | None
    step: int | None = None
    precision: str = "fp32"
    """Type of the matrix products."""

    @cached_property
    def trained(self) -> Trained:
        return Trained.of(self.config, length_modelled=self.denoiser.length_head is not None)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Around every pass of the denoiser."""
        return autocast(self.device, self.precision)


def build_model(
    export: Export, device: torch.device, *, source: str, precision: str | None = None
) -> LoadedModel:
    """A model in evaluation mode from exported weights and settings.

    They may be a stranger's: nothing is allocated before the settings are seen to agree with the tensors that exist.
    """
    try:
        config, data = config_from_dict(export.config), export.data
        shape = data_shape(data)
        _require_fit(config, shape, export.weights, source)
        denoiser = Denoiser(config.model, shape, seed=None)
        load_weights(denoiser, export.weights, source=source)
    except UserError as error:
        raise error if str(error).startswith(source) else UserError(f"{source}: {error}") from error
    precision = precision or sampling_precision(device)
    flash = flash_runs(device, precision, denoiser.config.head_width)
    fused = device.type == "cuda" and kernels_run_on(device)
    tiles = fused and denoiser.config.head_width in TILE_WIDTHS
    attention = ("by_length" if tiles else "varlen") if flash else plain_attention(device)
    denoiser.kernels = Kernels(attention, fused)
    denoiser.to(device).eval().requires_grad_(False)
    return LoadedModel(
        denoiser=denoiser,
        config=config,
        corruption=Corruption(config.corruption, vocab_size=shape.vocab_size, seed=config.train.seed),
        device=device,
        fingerprint=data["fingerprint"],
        normalizer=Normalizer.from_json(data["normalizer"]),
        encoder=data.get("encoder"),
        tokenizer_path=export.tokenizer_path,
        step=data.get("step"),
        precision=precision,
    )


def _require_fit(config: Config, shape: DataShape, weights: Mapping[str, Tensor], source: str) -> None:
    """Compare names and shapes of a network without memory with the tensors; `UserError` where they differ."""
    depth = resolve_model(config.model).depth
    blocks = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    if len(blocks) != depth:  # before so many blocks are made
        raise UserError(f"{source}: model.depth is {depth}, but there are weights of {len(blocks)} blocks")
    try:
        with torch.device("meta"):
            skeleton = Denoiser(config.model, shape, seed=None)
    except (RuntimeError, TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise UserError(f"{source}: its settings describe no network ({first_line(error)})") from error
    require_fit(skeleton.state_dict(), weights, whose="Denoiser", source=source)
    odd = [name for name, tensor in weights.items() if not tensor.is_floating_point()]
    if odd:
        raise UserError(f"{source}: {odd[0]} holds {weights[odd[0]].dtype} values, which are no weights")


def export_of(model: LoadedModel) -> Export:
    """What `write_export` needs to save a model that was loaded."""
    weights = {name: tensor.detach().cpu() for name, tensor in model.denoiser.state_dict().items()}
    tokenizer = None if model.tokenizer_path is None else Tokenizer.load(model.tokenizer_path).spec()
    data = {
        "fingerprint": model.fingerprint,
        **asdict(model.denoiser.shape),
        "normalizer": model.normalizer.to_json(),
        "tokenizer": tokenizer,
        "encoder": model.encoder,
        "step": model.step,
    }
    return Export(weights, config_to_dict(model.config), data, model.tokenizer_path)


def load_model(
    source: str | Path | os.PathLike[str], device: torch.device, precision: str | None = None
) -> LoadedModel:
    """The model of an export folder or of a run, given by its folder or by its name below `saved`.

    A run may be finished, still training, or killed, and its pair store may be gone.
    """
    folder = find_model(source)
    return build_model(read_weights(folder), device, source=str(folder), precision=precision)


def find_model(source: str | Path | os.PathLike[str]) -> Path:
    """The folder of an export or of a run, given as a path or as the name of a run below `saved`."""
    folder = Path(source)
    if not folder.exists() and (RUNS / folder).is_dir() and not folder.is_absolute():
        folder = RUNS / folder
    if is_model(folder):
        return folder
    if folder.exists():
        raise UserError(f"{folder}: is neither a run nor an export; name the folder of one")
    raise UserError(f"{folder}: there is no such run or export; {_nearest(folder)}")


def is_model(folder: Path) -> bool:
    """Whether a folder holds an export or a run."""
    return (folder / WEIGHTS).exists() or RunFolder(folder).is_run()


def _nearest(folder: Path) -> str:
    """What somebody may have meant by a folder that does not exist."""
    places = [place for place in dict.fromkeys([folder.parent, RUNS]) if place.is_dir()]
    known = {str(path): path.name for place in places for path in sorted(place.iterdir()) if is_model(path)}
    nearest = difflib.get_close_matches(folder.name, known.values(), n=1)
    meant = next((path for path, name in known.items() if name in nearest), None)
    return f"did you mean {meant}?" if meant else "name the folder of a run or of an export"


def read_weights(folder: Path, *, averaged: bool = True) -> Export:
    """Weights of an export folder or of a run, with settings, data description and tokenizer.

    Of a run: the newest valid checkpoint, or its export where that is as new. `averaged=False` takes the weights of
    the last step instead of their average.
    """
    export = read_export(folder) if (folder / WEIGHTS).exists() else _of_run(RunFolder(folder), averaged)
    if problem := unfit_data(export.data):
        raise UserError(f"{folder}: cannot be used ({problem}); copy or export it again")
    # what they say counts, also where the hash was made of others
    if export.data.keys() >= {"tokenizer", "encoder"}:
        export.data["fingerprint"] = fingerprint(export.data)
    return export


def _of_run(run: RunFolder, averaged: bool) -> Export:
    whole = published(run.checkpoints)
    newest = read_manifest(whole[-1]).step if whole else None
    step = exported_step(run.export)
    if step is not None and (newest is None or (averaged and step >= newest)):
        try:
            return read_export(run.export)
        except UserError as error:
            if newest is None:
                raise
            logger.warning("%s; the newest checkpoint is used instead", error)
    return _from_checkpoint(run, averaged)


def _from_checkpoint(run: RunFolder, averaged: bool) -> Export:
    snapshot = load_latest(run.checkpoints, report=logger.warning, groups=("model", "ema"))
    if snapshot is None:
        raise UserError(
            f"{run.path}: holds no checkpoint yet; the first is saved after train.checkpoint_every steps"
        )
    tensors, meta = snapshot.tensors, snapshot.meta
    if "model" not in tensors or not isinstance(meta.get("settings"), dict):
        raise UserError(f"{run.checkpoints}: the newest checkpoint holds no weights or settings of a run")
    described, tokenizer = read_description(run)
    if meta.get("content", "") != described.get("content", meta.get("content", "")):
        raise UserError(
            f"{run.path}: its data description does not belong to its checkpoints; restore both from a backup"
        )
    weights = tensors["ema" if averaged and "ema" in tensors else "model"]
    return Export(weights, meta["settings"], described | {"step": snapshot.step}, tokenizer)
