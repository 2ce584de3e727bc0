"""A run put together from its settings and its store: model, data, optimizer, and their shapes."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import torch

from mmldlm.config import Config
from mmldlm.corruption.joint import Corruption
from mmldlm.data.loader import StepReader
from mmldlm.data.order import Order
from mmldlm.data.packing import StepShape, plan_shape
from mmldlm.data.store import PairStore, Split
from mmldlm.errors import UserError
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.weights import init_weights
from mmldlm.objective.joint import Active, Objective
from mmldlm.runtime import Runtime
from mmldlm.train.ema import Ema
from mmldlm.train.optim import build_optimizer, freeze_parts
from mmldlm.train.step import Stepper
from mmldlm.types import Counts

log = logging.getLogger(__name__)


@dataclass
class Setup:
    """The parts of a run before the first step."""

    config: Config
    runtime: Runtime
    store: PairStore
    train_split: Split
    valid_split: Split
    shape: StepShape
    data_shape: DataShape
    corruption: Corruption
    objective: Objective
    order: Order
    denoiser: Denoiser

    def reader(self) -> StepReader:
        """Reads training steps."""
        return StepReader(
            self.store,
            self.train_split,
            self.order,
            self.shape,
            self.corruption.corrupt,
            self.count,
            self.config.speed.layout,
        )

    def count(self, positions: np.ndarray, lengths: np.ndarray) -> Counts:
        """What the loss of a step with these documents is divided by."""
        no_keys = np.zeros(len(positions), dtype=np.uint64)
        return self.corruption.count(
            lengths, self.corruption.times(positions, no_keys), self.data_shape.num_slots
        )

    def stepper(self) -> Stepper:
        """Optimizer, average and scaler for the denoiser, which must be on its device."""
        config, device = self.config, self.runtime.device
        freeze_parts(self.denoiser, self.objective.active.parts())
        return Stepper(
            denoiser=self.denoiser,
            objective=self.objective,
            optimizer=build_optimizer(self.denoiser, config.optim, fused=config.speed.fused_optimizer),
            ema=Ema(self.denoiser, config.optim.ema_decay) if config.optim.ema_decay > 0 else None,
            scaler=torch.amp.GradScaler(device.type, enabled=self.runtime.precision == "fp16"),
            runtime=self.runtime,
            config=config.optim,
        )


def set_up(config: Config, runtime: Runtime) -> Setup:
    """Open the store and build the model with its first weights, on the device."""
    store = PairStore.open(config.data.store)
    train_split = store.split(config.data.train_split)
    valid_split = store.split(config.data.valid_split)
    for split in (train_split, valid_split):
        if len(split) == 0:
            raise UserError(
                f"{store.path}: split {split.name} holds no documents; prepare more text or a larger share"
            )
    data_shape = data_shape_of(store)
    corruption = Corruption(
        config.corruption, config.train.seed, data_shape.vocab_size, config.objective.text_weighting,
        row_multiple=config.speed.chunk_rows if runtime.compile else 1,
    )  # fmt: skip
    denoiser = Denoiser(config.model, data_shape)
    counts = store.token_counts(config.data.train_split) if config.model.unigram_init else None
    init_weights(denoiser, config.train.seed, counts)
    denoiser.attention = runtime.attention
    denoiser.recompute_blocks = config.speed.activation_checkpointing == "block"
    denoiser.to(runtime.device)
    if runtime.compile:
        compile_blocks(denoiser)
    active = Active.of(config.corruption, config.objective, length_modelled=config.model.length == "modelled")
    return Setup(
        config=config,
        runtime=runtime,
        store=store,
        train_split=train_split,
        valid_split=valid_split,
        shape=_step_shape(config, store, train_split, data_shape),
        data_shape=data_shape,
        corruption=corruption,
        objective=Objective(
            config.objective,
            corruption.latent,
            active,
            config.speed.scored_rows,
            config.speed.chunk_rows,
            runtime.compile,
        ),
        order=Order(len(train_split), config.train.seed),
        denoiser=denoiser,
    )


def compile_blocks(denoiser: Denoiser) -> None:
    """One graph per block without breaks; all blocks share it."""
    for block in denoiser.blocks:
        block.compile(fullgraph=True, dynamic=False)


def data_shape_of(store: PairStore) -> DataShape:
    """What the data says about the ends of the network."""
    manifest = store.manifest
    longest = max(split["max_length"] for split in manifest.splits.values())
    return DataShape(manifest.vocab_size, manifest.num_slots, manifest.num_channels, longest)


def _step_shape(config: Config, store: PairStore, split: Split, data_shape: DataShape) -> StepShape:
    described = store.manifest.splits[split.name]
    return plan_shape(
        config.batch,
        mean_length=described["num_tokens"] / described["num_documents"],
        max_length=data_shape.max_length,
        num_slots=data_shape.num_slots,
        layout=config.speed.layout,
    )
