"""Text to pair store, from end to end: sources, segments, latents, shards.

The text is read from the beginning on every start, which is cheap. Encoding is expensive: it is done shard by shard,
and shards that are on the disk already are skipped. The next shards are read and cut while one is encoded and the last
one is written. Sources that are held out as a whole come first: of equal texts the first one stays, so no held-out text
trains.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import Place, StoreWriter, store_state
from mmldlm.durable import require_writable
from mmldlm.errors import Interrupted, UserError
from mmldlm.preparation.cutting import Segment, Segmenter
from mmldlm.preparation.derive import Deriver, Survey, missing_kinds
from mmldlm.preparation.derive_processes import drawing
from mmldlm.preparation.encoders import AnyEncoder, OwnEncoder, is_own, load_encoder
from mmldlm.preparation.ray_engine import CUT_FOLDER, RayEngine, RayOptions, cut_folder, fill
from mmldlm.preparation.ray_jobs import EncoderFacts, Jobs
from mmldlm.preparation.readers import LATENT_FIELD
from mmldlm.preparation.sentence_encoder import SentenceEncoder, Tokenized, check_dimension, cut_dimension
from mmldlm.preparation.settings import DEFAULT_ENCODER, PrepareSettings
from mmldlm.preparation.sources import Sources, describe, find_sources
from mmldlm.preparation.threads import Ahead, Behind, many_documents, until
from mmldlm.preparation.vectors import Vectors

logger = logging.getLogger(__name__)
SHARDS_AHEAD = 2
"""So many shards are read, cut and tokenized before the encoder has time for them."""

LOOKED_AT, MOST_CONSTANT = 1024, 0.9
"""Documents whose latents are compared in the end, and the share of constant channels that is reported."""


@dataclass(frozen=True)
class GivenLatents:
    """In place of an encoder: the latents come with the documents."""

    shape: tuple[int, ...]
    normalize: bool
    dimension: int | None

    def __post_init__(self) -> None:
        check_dimension(self.dimension, self.shape[1], "the latents have")

    @property
    def num_slots(self) -> int:
        return self.shape[0]

    @property
    def num_channels(self) -> int:
        return self.dimension or self.shape[1]

    def of(self, segments: list[Segment]) -> np.ndarray:
        """The latents (N, S, C) of some documents."""
        latents = np.stack([segment.latent for segment in segments if segment.latent is not None])
        return cut_dimension(latents.astype(np.float32), self.num_channels, self.normalize)


LatentSource = SentenceEncoder | OwnEncoder | GivenLatents


Progress = Callable[[int, int], None]
"""Called with the number of documents that are done and the number expected."""
Note = Callable[[str], None]
"""Called with a line for the user."""
_Lot = tuple[list[Segment], int | None]
"""Some documents, and how many there will be in all, as far as that is known by now."""


@dataclass(frozen=True)
class _Shard:
    """Documents that are written together, read ahead of their encoding."""

    split: str
    segments: list[Segment]
    ids: np.ndarray
    total: int | None
    """How many documents there will be in all, as far as that is known by now."""
    place: Place | None
    """None: the shard is on the disk already."""
    tokenized: Tokenized | None
    """What the encoder needs; None: nothing is to be encoded."""


@dataclass
class _Work:
    """The moving parts of one run."""

    writer: StoreWriter
    encoder: LatentSource
    report: Progress
    derives: bool
    accepts_tokens: bool
    """The encoder can use the tokens of the store."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when what is read ahead is no longer wanted."""
    done: int = 0
    total: int | None = None

    def shards(self, lots: Iterable[_Lot]) -> Iterator[_Shard]:
        """The documents of all lots, put together shard by shard."""
        pending: defaultdict[str, list[Segment]] = defaultdict(list)
        total, size = None, self.writer.shard_documents
        for segments, total in lots:
            for split, neighbours in groupby(segments, attrgetter("split")):
                pending[split] += neighbours
                while len(pending[split]) >= size:
                    yield self._shard(split, pending[split][:size], total)
                    del pending[split][:size]
        for split in sorted(split for split, waiting in pending.items() if waiting):
            yield self._shard(split, pending[split], total)

    def _shard(self, split: str, segments: list[Segment], total: int | None) -> _Shard:
        """Tokenized for the encoder, unless it is there already."""
        ids = np.array([segment.id for segment in segments], np.int64)
        if self.writer.keeps_shard(split, ids):
            return _Shard(split, segments, ids, total, None, None)
        tokenized = None
        if not isinstance(self.encoder, GivenLatents):
            tokenized = self.encoder.tokenize(*self._words(segments))
        return _Shard(split, segments, ids, total, self.writer.reserve(split), tokenized)

    def fill(self, shards: Iterable[_Shard], behind: Behind) -> None:
        """Encode one shard after the other; each is written while the next is encoded."""
        for shard in shards:
            self.total = shard.total
            if shard.place is None:
                self.progress(len(shard.segments))
            else:
                truncated = shard.tokenized.num_truncated if shard.tokenized else None
                behind.do(partial(self._write, shard, shard.place, self._latents(shard), truncated))

    def _words(self, segments: list[Segment]) -> tuple[list[str], list[np.ndarray] | None]:
        """Texts for the encoder, and their tokens where it can use those of the store."""
        tokens = [segment.tokens for segment in segments] if self.accepts_tokens else None
        return [segment.text for segment in segments], tokens

    def _latents(self, shard: _Shard) -> np.ndarray:
        if isinstance(self.encoder, GivenLatents):
            self.progress(len(shard.segments))
            return self.encoder.of(shard.segments)
        assert shard.tokenized is not None
        return self.encoder.embed(shard.tokenized, self.progress)

    def _write(self, shard: _Shard, place: Place, latents: np.ndarray, num_truncated: int | None) -> None:
        segments = shard.segments
        truncated = {} if num_truncated is None else {"truncated_by_encoder": num_truncated}
        self.writer.write_shard(
            place,
            [segment.tokens for segment in segments],
            latents,
            [segment.text for segment in segments],
            shard.ids,
            truncated,
            [segment.made_of for segment in segments] if self.derives and shard.split == "train" else None,
        )

    def progress(self, count: int) -> None:
        """So many more documents are done."""
        self.done += count
        self.report(self.done, max(self.done, self.total or 0))


