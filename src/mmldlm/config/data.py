"""Settings of the data and of the batch."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmldlm.config.fields import number


@dataclass
class DataConfig:
    """Where the pairs come from and how they are read."""

    store: str = ""
    """Folder of the pair store, relative to where the command is run."""
    train_split: str = "train"
    valid_split: str = "validation"
    num_workers: int | None = number(None, 0, 256)
    """Loader processes; null: min(8, CPUs // ranks of the machine) on a GPU, 0 on a CPU, where they would compete with
    the model."""
    prefetch: int = number(4, 1, 64)
    """Steps that each worker prepares ahead."""
    pin_memory: bool | None = None
    """Page-locked host memory for faster copies; null: on with a GPU."""
    worker_timeout: float = number(300.0, 0)
    """Seconds that loader processes may take for a step before they are started anew; 0: as long as they want."""
    worker_restarts: int = number(3, 0)
    """Loader processes that died or hung are started anew so often, unless 100 good steps lie between."""


@dataclass
class BatchStage:
    """The batch of the first part of a run; what is null is as in `batch`."""

    until: int = number(0, 1)
    """The stage covers the steps before this one that no earlier stage covers."""
    tokens_per_step: int | None = number(None, 1)
    documents_per_step: int | None = number(None, 1)
    micro_tokens: int | None = number(None, 1)
    micro_documents: int | None = number(None, 1)


@dataclass
class BatchConfig:
    """What one step trains on: the same documents whatever the number of ranks or micro-batches.

    How many micro-batches a step takes follows from these sizes; gradients are added up over them.
    """

    tokens_per_step: int | None = number(8192, 1)
    """Documents are taken in order until their tokens would exceed this; null: documents_per_step alone decides."""
    documents_per_step: int | None = number(None, 1)
    """At most this many documents a step; null: about as many as fit."""
    micro_tokens: int | None = number(None, 1)
    """Most tokens of a micro-batch on one rank, at least the longest document; null: the whole step at once. More
    micro-batches, same loss."""
    micro_documents: int | None = number(None, 1)
    """Most documents of a micro-batch on one rank; null: as many as its tokens allow."""
    slack: float = number(0.01, 0, 0.5)
    """Room left in a micro-batch, as a share, so that whole documents always fit."""
    schedule: list[BatchStage] = field(default_factory=list)
    """Stages before the sizes above hold, such as [{until: 1000, tokens_per_step: 16384}]."""
    adapt: bool = True
    """When memory runs out, redo the step in micro-batches of half the size, and try the full size again later."""
    grow_after: int = number(1000, 0)
    """Good steps after which a size that was halved is doubled again; 0: never."""
