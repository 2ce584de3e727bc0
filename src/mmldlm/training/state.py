"""All that a run has to remember: taken for a checkpoint and put back from one by the same list."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mmldlm.checkpoint.save import SCORE
from mmldlm.checkpoint.state import Snapshot, load_weights
from mmldlm.config.recipe import config_to_dict
from mmldlm.runtime import versions
from mmldlm.training.optim import parameter_names
from mmldlm.training.resume import same_micro_batches

if TYPE_CHECKING:
    from mmldlm.training.loop import Trainer


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Everything that the next step depends on."""
    denoiser, stepper = trainer.setup.denoiser, trainer.stepper
    tensors = {
        "model": dict(denoiser.state_dict()),
        "optimizer": stepper.optimizers.tensors(parameter_names(denoiser)),
        "log": trainer.interval.tensors() | trainer.faults.bad_steps.tensors(),
    }
    if stepper.ema is not None:
        tensors["ema"] = stepper.ema.average
    if stepper.balance is not None:
        tensors["balance"] = dict(stepper.balance.state_dict())
    meta = {
        "position": trainer.position,
        "tokens": trainer.tokens,
        "documents": trainer.documents,
        "scaler": stepper.scaler.state_dict(),
        "resizing": trainer.resizing.state(),
        "rollbacks": trainer.faults.rollbacks.state(),
        "plateau": trainer.plateau.state(),
        "mode_stage": trainer.stages.number,
        "norms_measured_at": stepper.balance.last if stepper.balance is not None else 0,
        "settings": config_to_dict(trainer.config),
        "fingerprint": trainer.setup.store.fingerprint,
        "content": trainer.setup.store.content,
        "versions": versions(),
    }
    if trainer.valid_loss is not None and trainer.valid_loss[0] == trainer.step:
        meta[SCORE] = trainer.valid_loss[1]
    return Snapshot(trainer.step, tensors, meta)


def restore_snapshot(trainer: Trainer, snapshot: Snapshot) -> None:
    """Put everything back that a checkpoint holds."""
    meta = snapshot.meta
    source = f"checkpoint of step {snapshot.step}"
    load_weights(trainer.setup.denoiser, snapshot.tensors["model"], source=source)
    names = parameter_names(trainer.setup.denoiser)
    trainer.stepper.optimizers.load(names, snapshot.tensors["optimizer"])
    if trainer.stepper.balance is not None:
        load_weights(trainer.stepper.balance, snapshot.tensors["balance"], source=source)
        # a run from before this was kept had measured at the last multiple
        trainer.stepper.balance.last = meta.get("norms_measured_at", max(0, snapshot.step - 1))
    if trainer.stepper.ema is not None:
        trainer.stepper.ema.load(snapshot.tensors["ema"])
    trainer.interval.load(snapshot.tensors["log"])
    trainer.faults.bad_steps.load(snapshot.tensors["log"], trainer.setup.runtime.device)
    if meta["scaler"] and trainer.stepper.scaler.is_enabled():
        trainer.stepper.scaler.load_state_dict(meta["scaler"])
    trainer.step, trainer.position = snapshot.step, meta["position"]
    if trainer.config.batch.adapt and same_micro_batches(trainer.config, meta["settings"]):
        trainer.resizing.load(meta.get("resizing", {}))
    trainer.setup.halvings = trainer.resizing.halvings
    trainer.tokens, trainer.documents = meta["tokens"], meta["documents"]
    trainer.valid_loss = (snapshot.step, meta[SCORE]) if SCORE in meta else None
    trainer.faults.rollbacks.load(meta.get("rollbacks", {}))
    trainer.plateau.load(meta.get("plateau", {}))
    trainer.stages.number = meta.get("mode_stage", 0)
