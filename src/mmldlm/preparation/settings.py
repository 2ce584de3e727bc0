"""What decides the bytes of a pair store. The same settings on the same text continue where a run was stopped."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from mmldlm.data.writer import LATENT_DTYPES
from mmldlm.errors import UserError
from mmldlm.preparation.readers import LATENT_FIELD

HELD_OUT = ("validation", "test")
VALIDATION_SHARE = 0.05
"""Held out by default."""
DEFAULT_ENCODER = "builtin:minilm"
TEXT_UNITS = ("auto", "file", "part", "line")
CUTS = ("none", "sentences", "paragraphs", "chunks")
SHORTEST_MAX = 8
"""Below this many tokens not even one unusual character is sure to fit."""
MOST_DERIVED = 16
_WHOLE = ("max_tokens", "min_tokens", "limit", "dimension", "shard_documents", "seed", "derive")


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
        for name in _WHOLE:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, value))
        if not self.input:
            raise UserError("source: no text is given; name a file, a folder, a dataset or builtin:sotu")
        share = "a share from 0 to below 1 is needed"
        problems = [
            (self.cut not in CUTS, f"cut={self.cut}: allowed are {', '.join(CUTS)}"),
            (self.max_tokens < SHORTEST_MAX, f"max_tokens={self.max_tokens}: at least {SHORTEST_MAX} is needed"),
            (
                not 1 <= self.min_tokens <= self.max_tokens,
                f"min_tokens={self.min_tokens}: allowed is 1 to max_tokens ({self.max_tokens})",
            ),
            (self.limit is not None and self.limit < 1, f"limit={self.limit}: at least 1 is needed"),
            (not 0 <= self.validation_share < 1, f"validation={self.validation}: {share}"),
            (not 0 <= self.test < 1, f"test={self.test}: {share}"),
            (self.validation_share + self.test >= 1, "validation and test together: less than 1 is needed"),
            (not 0 <= self.derive <= MOST_DERIVED, f"derive={self.derive}: allowed is 0 (nothing) to {MOST_DERIVED}"),
            (
                self.latent_dtype not in LATENT_DTYPES,
                f"latent_dtype={self.latent_dtype}: allowed are {', '.join(LATENT_DTYPES)}",
            ),
            (self.shard_documents < 1, f"shard_documents={self.shard_documents}: at least 1 is needed"),
            (
                self.text_unit not in TEXT_UNITS,
                f"text_unit={self.text_unit}: allowed are {', '.join(TEXT_UNITS)}",
            ),
        ]  # fmt: skip
        for split in HELD_OUT:
            chosen = self.dataset_splits[split]
            unread = (
                f"{split}_dataset_split={chosen}: there is no {split}_source that it could be read from; "
                "give one, or leave this out"
            )
            problems.append((chosen is not None and not self.inputs[split], unread))
        _reject(problems)

    @property
    def validation_share(self) -> float:
        """The share of the input that is held out for validation."""
        if self.validation is not None:
            return self.validation
        return 0.0 if self.validation_input else VALIDATION_SHARE

    @property
    def inputs(self) -> dict[str | None, tuple[str, ...]]:
        """The sources of each held-out split; of None: those that are divided by shares."""
        return {"validation": self.validation_input, "test": self.test_input, None: self.input}

    @property
    def dataset_splits(self) -> dict[str | None, str | None]:
        """What is read of a dataset, likewise."""
        held_out = self.validation_dataset_split, self.test_dataset_split
        return {"validation": held_out[0], "test": held_out[1], None: self.dataset_split}

    def check_given_latents(self, encoder: object | None) -> None:
        """`UserError` for settings that latents which were given exclude."""
        remedy = "" if self.latents else f" (latent_field='' ignores the field {self.latent_field!r})"
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
        _reject(problems, remedy)


def _whole(name: str, value: object) -> int:
    """The number; also one of numpy, which JSON would not take."""
    if not hasattr(value, "__index__"):
        raise UserError(f"{name}={value!r}: a whole number is needed")
    return operator.index(value)


def _reject(problems: list[tuple[bool, str]], remedy: str = "") -> None:
    """`UserError` with all problems that are there."""
    if present := [text for is_there, text in problems if is_there]:
        raise UserError("; ".join(present) + remedy)
