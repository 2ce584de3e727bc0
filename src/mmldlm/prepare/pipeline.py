"""Text to pair store, from end to end: sources, segments, latents, shards.

The text is streamed anew on every start, which is cheap; encoding, which is not, is done shard by shard and
skipped for every shard that is on the disk already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import LATENT_DTYPES, StoreWriter, store_state
from mmldlm.errors import Interrupted, UserError
from mmldlm.prepare.encoders import Encoder
from mmldlm.prepare.segments import Segment, Segmenter, SegmentOptions
from mmldlm.prepare.sources import TEXT_UNITS, SourceOptions, Sources, resolve


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
    validation: float = 0.05
    test: float = 0.0
    prompt: str = ""
    normalize: bool = True
    dimension: int | None = None
    latent_dtype: str = "float16"
    shard_documents: int = 8192
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.input:
            raise UserError("--input: give at least one source of text")
        if self.latent_dtype not in LATENT_DTYPES:
            raise UserError(f"--latent-dtype {self.latent_dtype}: allowed are {', '.join(LATENT_DTYPES)}")
        if self.shard_documents < 1:
            raise UserError(f"--shard-documents {self.shard_documents}: at least 1 is needed")
        if self.text_unit not in TEXT_UNITS:
            raise UserError(f"--text-unit {self.text_unit}: allowed are {', '.join(TEXT_UNITS)}")

    def source_options(self) -> SourceOptions:
        """The part that sources need."""
        return SourceOptions(
            self.text_field, self.text_unit, self.dataset_config, self.dataset_split, self.seed, self.limit
        )

    def segment_options(self) -> SegmentOptions:
        """The part that cutting and splitting need."""
        return SegmentOptions(
            self.cut, self.max_tokens, self.min_tokens, self.limit, self.validation, self.test, self.seed
        )

    def to_json(self, sources: Sources) -> dict[str, Any]:
        """What is written down and compared with a later command."""
        files = f"{len(sources.files)} files, {sources.num_bytes} bytes, {sources.digest()}"
        return {**asdict(self), "input": list(self.input), "input_files": files}


class Report:
    """What a caller can show of the work; this one shows nothing."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def update(self, done: int, total: int | None, encoded: int) -> None:
        """`done` of about `total` documents are finished, `encoded` of them in this run."""


@dataclass
class _Work:
    """The moving parts of one run."""

    writer: StoreWriter
    encoder: Encoder
    report: Report
    pending: dict[str, list[Segment]] = field(default_factory=dict)
    done: int = 0
    encoded: int = 0
    total: int | None = None

    def add(self, segment: Segment) -> None:
        waiting = self.pending.setdefault(segment.split, [])
        waiting.append(segment)
        if len(waiting) == self.writer.shard_documents:
            self.flush(segment.split)

    def flush(self, split: str) -> None:
        """Encode and write one shard, unless it is there already."""
        segments = self.pending.pop(split, [])
        ids = np.array([segment.id for segment in segments], np.int64)
        if not segments:
            return
        if self.writer.keeps_shard(split, ids):
            self.progress(len(segments), encoded=False)
            return
        texts = [segment.text for segment in segments]
        longest = self.encoder.max_tokens
        truncated = int((self.encoder.count_tokens(texts) > longest).sum()) if longest else 0
        latents = self.encoder.encode(texts, lambda count: self.progress(count, encoded=True))
        counts = {"truncated_by_encoder": truncated}
        self.writer.write_shard(split, [segment.tokens for segment in segments], latents, texts, ids, counts)

    def progress(self, count: int, *, encoded: bool) -> None:
        self.done += count
        self.encoded += count if encoded else 0
        self.report.update(self.done, self.total, self.encoded)


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
    sources = resolve(settings.input, settings.source_options())
    written = settings.to_json(sources)
    state = store_state(out, written)
    if state == "finished":
        report.note(f"{out} is finished already, nothing to do")
        return PairStore.open(out)
    if not any(
        document.text and document.text.strip() for document in sources
    ):  # before the encoder is loaded
        raise UserError(f"--input {' '.join(sources.names())}: there is no text in it; check the files")
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
            return _fill(_Work(writer, encoder, report), Segmenter(tokenizer, options), sources)
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


def _fill(work: _Work, segmenter: Segmenter, sources: Sources) -> PairStore:
    work.report.note("reading and cutting the text")
    for segment in _with_total(work, segmenter, sources):
        work.add(segment)
    for split in sorted(work.pending):
        work.flush(split)
    if not work.done:
        told = ", ".join(
            f"{value} {key.replace('_', ' ')}" for key, value in segmenter.counts.items() if value
        )
        raise UserError(
            f"--input {' '.join(sources.names())}: no text came out ({told or 'the source is empty'})"
        )
    return work.writer.finish(dict(segmenter.counts))


def _with_total(work: _Work, segmenter: Segmenter, sources: Sources) -> Iterator[Segment]:
    """Pass segments on, with an estimate of how many there will be."""
    segments = segmenter.segments(sources)
    if segmenter.options.limit is not None:
        chosen = list(segments)
        work.total = len(chosen)
        yield from chosen
        return
    size = sources.num_bytes
    for count, segment in enumerate(segments, start=1):
        if size and segmenter.read_bytes:
            work.total = max(count, round(count * size / segmenter.read_bytes))
        yield segment
