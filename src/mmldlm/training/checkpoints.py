"""The checkpoints of a run: saved by the main rank, or by all where each holds a part; and how a run starts.

It starts from its own checkpoint, where some settings must not have changed, or from other weights.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmldlm.checkpoint.export import Export
from mmldlm.checkpoint.load import find_model, load_latest, read_weights
from mmldlm.checkpoint.save import Retention, Saver
from mmldlm.checkpoint.state import Part, Snapshot, load_weights, restore_snapshot
from mmldlm.config import Config, TrainConfig, resolve_model
from mmldlm.config.recipe import config_from_dict, config_to_dict, flatten
from mmldlm.corruption.times import describe_modes
from mmldlm.data.store import PairStore, Split
from mmldlm.distributed.ranks import Muted, Ranks
from mmldlm.errors import UserError
from mmldlm.model.denoiser import Denoiser
from mmldlm.run_folder import RunFolder
from mmldlm.training.recovery import Rollbacks, is_good

if TYPE_CHECKING:  # FSDP2 is loaded where it is needed
    from mmldlm.distributed.shards import Shards

log = logging.getLogger(__name__)

FIXED = (
    "model",
    "corruption",
    "objective",
    "optim",
    "data.train_split",
    "batch.tokens_per_step",
    "batch.documents_per_step",
    "train.seed",
    "train.steps",
    "train.frozen",
)
"""Settings that decide what the weights become. All others may change at any time."""

WHOLE = "whole_documents_are_joint"
"""Present in a checkpoint's meta if derived documents were left out of mode joint and of dropped conditions."""

LONGER = ("train.steps",)
"""Of these, a larger value is allowed: it stretches the learning-rate schedule."""


def check_room(run: Path, denoiser: Denoiser) -> None:
    """Reject a disk without room for the first checkpoint and the export: all the work would be lost at its end.

    A checkpoint holds the weights, their average and at least one moment of the optimizer, in fp32.
    """
    needed = 4 * 4 * sum(weight.numel() for weight in denoiser.parameters())
    free = shutil.disk_usage(run).free
    if free < needed:
        raise UserError(
            f"run folder {run}: {free / 2**20:,.0f} MiB are free on its disk, and its first checkpoint and its export "
            f"need about {needed / 2**20:,.0f} MiB; free some space, or choose a run folder on another disk"
        )


def check_export(run: RunFolder) -> None:
    """Reject a run that has lost its checkpoints: starting again at the first step would replace its export."""
    if run.export.exists():
        raise UserError(
            f"run folder {run.path}: holds an export but no checkpoint to continue from, and a new run would replace "
            f"the export; choose another run folder, where train.init={run.path} begins with these weights, or move "
            "the export away to start here from the beginning"
        )


def check_resume(config: Config, store: PairStore, meta: dict[str, Any], run: str) -> None:
    """Reject settings or data under which the run would become another one."""
    if meta["content"] != store.content:
        other = (
            "other documents" if meta["fingerprint"] == store.fingerprint else "another tokenizer or encoder"
        )
        raise UserError(
            f"data.store={config.data.store}: the run in {run} was trained on another pair store "
            f"(this one has {other}); use the old store, or a new run folder"
        )
    # a setting younger than the run had its default, which means what was done before
    old = flatten(config_to_dict(config_from_dict(meta["settings"])))
    new = flatten(config_to_dict(config))
    for values in (old, new):
        values["batch.schedule"] = [
            {key: value for key, value in stage.items() if not key.startswith("micro_")}
            for stage in values["batch.schedule"]
        ]
    changed = [
        f"{key}: {old.get(key)} -> {new[key]}"
        for key in new
        if _is_fixed(key) and not _allowed(key, old, new)
    ]
    if changed:
        raise UserError(
            f"the run in {run} was started with other settings ({'; '.join(changed)}); "
            f"put them back, or choose a new run folder"
        )


def report_other_modes(config: Config, meta: dict[str, Any], split: Split) -> None:
    """Say once that a run goes on with other modes than it began with: it is older than the rule."""
    before, now = (describe_modes(config.corruption, share) for share in (0.0, split.derived_share))
    if WHOLE not in meta and now != before:
        log.warning("the run was begun when derived documents, too, were in mode joint and lost their condition; "
                    "from here on whole ones alone are, see docs/modes.md")  # fmt: skip


def report_ignored_init(config: Config, meta: dict[str, Any]) -> None:
    """Say once that a resumed run does not start from `train.init`, if that is not what it started from."""
    before, now = meta["settings"]["train"].get("init"), config.train.init
    if now != before:
        log.warning("train.init=%s: ignored, the run resumes from its own checkpoint (it started from %s)",
                    now, before or "new weights")  # fmt: skip


