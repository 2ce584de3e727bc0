"""`engine=ray`: Ray Data reads, cuts, encodes and writes on the workers of a cluster; the store is that of one process.

The jobs run in up to three passes of Ray Data, each with Ray's back-pressure and retries:

1. cut: a job reads a portion of the sources and writes its segments to a file. Their ids and splits come back.
2. derive, if asked for: a job writes what is derived from some of them, and ids come back.
3. encode: a job takes the documents of a shard from those files, encodes them and writes the shard.

This process decides only what depends on the order: duplicates, `limit`, and which shard a document goes to. It holds
some twelve bytes of each document. All else lies on the disk, in a folder that is removed in the end.
"""

from __future__ import annotations

import heapq
import logging
import os
import socket
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from mmldlm import __version__
from mmldlm.data.files import read_json, write_json
from mmldlm.data.format import DERIVED, checksum
from mmldlm.data.writer import Place, StoreWriter
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.cutting import BATCH, SeenIds, cutter, forced_splits, hash63
from mmldlm.preparation.derive import OUTCOMES, num_partners, partner_key
from mmldlm.preparation.ray_jobs import PARTNERS, SPLICEABLE, SPLITS, Cut, Encoder, Jobs, Rows, work
from mmldlm.preparation.sources import Portion, Sources

STORE_BYTES = 512 * 2**20
"""Shared memory of a local Ray, for what is on its way between processes."""
SHARDS_PER_WORKER = 2
"""In the hands of a worker: one is encoded, another is read or written meanwhile."""
ANSWER_SECONDS = 10
"""Within which a cluster takes a connection."""
TRIES = 5
"""Of a job: one whose workers die that often would kill every other too."""
CUT_FOLDER = "cut"
"""In the folder of the store, until that is finished."""


@dataclass(frozen=True)
class RayOptions:
    """Where and how wide the work runs."""

    address: str | None = None
    """Of a cluster that is running: `auto` or HOST:PORT; None: a local one for this run."""
    workers: int | None = None
    """Processes that encode. None: one per GPU of the cluster, without GPUs one per two CPUs."""


