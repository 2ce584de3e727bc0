"""One optimizer update: what it trains, forward and backward over the micro-batches, clip, step, average.

What gets no loss in a stage of the modes gets no update at all: no gradient step, no weight decay, no momentum, and its
average stays as it is.

With `objective.balance=gradient_norm`, now and then the norms of the gradients of text and latent on what they share
are measured first: two more passes over the step's documents, one for each loss. They run beside recorded graphs and
DDP, and touch no gradient that the step itself collects. Summed over micro-batches and ranks before the norm is taken,
the result is that of the step however it was cut up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mmldlm.config import Config, OptimConfig
from mmldlm.corruption.times import Stage, mode_weights_at, stage_at
from mmldlm.data.loader import StepBatch, StepRange
from mmldlm.distributed.replicas import Replicas
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import other_rows, parameter_groups, part_of, unused_parameters
from mmldlm.objective.joint import Active, GradientNorm, LossTerms, Objective, add_terms, norms_of_shared
from mmldlm.runtime import Runtime, empty_cache
from mmldlm.training.graphs import Graphs
from mmldlm.training.optim import Ema, Optimizers
from mmldlm.types import MicroBatch

if TYPE_CHECKING:  # FSDP2 and Triton are loaded where they are needed
    from mmldlm.distributed.shards import Shards
    from mmldlm.training.fused_update import FusedUpdate

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The losses that exist and the parameters that are updated."""

    active: Active
    names: frozenset[str]
    still: dict[str, slice] = field(default_factory=dict)
    """Parameter -> rows of it that no loss depends on."""


def trained_in(stage: Stage, config: Config, denoiser: Denoiser) -> Trained:
    """What a stage trains: all that its losses depend on, but for the parts that the settings freeze."""
    modelled = denoiser.length_head is not None
    active = Active.of_modes(stage.modes, config.objective, length_modelled=modelled)
    unused = unused_parameters(denoiser, text=active.text, latent=active.latent, length=active.length)
    frozen = {*stage.frozen, *config.train.frozen}
    names = frozenset(
        name
        for name, _ in denoiser.named_parameters()
        if name not in unused.names and part_of(name) not in frozen
    )
    return Trained(active, names, {name: rows for name, rows in unused.rows.items() if name in names})


class ModeStages:
    """Follows the stages of a run; the number of the current one is kept in checkpoints."""

    def __init__(self, config: Config, denoiser: Denoiser, record: Callable[..., None]) -> None:
        self.config, self.denoiser, self.record = config, denoiser, record
        self.number = 0
        self._known: dict[tuple[frozenset[str], tuple[str, ...]], Trained] = {}

    def trained_at(self, where: StepRange, epoch: float) -> Trained:
        """What a step trains, which begins after so many passes over the documents. A new stage is reported.

        Asked at every step, because a resume or a rollback may lead into any stage.
        """
        stage = stage_at(self.config.corruption, where.step, epoch)
        key = (stage.modes, stage.frozen)
        if key not in self._known:
            self._known[key] = trained_in(stage, self.config, self.denoiser)
        if stage.number != self.number:
            self.number = stage.number
            self._report(where, epoch, stage, self._known[key])
        return self._known[key]

    def fields(self) -> dict[str, int]:
        """For a line of the log, where there are stages."""
        return {"mode_stage": self.number} if self.config.corruption.mode_schedule else {}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"stage": self.number}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self.number = state["stage"]

    def _report(self, where: StepRange, epoch: float, stage: Stage, trained: Trained) -> None:
        weights = vars(mode_weights_at(self.config.corruption, where.step, epoch))
        losses = [name for name, active in vars(trained.active).items() if active]
        frozen = sorted({*stage.frozen, *self.config.train.frozen})
        log.info(
            "step %d: stage %d of the modes: %s, losses %s, frozen %s", where.step, stage.number,
            ", ".join(f"{mode} {weight:g}" for mode, weight in weights.items()), ", ".join(losses),
            ", ".join(frozen) or "none",
        )  # fmt: skip
        self.record(
            "modes", step=where.step, stage=stage.number, mode_weights=weights, losses=losses, frozen=frozen,
            trained_parameters=len(trained.names),
        )  # fmt: skip


