"""A run put together from its settings and its store: model, data, optimizer; how far it is, and its documents."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from mmldlm.config import Config, resolve_model
from mmldlm.corruption.joint import Corruption
from mmldlm.corruption.times import stage_at
from mmldlm.data.loader import (
    POLL_SECONDS,
    Feed,
    LoaderError,
    Restarts,
    StepBatch,
    StepRange,
    StepReader,
    WatchedSteps,
    make_loader,
    plan_steps,
)
from mmldlm.data.packing import BatchPlan, Lengths, Order, StepShape, plan_batches
from mmldlm.data.store import PairStore, Split
from mmldlm.distributed.ranks import Ranks
from mmldlm.distributed.replicas import Replicas
from mmldlm.errors import UserError
from mmldlm.model.attention import candidates, measure_attention, remembered_attention
from mmldlm.model.denoiser import DataShape, Denoiser, recomputed_blocks, step_flops
from mmldlm.model.fp8 import find_problem, fits
from mmldlm.model.layers import Kernels, Stream
from mmldlm.model.weights import init_weights
from mmldlm.objective.joint import Active, Objective, build_balance
from mmldlm.runtime import DTYPES, Runtime, kernels_run_on, peak_flops
from mmldlm.trackers import check_trackers
from mmldlm.training.graphs import Graphs
from mmldlm.training.optim import Ema, Optimizers, build_optimizers
from mmldlm.training.signals import AskedToStopError, StopFlag, StopWaiting
from mmldlm.training.start import Beside, StartClock, import_ahead, rehearse
from mmldlm.training.step import Stepper, trained_in
from mmldlm.types import Counts, MicroBatch, When

if TYPE_CHECKING:  # FSDP2 and Triton are loaded where they are needed
    from mmldlm.distributed.shards import Shards
    from mmldlm.training.fused_update import FusedUpdate

log = logging.getLogger(__name__)
Fields = dict[str, Any]


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
    beside: list[Beside] = field(default_factory=list)
    """What is done while the run starts, to save time."""

    def settle(self) -> None:
        """Wait for what is done beside: before processes are forked, and before the first step uses the device."""
        while self.beside:
            self.beside.pop().wait_or_ignore()

    @property
    def sharded(self) -> bool:
        """Whether the network is divided among ranks; not in a trial without a group of ranks."""
        return is_sharded(self.config, self.ranks)

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
        return StepReader(
            self.store, self.train_split, self.order, plan or self.plan, self.corruption.corrupt, self.count,
            with_rows=self.needs_rows, rank=self.ranks.rank, world_size=self.ranks.world_size,
        )  # fmt: skip

    @property
    def needs_rows(self) -> bool:
        """Whether attention puts documents into padded rows; `sdpa` takes those of equal length as they are."""
        attention = self.denoiser.kernels.attention
        return attention == "rows" or (attention == "sdpa" and not self.lengths.equal)

    def count(
        self, positions: np.ndarray, lengths: np.ndarray, when: When, derived: np.ndarray | None = None
    ) -> Counts:
        """What the loss of a step with these documents is divided by."""
        no_keys = np.zeros(len(positions), dtype=np.uint64)
        times = self.corruption.times(positions, no_keys, when, derived)
        return self.corruption.count(lengths, times, self.data_shape.num_slots)

    def stepper(self) -> Stepper:
        """Optimizer, average and scaler for the denoiser, which must be on its device."""
        config, device = self.config, self.runtime.device
        joined, graphs = self.ranks.joined, config.speed.cuda_graphs and device.type == "cuda"
        if self.sharded and graphs:
            log.warning("speed.cuda_graphs: off, weights that are gathered for each block are not recorded")
        shards = self._shards() if self.sharded else None
        held = None if shards is None else shards.held
        optimizers = build_optimizers(
            self.denoiser, config.optim, fused=config.speed.fused_optimizer, shards=shards
        )
        ema = Ema(self.denoiser, config.optim.ema_decay, held) if config.optim.ema_decay > 0 else None
        losses = self.objective.active
        balance = build_balance(config.objective, text=losses.text, latent=losses.latent)
        stepper = Stepper(
            denoiser=self.denoiser,
            objective=self.objective,
            optimizers=optimizers,
            ema=ema,
            scaler=self._scaler(),
            runtime=self.runtime,
            config=config.optim,
            graphs=Graphs() if graphs and shards is None else None,
            replicas=Replicas(self.denoiser, self.ranks, config.distributed)
            if joined and shards is None
            else None,
            shards=shards,
            fused_update=None if shards is not None else self._fused_update(optimizers, ema),
            balance=None if balance is None else balance.to(device),
        )
        stepper.train_only(trained_in(stage_at(config.corruption, 0), config, self.denoiser))
        return stepper

    def _fused_update(self, optimizers: Optimizers, ema: Ema | None) -> FusedUpdate | None:
        """Where Triton's kernels run, and AdamW has all weights."""
        if not (
            self.runtime.device.type == "cuda"
            and len(optimizers.parts) == 1
            and self.runtime.fused
            and self.config.speed.fused_optimizer
        ):
            return None
        from mmldlm.training.fused_update import FusedUpdate

        return FusedUpdate(optimizers.parts[0], ema)

    def _shards(self) -> Shards:
        from mmldlm.distributed.shards import Shards

        precision = DTYPES[self.runtime.precision]
        return Shards(self.denoiser, self.denoiser.blocks, self.ranks, self.config.distributed, precision)

    def _scaler(self) -> torch.amp.GradScaler:
        """For fp16; where ranks hold different rows, they agree whether all gradients are finite."""
        device, enabled = self.runtime.device.type, self.runtime.precision == "fp16"
        if not self.sharded or not enabled:
            return torch.amp.GradScaler(device, enabled=enabled)
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device)