class RayEngine:
    """A Ray cluster that does jobs, for as long as the `with` lasts."""

    def __init__(self, options: RayOptions, note: Callable[[str], None]) -> None:
        self._options, self._note, self._leave = options, note, ExitStack()

    def __enter__(self) -> Self:
        self._ray, own = _start(self._options)
        if own:
            self._leave.callback(self._ray.shutdown)
        try:
            self._count, self._resources = self._size()
        except UserError:
            self._leave.close()
            raise
        self._note(f"Ray: {self._count} workers with {_words(self._resources)} each")
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.close()

    def cut(self, jobs: Jobs, method: str, arguments: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The answers of jobs that need one CPU each, in their order."""
        bare = tuple(part if part.rows is None else replace(part, rows=None) for part in jobs.sources)
        jobs = replace(jobs, encoder=None, sources=bare)  # what is large goes with the jobs that need it
        return self._answers(partial(work, jobs), method, arguments, num_cpus=1, max_retries=TRIES - 1)

    def encode(self, jobs: Jobs, arguments: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """The answers of the workers that hold the encoder."""
        from ray.data import ActorPoolStrategy

        names: list[str] = []
        self._leave.callback(self._end_workers, names)

        def named() -> dict[str, str]:
            names.append(f"mmldlm {uuid.uuid4()}")
            return {"name": names[-1]}

        pool = ActorPoolStrategy(size=self._count, max_tasks_in_flight_per_actor=SHARDS_PER_WORKER)
        options = {"compute": pool, "fn_constructor_args": (replace(jobs, sources=()),), **self._resources}
        options |= {"max_concurrency": SHARDS_PER_WORKER, "max_task_retries": TRIES - 1}
        return self._answers(Encoder, "encode", arguments, ray_remote_args_fn=named, **options)

    def _end_workers(self, names: list[str]) -> None:
        """Those that are still there: one that was started again after a failure would hold its CPUs for ever."""
        for name in names:
            with suppress(ValueError):
                self._ray.kill(self._ray.get_actor(name))

    def describe(self, jobs: Jobs, probe: str) -> Any:
        """What a worker says about the encoder."""
        jobs = replace(jobs, sources=())
        options = self._resources | {"max_retries": TRIES - 1}
        return next(self._answers(partial(work, jobs), "describe", [(probe,)], **options))

    def _answers(
        self, function: Any, method: str, arguments: Iterable[tuple[Any, ...]], **options: Any
    ) -> Iterator[Any]:
        from ray import cloudpickle, data

        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what goes wrong is reported here
        rows = [{"job": cloudpickle.dumps((method, job))} for job in arguments]
        if not rows:
            return
        dataset = data.from_items(rows, override_num_blocks=len(rows))
        dataset.context.execution_options.preserve_order = True
        dataset.context.enable_progress_bars = False
        # retries and names of workers have no other way yet; hence the bound in pyproject.toml
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`ray_remote_args(_fn)?` is deprecated")
            mapped = dataset.map(function, **options)
        answers = iter(mapped.iter_rows())
        self._leave.callback(answers.close)  # type: ignore[attr-defined]  # or its workers stay for a while
        try:
            for row in answers:
                if row["error"]:
                    raise UserError(row["error"])
                yield cloudpickle.loads(row["answer"])
        except self._ray.exceptions.RayError as error:
            raise UserError(
                f"a Ray worker cannot work ({first_line(error)}); is mmldlm installed on all nodes?"
            ) from error

    def _size(self) -> tuple[int, dict[str, float]]:
        """How many workers, and what each of them holds."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus, cpus = (sum(int(node.get(kind, 0)) for node in nodes) for kind in ("GPU", "CPU"))
        count = self._options.workers or gpus or max(1, cpus // 2)
        if gpus >= count:
            return count, {"num_gpus": 1, "num_cpus": 1}
        if count > cpus:
            raise UserError(
                f"workers={count}: the cluster has {cpus} CPUs and {gpus} GPUs; use at most {max(cpus, gpus)}"
            )
        shares = range(cpus // count, 0, -1)
        return count, {
            "num_cpus": next(n for n in shares if sum(node.get("CPU", 0) // n for node in nodes) >= count)
        }


def _start(options: RayOptions) -> tuple[Any, bool]:
    """Ray, and whether it was started here; one that this process has joined already is used as it is."""
    if (options.address or "").startswith("ray://"):
        raise UserError(
            f"ray_address={options.address}: Ray Data does not work through the Ray Client; run the command on "
            "a machine of the cluster with ray_address=auto or HOST:PORT"
        )
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray
    except ImportError as error:
        raise UserError("engine=ray: Ray is not installed; run: pip install 'mmldlm[ray]'") from error
    _require_answer(options.address)
    if ray.is_initialized():
        return ray, False
    local: dict[str, Any] = (
        {} if options.address else {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    )
    try:
        ray.init(
            address=options.address or "local", logging_level=logging.ERROR, log_to_driver=False, **local
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UserError(
            f"ray_address={options.address}: no Ray cluster answers ({first_line(error)[:160]}); "
            "start one with 'ray start --head', or leave the address out"
        ) from error
    return ray, True


def _require_answer(address: str | None) -> None:
    """Reject HOST:PORT where nobody listens, for which Ray would wait for minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(
            f"ray_address={address}: no Ray cluster answers ({error}); start one with 'ray start --head', or leave "
            "the address out"
        ) from error


def _words(resources: dict[str, float]) -> str:
    return " and ".join(f"{value:g} {name.removeprefix('num_')}" for name, value in resources.items())


class Lot(NamedTuple):
    """Some documents of a file of segments."""

    file: str
    rows: np.ndarray
    ids: np.ndarray
    codes: np.ndarray

    def pick(self, which: Any) -> Lot:
        """Some of them."""
        return Lot(self.file, self.rows[which], self.ids[which], self.codes[which])

    @classmethod
    def of(cls, file: str, cut: Cut, kept: np.ndarray) -> Lot:
        """Those segments of a file that are kept."""
        return cls(file, np.flatnonzero(kept).astype(np.int32), cut.ids[kept], cut.codes[kept])


class Group:
    """Documents that wait until there are enough of them."""

    def __init__(self, size: int) -> None:
        self.size, self.room = size, size
        self.lots: list[Lot] = []

    def add(self, lot: Lot) -> Iterator[list[Lot]]:
        """Every group that is full with these."""
        while len(lot.rows):
            self.lots.append(lot.pick(slice(self.room)))
            lot = lot.pick(slice(self.room, None))
            self.room -= len(self.lots[-1].rows)
            if not self.room:
                yield self.lots
                self.lots, self.room = [], self.size


@dataclass
class Plan:
    """Which documents the store holds, and where."""

    engine: RayEngine
    jobs: Jobs
    counts: Counter[str] = field(default_factory=Counter)
    seen: SeenIds = field(default_factory=SeenIds)

    def shards(self, size: int) -> Iterator[tuple[str, np.ndarray, list[Rows]]]:
        """(split, ids, documents) of all shards; those of a split come in order."""
        groups = [Group(size) for _ in SPLITS]
        for lot in self._extended() if self.jobs.settings.derive else self._lots():
            for number, (split, group) in enumerate(zip(SPLITS, groups, strict=True)):
                for full in group.add(lot.pick(lot.codes % SPLICEABLE == number)):
                    yield split, *_contents(full)
        for split, group in zip(SPLITS, groups, strict=True):
            if group.lots:
                yield split, *_contents(group.lots)

    def _lots(self) -> Iterator[Lot]:
        """The documents of all sources, in order, without duplicates."""
        jobs, limit = list(self._cut_jobs()), self.jobs.settings.limit
        answers = zip(jobs, self.engine.cut(self.jobs, "cut", jobs), strict=True)
        for number, part in enumerate(self.jobs.sources):
            lots = self._fresh(part, islice(answers, sum(job[1] == number for job in jobs)))
            yield from lots if limit is None or part.split is not None else self._sample(list(lots), limit)

    def _cut_jobs(self) -> Iterator[tuple[str, int, Portion, tuple[str, ...]]]:
        options, name = self.jobs.settings, 0
        for number, part in enumerate(self.jobs.sources):
            forced = forced_splits(options) if part.split is None else ()
            for portion in part.divided():
                cut, documents = cutter(options.cut), part.documents(portion) if forced else ()
                usable = sum(1 for _ in islice((1 for one in documents if cut(one.text or "")), len(forced)))
                yield f"{name:06d}", number, portion, forced[:usable]
                forced, name = forced[usable:], name + 1

    def _fresh(self, part: Sources, answers: Iterable[tuple[Any, Cut]]) -> Iterator[Lot]:
        """What is new of the sources of a split; sources that give nothing are a mistake."""
        before, is_empty = Counter(self.counts), True
        for (file, *_), cut in answers:
            fresh = self.seen.add(cut.ids)
            self.counts.update(cut.counts, duplicates=int((~fresh).sum()))
            is_empty = is_empty and not fresh.any()
            yield Lot.of(file, cut, fresh)
        if is_empty:
            part.raise_empty(self.counts - before)

    def _sample(self, lots: list[Lot], limit: int) -> Iterator[Lot]:
        """The documents whose hashes are smallest, as `Segmenter` samples them."""
        seed, ids = self.jobs.settings.seed, np.concatenate([lot.ids for lot in lots])
        keys = np.fromiter((hash63(f"{seed} {id}") for id in ids.tolist()), np.int64, len(ids))
        chosen = np.zeros(len(ids), bool)
        chosen[np.lexsort((-np.arange(len(ids)), keys))[:limit]] = True
        self.counts["left_by_limit"] += int((~chosen).sum())
        for lot, part in zip(lots, np.split(chosen, np.cumsum([len(lot.ids) for lot in lots])), strict=False):
            yield lot.pick(part)

    def _extended(self) -> Iterator[Lot]:
        """All documents, some at a time, each time followed by what is derived from them."""
        self.counts.update(dict.fromkeys((*OUTCOMES, "derived_duplicates"), 0))
        lots, group = list(self._lots()), Group(BATCH)
        write_json(self.jobs.folder / PARTNERS, {"partners": self._partners(lots)})
        groups = [full for lot in lots for full in group.add(lot)] + [group.lots] * bool(group.lots)
        parents = [[lot.pick(lot.codes % SPLICEABLE == 0) for lot in some] for some in groups]
        jobs = [(f"derived-{idx:06d}", _contents(some)[1]) for idx, some in enumerate(parents)]
        for some, (file, _), cut in zip(
            groups, jobs, self.engine.cut(self.jobs, "derive", jobs), strict=True
        ):
            fresh = self.seen.add(cut.ids)
            self.counts["derived_duplicates"] += int((~fresh).sum())
            self.counts.update(OUTCOMES[code] for code in cut.codes[fresh].tolist())
            yield from some
            derived = Lot.of(file, cut, fresh & (cut.codes < len(DERIVED)))
            yield derived._replace(codes=np.zeros_like(derived.codes))

    def _partners(self, lots: Iterable[Lot]) -> list[tuple[int, str]]:
        """Ids and texts that `Survey` chooses, in the same order."""
        options = self.jobs.settings
        ranked = (
            (partner_key(options, id), id, lot.file, row)
            for lot in (lot.pick(lot.codes == SPLICEABLE) for lot in lots)
            for id, row in zip(lot.ids.tolist(), lot.rows.tolist(), strict=True)
        )
        chosen = heapq.nsmallest(num_partners(options), ranked)
        rows: dict[str, list[int]] = {}
        for _, _, file, row in sorted(chosen, key=lambda one: one[2:]):
            rows.setdefault(file, []).append(row)
        lots_of = ((file, np.array(some)) for file, some in rows.items())
        texts = {segment.id: segment.text for segment in self.jobs.segments(lots_of)}
        return [(id, texts[id]) for _, id, _, _ in chosen]


def _contents(lots: list[Lot]) -> tuple[np.ndarray, list[Rows]]:
    """Ids of some documents, and where they are."""
    return np.concatenate([lot.ids for lot in lots]), [(lot.file, lot.rows) for lot in lots]


def cut_folder(out: Path, written: dict[str, Any], sources: tuple[Sources, ...]) -> Path:
    """Where the files of segments of these sources are; other sources or settings have others."""
    times = [[getattr(path.stat(), "st_mtime_ns", 0) for path in part.files] for part in sources]
    return out.absolute() / CUT_FOLDER / checksum([__version__, written, times])[:16]


def fill(
    engine: RayEngine, writer: StoreWriter, jobs: Jobs, report: Callable[[int, int], None]
) -> dict[str, int]:
    """Write all shards that are not there; what happened on the way."""
    jobs.folder.mkdir(parents=True, exist_ok=True)
    plan, places, todo, done, total = Plan(engine, jobs), list[Place](), [], 0, 0
    for split, ids, lots in plan.shards(writer.shard_documents):
        total += len(ids)
        if writer.keeps_shard(split, ids):
            done += len(ids)
        else:
            places.append(writer.reserve(split))
            with_origin = jobs.settings.derive > 0 and split == "train"
            todo.append((places[-1].path.absolute(), writer.format, lots, with_origin))
    for place, count in zip(places, engine.encode(jobs, todo), strict=True):
        place.entry.update(read_json(place.path.with_suffix(".json"), "run the same command again"))
        done += count
        report(done, total)
    return plan.counts
