"""The fresh process of one measurement: `python -m mmldlm.benchmark.worker JOB.json RESULT.json`.

The only file of the benchmark that touches the engine. It drives a real `Trainer` on its real loader, without
checkpoints, and validates only at the end of the loss gate. The device is idle at both ends of every timed block.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmldlm.benchmark.measuring import Block, Job, Measurement, Memory
from mmldlm.config import Config, resolve_model
from mmldlm.config.recipe import load_recipe
from mmldlm.data.store import PairStore
from mmldlm.distributed import shards
from mmldlm.distributed.ranks import Muted
from mmldlm.durable import replace_file
from mmldlm.errors import UserError
from mmldlm.evaluation.validation import make_validation
from mmldlm.json_lines import from_plain
from mmldlm.model.denoiser import step_flops
from mmldlm.run_folder import RunFolder
from mmldlm.runtime import Runtime, peak_flops, start_runtime, synchronize
from mmldlm.training.fit import Trainer
from mmldlm.training.setup import Hooks, Setup, set_up

log = logging.getLogger(__name__)


_SETTLED = 0.05
"""Two blocks whose times differ by no more than this share take the same time."""
_LONGEST_SETTLING = 20.0
"""Seconds."""
_MOST_REPEATS = 2
"""How often the timed blocks are repeated because something was recorded inside them."""


class OverLimitError(MemoryError):
    """The process took more memory than it was given."""


class Drive:
    """A trainer under the clock."""

    def __init__(self, setup: Setup, folder: Path, memory_limit: int | None) -> None:
        self.setup, self.device, self.memory_limit = setup, setup.runtime.device, memory_limit
        self.model = resolve_model(setup.config.model)
        run = RunFolder(folder)
        run.create()
        self.trainer = Trainer(setup, run, Hooks(lambda denoiser: {}, lambda denoiser, step: [], Muted()))

    def close(self) -> None:
        """End the loader and give the folder free."""
        self.trainer.close()

    def block(self, steps: int) -> Block:
        """So many steps, from an idle device to an idle device."""
        done = Block(steps)
        synchronize(self.device)
        began = time.perf_counter()
        for _ in range(steps):
            self._step(done)
        synchronize(self.device)
        done.seconds = time.perf_counter() - began
        return done

    def recordings(self) -> int | None:
        """How many micro-batches and updates are recorded; None while it is not decided whether any will be."""
        graphs = self.trainer.stepper.graphs
        if self.trainer.attempts.watch is not None:
            return None
        # the update after a shape is recorded later than the shape
        return len(graphs.recordings) + len(graphs._updates) if graphs else 0

    def loss(self) -> float | None:
        """One step, and its loss read from the device."""
        self.block(1)
        value = float(self.read()["loss"])
        return value if math.isfinite(value) else None

    def held_out_loss(self) -> float | None:
        """The loss on the validation split with the weights of now, not their average, which is too young."""
        value = make_validation(self.setup)(self.setup.denoiser)["valid_loss"]
        return value if math.isfinite(value) else None

    def read(self) -> dict[str, Any]:
        """What the engine says about the steps since the last call; waits for the device."""
        return self.trainer.window.fields()

    def memory(self) -> Memory:
        """Peaks so far. Replaying a recorded graph allocates nothing, so its peak was taken at the recording."""
        if self.device.type != "cuda":
            return Memory(resident=resident_peak())
        recorded = self.trainer.stepper.graphs.peak if self.trainer.stepper.graphs else 0
        allocated = max(recorded, torch.cuda.max_memory_allocated(self.device))
        return Memory(allocated, torch.cuda.max_memory_reserved(self.device), resident_peak())

    def _step(self, into: Block) -> None:
        began = time.perf_counter()
        batch = next(self.trainer.batches)
        waited = time.perf_counter() - began
        if isinstance(batch, UserError):  # met in a loader process
            raise batch
        self.trainer.train_step(batch, waited)
        into.documents += batch.num_documents
        into.tokens += batch.num_tokens
        into.places += batch.num_places
        into.flops += step_flops(
            self.model, self.setup.data_shape, tokens=batch.num_tokens, documents=batch.num_documents,
            squares=batch.num_squares, scored=batch.num_scored,
        )  # fmt: skip
        self._check_limit()

    def _check_limit(self) -> None:
        """A GPU reports out of memory by itself; on the host the process has to look."""
        if self.memory_limit is None or self.device.type == "cuda":
            return
        taken = resident_peak()
        if taken > self.memory_limit:
            raise OverLimitError(
                f"{taken / 2**30:.2f} GiB resident, the limit is {self.memory_limit / 2**30:.2f} GiB"
            )


@dataclass
class Exchange:
    """A collective of a step."""

    kind: str
    """all-reduce, all-gather or reduce-scatter."""
    payload: Tensor
    """The larger side: the sum, what is gathered, or what is to be scattered."""
    group: Any

    @property
    def sent(self) -> float:
        """Bytes that each rank sends in a ring: all but its own share, and twice for a sum."""
        ranks, passes = dist.get_world_size(self.group), 2 if self.kind == "all-reduce" else 1
        return passes * (ranks - 1) / ranks * self.payload.numel() * self.payload.element_size()

    def repeat(self) -> None:
        """The same once more, on a buffer of its own."""
        if self.kind == "all-reduce":
            dist.all_reduce(self.payload.zero_(), group=self.group)
            return
        part = self.payload.chunk(dist.get_world_size(self.group))[0].clone()
        if self.kind == "all-gather":
            dist.all_gather_into_tensor(self.payload, part, group=self.group)
        else:
            dist.reduce_scatter_tensor(part, self.payload, group=self.group)


class _Done:
    """The handle of an exchange that was left out."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([self.tensor])
        return future


