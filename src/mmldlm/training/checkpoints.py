"""The checkpoints of a run: saved by the main rank, restored by all ranks alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmldlm.checkpoint.load import load_latest
from mmldlm.checkpoint.save import Retention, Saver
from mmldlm.checkpoint.state import Part, Snapshot, restore_snapshot
from mmldlm.config import TrainConfig
from mmldlm.distributed.ranks import Muted, Ranks
from mmldlm.errors import UserError
from mmldlm.training.recovery import Rollbacks, is_good

log = logging.getLogger(__name__)


class Checkpoints:
    """Saves and restores the parts of a run. `record` writes into the ledger."""

    def __init__(
        self, folder: Path, settings: TrainConfig, ranks: Ranks, record: Callable[..., None]
    ) -> None:
        self.folder, self.ranks, self.record = folder, ranks, record
        self.unsaved: str | None = None
        """Why the newest checkpoint could not be saved, if so."""
        self.restored_step: int | None = None
        """The step of a checkpoint that holds the very state from which the run continued."""
        kept = Retention(settings.keep_best, settings.keep_every, is_good)
        self.saver: Any = Muted()
        if ranks.main:
            self.saver = Saver(
                folder, keep=settings.keep_checkpoints, spared=kept, needed=replace(kept, good=1),
                on_error=self._failed, on_saved=self._saved,
            )  # fmt: skip

    @property
    def last_saved(self) -> int | None:
        """Step of the newest checkpoint that this process made durable."""
        step: int | None = self.saver.last_saved
        return step

    def holds(self, step: int) -> bool:
        """Whether the state after a step is on the disk."""
        return step in (self.last_saved, self.restored_step)

    def save(self, snapshot: Snapshot, *, wait: bool) -> None:
        """Begin to save, on all ranks together; `wait` until it is durable."""
        self.saver.save(snapshot, wait=wait)
        self.ranks.barrier()  # nobody leaves before the checkpoint is complete, and no step waits for it

    def latest(self) -> Snapshot | None:
        """The newest that is whole; None if there has never been one."""
        self.ranks.barrier()  # the main rank has put the folder in order
        return self._same_everywhere(load_latest(self.folder, report=log.warning))

    def last_good(self, rollbacks: Rollbacks) -> Snapshot | None:
        """The one to roll back to, if there is one."""
        self.saver.wait()
        self.ranks.barrier()  # all ranks see the same checkpoints
        return self._same_everywhere(rollbacks.choose(self.folder, log.warning))

    def restore(self, parts: Mapping[str, Part], snapshot: Snapshot) -> None:
        """Put all parts back into the state of a checkpoint."""
        restore_snapshot(parts, snapshot)
        self.restored_step = snapshot.step

    def _same_everywhere(self, snapshot: Snapshot | None) -> Snapshot | None:
        """Reject checkpoints that differ from rank to rank."""
        seen = None if snapshot is None else (snapshot.step, snapshot.meta["progress"]["position"])
        if not self.ranks.all_equal(seen):
            raise UserError(
                f"{self.folder}: the ranks do not see the same checkpoint there; "
                f"the run folder must be on a disk that all machines share"
            )
        return snapshot

    def _failed(self, error: Exception) -> None:
        log.error("%s", error)
        self.unsaved = str(error)
        self.record("save_failed", step=getattr(error, "step", None), reason=str(error))

    def _saved(self, step: int, path: Path, seconds: float) -> None:
        self.unsaved = None
        log.info("step %d: checkpoint %s written in %.1f s", step, path.name, seconds)