def is_sharded(config: Config, ranks: Ranks) -> bool:
    """Whether a run divides its network among ranks."""
    return config.distributed.parallel != "ddp" and ranks.joined


def set_up(
    config: Config, runtime: Runtime, ranks: Ranks | None = None, clock: StartClock | None = None
) -> Setup:
    """Open the store and build the model with its first weights, on the device.

    `clock` is told of the parts of a run that starts at once; then what its first step loads is loaded beside the rest.
    """
    parts = clock or StartClock()
    imports = import_ahead(config.train, runtime)
    check_trackers(config.train.trackers)
    store = PairStore.open(config.data.store)
    train_split, valid_split = _open_splits(config, store)
    ranks = ranks or Ranks()
    ranks.compare(
        "data",
        {
            "content of data.store": store.content,
            "precision": runtime.precision,
            "device": runtime.device.type,
        },
    )
    data_shape = store.shape
    parts.done("data")
    corruption = Corruption(
        config.corruption, vocab_size=data_shape.vocab_size, seed=config.train.seed,
        row_multiple=config.speed.chunk_rows if runtime.constant_shapes else 1, derived_share=train_split.derived_share,
    )  # fmt: skip
    sharded = is_sharded(config, ranks)
    _require_memory(config, data_shape, ranks.local_world_size if sharded else 1)
    denoiser = Denoiser(config.model, data_shape, seed=None)
    counts = store.token_counts(config.data.train_split) if config.model.unigram_init else None
    weights = Beside("weights", partial(init_weights, denoiser, config.train.seed, counts))
    objective = Objective(
        config.objective, corruption, length_modelled=denoiser.length_head is not None,
        scored_rows=config.speed.scored_rows, chunk_rows=config.speed.chunk_rows, fused=runtime.fused,
    )  # fmt: skip
    setup = Setup(
        config=config, runtime=runtime, store=store, train_split=train_split, valid_split=valid_split,
        lengths=Lengths.of(train_split.lengths, data_shape.max_length), data_shape=data_shape, corruption=corruption,
        objective=objective, order=Order(len(train_split), config.train.seed), denoiser=denoiser, ranks=ranks,
        beside=[imports],
    )  # fmt: skip
    setup.plan  # noqa: B018  sizes that do not fit the data are rejected here
    choose_kernels(setup, may_rehearse=clock is not None)
    parts.done("attention")
    weights.wait()
    if not sharded:  # else block by block, when each rank takes its rows
        denoiser.to(runtime.device)
    parts.done("model")
    if runtime.compile:
        imports.wait()
        compile_blocks(denoiser, sharded=sharded, rows_vary=config.speed.scored_rows)
        parts.done("compiler")
    return setup


def _open_splits(config: Config, store: PairStore) -> tuple[Split, Split]:
    """What is trained on and what is validated on; neither may be empty."""
    splits = store.split(config.data.train_split), store.split(config.data.valid_split)
    for split in splits:
        if len(split) == 0:
            raise UserError(
                f"{store.path}: split {split.name} holds no documents; prepare more text or a larger share"
            )
    return splits


def _require_memory(config: Config, shape: DataShape, copies: int) -> None:
    """Reject a network whose weights alone exceed the memory of this machine, before any of it is allocated.

    Ranks that divide it each begin with a copy in host memory.
    """
    model = resolve_model(config.model)
    inner = model.num_heads * model.head_width
    blocks = sum(
        width * (4 * inner + 2 * int(width * model.mlp_ratio) + 6 * model.time_width)
        for width in (model.width, model.latent_width)
    )
    needed = copies * 4 * (model.depth * blocks + 2 * shape.vocab_size * model.width)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UserError(
            f"model.depth={model.depth}, model.width={model.width}, model.latent_width={model.latent_width}: "
            f"the weights need {needed / 2**30:,.0f} GiB, this machine has {memory / 2**30:,.0f}; choose smaller ones"
        )


