"""A run put together from its settings and its store: model, data, optimizer, and their shapes."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from mmldlm.checkpoint.export import data_shape_of
from mmldlm.config import Config
from mmldlm.corruption.joint import Corruption
from mmldlm.corruption.times import stage_at
from mmldlm.data.loader import StepBatch, StepRange, StepReader, plan_steps
from mmldlm.data.packing import BatchPlan, Lengths, Order, StepShape, plan_batches
from mmldlm.data.store import PairStore, Split
from mmldlm.distributed.ranks import Ranks
from mmldlm.distributed.replicas import Replicas
from mmldlm.errors import UserError
from mmldlm.model.attention import candidates, choose_attention_for
from mmldlm.model.denoiser import DataShape, Denoiser, recomputed_blocks, step_flops
from mmldlm.model.layers import Kernels
from mmldlm.objective.joint import Active, Objective, build_balance
from mmldlm.runtime import DTYPES, Runtime, kernels_run_on, peak_flops
from mmldlm.trackers import check_trackers
from mmldlm.training.graphs import Graphs
from mmldlm.training.optim import Ema, build_optimizers
from mmldlm.training.start import StartClock, import_ahead
from mmldlm.training.step import Stepper, trained_in
from mmldlm.types import Counts, When, to_device

log = logging.getLogger(__name__)


@dataclass
class Setup:
    """The parts of a run before the first step."""

    config: Config
    runtime: Runtime
    store: PairStore
    train_split: Split
    valid_split: Split
    lengths: Lengths
    data_shape: DataShape
    corruption: Corruption
    objective: Objective
    order: Order
    denoiser: Denoiser
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def plan(self) -> BatchPlan:
        """How the steps of the run are cut into micro-batches."""
        return self.plan_halved(0)

    def plan_halved(self, halvings: int) -> BatchPlan:
        """The same with micro-batches halved so many times, because memory ran out."""
        return plan_batches(
            self.config.batch, self.lengths, world_size=self.ranks.world_size, layout=self.config.speed.layout,
            halvings=halvings,
        )  # fmt: skip

    @property
    def shape(self) -> StepShape:
        """The shape that stays, after all stages."""
        return self.plan.last

    @property
    def peak_flops(self) -> float | None:
        """What the devices of all ranks could do at best, where that is known."""
        one = peak_flops(self.runtime.device, self.runtime.precision)
        return one * self.ranks.world_size if one is not None else None

    def flops_of(self, batch: StepBatch) -> float:
        """Operations that a step needs on this rank: an even share, but for the scored tokens, which are its own."""
        share = self.ranks.world_size
        return step_flops(
            self.denoiser.config, self.data_shape, tokens=batch.num_tokens / share,
            documents=batch.num_documents / share, squares=batch.num_squares / share, scored=batch.num_scored,
            **vars(self.active_at(batch.where)),
        )  # fmt: skip

    def active_at(self, where: StepRange) -> Active:
        """The losses of a step."""
        stage = stage_at(self.config.corruption, where.step, self.order.epoch_of(where.start))
        modelled = self.denoiser.length_head is not None
        return Active.of_modes(stage.modes, self.config.objective, length_modelled=modelled)

    def reader(self, plan: BatchPlan | None = None) -> StepReader:
        """Reads training steps, cut as the plan says."""
        with_rows = self.denoiser.kernels.attention in ("sdpa", "rows")
        return StepReader(
            self.store, self.train_split, self.order, plan or self.plan, self.corruption.corrupt, self.count,
            with_rows=with_rows and not self.lengths.equal, rank=self.ranks.rank, world_size=self.ranks.world_size,
        )  # fmt: skip

    def count(self, positions: np.ndarray, lengths: np.ndarray, when: When) -> Counts:
        """What the loss of a step with these documents is divided by."""
        no_keys = np.zeros(len(positions), dtype=np.uint64)
        return self.corruption.count(
            lengths, self.corruption.times(positions, no_keys, when), self.data_shape.num_slots
        )

    def stepper(self) -> Stepper:
        """Optimizer, average and scaler for the denoiser, which must be on its device."""
        config, device = self.config, self.runtime.device
        several, graphs = self.ranks.several, config.speed.cuda_graphs and device.type == "cuda"
        if several and graphs:
            log.warning("speed.cuda_graphs: off, sums over several ranks are not recorded")
        optimizers = build_optimizers(self.denoiser, config.optim, fused=config.speed.fused_optimizer)
        losses = self.objective.active
        balance = build_balance(config.objective, text=losses.text, latent=losses.latent)
        stepper = Stepper(
            denoiser=self.denoiser,
            objective=self.objective,
            optimizers=optimizers,
            ema=Ema(self.denoiser, config.optim.ema_decay) if config.optim.ema_decay > 0 else None,
            scaler=torch.amp.GradScaler(device.type, enabled=self.runtime.precision == "fp16"),
            runtime=self.runtime,
            config=config.optim,
            graphs=Graphs() if graphs and not several else None,
            replicas=Replicas(self.denoiser, self.ranks, config.distributed) if several else None,
            balance=None if balance is None else balance.to(device),
        )
        stepper.train_only(trained_in(stage_at(config.corruption, 0), config, self.denoiser))
        return stepper


def set_up(
    config: Config, runtime: Runtime, ranks: Ranks | None = None, clock: StartClock | None = None
) -> Setup:
    """Open the store and build the model with its first weights, on the device; `clock` is told of the parts."""
    clock = clock or StartClock()
    import_ahead(runtime)
    check_trackers(config.train.trackers)
    store = PairStore.open(config.data.store)
    train_split = store.split(config.data.train_split)
    valid_split = store.split(config.data.valid_split)
    for split in (train_split, valid_split):
        if len(split) == 0:
            raise UserError(
                f"{store.path}: split {split.name} holds no documents; prepare more text or a larger share"
            )
    ranks = ranks or Ranks()
    ranks.compare(
        "data",
        {
            "content of data.store": store.content,
            "precision": runtime.precision,
            "device": runtime.device.type,
        },
    )
    data_shape = data_shape_of(store)
    clock.done("data")
    corruption = Corruption(
        config.corruption, vocab_size=data_shape.vocab_size, seed=config.train.seed,
        row_multiple=config.speed.chunk_rows if runtime.constant_shapes else 1,
    )  # fmt: skip
    counts = store.token_counts(config.data.train_split) if config.model.unigram_init else None
    denoiser = Denoiser(config.model, data_shape, seed=config.train.seed, token_counts=counts)
    denoiser.to(runtime.device)
    setup = Setup(
        config=config,
        runtime=runtime,
        store=store,
        train_split=train_split,
        valid_split=valid_split,
        lengths=Lengths.of(train_split.lengths, data_shape.max_length),
        data_shape=data_shape,
        corruption=corruption,
        objective=Objective(
            config.objective,
            corruption,
            length_modelled=denoiser.length_head is not None,
            scored_rows=config.speed.scored_rows,
            chunk_rows=config.speed.chunk_rows,
            fused=runtime.fused,
        ),
        order=Order(len(train_split), config.train.seed),
        denoiser=denoiser,
        ranks=ranks,
    )
    clock.done("model")
    setup.plan  # noqa: B018  sizes that do not fit the data are rejected here
    choose_kernels(setup)
    clock.done("attention")
    if runtime.compile:
        compile_blocks(denoiser)
    return setup


def choose_kernels(setup: Setup) -> None:
    """Tell the denoiser which of several equal ways to compute; the fastest attention is measured if need be."""
    config, runtime, denoiser = setup.config.speed, setup.runtime, setup.denoiser
    kind, depth = config.activation_checkpointing, denoiser.config.depth
    share = {"block": 0.0, "budget": config.activation_budget}.get(kind, 1.0)
    denoiser.recomputed = recomputed_blocks(depth, share)
    keep = "products" if kind == "selective" else "all"
    denoiser.kernels = Kernels(runtime.attention, runtime.fused, DTYPES[config.residual], keep)
    if runtime.attention == "auto":
        denoiser.kernels = denoiser.kernels._replace(
            attention=setup.ranks.from_main(_fastest_attention(setup))
        )


def _fastest_attention(setup: Setup) -> str:
    model, runtime = setup.denoiser.config, setup.runtime
    first = next(plan_steps(setup.order, setup.train_split.lengths, setup.shape, 0))
    reader = replace(setup.reader(), plan=setup.shape)
    layout = to_device(reader.make(first).micro_batches[0].open().noisy.layout, runtime.device)
    names = candidates(layout, model.head_width, kernels=kernels_run_on(runtime.device))
    return choose_attention_for(layout, model.num_heads, model.head_width, DTYPES[runtime.precision], names)


def compile_blocks(denoiser: Denoiser) -> None:
    """One graph per block without breaks; all blocks share it."""
    # a shape for each stage of the batch and each size of micro-batch
    torch.compiler.config.recompile_limit = 64
    for block in denoiser.blocks:
        block.compile(fullgraph=True, dynamic=False)