def run(
    settings: PrepareSettings,
    out: str | Path,
    *,
    rows: Iterable[Any] | None = None,
    vectors: Vectors | None = None,
    encoder: AnyEncoder | None = None,
    device: str = "auto",
    batch_size: int | None = None,
    progress: Progress | None = None,
    note: Note | None = None,
    ray: RayOptions | None = None,
) -> PairStore:
    """Make the store, or continue an unfinished one, or just open it if it is finished.

    `rows` are texts in memory instead of `settings.input`, `vectors` the latents of all documents, `encoder` the object
    that `settings.encoder` names. `ray`: the workers of a Ray cluster encode. Without `note` only warnings are shown.
    """
    warn, note, out = note or logger.warning, note or (lambda text: None), Path(out)
    sources = find_sources(settings, rows, vectors)
    settings, given_latents = _with_latents(settings, sources)
    written = describe(settings, sources)
    state = store_state(out, written)
    if state == "finished":
        note(f"{out} is finished already, nothing to do")
        return _judged(PairStore.open(out), warn)
    require_writable(out)
    if state == "partial":
        note(f"continuing {out}")
    for path in chain.from_iterable(part.one_per_line() for part in sources):
        warn(
            f"{path}: looks like one text per line, but its lines are joined into longer documents; "
            "use text_unit=line to make each line a document"
        )
    tokenizer, how = Tokenizer.load(settings.tokenizer), _how(settings, device, batch_size)
    name = encoder or settings.encoder or DEFAULT_ENCODER
    if given_latents is None:
        note(f"loading the encoder {settings.encoder}")
    elif ray is not None:
        raise UserError("engine=ray: the latents are given, so nothing is encoded; use engine=plain")
    first_text = partial(_first_text, tokenizer, settings, sources)
    show = progress or (lambda done, total: None)
    try:
        if ray is not None:
            folder = cut_folder(out, written, sources)
            jobs = Jobs(os.getcwd(), out.absolute(), folder, settings, sources, name, how)
            with RayEngine(ray, note) as engine:
                facts = engine.describe(jobs, first_text())
                with _open_writer(out, settings, written, tokenizer, facts) as writer:
                    note("reading and cutting the text")
                    return _finish(writer, fill(engine, writer, jobs, show), warn)
        source = given_latents or load_encoder(name, first_text, **how)
        with _open_writer(out, settings, written, tokenizer, source) as writer:
            note("reading and cutting the text")
            accepts_tokens = not isinstance(source, GivenLatents) and source.accepts(tokenizer)
            work = _Work(writer, source, show, settings.derive > 0, accepts_tokens)
            return _finish(writer, _fill(work, tokenizer, settings, sources), warn)
    except KeyboardInterrupt:
        raise Interrupted("stopped; finished shards are kept: run the same command to go on") from None


