"""What decides the bytes of a pair store. The same settings on the same text continue where a run was stopped."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mmldlm.data.writer import LATENT_DTYPES
from mmldlm.errors import UserError
from mmldlm.preparation.readers import LATENT_FIELD, Vectors
from mmldlm.preparation.sources import TEXT_UNITS, SourceOptions, Sources, reject_overlap, resolve

HELD_OUT = ("validation", "test")
VALIDATION_SHARE = 0.05
"""Held out by default."""
DEFAULT_ENCODER = "builtin:minilm"
_NEW = {"latents": None, "latent_field": LATENT_FIELD}
"""Settings that older stores do not have, with the value that changes nothing."""
CUTS = ("none", "sentences", "paragraphs", "chunks")
SHORTEST_MAX = 8
"""Below this many tokens not even one unusual character is sure to fit."""
MOST_DERIVED = 16


@dataclass(frozen=True)
class SegmentOptions:
    """What becomes of a source document."""

    cut: str = "none"
    max_tokens: int = 128
    min_tokens: int = 1
    limit: int | None = None
    validation: float = 0.05
    test: float = 0.0
    seed: int = 0
    derive: int = 0
    """So many spans and so many splices of each training document are added, see `derive`."""

    def __post_init__(self) -> None:
        problems = [
            (self.cut not in CUTS, f"cut={self.cut}: allowed are {', '.join(CUTS)}"),
            (
                self.max_tokens < SHORTEST_MAX,
                f"max_tokens={self.max_tokens}: at least {SHORTEST_MAX} is needed",
            ),
            (
                not 1 <= self.min_tokens <= self.max_tokens,
                f"min_tokens={self.min_tokens}: allowed is 1 to max_tokens ({self.max_tokens})",
            ),
            (self.limit is not None and self.limit < 1, f"limit={self.limit}: at least 1 is needed"),
            (
                not 0 <= self.validation < 1,
                f"validation={self.validation}: a share from 0 to below 1 is needed",
            ),
            (not 0 <= self.test < 1, f"test={self.test}: a share from 0 to below 1 is needed"),
            (self.validation + self.test >= 1, "validation and test together: less than 1 is needed"),
            (
                not 0 <= self.derive <= MOST_DERIVED,
                f"derive={self.derive}: allowed is 0 (nothing) to {MOST_DERIVED}",
            ),
        ]
        wrong = [text for is_wrong, text in problems if is_wrong]
        if wrong:
            raise UserError("; ".join(wrong))


@dataclass(frozen=True)
class PrepareSettings:
    """The settings of one store. Sources in memory are passed beside them; here is only what names them."""

    input: tuple[str, ...]
    tokenizer: str = "builtin:minilm"
    encoder: str | None = None
    """Name of the encoder; None: `DEFAULT_ENCODER`, or nothing where the latents are given."""
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
    normalize: bool | None = None
    """Latents to unit length; None: only those of sentence-transformers models."""
    dimension: int | None = None
    latent_dtype: str = "float16"
    shard_documents: int = 8192
    seed: int = 0
    derive: int = 0
    validation_input: tuple[str, ...] = ()
    test_input: tuple[str, ...] = ()
    validation_dataset_split: str | None = None
    test_dataset_split: str | None = None
    latents: str | None = None
    """Where the latents were given: a file, or `an array`."""
    latent_field: str | None = LATENT_FIELD
    """Field of a row that holds its latent; None: such a field is ignored."""

    def __post_init__(self) -> None:
        if not self.input:
            raise UserError("source: no text is given; name a file, a folder, a dataset or builtin:sotu")
        if self.latent_dtype not in LATENT_DTYPES:
            raise UserError(f"latent_dtype={self.latent_dtype}: allowed are {', '.join(LATENT_DTYPES)}")
        if self.shard_documents < 1:
            raise UserError(f"shard_documents={self.shard_documents}: at least 1 is needed")
        if self.text_unit not in TEXT_UNITS:
            raise UserError(f"text_unit={self.text_unit}: allowed are {', '.join(TEXT_UNITS)}")
        for split in HELD_OUT:
            if self._dataset_split(split) is not None and not self._inputs(split):
                raise UserError(
                    f"{split}_dataset_split={self._dataset_split(split)}: there is no {split}_source that it "
                    "could be read from; give one, or leave this out"
                )

    @property
    def validation_share(self) -> float:
        """The share of the input that is held out for validation."""
        if self.validation is not None:
            return self.validation
        return 0.0 if self.validation_input else VALIDATION_SHARE

    def sources(
        self, rows: Iterable[Any] | None = None, vectors: Vectors | None = None
    ) -> tuple[Sources, ...]:
        """All sources, those that are held out as a whole before the others; `rows`: in memory, instead of `input`."""
        if vectors is not None and (self.validation_input or self.test_input):
            raise UserError(
                f"latents={vectors.name}: belongs to one source; for held-out sources too, give every row a field "
                f"{LATENT_FIELD!r} instead"
            )
        held_out = [
            resolve(self._inputs(split), self._source_options(split))
            for split in HELD_OUT
            if self._inputs(split)
        ]
        options = self._source_options(None)
        main = (
            resolve(self.input, options, vectors) if rows is None else Sources((), (), options, rows, vectors)
        )
        reject_overlap([*held_out, main])
        return *held_out, main

    def check_given_latents(self, encoder: object | None) -> None:
        """`UserError` for settings that latents which were given exclude."""
        problems = [
            (
                encoder is not None,
                "encoder: the latents are given, so nothing is encoded; leave one of the two out",
            ),
            (self.cut != "none", f"cut={self.cut}: a latent belongs to a whole document; use cut=none"),
            (self.derive > 0, f"derive={self.derive}: derived texts need an encoder; use derive=0"),
            (
                bool(self.prompt),
                f"prompt={self.prompt!r}: there is no encoder that could read it; leave it out",
            ),
            (
                self.latents is not None and self.text_unit == "part",
                "text_unit=part: with latents a document is a line or a file; use text_unit=line",
            ),
        ]
        wrong = [text for is_wrong, text in problems if is_wrong]
        if wrong:
            remedy = "" if self.latents else f" (latent_field='' ignores the field {self.latent_field!r})"
            raise UserError("; ".join(wrong) + remedy)

    def _source_options(self, split: str | None) -> SourceOptions:
        """How the sources of one held-out split, or those of `input`, are read."""
        dataset_split = self.dataset_split if split is None else self._dataset_split(split) or split
        limit = self.limit if split is None else None
        return SourceOptions(
            self.text_field,
            self.text_unit,
            self.dataset_config,
            dataset_split,
            self.seed,
            limit,
            split,
            self.latent_field or None,
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
        """What is written down and compared with a later command, without settings that are not used.

        So stores from before there were such settings are still recognised.
        """
        values = asdict(self) | {"validation": self.validation_share}
        optional = (
            "derive",
            *(f"{split}_{word}" for split in HELD_OUT for word in ("input", "dataset_split")),
        )
        written = {
            key: value
            for key, value in values.items()
            if (value or key not in optional) and not (key in _NEW and value == _NEW[key])
        }
        for part in sources:
            key = part.options.name.replace("source", "input")
            size = "texts" if part.rows is not None else f"{len(part.files)} files, {part.num_bytes} bytes"
            written |= {key: list(values[key]), f"{key}_files": f"{size}, {part.digest()}"}
            if part.vectors is not None:
                written["latents_content"] = part.vectors.digest()
        return written
