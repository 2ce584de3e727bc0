"""Text to pair store, from end to end: sources, segments, latents, shards.

The text is streamed anew on every start, which is cheap; encoding, which is not, is done shard by shard and
skipped for every shard that is on the disk already. The next shards are read and cut while one is encoded and the last
one is written. Sources that are held out as a whole come first: of a text that
is found twice the first stays, so no such text trains.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import LATENT_DTYPES, Place, StoreWriter, store_state
from mmldlm.errors import Interrupted, UserError
from mmldlm.preparation.derive import Deriver, Survey
from mmldlm.preparation.encoders import Encoder, Tokenized
from mmldlm.preparation.overlap import Ahead, Behind, many_documents, until
from mmldlm.preparation.segments import Segment, Segmenter, SegmentOptions
from mmldlm.preparation.sources import TEXT_UNITS, SourceOptions, Sources, refuse_overlap, resolve

HELD_OUT = ("validation", "test")
VALIDATION_SHARE = 0.05
"""Held out if nothing else is said."""
SHARDS_AHEAD = 2
"""So many shards are read, cut and tokenized before the encoder has time for them."""


@dataclass(frozen=True)
class PrepareSettings:
    """What decides the bytes of a store. The same settings on the same text go on where a run was stopped."""

    input: tuple[str, ...]
    tokenizer: str = "builtin:minilm"
    encoder: str = "builtin:minilm"
    text_field: str | None = None
    text_unit: str = "auto"
    dataset_config: str | None = None
    dataset_split: str = "train"
    cut: str = "none"
    max_tokens: int = 128
    min_tokens: int = 1
    limit: int | None = None
    validation: float | None = None
    """None: `VALIDATION_SHARE`, or nothing if there are sources for validation."""
    test: float = 0.0
    prompt: str = ""
    normalize: bool = True
    dimension: int | None = None
    latent_dtype: str = "float16"
    shard_documents: int = 8192
    seed: int = 0
    derive: int = 0
    validation_input: tuple[str, ...] = ()
    test_input: tuple[str, ...] = ()
    validation_dataset_split: str | None = None
    test_dataset_split: str | None = None

    def __post_init__(self) -> None:
        if not self.input:
            raise UserError("--input: give at least one source of text")
        if self.latent_dtype not in LATENT_DTYPES:
            raise UserError(f"--latent-dtype {self.latent_dtype}: allowed are {', '.join(LATENT_DTYPES)}")
        if self.shard_documents < 1:
            raise UserError(f"--shard-documents {self.shard_documents}: at least 1 is needed")
        if self.text_unit not in TEXT_UNITS:
            raise UserError(f"--text-unit {self.text_unit}: allowed are {', '.join(TEXT_UNITS)}")
        for split in HELD_OUT:
            if self._dataset_split(split) is not None and not self._inputs(split):
                raise UserError(
                    f"--{split}-dataset-split {self._dataset_split(split)}: there is no --{split}-input that it "
                    "could be read from; give one, or leave this out"
                )

    @property
    def validation_share(self) -> float:
        """The share of --input that is held out for validation."""
        if self.validation is not None:
            return self.validation
        return 0.0 if self.validation_input else VALIDATION_SHARE

    def sources(self) -> tuple[Sources, ...]:
        """All sources, those that are held out as a whole before the others."""
        parts = tuple(
            resolve(self._inputs(split), self.source_options(split))
            for split in (*HELD_OUT, None)
            if self._inputs(split)
        )
        refuse_overlap(parts)
        return parts

    def source_options(self, split: str | None = None) -> SourceOptions:
        """The part that sources need: those for one held-out split, or those of --input."""
        dataset_split = self.dataset_split if split is None else self._dataset_split(split) or split
        limit = self.limit if split is None else None
        return SourceOptions(
            self.text_field, self.text_unit, self.dataset_config, dataset_split, self.seed, limit, split
        )

    def _inputs(self, split: str | None) -> tuple[str, ...]:
        return {None: self.input, "validation": self.validation_input, "test": self.test_input}[split]

    def _dataset_split(self, split: str) -> str | None:
        return {"validation": self.validation_dataset_split, "test": self.test_dataset_split}[split]

    def segment_options(self) -> SegmentOptions:
        """The part that cutting and splitting need."""
        return SegmentOptions(
            self.cut,
            self.max_tokens,
            self.min_tokens,
            self.limit,
            self.validation_share,
            self.test,
            self.seed,
            self.derive,
        )

    def to_json(self, sources: Iterable[Sources]) -> dict[str, Any]:
        """What is written down and compared with a later command; without the options that are not used.

        So stores from before there were such options are still recognised.
        """
        values = asdict(self) | {"validation": self.validation_share}
        optional = (
            "derive",
            *(f"{split}_{word}" for split in HELD_OUT for word in ("input", "dataset_split")),
        )
        written = {key: value for key, value in values.items() if value or key not in optional}
        for part in sources:
            key = part.options.name.removeprefix("--").replace("-", "_")
            files = f"{len(part.files)} files, {part.num_bytes} bytes, {part.digest()}"
            written |= {key: list(values[key]), f"{key}_files": files}
        return written


class Report:
    """What a caller can show of the work; this one shows nothing."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def update(self, done: int, total: int | None, encoded: int) -> None:
        """`done` of about `total` documents are finished, `encoded` of them in this run."""


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


