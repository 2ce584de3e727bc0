"""What `mmldlm sample` does once its words are understood: read what is given, sample, write as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from mmldlm.corruption.times import modes_of_run
from mmldlm.errors import UserError
from mmldlm.sampling.checks import trained_parts
from mmldlm.sampling.neighbours import neighbour_records
from mmldlm.sampling.records import (
    Samples,
    SelfCheck,
    fill_texts,
    sample_latents,
    sample_pairs,
    sample_texts,
    vary_texts,
)
from mmldlm.sampling.sources import (
    Given,
    between,
    given_infill,
    given_latents,
    given_split,
    given_texts,
    make_ids,
    open_store,
    texts_of,
)

if TYPE_CHECKING:
    from mmldlm.checkpoint.loaded import LoadedModel
    from mmldlm.data.store import Split
    from mmldlm.preparation.encoders import OwnEncoder, SentenceEncoder
    from mmldlm.sampling.options import SamplingOptions

Progress = Callable[[float, float], None]


@dataclass
class Request:
    """The words of the command that say what is given and what is wanted."""

    mode: str
    texts: list[str] = field(default_factory=list)
    latents: Path | None = None
    from_split: str | None = None
    data: Path | None = None
    count: int = 8
    counted: bool = False
    """Whether the user said how many."""
    infill: list[str] = field(default_factory=list)
    paraphrase: list[str] = field(default_factory=list)
    strength: float = 0.5
    vary: str = "both"
    interpolate: tuple[str, str] | None = None
    points: int = 5
    length: str | None = None
    against: str | None = None
    encode_with: str = "encoder"
    candidates: int = 1
    refine: int = 0
    check: str = "model"
    neighbours: int = 0


class Work:
    """A model and what is wanted of it."""

    def __init__(self, model: LoadedModel, request: Request, options: SamplingOptions) -> None:
        self.model, self.request, self.options = model, request, options
        self._noted: set[str] = set()
        if request.against is not None and options.guidance == 1.0:
            raise UserError("--against: has an effect only with a --guidance other than 1, such as 2")

    def given(self) -> Given | None:
        """The documents that the command line names; None: none are given."""
        model, request = self.model, self.request
        given = None
        if request.interpolate is not None:
            ends = given_texts(model, list(request.interpolate), "--interpolate")
            first, second = self.latents_of(ends)
            points = between(first, second, request.points)
            return Given(None, None, points, make_ids([row.tobytes() for row in points]))
        if request.paraphrase:
            return given_texts(model, request.paraphrase, "--paraphrase")
        if request.texts:
            given = given_texts(model, request.texts)
        elif request.latents is not None:
            given = given_latents(model, request.latents)
        elif request.from_split is not None:
            given = given_split(model, open_store(model, request.data), request.from_split, request.count)
            if len(given.ids) < request.count and request.counted:
                self.note(f"-n {request.count}: the split {request.from_split} has {len(given.ids)} pairs")
        return given_infill(model, request.infill, given) if request.infill else given

    def run(self, given: Given | None, progress: Progress) -> Samples:
        """Sample what is wanted of these documents."""
        samples = self._sample(given, progress)
        if self.request.interpolate is not None:
            shares = np.linspace(0.0, 1.0, self.request.points).tolist()
            samples.records[:] = [
                {"at": share, **record} for share, record in zip(shares, samples.records, strict=True)
            ]
        if self.request.neighbours:
            if samples.about is None:
                raise UserError("--neighbours: these texts have no latent; give one")
            found = neighbour_records(self._train_split, samples.about, self.request.neighbours)
            for record, near in zip(samples.records, found, strict=True):
                record["neighbours"] = near
        return samples

    def _sample(self, given: Given | None, progress: Progress) -> Samples:
        model, options, request = self.model, self.options, self.request
        if given is None:
            if modes_of_run(model.config.corruption).joint == 0:
                self.note("in training, text and latent were never noisy together (mode joint)")
            return sample_pairs(model, request.count, options, self._lengths(request.count, None), progress)
        self._note_long(given)
        if request.mode == "t2l":
            return sample_latents(model, given, self._real_latents(given), options, progress)
        if given.blanks is not None:
            latents = None if given.texts is None and given.latents is None else self.latents_of(given)
            if latents is None and options.guidance != 1.0:
                raise UserError("--guidance: has no effect without a latent; leave it out")
            return fill_texts(model, given, latents, options, progress, against=self._against(len(given.ids)))
        latents, lengths = self.latents_of(given), self._lengths(len(given.ids), given)
        if request.paraphrase:
            return vary_texts(
                model, given, latents, options, lengths, progress,
                strength=request.strength, what=request.vary,
            )  # fmt: skip
        return sample_texts(
            model, given, latents, options, lengths, progress,
            against=self._against(len(given.ids)), check=self._check(),
        )  # fmt: skip

    @cached_property
    def _train_split(self) -> Split:
        return open_store(self.model, self.request.data).split(self.model.config.data.train_split)

    @cached_property
    def encoder(self) -> SentenceEncoder | OwnEncoder:
        """The encoder that made the training data."""
        if self.model.encoder is None:
            raise UserError(
                "the model does not say which encoder made its latents; use --latents, --from-split or "
                "--encode-with model"
            )
        from mmldlm.preparation.encoders import open_encoder

        return open_encoder(self.model.encoder, device=self.model.device.type)

    def latents_of(self, given: Given) -> np.ndarray:
        """Raw latents: those that are given, or those of the texts."""
        if given.latents is not None:
            return given.latents
        assert given.texts is not None
        assert given.tokens is not None
        if self.request.encode_with == "encoder":
            return self.encoder.encode(given.texts)
        from mmldlm.sampling.decode import document_keys, encode_tokens

        keys = document_keys(self.options.seed, given.ids)
        return self.model.normalizer.denormalize(
            encode_tokens(self.model, given.tokens, self.options, keys=keys)
        )

    def _real_latents(self, given: Given) -> np.ndarray | None:
        try:
            return self.latents_of(given)
        except UserError as error:
            self.note(f"cannot compare with the encoder: {error}")
            return None

    def _against(self, count: int) -> np.ndarray | None:
        """(n, S, C) what --against names, for each document."""
        word = self.request.against
        if word is None:
            return None
        named = given_latents(self.model, Path(word), "--against") if word.endswith(".npy") else given_texts(
            self.model, [word], "--against"
        )  # fmt: skip
        latents = self.latents_of(named)
        if len(latents) not in (1, count):
            raise UserError(f"--against {word}: holds {len(latents)} latents; 1 or {count} are needed")
        return np.broadcast_to(latents, (count, *latents.shape[1:]))

    def _check(self) -> SelfCheck | None:
        request = self.request
        if request.candidates == 1 and request.refine == 0:
            return None
        encode = None
        if request.check == "model" and not trained_parts(self.model).latent:
            raise UserError(
                "--check model: this model was not trained to produce latents (t2l), so it cannot read a text back; "
                "use --check encoder"
            )
        if request.check == "encoder":
            encoder = self.encoder
            encode = lambda tokens: encoder.encode(texts_of(self.model, tokens))  # noqa: E731
        return SelfCheck(request.candidates, request.refine, encode)

    def _lengths(self, count: int, given: Given | None) -> np.ndarray | None:
        """What --length says, one number a document; None: the model predicts them."""
        word = self.request.length
        if word is None:
            return None
        if word == "original":
            if given is None or given.lengths is None:
                raise UserError("--length original: there is no original text here; give a number")
            return given.lengths
        longest = self.model.denoiser.shape.max_length
        if not (word.isascii() and word.isdigit() and 1 <= int(word) <= longest):
            raise UserError(
                f"--length {word}: allowed are 'original' and 1 to {longest}, the longest the model knows"
            )
        return np.full(count, int(word))

    def _note_long(self, given: Given) -> None:
        """Texts longer than any in training are taken, but not without a word."""
        asked = [*(given.tokens or []), *(given.blanks or [])]
        longest = self.model.denoiser.shape.max_length
        num_long = sum(len(tokens) > longest for tokens in asked)
        goes_in = self.request.mode == "t2l" or given.blanks or self.request.paraphrase
        if num_long and (goes_in or self.request.length == "original"):
            self.note(f"texts have more than {longest} tokens, the most in training; expect less of them")

    def note(self, text: str) -> None:
        """One line on the side, once."""
        if text not in self._noted:
            self._noted.add(text)
            typer.echo(f"note: {text}", err=True)


def stream(work: Work, source: Path, out: Path, asked: list[Any], progress: Progress) -> tuple[int, int]:
    """Sample the documents of a file into a file of records; how many there are, and how many were there before."""
    from mmldlm.sampling.stream import InputFile, LineFile

    documents = InputFile(work.model, source)
    lines = LineFile(out, [*asked, documents.identity()])
    found = done = lines.num_lines
    total = documents.num_documents
    try:
        for given in _suiting(work, documents.parts(done), source):
            size = len(given.ids)
            start = done
            samples = work.run(given, lambda part, whole: progress(start + size * part / whole, total))  # noqa: B023
            lines.write(samples.records)
            done += size
            progress(done, total)
        lines.finish()
    finally:
        lines.close()
    return total, found


def _suiting(work: Work, parts: Iterator[Given], source: Path) -> Iterator[Given]:
    """The parts, if they hold what the mode needs."""
    for given in parts:
        if work.request.mode == "t2l" and (given.tokens is None or given.blanks is not None):
            raise UserError(f"--in {source}: --mode t2l needs texts, and none with blanks")
        asked = work.request
        for word, is_asked in (
            ("--candidates", asked.candidates > 1),
            ("--refine", asked.refine > 0),
            ("--length", asked.length is not None),
        ):
            if given.blanks is not None and is_asked:
                raise UserError(f"--in {source}: texts with blanks do not go with {word}; leave it out")
        yield given
