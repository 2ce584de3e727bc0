"""Checkpoints that all ranks write together, through PyTorch's distributed checkpoint (DCP).

Each rank holds some rows of the tensors. DCP plans who writes what, checks that the rows make up whole tensors, and
turns a failure on one rank into a failure on all. Each rank writes a safetensors file for each group into the folder
that the main rank has staged. When all files are on the disk, the main rank lists them and renames the folder, as for
any other checkpoint. `files.read_rows` reads them, in whole or by rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from mmldlm import durable
from mmldlm.checkpoint.files import (
    PIECES,
    SUFFIX,
    dispensable,
    entry,
    piece_of,
    publish,
    retire,
    stage,
)
from mmldlm.checkpoint.save import Saver
from mmldlm.checkpoint.state import META, META_GROUP, Snapshot
from mmldlm.types import Piece


@dataclass(frozen=True)
class ShardPlace:
    """Which part of the state a rank holds, and of how many equal copies of it this is one."""

    pieces: Mapping[str, Piece]
    """Of each parameter."""
    replica: int
    num_replicas: int
    group: Any
    """Of all ranks, over gloo, for the writing threads alone."""

    @property
    def main(self) -> bool:
        """Whether this rank publishes."""
        return dist.get_rank(self.group) == 0


@dataclass
class ShardRows:
    """What a rank writes of a tensor, in the terms of DCP."""

    tensor: Tensor
    piece: Piece

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        start = torch.Size([self.piece.start, *[0] * (self.tensor.ndim - 1)])
        chunk = ChunkStorageMetadata(start, self.tensor.size())
        kind = TensorProperties.create_from_tensor(self.tensor)
        data = TensorWriteData(chunk, kind, torch.Size(self.piece.shape))
        return [WriteItem(MetadataIndex(name, start), WriteItemType.SHARD, tensor_data=data)]


class ShardSaver(Saver):
    """A saver on every rank. All of them save the same steps; each copies its own part and writes it in its thread."""

    def __init__(self, folder: Path, place: ShardPlace, **options: Any) -> None:
        self._place = place
        super().__init__(folder, **options)

    def _prepare(self) -> None:
        if self._place.main:
            super()._prepare()

    def _take(self, snapshot: Snapshot) -> Any:
        """What this rank writes, and its copy on the host; an error is for all ranks, which wait for this one."""
        part = own_part(snapshot, self._place)
        tensors: dict[str, dict[str, Tensor]] = {}
        pieces: dict[str, dict[str, list[int]]] = {}
        for place, held in part.items():
            group, name = place.split("/", 1)
            tensors.setdefault(group, {})[name] = held.tensor if isinstance(held, ShardRows) else held
            noted = pieces.setdefault(group, {})
            noted |= {name: [held.piece.start, *held.piece.shape]} if isinstance(held, ShardRows) else {}
        notes = {group: {PIECES: json.dumps(noted)} for group, noted in pieces.items()}
        try:
            return part, self._memory.take(tensors, notes)
        except (MemoryError, RuntimeError) as error:
            return error

    def _write(self, step: int, work: Any, meta: bytes) -> None:
        began = time.perf_counter()
        while True:
            writer = _Writer(self._folder, step, meta, self._place.group, work)
            try:
                self._memory.finish()
                state = {} if isinstance(work, Exception) else work[0]
                planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
                dcp.save(state, storage_writer=writer, planner=planner, process_group=self._place.group)
                break
            except (Exception, dcp.CheckpointException) as error:
                writer.discard()
                reason = _cause(error)
                if not self._room_was_made(reason):
                    if self._place.main:
                        self._fail(step, reason)
                    return
        self.last_saved = step
        if self._place.main:
            retire(self._folder, self._keep, self._spared)
            self._report(step, writer.path, time.perf_counter() - began)

    def _room_was_made(self, error: Exception) -> bool:
        """Whether the main rank has deleted a checkpoint that can be done without, because a disk was full."""
        made = [False]
        if self._place.main and isinstance(error, OSError) and durable.is_full(error):
            surplus = dispensable(self._folder, self._needed)
            made = [bool(surplus) and self._make_room(error, surplus[0])]
        try:
            dist.broadcast_object_list(made, src=0, group=self._place.group)
        except RuntimeError:  # a rank is gone
            return False
        return made[0]


def own_part(snapshot: Snapshot, place: ShardPlace) -> dict[str, Tensor | ShardRows]:
    """`group/name` -> what this rank writes: its rows, or some of them where it has replicas.

    What is not divided is written by the main rank.
    """
    part: dict[str, Tensor | ShardRows] = {}
    for group, tensors in snapshot.tensors.items():
        for number, (name, tensor) in enumerate(sorted(tensors.items())):
            piece = piece_of(name, place.pieces)
            local = None if piece is None else (piece.rows, *piece.shape[1:])
            if piece is not None and tuple(tensor.shape) == local:
                if piece.rows and number % place.num_replicas == place.replica:
                    part[f"{group}/{name}"] = ShardRows(tensor, piece)
            elif place.main:
                part[f"{group}/{name}"] = tensor
    return part


class _Writer(StorageWriter):
    """Where DCP's plan becomes files: staged by the main rank, written by all, published by the main rank."""

    def __init__(self, folder: Path, step: int, meta: bytes, group: Any, work: Any) -> None:
        self.folder, self.step, self.meta = folder, step, meta
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.failure = work if isinstance(work, Exception) else None
        self.images = {} if self.failure else {image.group: image for image in work[1]}
        self.staging: Path | None = None
        self.path = folder

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self.failure is not None:
            raise self.failure
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.staging = stage(self.folder, self.step)
        return [replace(plan, storage_data=str(self.staging)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        first = {item.index.fqn.partition("/")[0]: item for item in reversed(plan.items)}
        staging = Path(plan.storage_data)
        tasks = [partial(self._write, staging, group, item) for group, item in first.items()]
        results: Future[list[WriteResult]] = Future()
        results.set_result(durable.in_parallel(tasks))
        return results

    def _write(self, staging: Path, group: str, item: WriteItem) -> WriteResult:
        name = f"{group}-{self.rank:05d}-of-{self.count:05d}{SUFFIX}"
        written = durable.write_file(staging / name, self.images[group].chunks())
        return WriteResult(item.index, written.size, entry(name, group, written))

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        assert self.staging is not None
        files = [result.storage_data for rank in results for result in rank]
        files.append(entry(META, META_GROUP, durable.write_file(self.staging / META, [self.meta])))
        self.path = publish(self.folder, self.staging, self.step, files)

    def discard(self) -> None:
        """Give back the room of a save that failed."""
        if self.staging is not None and self.staging.exists():
            durable.discard(self.staging)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def _cause(error: Exception | dcp.CheckpointException) -> Exception:
    """The first failure that DCP collected from the ranks; a full disk before all others."""
    if not isinstance(error, dcp.CheckpointException):
        return error
    causes = [failure[0] for _, failure in sorted(error.failures.items())]
    errors = [cause for cause in causes if isinstance(cause, Exception)]
    return next(filter(durable.is_full, errors), errors[0] if errors else RuntimeError(str(error)))