@dataclass
class _Work:
    """The moving parts of one run."""

    writer: StoreWriter
    encoder: Encoder
    report: Report
    derives: bool
    accepts_tokens: bool
    """The encoder can use the tokens of the store."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when what is read ahead is no longer wanted."""
    done: int = 0
    encoded: int = 0
    total: int | None = None

    def shards(self, lots: Iterable[_Lot]) -> Iterator[_Shard]:
        """The documents of all lots, put together shard by shard."""
        pending: dict[str, list[Segment]] = {}
        total = None
        for lot in lots:
            total = lot.total
            for segment in lot.segments:
                waiting = pending.setdefault(segment.split, [])
                waiting.append(segment)
                if len(waiting) == self.writer.shard_documents:
                    yield self._shard(segment.split, pending.pop(segment.split), total)
        for split in sorted(pending):
            yield self._shard(split, pending[split], total)

    def _shard(self, split: str, segments: list[Segment], total: int | None) -> _Shard:
        """Tokenized for the encoder, unless it is there already."""
        ids = np.array([segment.id for segment in segments], np.int64)
        if self.writer.keeps_shard(split, ids):
            return _Shard(split, segments, ids, total, None, None)
        texts = [segment.text for segment in segments]
        tokens = [segment.tokens for segment in segments] if self.accepts_tokens else None
        place, tokenized = self.writer.reserve(split), self.encoder.tokenize(texts, tokens)
        return _Shard(split, segments, ids, total, place, tokenized)

    def fill(self, shards: Iterable[_Shard], behind: Behind) -> None:
        """Encode one shard after the other; each is written while the next is encoded."""
        for shard in shards:
            self.total = shard.total
            if shard.place is None or shard.tokenized is None:
                self.progress(len(shard.segments), encoded=False)
                continue
            latents = self.encoder.embed(shard.tokenized, lambda count: self.progress(count, encoded=True))
            behind.do(partial(self._write, shard, latents))

    def _write(self, shard: _Shard, latents: np.ndarray) -> None:
        assert shard.tokenized is not None
        segments = shard.segments
        self.writer.write_shard(
            shard.split,
            [segment.tokens for segment in segments],
            latents,
            shard.tokenized.texts,
            shard.ids,
            {"truncated_by_encoder": shard.tokenized.num_truncated},
            [segment.made_of for segment in segments] if self.derives and shard.split == "train" else None,
            shard.place,
        )

    def progress(self, count: int, *, encoded: bool) -> None:
        self.done += count
        self.encoded += count if encoded else 0
        self.report.update(self.done, self.total, self.encoded)


