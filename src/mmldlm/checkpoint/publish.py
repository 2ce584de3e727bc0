"""Checkpoints get their name only when they are whole, and lose it before they are deleted.

    checkpoints/
      step_00001000/    model.safetensors, ema.safetensors, optimizer.safetensors, meta.json, manifest.json
      latest            -> step_00001000
      .staging-*        being written; a crash leaves it behind, the next start deletes it
      .aside-*          the former checkpoint of a step that is published again; put back after a crash
      .trash-*          being deleted

One process at a time publishes into a folder (the lock of the run sees to that); any number may read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from mmldlm import durable
from mmldlm.checkpoint.manifest import (
    DamagedError,
    Entry,
    Manifest,
    check_sizes,
    read_manifest,
    write_manifest,
)

LATEST = "latest"
KIND = "checkpoint"
_ASIDE = re.compile(r"\.aside-(.+)-[0-9a-f]{12}")
_STEP = re.compile(r"step_\d+")
_LEFTOVER = re.compile(r"\.(staging|trash|new)-.+-[0-9a-f]{12}")

logger = logging.getLogger(__name__)


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def stage(folder: Path, step: int) -> Path:
    """A fresh folder to write a checkpoint into."""
    staging = durable.volatile(folder, "staging", step_name(step))
    staging.mkdir(parents=True)
    return staging


def publish(folder: Path, staging: Path, step: int, files: Iterable[Entry]) -> Path:
    """Make a staged checkpoint the newest one. Its files are on the disk already; returns its final path."""
    write_manifest(staging, Manifest(KIND, step, _next_sequence(folder), tuple(files)))
    durable.flush_folder(staging)
    final = folder / step_name(step)
    swap_in(staging, final)
    point_latest(folder, final.name)
    return final


def swap_in(staging: Path, final: Path) -> None:
    """Give the staged folder its name. What had the name before exists until the new one is durable."""
    aside = durable.volatile(final.parent, "aside", final.name) if os.path.lexists(final) else None
    if aside:
        os.rename(final, aside)
    try:
        os.rename(staging, final)
    except BaseException:
        if aside:
            os.rename(aside, final)
        raise
    durable.flush_folder(final.parent)
    if aside:
        durable.discard(aside)


def point_latest(folder: Path, name: str) -> None:
    """Move `latest`. It is for people, resuming does without it, so trouble here is only a warning."""
    try:
        _replace_pointer(folder, name)
    except OSError as error:
        logger.warning("%s could not be moved to %s: %s", folder / LATEST, name, error)


def _replace_pointer(folder: Path, name: str) -> None:
    """In one stroke: a relative link, or a line of text where links are impossible."""
    staged = durable.volatile(folder, "new", LATEST)
    try:
        os.symlink(name, staged)
    except (OSError, NotImplementedError):
        durable.replace_file(folder / LATEST, f"{name}\n".encode())
        return
    try:
        os.replace(staged, folder / LATEST)
    except OSError:
        staged.unlink()
        raise
    durable.flush_folder(folder)


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
        return [folder / name for name in names if _STEP.fullmatch(_true_name(name))]
    return []


def published(folder: Path) -> list[Path]:
    """Checkpoints that look whole (manifest and sizes; checksums are for resuming), oldest first."""
    found = []
    for path in candidates(folder):
        with contextlib.suppress(DamagedError):
            manifest = read_manifest(path)
            check_sizes(path, manifest)
            found.append((manifest.sequence, manifest.step, path))
    return [path for _, _, path in sorted(found)]


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


def clean(folder: Path) -> None:
    """Put a folder of checkpoints in order after a crash, at the start of the process that holds the lock."""
    clean_leftovers(folder)
    newest = published(folder)[-1:]
    if newest and read_latest(folder) != newest[0]:
        point_latest(folder, newest[0].name)


def clean_leftovers(folder: Path) -> None:
    """Delete or settle what a crash left under a volatile name."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if _LEFTOVER.fullmatch(path.name):
            logger.info("%s was left by a run that did not end; deleting it", path)
            durable.discard(path)
        elif _ASIDE.fullmatch(path.name):
            _settle(path, folder / _true_name(path.name))


def _true_name(name: str) -> str:
    """The name that a folder put aside had before; other names stay as they are."""
    match = _ASIDE.fullmatch(name)
    return match[1] if match else name


def _settle(aside: Path, final: Path) -> None:
    """A crash came while a step was published again: keep the new one if it is whole, else the old one."""
    if _looks_whole(final):
        durable.discard(aside)
    elif not final.exists():
        os.rename(aside, final)
    elif _looks_whole(aside):
        durable.discard(final)
        os.rename(aside, final)


def _looks_whole(path: Path) -> bool:
    try:
        check_sizes(path, read_manifest(path))
    except DamagedError:
        return False
    return True