PerParameter = list[Tensor | None]
"""A tensor for each parameter that a loss reaches."""


@dataclass
class StepResult:
    """What a step did; tensors stay on the device until somebody logs them."""

    terms: LossTerms
    grad_norm: Tensor
    skipped: Tensor
    """1 where the gradient was not finite and nothing was updated."""


@dataclass
class Stepper:
    """Everything one update touches."""

    denoiser: Denoiser
    objective: Objective
    optimizers: Optimizers
    ema: Ema | None
    scaler: torch.amp.GradScaler
    runtime: Runtime
    config: OptimConfig
    graphs: Graphs | None = None
    """Recorded micro-batches, where launching them one kernel at a time takes too long."""
    replicas: Replicas | None = None
    """The denoiser on several ranks, whole on each."""
    shards: Shards | None = None
    """The denoiser divided among ranks."""
    fused_update: FusedUpdate | None = None
    """AdamW and the average in one pass, where the device has it."""
    balance: GradientNorm | None = None
    """What scales the parts of the loss besides their weights."""
    _norms: Tensor | None = None
    """Of the gradients of text and latent, where this step measured them."""
    trained: Trained | None = None
    """What is updated at present; None: everything."""

    @property
    def joined(self) -> Replicas | Shards | None:
        """What runs the passes of a step together with other ranks."""
        return self.replicas or self.shards

    @property
    def active(self) -> Active:
        """The losses that exist at present."""
        return self.objective.active if self.trained is None else self.trained.active

    def train_only(self, trained: Trained) -> bool:
        """From now on only these losses exist, and nothing else gets an update of any kind; true if that is new."""
        if self.trained == trained:
            return False
        if self.replicas is not None:
            self.replicas.reset()
        self.forget()
        self.trained = trained
        others = {name: other_rows(rows) for name, rows in trained.still.items()}
        if self.shards is not None:
            self.shards.train_only(trained.names)
            still = {
                self.shards.held[name]: self.shards.rows(name, rows) for name, rows in trained.still.items()
            }
            others = {name: self.shards.rows(name, rows) for name, rows in others.items()}
        else:
            parameters = dict(self.denoiser.named_parameters())
            for name, parameter in parameters.items():
                parameter.requires_grad_(name in trained.names)
                parameter.grad = None
            still = {parameters[name]: rows for name, rows in trained.still.items()}
        self.optimizers.still = still
        if self.ema is not None:
            self.ema.follow(trained.names, others)
        return True

    def gradients(self, batch: StepBatch) -> LossTerms:
        """Forward and backward over a step's documents, which are on the device; nothing but gradients changes."""
        self._norms = None
        if self.balance is not None and self.balance.due(batch.where.step) and self._has_both(batch):
            norms_of = self._norms_of if self.shards is None else partial(self._norms_of_shards, self.shards)
            self._norms = norms_of_shared(norms_of(batch, "text"), norms_of(batch, "latent"))
        if self.replicas is not None and self.graphs is not None:
            first = batch.micro_batches[0]
            return self.replicas.run_apart(
                partial(self._own_gradients, batch), lambda: self.pass_over(first.open())
            )
        if (joined := self.joined) is not None:
            return self._gradients_of_all(joined, batch)
        return self._own_gradients(batch)

    def _own_gradients(self, batch: StepBatch) -> LossTerms:
        """Of this rank's documents, by this rank alone."""
        single = len(batch.micro_batches) == 1 and self.replicas is None and self._update_recordable
        if self.graphs is not None and self.graphs.fresh and not single:
            self.graphs = Graphs(fresh=False, broken=self.graphs.broken)
        terms: LossTerms | None = None
        for parcel in batch.micro_batches:
            part = self.graphs(parcel, self._recorded_pass) if self.graphs else self.pass_over(parcel.open())
            terms = add_terms(terms, part)
        assert terms is not None
        return terms

    def _gradients_of_all(self, joined: Replicas | Shards, batch: StepBatch) -> LossTerms:
        """On several ranks; the terms are of this rank's documents, the gradients of all."""
        parts = joined.run([partial(self.pass_over, parcel.open()) for parcel in batch.micro_batches])
        return reduce(add_terms, parts[1:], add_terms(None, parts[0]))

    def update(self, terms: LossTerms, lr: float, step: int) -> StepResult:
        """Use up the gradients, whose loss was `terms`. What fails here cannot be done again."""
        self.optimizers.set_lr(lr)
        if self.ema is not None:
            self.ema.set_step(step + 1)
        if self.graphs is not None and self._update_recordable:
            grad_norm, skipped = self.graphs.update(self._update)
        else:
            grad_norm, skipped = self._update()
        if not self._keeps_gradients:
            self.optimizers.zero_grad(set_to_none=True)
        if self.balance is not None and self._norms is not None:
            self.balance.settle(self._norms, step)
        return StepResult(terms, grad_norm, skipped)

    @property
    def _update_recordable(self) -> bool:
        return self.optimizers.recordable and not self.scaler.is_enabled()

    @property
    def _keeps_gradients(self) -> bool:
        """Whether gradients stay where they are: in the buckets of DDP, or where recordings add to them."""
        recorded = self.graphs is not None and not self.graphs.broken and not self.graphs.fresh
        return recorded or self.replicas is not None

    def _recorded_pass(self, micro_batch: MicroBatch) -> LossTerms:
        """As `pass_over`. Where gradients are written, not added, those that a failed recording left are dropped."""
        if self.graphs is not None and self.graphs.fresh:
            self.optimizers.zero_grad(set_to_none=True)
        return self.pass_over(micro_batch)

    def pass_over(self, micro_batch: MicroBatch) -> LossTerms:
        """Forward and backward; adds to the gradients."""
        with self.runtime.autocast():
            terms = self._terms(micro_batch)
        self.scaler.scale(terms.trained).backward()
        return terms.detached()

    def _terms(self, micro_batch: MicroBatch) -> LossTerms:
        def compute(denoiser: Denoiser) -> dict[str, Tensor]:
            terms = self.objective(
                denoiser, micro_batch.noisy, micro_batch.counts, active=self.active, balance=self.balance
            )
            return vars(terms)

        return LossTerms(**(compute(self.denoiser) if self.joined is None else self.joined(compute)))

    def record(self, yes: bool) -> None:
        """Record micro-batches from now on, or run them kernel by kernel."""
        self.graphs = Graphs() if yes else None
        self.optimizers.zero_grad(set_to_none=True)

    def run_eagerly(self) -> None:
        """Undo compilation, after the compiler failed."""
        for block in self.denoiser.blocks:
            # Module.compile has no public way back; torch.compiler.set_stance would hold for the whole process
            block._compiled_call_impl = None
            vars(block).pop("forward", None)
        self.forget()

    def forget(self) -> None:
        """Drop the gradients of a step that failed half-way, and the memory that it took."""
        if self.graphs is not None:
            self.graphs = Graphs()
        self.optimizers.zero_grad(set_to_none=True)
        empty_cache(self.runtime.device)

    def _update(self) -> tuple[Tensor, Tensor]:
        """Clip and step. A gradient that is not finite changes nothing: not the weights, not the moments."""
        self.optimizers.unscale(self.scaler)
        grad_norm = self._grad_norm()
        skipped = (~torch.isfinite(grad_norm)).float()
        shrink = self._shrink(grad_norm)
        fused = None if self.optimizers.still or self.scaler.is_enabled() else self.fused_update
        averaged = fused is not None and fused(skipped, shrink)
        if not averaged:
            self.optimizers.step(self.scaler, skipped, shrink)
        if fused is not None and not averaged:
            # the moments are there now; the next update may be a recording, which makes no tables
            fused.prepare(skipped, shrink)
        if self._keeps_gradients:
            self.optimizers.zero_grad(set_to_none=False)
        if self.ema is not None and not averaged:
            self.ema.update(skipped)
        return grad_norm, skipped

    def _grad_norm(self) -> Tensor:
        gradients = self.optimizers.gradients()
        if self.shards is None:
            return torch.nn.utils.get_total_norm(gradients)
        return torch.nn.utils.get_total_norm([self.shards.norms(gradients)])

    def _shrink(self, grad_norm: Tensor) -> Tensor | None:
        """What the gradients are to be multiplied with so that their norm is within bounds."""
        if self.config.clip_norm <= 0:
            return None
        return (self.config.clip_norm / (grad_norm + 1e-6)).clamp(max=1.0)

    def _has_both(self, batch: StepBatch) -> bool:
        """Whether both losses of a step reach something that they share; without that there is nothing to compare."""
        active, counts = self.active, batch.counts
        present = active.text and active.latent and float(counts.tokens) > 0 and float(counts.slots) > 0
        return present and bool(self._trunk())

    def _norms_of(self, batch: StepBatch, part: str) -> PerParameter:
        """For each parameter of the trunk, the norm of the step's gradient of one loss; None where it reaches none."""
        weights = dict(self.denoiser.named_parameters())
        parameters = [weights[name] for name in self._trunk()]
        reached: list[bool] = []

        def flat() -> Tensor:
            gradients = self._gradients_of(part, batch, parameters)
            reached[:] = [gradient is not None for gradient in gradients]
            return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

        summed = flat() if self.replicas is None else self.replicas.summed(flat)
        sizes = [parameter.numel() for parameter, here in zip(parameters, reached, strict=True) if here]
        norms = iter(torch._foreach_norm(summed.split(sizes)))
        return [next(norms) if here else None for here in reached]

    def _norms_of_shards(self, shards: Shards, batch: StepBatch, part: str) -> PerParameter:
        """The same where each rank holds some rows: FSDP2 sums gradients only in a backward pass."""
        active = Active(text=part == "text", latent=part == "latent", length=False)

        def one_pass(micro_batch: MicroBatch) -> None:
            with self.runtime.autocast():
                terms = shards(lambda denoiser: vars(self.objective(
                    denoiser, micro_batch.noisy, micro_batch.counts, active=active
                )))  # fmt: skip
            self.scaler.scale(terms[part]).backward()

        shards.run([partial(one_pass, parcel.open()) for parcel in batch.micro_batches], part)
        gradients = [shards.held[name].grad for name in self._trunk()]
        norms = shards.norms(gradients).unbind()
        self.optimizers.zero_grad(set_to_none=True)
        return [None if gradient is None else norm for gradient, norm in zip(gradients, norms, strict=True)]

    def _trunk(self) -> list[str]:
        """All trained parameters but those of the heads, which have one loss each."""
        groups = [group for group in parameter_groups(self.denoiser) if not group.part.endswith("_head")]
        return [name for group in groups for name, p in group.parameters.items() if p.requires_grad]

    def _gradients_of(self, part: str, batch: StepBatch, parameters: list[nn.Parameter]) -> PerParameter:
        """Of this rank's documents. A common scale does not matter, so that of fp16 stays inside."""
        active = Active(text=part == "text", latent=part == "latent", length=False)
        total: PerParameter = [None] * len(parameters)
        for parcel in batch.micro_batches:
            micro_batch = parcel.open()
            with self.runtime.autocast():
                terms = self.objective(self.denoiser, micro_batch.noisy, micro_batch.counts, active=active)
            loss = self.scaler.scale(getattr(terms, part))
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            total = [_sum(*pair) for pair in zip(total, gradients, strict=True)]
        return total


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more


class BalanceState:
    """The balance as a part of a run: its buffers, and when it was measured last."""

    def __init__(self, balance: GradientNorm) -> None:
        self.balance = balance

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {**self.balance.state_dict(), "last": self.balance.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.balance.load_state_dict({key: value for key, value in state.items() if key != "last"})
        self.balance.last = state["last"]