@dataclass(frozen=True)
class _Lot:
    """Some documents, and how many there will be in all, as far as that is known by now."""

    segments: list[Segment]
    total: int | None


def run(
    settings: PrepareSettings,
    out: str | Path,
    *,
    device: str = "auto",
    batch_size: int | None = None,
    report: Report | None = None,
) -> PairStore:
    """Make the store, or go on making it, or just open it if it is finished."""
    report, out = report or Report(), Path(out)
    options = settings.segment_options()
    sources = settings.sources()
    written = settings.to_json(sources)
    state = store_state(out, written)
    if state == "finished":
        report.note(f"{out} is finished already, nothing to do")
        return PairStore.open(out)
    for part in sources:  # before the encoder is loaded
        if not any(document.text and document.text.strip() for document in part):
            raise UserError(f"{_told_names(part)}: there is no text in it; check the files")
    if state == "partial":
        report.note(f"going on with {out}")
    tokenizer = Tokenizer.load(settings.tokenizer)
    report.note(f"loading the encoder {settings.encoder}")
    encoder = Encoder.load(
        settings.encoder,
        prompt=settings.prompt,
        normalize=settings.normalize,
        dimension=settings.dimension,
        device=device,
        batch_size=batch_size,
    )
    try:
        with _open_writer(out, settings, written, tokenizer, encoder) as writer:
            accepts_tokens = encoder.accepts(tokenizer)
            work = _Work(writer, encoder, report, options.derive > 0, accepts_tokens)
            return _fill(work, tokenizer, options, sources)
    except KeyboardInterrupt:
        raise Interrupted("stopped; finished shards are kept: run the same command to go on") from None


def _open_writer(
    out: Path, settings: PrepareSettings, written: dict[str, Any], tokenizer: Tokenizer, encoder: Encoder
) -> StoreWriter:
    return StoreWriter(
        out,
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        num_slots=encoder.num_slots,
        num_channels=encoder.num_channels,
        latent_dtype=settings.latent_dtype,
        encoder=encoder.spec(),
        shard_documents=settings.shard_documents,
        settings=written,
    )


def _fill(
    work: _Work, tokenizer: Tokenizer, options: SegmentOptions, sources: tuple[Sources, ...]
) -> PairStore:
    work.report.note("reading and cutting the text")
    counts: dict[str, int] = {}
    shards = work.shards(_lots(Segmenter(tokenizer, options), sources, work.stop, counts))
    with many_documents(), Behind() as behind, Ahead(shards, SHARDS_AHEAD, work.stop) as ahead:
        work.fill(ahead, behind)
    return work.writer.finish(counts)


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
        lots = _with_total(deriver.extend(chain.from_iterable(batches)), lambda: deriver.share_done)
    elif isinstance(batches, list):
        total = sum(map(len, batches))
        lots = (_Lot(batch, total) for batch in batches)
    else:
        size = sum(part.num_bytes for part in sources)
        lots = _with_total(batches, lambda: segmenter.read_bytes / size if size else 0.0)
    yield from lots
    counts.update(segmenter.counts)
    if deriver is not None:
        counts.update(deriver.counts)


def _cut(segmenter: Segmenter, sources: Iterable[Sources], stop: threading.Event) -> Iterator[list[Segment]]:
    """The segments of all sources; a source that gives none is a mistake."""
    for part in sources:
        before, found = Counter(segmenter.counts), False
        for batch in segmenter.segments(until(stop, part), part.options.split):
            found = found or bool(batch)
            yield batch
        if not found:
            counts = segmenter.counts - before
            told = ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in counts.items())
            raise UserError(f"{_told_names(part)}: no text came out ({told or 'the source is empty'})")


def _told_names(part: Sources) -> str:
    return f"{part.options.name} {' '.join(part.names())}"


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
        yield _Lot(batch, max(count, round(count / share)) if share else None)