_COLLECTIVES = {
    (dist, "all_reduce"): "all-reduce",
    (shards, "_gather_rows"): "all-gather",
    (shards, "_sum_rows"): "reduce-scatter",
}
"""Where ddp, fsdp, hybrid and agreements take their exchanges from."""


@contextlib.contextmanager
def watch_exchanges(*, leave_out: bool = False) -> Iterator[list[Exchange]]:
    """List the exchanges between ranks; left out, each rank goes on with its own part, to be timed alone."""
    seen: list[Exchange] = []
    before = {(module, name): getattr(module, name) for module, name in _COLLECTIVES}

    def wrap(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            values, group = list(bound.values()), bound.get("group")
            larger = values[1] if kind == "reduce-scatter" else values[0]
            if leave_out:
                _own_part(kind, values, dist.get_rank(group), dist.get_world_size(group))
                return _Done(values[0]) if bound.get("async_op") else None
            seen.append(Exchange(kind, torch.empty_like(larger), group))
            return original(*args, **kwargs)

        return call

    for place, original in before.items():
        setattr(*place, wrap(_COLLECTIVES[place], original))
    try:
        yield seen
    finally:
        for place, original in before.items():
            setattr(*place, original)


def _own_part(kind: str, tensors: list[Tensor], rank: int, ranks: int) -> None:
    """What a rank has without the others; numbers of a size that occurs, so that computing takes its usual time."""
    if kind == "all-gather":
        own = tensors[1].reshape(1, -1).clone()  # it may lie inside of the other
        tensors[0].view(ranks, -1).copy_(own)
    elif kind == "reduce-scatter":
        tensors[0].copy_(tensors[1].view(ranks, -1)[rank].view_as(tensors[0]))


def measure(job: Job) -> Measurement:
    """Set a run up, read the first losses, warm up, then time blocks of steps."""
    began = time.perf_counter()
    config = load_recipe(job.recipe, list(job.settings))
    runtime = start_runtime(config)
    _limit_memory(runtime, job.memory_limit)
    with tempfile.TemporaryDirectory(prefix="mmldlm-benchmark-") as folder, collect_warnings() as warnings:
        config = _with_valid_split(config, warnings if job.gate_steps else [])
        drive = Drive(set_up(config, runtime), Path(folder) / "run", job.memory_limit)
        measured = Measurement(
            str(runtime.device), runtime.precision, drive.setup.denoiser.kernels.attention, runtime.compile,
            set_up_seconds=time.perf_counter() - began, peak_flops=peak_flops(runtime.device, runtime.precision),
            warnings=warnings,
        )  # fmt: skip
        try:
            _run(drive, job, measured)
        finally:
            drive.close()
        measured.memory = drive.memory()
    return measured


def _with_valid_split(config: Config, warnings: list[str]) -> Config:
    """The settings as they are; where the store holds nothing out, training documents stand in, and it is said."""
    data, store = config.data, PairStore.open(config.data.store)
    if data.valid_split in store.manifest.splits:
        return config
    warnings.append(
        f"{store.path} has no split {data.valid_split!r}: the held-out loss of the gate is of training documents"
    )
    return replace(config, data=replace(data, valid_split=data.train_split))


@contextlib.contextmanager
def collect_warnings() -> Iterator[list[str]]:
    """Warnings of the engine while this lasts, each once."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mmldlm")
    logger.addHandler(handler)
    try:
        yield warnings
    finally:
        logger.removeHandler(handler)
        warnings[:] = dict.fromkeys(warnings)


def _run(drive: Drive, job: Job, measured: Measurement) -> None:
    began = time.perf_counter()
    for idx in range(job.gate_steps):
        measured.losses.append(drive.loss())
        if idx == 0:
            measured.first_step_seconds = time.perf_counter() - began
    if job.gate_steps:
        measured.valid_loss = drive.held_out_loss()
    if not job.steps:
        return
    for idx in range(job.warmup):
        seconds = drive.block(1).seconds
        if idx == 0 and not job.gate_steps:
            measured.first_step_seconds = seconds
    measured.warmup_steps = job.warmup + _settle(drive, job.block, measured)
    _time_blocks(drive, job, measured, began)


def _time_blocks(drive: Drive, job: Job, measured: Measurement, began: float) -> None:
    """Time the blocks. Where a rare shape was recorded inside them, they count as warm-up and others are timed."""
    for _ in range(1 + _MOST_REPEATS):
        if measured.recorded:
            measured.warmup_steps += job.steps
        measured.warmup_seconds = time.perf_counter() - began
        drive.read()
        recorded = drive.recordings()
        measured.blocks = [drive.block(steps) for steps in block_sizes(job.steps, job.block)]
        measured.data_wait = float(drive.read()["data_wait"])
        measured.recorded = drive.recordings() != recorded
        if not measured.recorded:
            return


def _settle(drive: Drive, block: int, measured: Measurement) -> int:
    """Go on until two blocks in a row take the same time and nothing more is recorded; returns the steps that took.

    Only on a GPU: elsewhere nothing is recorded, and a host is never that quiet.
    """
    if drive.device.type != "cuda":
        return 0
    before, steps, began = math.inf, 0, time.perf_counter()
    while time.perf_counter() - began < _LONGEST_SETTLING:
        recorded = drive.recordings()
        seconds, steps = drive.block(block).seconds, steps + block
        if (
            recorded is not None
            and drive.recordings() == recorded
            and abs(seconds / before - 1.0) <= _SETTLED
        ):
            return steps
        before = seconds
    measured.warnings.append(f"the time of a step had not settled after {steps} more steps of warm-up")
    return steps


def block_sizes(steps: int, block: int) -> list[int]:
    """Steps in blocks of about the wanted size, equal within one."""
    count = max(1, steps // block)
    return [steps // count + (idx < steps % count) for idx in range(count)]


def resident_peak() -> int:
    """Largest memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _limit_memory(runtime: Runtime, limit: int | None) -> None:
    if limit is None or runtime.device.type != "cuda":
        return
    total = torch.cuda.get_device_properties(runtime.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))


def explain(error: Exception) -> dict[str, str]:
    """What a measurement died of: a kind for the search, a line for people."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, OverLimitError):
        return {"kind": "memory", "reason": f"over the memory limit: {text}"}
    starved = "out of memory" in text or "allocate memory" in text
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and starved
    ):
        return {"kind": "memory", "reason": "out of memory"}
    if isinstance(error, UserError) and text.startswith("out of memory"):
        return {"kind": "memory", "reason": text}
    if isinstance(error, UserError):
        return {"kind": "settings", "reason": str(error)}
    return {"kind": "error", "reason": f"{type(error).__name__}: {text}"}


def main(job_path: Path, result_path: Path) -> None:
    """Measure one job; the result, or the reason why there is none, is the file that is left."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        result = {"measurement": asdict(measure(from_plain(Job, json.loads(job_path.read_text()))))}
    except Exception as error:  # every cause of death is a result
        log.exception("the measurement failed")
        result = {"failure": explain(error)}
    replace_file(result_path, json.dumps(result).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