def _finish(writer: StoreWriter, counts: dict[str, int], warn: Note) -> PairStore:
    """Publish the store, without what a Ray cluster may have left in it."""
    shutil.rmtree(writer.path / CUT_FOLDER, ignore_errors=True)
    if missing := missing_kinds(counts):
        warn(missing)
    try:
        return _judged(writer.finish(counts), warn)
    except FileNotFoundError as error:
        raise UserError(
            f"{writer.path}: files of it were deleted meanwhile; delete it and run the same command again"
        ) from error


def _judged(store: PairStore, warn: Note) -> PairStore:
    """The finished store, with a warning about what keeps a model from learning its pairs."""
    for warning in (store.unknown_warning(), _constant_channels(store)):
        if warning:
            warn(warning)
    return store


def _constant_channels(store: PairStore) -> str | None:
    """A line for the user if nearly all channels of the latents are the same for all training documents."""
    split = store.split("train")
    if len(split) < 2:
        return None
    places = np.linspace(0, len(split) - 1, min(len(split), LOOKED_AT)).astype(np.int64)
    latents = split.read(places).latents.astype(np.float64)
    rounding = np.finfo(store.manifest.latent_dtype).eps * np.abs(latents.mean(axis=0))
    constant = latents.std(axis=0) <= rounding
    if constant.mean() < MOST_CONSTANT:
        return None
    return (
        f"{store.path}: {constant.sum():,} of {constant.size:,} channels of the latents are the same for all training "
        "documents, so they tell a model next to nothing about their texts; check the encoder, or the latents"
    )


def _how(settings: PrepareSettings, device: str, batch_size: int | None) -> dict[str, Any]:
    """The keywords of `load_encoder`, here and on workers."""
    own = {key: getattr(settings, key) for key in ("prompt", "normalize", "dimension")}
    return {**own, "device": device, "batch_size": batch_size}


def _with_latents(
    settings: PrepareSettings, sources: tuple[Sources, ...]
) -> tuple[PrepareSettings, GivenLatents | None]:
    """The settings with the encoder and what follows from it; and the latents, if they are given."""
    for part in sources:
        part.check_count()
    shapes = {part.name: part.latent_shape for part in sources}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape or 'none'}" for name, shape in shapes.items())
        raise UserError(f"the latents of the sources differ in shape (slots, channels): {listed}")
    shape = next(iter(shapes.values()))
    if shape is None and settings.latent_field not in (None, LATENT_FIELD):
        raise UserError(
            f"latent_field={settings.latent_field}: the first document has no latent there; correct the name, or leave "
            "it out and an encoder makes the latents"
        )
    if shape is None:
        name = settings.encoder or DEFAULT_ENCODER
        normalize = not is_own(name) if settings.normalize is None else settings.normalize
        return replace(settings, encoder=name, normalize=normalize), None
    settings.check_given_latents(settings.encoder)
    settings = replace(
        settings, normalize=bool(settings.normalize), latents=settings.latents or "in the rows"
    )
    return settings, GivenLatents(shape, bool(settings.normalize), settings.dimension)