def choose_kernels(setup: Setup, *, may_rehearse: bool = False) -> None:
    """Tell the denoiser which of several equal ways to compute; the fastest attention is measured if need be."""
    config, runtime, denoiser = setup.config.speed, setup.runtime, setup.denoiser
    kind, depth = config.activation_checkpointing, denoiser.config.depth
    share = {"block": 0.0, "budget": config.activation_budget}.get(kind, 1.0)
    denoiser.recomputed = recomputed_blocks(depth, share)
    keep = "products" if kind == "selective" else "all"
    denoiser.kernels = Kernels(runtime.attention, runtime.fused, DTYPES[config.residual], keep)
    if runtime.precision == "fp8":
        _choose_fp8(setup)
    eager = runtime.device.type == "cuda" and runtime.fused and not runtime.compile
    rehearsed = may_rehearse and eager and not setup.sharded
    if runtime.attention == "auto" or rehearsed:
        _choose_attention(setup, rehearsed)


def _choose_attention(setup: Setup, rehearsed: bool) -> None:
    """The fastest attention for the first micro-batch, which is rehearsed meanwhile with one that needs no compiler."""
    model, runtime, denoiser = setup.denoiser.config, setup.runtime, setup.denoiser
    batch = _first_micro_batch(setup)
    layout, chosen = batch.noisy.layout, None if runtime.attention == "auto" else runtime.attention
    kernels = kernels_run_on(runtime.device)
    names = candidates(layout, model.head_width, kernels=kernels, fused=runtime.fused)
    problem = (layout, model.num_heads, model.head_width, DTYPES[runtime.precision], names)
    chosen = chosen or remembered_attention(*problem)
    if rehearsed:
        rehearsal = denoiser.kernels._replace(attention=chosen or "varlen")
        parts = (setup.config.model, setup.data_shape, rehearsal, setup.objective, setup.runtime, batch)
        setup.beside.append(Beside("rehearsal", partial(rehearse, *parts)))
    chosen = chosen or measure_attention(*problem, setup.settle)
    denoiser.kernels = denoiser.kernels._replace(attention=setup.ranks.from_main(chosen))


def _choose_fp8(setup: Setup) -> None:
    """Products in fp8; in bf16, with a line in the log, where a try on the device fails or a matrix does not fit."""
    products = next(part for part in setup.denoiser.modules() if isinstance(part, Stream)).products()
    unfit = [linear for linear in products if not fits(linear)]
    reason = find_problem(setup.runtime.device)
    if unfit:
        sides = ", ".join(f"{linear.in_features} x {linear.out_features}" for linear in unfit)
        log.warning("speed.precision=fp8: bf16 is used for %s, whose sides are no multiples of 16", sides)
    if reason is not None:
        log.warning("speed.precision=fp8: does not work on this device, bf16 is used: %s", reason)
    if reason is not None or len(unfit) == len(products):
        setup.runtime = replace(setup.runtime, precision="bf16")
    else:
        setup.denoiser.kernels = setup.denoiser.kernels._replace(fp8=True)


def _first_micro_batch(setup: Setup) -> MicroBatch:
    """Of the shape that stays, on the device."""
    first = next(plan_steps(setup.order, setup.train_split.lengths, setup.shape, 0))
    reader = replace(setup.reader(), plan=setup.shape)
    parcel = reader.make(first).micro_batches[0]
    return parcel.with_buffer(parcel.buffer.to(setup.runtime.device)).open()


def compile_blocks(denoiser: Denoiser, *, sharded: bool = False, rows_vary: bool = False) -> None:
    """One graph per block without breaks; all blocks share it. What FSDP2 does around a block is not compiled.

    `rows_vary`: the last block ends with the scored rows, whose number would ask for a graph of its own each time; it
    is not compiled.
    """
    # a shape for each stage of the batch and each size of micro-batch
    torch.compiler.config.recompile_limit = 64
    for block in list(denoiser.blocks)[: -1 if rows_vary else None]:
        if sharded:
            block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
        else:
            block.compile(fullgraph=True, dynamic=False)


def launch_key(setup: Setup) -> str:
    """What the time of launching a step depends on: the GPU, PyTorch, and all settings of the computation."""
    config = setup.config
    parts = (
        setup.denoiser.config,
        setup.data_shape,
        setup.plan,
        config.optim,
        config.speed,
        config.objective,
    )
    digest = hashlib.sha256(repr((parts, setup.runtime)).encode()).hexdigest()[:16]
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {digest}"


class Reporter(Protocol):
    """Whoever shows the run to people."""

    def start(self, step: int, num_steps: int) -> None:
        """The run begins, or resumes, at a step."""
        ...

    def update(self, step: int, fields: Fields) -> None:
        """A line was logged."""
        ...