def start_from_init(config: Config, denoiser: Denoiser, store: PairStore) -> list[tuple[int, str]]:
    """Give the denoiser the averaged weights of `train.init`, which must have the same shape and vocabulary.

    To be called before anything is made of the denoiser, and before a run folder exists. So what is to be logged is
    returned, as levels and messages.
    """
    source = config.train.init
    if source is None:
        return []
    try:
        folder = find_model(source)
        export = read_weights(folder)
    except UserError as error:
        raise UserError(f"train.init={source}: {error}") from error
    differences = _differences(export, denoiser, store)
    if differences:
        raise UserError(
            f"train.init={source}: its weights do not fit this run ({'; '.join(differences)}); "
            f"use the same values, or train from new weights with train.init=null"
        )
    load_weights(denoiser, _fit_length_head(export.weights, denoiser), source=str(folder))
    started = f"starting from the weights of {folder}, step {export.data.get('step')}"
    return [*_other_meaning(source, export, store, config), (logging.INFO, started)]


def _differences(export: Export, denoiser: Denoiser, store: PairStore) -> list[str]:
    """What keeps weights from being used here, as `setting: theirs -> ours`."""
    manifest, data = store.manifest, export.data
    theirs, ours = vars(resolve_model(config_from_dict(export.config).model)), vars(denoiser.config)
    pairs = {f"model.{name}": (theirs.get(name), ours[name]) for name in ours}
    pairs |= {
        name: (data[name], getattr(manifest, name)) for name in ("vocab_size", "num_slots", "num_channels")
    }
    if data["vocab_size"] == manifest.vocab_size and data.get("tokenizer") and manifest.tokenizer:
        pairs["tokenizer"] = (_tokenizer(data["tokenizer"]), _tokenizer(manifest.tokenizer))
    return [f"{name}: {old} -> {new}" for name, (old, new) in pairs.items() if old != new]


def _tokenizer(described: dict[str, Any]) -> str:
    """The same for the same vocabulary and rules, whatever the tokenizer was called."""
    return f"sha256 {described['sha256'][:12]}"


def _other_meaning(source: str, export: Export, store: PairStore, config: Config) -> list[tuple[int, str]]:
    """Weights that fit but meant something else take a while to adapt."""
    changed = []
    if export.data["fingerprint"] != store.fingerprint:
        changed.append("the latents were made by another encoder")
    before = config_from_dict(export.config).corruption
    for name in ("prediction_type", "latent_schedule"):
        old, new = getattr(before, name), getattr(config.corruption, name)
        if old != new:
            changed.append(f"corruption.{name}: {old} -> {new}")
    text = f"train.init={source}: the weights fit, but {'; '.join(changed)}; they have to adapt"
    return [(logging.WARNING, text)] if changed else []


def _fit_length_head(weights: dict[str, Tensor], denoiser: Denoiser) -> dict[str, Tensor]:
    """The head has an output per document length; where the longest differs, the lengths that both have are kept."""
    fitted, own = dict(weights), denoiser.state_dict()
    for name in ("length_head.output.weight", "length_head.output.bias"):
        if name in fitted and name in own and fitted[name].shape[0] != own[name].shape[0]:
            common = min(len(fitted[name]), len(own[name]))
            merged = own[name].clone()
            merged[:common] = fitted[name][:common]
            fitted[name] = merged
    return fitted


def _is_fixed(key: str) -> bool:
    return key == "batch.schedule" or any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)


def _allowed(key: str, old: dict[str, Any], new: dict[str, Any]) -> bool:
    return old[key] == new[key] or (key in LONGER and new[key] > old[key])


def _shard_saver(folder: Path, shards: Shards, options: dict[str, Any]) -> Saver:
    from mmldlm.checkpoint.sharded import ShardPlace, ShardSaver  # DCP is loaded where it is needed

    group = shards.new_host_group()  # threads that write must not meet the agreements of the loop
    return ShardSaver(
        folder, ShardPlace(shards.pieces, shards.replica, shards.num_replicas, group), **options
    )


class Checkpoints:
    """Saves and restores the parts of a run. `record` writes into the ledger."""

    def __init__(
        self,
        folder: Path,
        settings: TrainConfig,
        ranks: Ranks,
        record: Callable[..., None],
        shards: Shards | None = None,
    ) -> None:
        """`shards` say which rows this rank holds, where the network is divided among ranks: then all of them save."""
        self.folder, self.ranks, self.record = folder, ranks, record
        self.held = None if shards is None else shards.pieces
        self.unsaved: str | None = None
        """Why the newest checkpoint could not be saved, if so."""
        self.restored_step: int | None = None
        """The step of a checkpoint that holds the very state from which the run continued."""
        kept = Retention(settings.keep_best, settings.keep_every, is_good)
        self.saver: Any = Muted()
        options: dict[str, Any] = {
            "keep": settings.keep_checkpoints,
            "spared": kept,
            "needed": replace(kept, good=1),
            "on_error": self._failed,
            "on_saved": self._saved,
        }
        if shards is not None:
            self.saver = _shard_saver(folder, shards, options)
        elif ranks.main:
            self.saver = Saver(folder, **options)

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
        return self._same_everywhere(load_latest(self.folder, report=log.warning, held=self.held))

    def last_good(self, rollbacks: Rollbacks) -> Snapshot | None:
        """The one to roll back to, if there is one."""
        self.saver.wait()
        self.ranks.barrier()  # all ranks see the same checkpoints
        return self._same_everywhere(rollbacks.choose(self.folder, log.warning, self.held))

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