def _first_text(tokenizer: Tokenizer, options: PrepareSettings, sources: tuple[Sources, ...]) -> str:
    """The first text that the encoder will get."""
    segmenter = Segmenter(tokenizer, replace(options, limit=None))
    for part in sources:
        for batch in segmenter.segments(part, part.split):
            if batch:
                return batch[0].text
    raise UserError(f"{sources[-1].label()}: no text came out")


def _open_writer(
    out: Path,
    settings: PrepareSettings,
    written: dict[str, Any],
    tokenizer: Tokenizer,
    source: LatentSource | EncoderFacts,
) -> StoreWriter:
    return StoreWriter(
        out,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        num_slots=source.num_slots,
        num_channels=source.num_channels,
        latent_dtype=settings.latent_dtype,
        encoder=None if isinstance(source, GivenLatents) else source.describe(),
        shard_documents=settings.shard_documents,
        settings=written,
    )


def _fill(
    work: _Work, tokenizer: Tokenizer, options: PrepareSettings, sources: tuple[Sources, ...]
) -> dict[str, int]:
    counts: dict[str, int] = {}
    shards = work.shards(_lots(Segmenter(tokenizer, options), sources, work.stop, counts))
    with many_documents(), Behind() as behind, Ahead(shards, SHARDS_AHEAD, work.stop) as ahead:
        work.fill(ahead, behind)
    return counts


def _lots(
    segmenter: Segmenter, sources: tuple[Sources, ...], stop: threading.Event, counts: dict[str, int]
) -> Iterator[_Lot]:
    """All documents, in their order; in the end `counts` has what happened on the way."""
    options = segmenter.options
    batches: Iterable[list[Segment]] = _cut(segmenter, sources, stop)
    if options.limit is not None:
        batches = list(batches)
    deriver = _deriver(segmenter, batches, sources, stop) if options.derive else None
    if deriver is not None:
        with drawing(deriver) as begin:
            derived = deriver.extend(chain.from_iterable(batches), begin)
            yield from _with_total(derived, lambda: deriver.share_done)
    elif isinstance(batches, list):
        total = sum(map(len, batches))
        yield from ((batch, total) for batch in batches)
    else:
        size = sum(part.num_bytes for part in sources)
        yield from _with_total(batches, lambda: segmenter.read_bytes / size if size else 0.0)
    counts.update(segmenter.counts)
    if deriver is not None:
        counts.update(deriver.counts)


def _cut(segmenter: Segmenter, sources: Iterable[Sources], stop: threading.Event) -> Iterator[list[Segment]]:
    """The segments of all sources; a source that gives none is a mistake."""
    for part in sources:
        before, is_empty = Counter(segmenter.counts), True
        for batch in segmenter.segments(until(stop, part), part.split):
            is_empty = is_empty and not batch
            yield batch
        if is_empty:
            part.raise_empty(segmenter.counts - before)


def _deriver(
    segmenter: Segmenter,
    batches: Iterable[list[Segment]],
    sources: tuple[Sources, ...],
    stop: threading.Event,
) -> Deriver:
    """What derives further documents: it has met every text before the first is derived."""
    if not isinstance(batches, list):  # a stream: another one goes ahead of it
        segmenter = Segmenter(segmenter.tokenizer, segmenter.options)
        batches = _cut(segmenter, sources, stop)
    survey = Survey.of(chain.from_iterable(batches), segmenter.options)
    return Deriver(segmenter.tokenizer, segmenter.options, survey, segmenter.seen)


def _with_total(batches: Iterable[list[Segment]], share_done: Callable[[], float]) -> Iterator[_Lot]:
    """The documents, with an estimate of how many there will be."""
    count = 0
    for batch in batches:
        count += len(batch)
        share = share_done()
        yield batch, max(count, round(count / share)) if share else None
