"""What the workers of a Ray cluster do for `engine=ray`: cut, derive, encode and write.

Each job has a result of its own on the disk: a file of segments beside the store, or a shard. A job that finds its file
of segments finished leaves it as it is, so one that is repeated after a crash changes nothing.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mmldlm.data.files import write_json
from mmldlm.data.format import SETTINGS
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.data.writer import ShardFormat
from mmldlm.durable import is_full, staged_file
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.cutting import SeenIds, Segment, Segmenter
from mmldlm.preparation.derive import Deriver, Survey, boundaries
from mmldlm.preparation.encoders import AnyEncoder, load_encoder
from mmldlm.preparation.settings import PrepareSettings
from mmldlm.preparation.sources import Portion, Sources

SPLITS = ("train", "validation", "test")
SPLICEABLE = 4
"""Added to the number of a split: the text can be the second half of a splice."""
PARTNERS = "partners.json"
ENCODING = threading.Lock()
"""A worker has several shards in hand, so that one is read or written while another is encoded; one at a time."""
Rows = tuple[str, np.ndarray]
"""A file of segments, and which of them, in order."""


class Cut(NamedTuple):
    """What a job says about the segments that it wrote."""

    ids: np.ndarray
    codes: np.ndarray
    """Of a segment: its split, and `SPLICEABLE`. Of a derived one: its place in `OUTCOMES`."""
    counts: dict[str, int]


class EncoderFacts(NamedTuple):
    """What a store has to know about an encoder that runs elsewhere."""

    num_slots: int
    num_channels: int
    description: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """What the manifest says about this encoder."""
        return self.description


@dataclass(frozen=True)
class Jobs:
    """All that the jobs of one run have in common, and the jobs themselves."""

    working_directory: str
    out: Path
    folder: Path
    """Of the files of segments."""
    settings: PrepareSettings
    sources: tuple[Sources, ...]
    encoder: AnyEncoder | None = None
    how: Mapping[str, Any] | None = None
    """The keywords of `load_encoder`."""

    def answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Do one job; relative names mean the same as in the process that the user started."""
        with suppress(OSError):
            os.chdir(self.working_directory)
        os.environ.setdefault("RAYON_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
        if method != "describe" and not (self.out / SETTINGS).is_file():
            raise UserError(
                f"{self.out}: a Ray worker on {socket.gethostname()} does not see this folder; with engine=ray the "
                "pair store must lie on storage that all nodes share"
            )
        return getattr(self, method)(*arguments)

    def cut(self, name: str, part: int, portion: Portion, forced: tuple[str, ...]) -> Cut:
        """Read and cut a portion of the sources."""
        segmenter = Segmenter(_tokenizer(self.settings.tokenizer), self.settings, forced)
        documents = self.sources[part].documents(portion)

        def batches() -> Iterator[tuple[list[Segment], list[int]]]:
            for segments in segmenter.cut(documents, self.sources[part].split):
                yield segments, [self._code(segment) for segment in segments]

        return self._written(name, batches, segmenter.counts)

    def _code(self, segment: Segment) -> int:
        spliceable = self.settings.derive and boundaries(segment.text)
        return SPLITS.index(segment.split) + (SPLICEABLE if spliceable else 0)

    def derive(self, name: str, parents: list[Rows]) -> Cut:
        """Derive from training documents: all candidates, whether their texts are new or not."""
        deriver = _deriver(self.folder, self.settings)

        def batches() -> Iterator[tuple[list[Segment], list[int]]]:
            drawn = deriver.draw((segment.id, segment.text) for segment in self.segments(parents))
            yield drawn.segments(np.ones(len(drawn.ids), bool)), drawn.outcomes.tolist()

        return self._written(name, batches, {})

    def _written(self, name: str, batches: Callable[[], Any], counts: dict[str, int]) -> Cut:
        """What is in a file of segments; it is written unless it is there. `counts` are complete after that."""
        path, counted = self.folder / f"{name}.arrow", self.folder / f"{name}.json"
        if not counted.is_file():
            _write_segments(path, batches())
            write_json(counted, counts)
        table = _open(path).read_all()
        return Cut(table["id"].to_numpy(), table["code"].to_numpy(), json.loads(counted.read_bytes()))

    def segments(self, lots: Iterable[Rows]) -> Iterator[Segment]:
        """These documents, in order."""
        for name, rows in lots:
            for batch in _chosen(self.folder / f"{name}.arrow", rows):
                tokens = batch["tokens"]
                arrays = np.split(tokens.flatten().to_numpy(), np.cumsum(tokens.value_lengths())[:-1])
                columns = (batch[key].to_pylist() for key in ("text", "id", "made_of"))
                for array, (text, id, made_of) in zip(arrays, zip(*columns, strict=True), strict=True):
                    yield Segment(text, array, id, "", made_of)

    def describe(self, probe: str) -> EncoderFacts:
        """Load the encoder, try it with a text, and forget it."""
        assert self.encoder is not None
        loaded = load_encoder(self.encoder, lambda: probe, **self.how or {})
        return EncoderFacts(loaded.num_slots, loaded.num_channels, loaded.describe())

    def encode(self, path: Path, shape: ShardFormat, lots: list[Rows], with_origin: bool) -> int:
        """Encode the documents of a shard and write it."""
        segments = list(self.segments(lots))
        tokens, texts = [segment.tokens for segment in segments], [segment.text for segment in segments]
        with ENCODING:
            encoder, accepts_tokens = self._loaded
        tokenized = encoder.tokenize(texts, tokens if accepts_tokens else None)
        with ENCODING:
            latents = encoder.embed(tokenized)
        shape.write(
            path,
            tokens,
            latents,
            texts,
            np.array([segment.id for segment in segments], np.int64),
            {"truncated_by_encoder": tokenized.num_truncated},
            [segment.made_of for segment in segments] if with_origin else None,
        )
        return len(segments)

    @cached_property
    def _loaded(self) -> tuple[Any, bool]:
        """The encoder, and whether it can use the tokens of the store."""
        assert self.encoder is not None
        encoder = load_encoder(self.encoder, lambda: "A text.", **self.how or {})
        return encoder, encoder.accepts(_tokenizer(self.settings.tokenizer))


@lru_cache(1)
def _tokenizer(name: str) -> Tokenizer:
    return Tokenizer.load(name)


@lru_cache(1)
def _deriver(folder: Path, settings: PrepareSettings) -> Deriver:
    partners = json.loads((folder / PARTNERS).read_bytes())["partners"]
    survey = Survey([(id, text) for id, text in partners], 0)
    return Deriver(_tokenizer(settings.tokenizer), settings, survey, SeenIds())


def _write_segments(path: Path, batches: Iterable[tuple[list[Segment], list[int]]]) -> None:
    """All segments with their codes, batch by batch, into a file that is whole or not there."""
    import pyarrow as pa

    kinds = {"id": pa.int64(), "code": pa.uint8(), "tokens": pa.list_(pa.uint32()), "text": pa.large_string()}
    schema = pa.schema(kinds | {"made_of": pa.large_string()})
    try:
        with staged_file(path) as staged, staged.open("wb") as raw:
            with pa.ipc.new_file(raw, schema) as out:
                for segments, codes in batches:
                    texts, tokens, ids, _, made_of, _ = zip(*segments, strict=True) if segments else [()] * 6
                    columns = [ids, codes, tokens, texts, made_of]
                    arrays = [
                        pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)
                    ]
                    out.write_batch(pa.record_batch(arrays, schema))
            raw.flush()
            os.fsync(raw.fileno())
    except OSError as error:
        if is_full(error):
            raise UserError(
                f"{path}: no space left on the disk; free some and run the same command again"
            ) from error
        raise


def _open(path: Path) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(path)))


def _chosen(path: Path, rows: np.ndarray) -> Iterator[Any]:
    """Record batches with these rows of a file, which ascend."""
    reader, start = _open(path), 0
    for idx in range(reader.num_record_batches):
        batch = reader.get_batch(idx)
        first, end = np.searchsorted(rows, [start, start + len(batch)])
        if end > first:
            yield batch.take(rows[first:end] - start)
        start += len(batch)


def work(jobs: Jobs, row: dict[str, bytes]) -> dict[str, Any]:
    """A job as a row of Ray Data, and its answer as another; an error is an answer too, without Ray's traceback."""
    from ray import cloudpickle

    try:
        return {"answer": cloudpickle.dumps(jobs.answer(*cloudpickle.loads(row["job"]))), "error": ""}
    except UserError as error:
        return {"answer": b"", "error": str(error)}
    except Exception as error:  # code of the user's and files of any kind may raise anything
        return {"answer": b"", "error": f"a Ray worker failed: {type(error).__name__}: {first_line(error)}"}


class Encoder:
    """Keeps the encoder in a process of the cluster."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def __call__(self, row: dict[str, bytes]) -> dict[str, Any]:
        return work(self._jobs, row)