@dataclass
class Hooks:
    """Validation and decoding of samples, on the averaged weights; and whoever shows the run."""

    validate: Callable[[Denoiser], Fields]
    decode: Callable[[Denoiser, int], list[Fields]]
    reporter: Reporter
    leave: Callable[[int], Any] = os._exit
    """Ends the process at once with an exit code, when a step hangs and `train.step_timeout_action` is exit."""


@dataclass
class Progress:
    """How far a run is. Kept in checkpoints."""

    step: int = 0
    position: int = 0
    """In the order of documents."""
    tokens: int = 0
    documents: int = 0
    validated: list[Any] | None = None
    """Step and loss of the last validation."""

    def advance(self, batch: StepBatch) -> None:
        """A step was done."""
        self.step += 1
        self.position = batch.where.end
        self.tokens += batch.num_tokens
        self.documents += batch.num_documents

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in ({"validated": None} | dict(state)).items():
            setattr(self, name, value)


class Batches(Iterator["StepBatch | UserError"]):
    """Endless. Where data cannot be had, the error comes in its place: ranks have to agree before one of them stops.

    The loader is started at the first step, and again after `restart`, or when its processes died or hung, which
    `record` writes into the ledger.
    """

    def __init__(self, setup: Setup, stop: StopFlag, record: Callable[..., None]) -> None:
        self.setup, self.stop, self.record = setup, stop, record
        self.restarts = Restarts(setup.config.data.worker_restarts)
        self.watched: WatchedSteps | None = None
        """The loader at work."""
        self._feed: Feed | None = None
        self._plan = setup.plan
        self._step = self._position = 0

    def restart(self, step: int, position: int, plan: BatchPlan) -> None:
        """Continue at a step with the document at a position, cut into micro-batches as the plan says."""
        self.close()
        self._step, self._position, self._plan = step, position, plan

    def __next__(self) -> StepBatch | UserError:
        while True:
            try:
                self._feed = self._feed or self._start()
                batch = next(self._feed)
            except UserError as error:
                return error
            except StopWaiting:
                return AskedToStopError("asked to stop while waiting for data")
            except LoaderError as error:
                self.close()
                self.record("loader_failed", step=self._step, reason=str(error))
                if exhausted := self.restarts.failed(error, self._position):
                    return exhausted
                continue
            self.restarts.step_done()
            if isinstance(batch, StepBatch):
                self._step, self._position = batch.where.step + 1, batch.where.end
            return batch

    def close(self) -> None:
        """End the loader's processes; one that is stuck would keep this process from ending."""
        self._feed = None
        if self.watched is not None:
            self.watched.kill()

    def _start(self) -> Feed:
        setup, runtime = self.setup, self.setup.runtime
        setup.settle()
        steps = plan_steps(setup.order, setup.train_split.lengths, self._plan, self._position, self._step)
        reader = setup.reader(self._plan)
        if runtime.num_workers and (free := shared_memory()) is not None and free < _PLENTY:
            first = next(
                plan_steps(setup.order, setup.train_split.lengths, self._plan, self._position, self._step)
            )
            size = sum(part.buffer.nbytes for part in reader.make(first).micro_batches)
            check_shared_memory(free, size, runtime.num_workers, setup.config.data.prefetch)
        loader = make_loader(
            reader, steps, num_workers=runtime.num_workers, prefetch=setup.config.data.prefetch,
            pin_memory=runtime.pin_memory, poll_seconds=POLL_SECONDS,
        )  # fmt: skip
        self.watched = WatchedSteps(loader, setup.config.data.worker_timeout, self.stop.waiting)
        return Feed(self.watched, runtime.device, overlap=setup.config.speed.overlap_copies)

    def make(self, where: Any, plan: BatchPlan) -> StepBatch:
        """One step again, in this process, cut as another plan says."""
        batch = self.setup.reader(plan).make(where)
        pinned = batch.pin_memory() if self.setup.runtime.pin_memory else batch
        return pinned.to(self.setup.runtime.device)


_PLENTY = 2 * 2**30
"""Bytes of shared memory above which nothing is measured."""


def shared_memory() -> int | None:
    """Free bytes where loader processes leave their batches; None where that is not known."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def check_shared_memory(free: int, step: int, num_workers: int, prefetch: int) -> None:
    """Reject loader processes for which there is no room: they would be killed in the middle of the run."""
    needed = step * (num_workers * prefetch + 2)  # two more are being handed over and used
    if needed > free:
        raise UserError(
            f"/dev/shm: {free / 2**20:.0f} MiB are free, loader processes need about {needed / 2**20:.0f} MiB "
            f"(data.num_workers={num_workers}, data.prefetch={prefetch}); start the container with a larger shared "
            f"memory (docker run --shm-size=8g, or --ipc=host), or set data.num_workers=0"
        )
