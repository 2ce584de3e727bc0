"""Find the newest checkpoint that is whole, and read it.

Every byte is compared with the manifest before it is used. A torn or damaged checkpoint is passed over with
a message that names the file and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from torch import Tensor

from mmldlm.checkpoint import strict_json
from mmldlm.checkpoint.manifest import DamagedError, Manifest, check_file, check_sizes, read_manifest
from mmldlm.checkpoint.publish import KIND, candidates
from mmldlm.checkpoint.state import Snapshot
from mmldlm.checkpoint.tensor_file import SUFFIX, read_tensors
from mmldlm.durable import in_parallel
from mmldlm.errors import UserError

META = "meta.json"
META_GROUP = "meta"


def load_latest(
    folder: Path, *, report: Callable[[str], None], groups: Collection[str] | None = None
) -> Snapshot | None:
    """The newest checkpoint that is whole; None when there has never been one.

    `report` gets a line for each one that is passed over. When there are checkpoints and all are damaged,
    that is an error: starting anew in silence would look like a resumed run.
    """
    for _ in range(3):  # a run that goes on meanwhile may retire what was listed
        listed = candidates(folder)
        passed: list[str] = []
        for path in _newest_first(listed, passed):
            try:
                snapshot = load_checkpoint(path, groups=groups)
            except DamagedError as error:
                passed.append(str(error))
                continue
            _tell(passed, f"going on from {path} instead", report)
            return snapshot
        if candidates(folder) == listed:
            break
    if not listed:
        return None
    raise UserError(
        f"{folder}: no checkpoint can be used ({'; '.join(passed)}); "
        "restore one from a backup, or move this folder away to start from the beginning"
    )


def _tell(passed: list[str], remedy: str, report: Callable[[str], None]) -> None:
    for message in passed:
        report(f"{message}; {remedy}")


def _newest_first(paths: list[Path], passed: list[str]) -> list[Path]:
    found: list[tuple[int, int, Path]] = []
    for path in paths:
        try:
            manifest = read_manifest(path)
            found.append((manifest.sequence, manifest.step, path))
        except DamagedError as error:
            passed.append(str(error))
    return [path for _, _, path in sorted(found, reverse=True)]


def load_checkpoint(path: Path, *, groups: Collection[str] | None = None) -> Snapshot:
    """One checkpoint, checked while it is read.

    `groups` limits what is read (weights without the optimizer, say); one that was never saved is simply
    not there.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint; a folder like checkpoints/step_00001000 is needed")
    manifest = read_manifest(path)
    if manifest.kind != KIND:
        raise DamagedError(path, f"holds a {manifest.kind}, not a checkpoint")
    check_sizes(path, manifest)
    return Snapshot(manifest.step, _read_groups(path, manifest, groups), _read_meta(path, manifest))


def _read_groups(
    path: Path, manifest: Manifest, groups: Collection[str] | None
) -> dict[str, dict[str, Tensor]]:
    wanted = [
        file
        for file in manifest.files
        if file.name.endswith(SUFFIX) and (groups is None or file.group in groups)
    ]
    checked = in_parallel([partial(check_file, path, file) for file in wanted])
    tensors: dict[str, dict[str, Tensor]] = {}
    for file, good in zip(wanted, checked, strict=True):
        try:
            tensors.setdefault(file.group, {}).update(read_tensors(good)[0])
        except (ValueError, OSError) as error:
            raise DamagedError(good, str(error)) from error
    return tensors


def _read_meta(path: Path, manifest: Manifest) -> dict:
    for file in manifest.files:
        if file.group == META_GROUP:
            try:
                return strict_json.load(check_file(path, file).read_bytes())
            except DamagedError:
                raise
            except (ValueError, OSError) as error:
                raise DamagedError(path / file.name, f"is damaged: {error}") from error
    raise DamagedError(path / META, "is missing")
