"""What requests and answers of the service look like; the sizes of a model's latents are part of its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, create_model

from mmldlm.api.model import Model
from mmldlm.api.values import EMPTY, HALF_CHARACTER, NO_BLANK, blank_marks, latents_array
from mmldlm.errors import UserError


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and what all of them may."""

    documents: int = 64
    """Texts or latents of a request."""
    characters: int = 2000
    """Of a text."""
    steps: int = 128
    """Of a sampler."""
    bytes: int = 4 * 2**20
    """Of a request's body."""
    receive_seconds: float = 10.0
    """From the head of a request to its last byte."""
    answer_seconds: float = 60.0
    """From its last byte to the answer."""
    waiting: int = 1024
    """Documents in the queue of all clients."""
    batch: int = 128
    """Documents that are computed together."""


_ANYTHING = r"\S"
"""Pattern of a text that is not empty."""


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def whole(low: int, high: int) -> Any:
    """A whole number from `low` to `high`."""
    return Annotated[int, Field(ge=low, le=high), BeforeValidator(_whole)]


class Settings(BaseModel):
    """What all requests share; what is absent has the value of the run's settings."""

    model_config = ConfigDict(extra="forbid", strict=True)
    seed: Annotated[int, Field(ge=0, le=2**53 - 1), BeforeValidator(_whole)] = Field(
        0, description="Another seed, another sample, where something is drawn."
    )


class TextSettings(Settings):
    """How texts are sampled."""

    temperature: Annotated[FiniteFloat, Field(ge=0, le=10)] | None = Field(
        None, description="0: always the most probable token."
    )
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    order: Literal["confidence", "margin", "ancestral", "first_hitting", "block"] | None = None


class Texts(BaseModel):
    """Texts, one for each document."""

    texts: list[str]


class Latents(BaseModel):
    """Latents of all documents, each of some slots with some channels."""

    latents: list[list[list[float]]]


class Pairs(Texts, Latents):
    """Texts and their latents."""


class Problem(BaseModel):
    """What is wrong and what to do, in one line."""

    error: str


ANSWERS: dict[str, type[BaseModel]] = {"encode": Latents, "decode": Texts, "generate": Pairs, "infill": Texts}


def request_types(model: Model, limits: Limits) -> dict[str, type[BaseModel]]:
    """The body of each kind of request for this model."""
    slots = model.num_slots
    value: Any = Annotated[FiniteFloat, Field(ge=-1e4, le=1e4)]
    vector: Any = Annotated[list[value], Field(min_length=model.num_channels, max_length=model.num_channels)]
    latent: Any = Annotated[list[vector], Field(min_length=slots, max_length=slots)]
    many = Field(min_length=1, max_length=limits.documents)
    either: Any = latent | vector if slots == 1 else latent
    latents: Any = Annotated[list[either], many]
    texts, blanks = (_texts(limits, pattern, many) for pattern in (_ANYTHING, _blanks(model)))
    steps: Any = (whole(1, limits.steps) | None, None)
    length: Any = whole(1, model.max_length)
    guidance: Any = (
        Annotated[
            FiniteFloat, Field(ge=-20, le=20, description="1: none; larger follows the condition more.")
        ]
        | None,
        None,
    )
    solver: Any = (Literal["ddim", "dpmpp_2m", "heun"] | None, None)
    count: Any = (whole(1, limits.documents), 1)
    candidates: Any = (whole(1, 16) | None, None)

    def body(name: str, base: type[BaseModel], **fields: Any) -> type[BaseModel]:
        return create_model(name, __base__=base, __doc__=base.__doc__, **fields)

    decode = body(
        "DecodeRequest", TextSettings, latents=(latents, None), texts=(texts, None), steps=steps,
        lengths=(Annotated[list[length], many] | length | None, None), candidates=candidates, guidance=guidance,
    )  # fmt: skip
    one: Any = [{"required": ["latents"]}, {"required": ["texts"]}]
    decode.model_config["json_schema_extra"] = {"oneOf": one}
    return {
        "encode": body("EncodeRequest", Settings, texts=(texts, ...), steps=steps, solver=solver, guidance=guidance),
        "decode": decode,
        "generate": body(
            "GenerateRequest", TextSettings, n=count, steps=steps, latent_steps=steps,
            lengths=(length | None, None), solver=solver, guidance=guidance,
        ),
        "infill": body(
            "InfillRequest", TextSettings, texts=(blanks, ...), latents=(latents | None, None), steps=steps
        ),
    }  # fmt: skip


def _blanks(model: Model) -> str:
    return "____" if model.loaded.tokenizer_path is None else blank_marks(model.codec.tokenizer)


def _texts(limits: Limits, pattern: str, many: Any) -> Any:
    text = Annotated[str, Field(min_length=1, max_length=limits.characters, pattern=pattern)]
    return Annotated[list[text], many]  # type: ignore[valid-type]


_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "no such field; /openapi.json lists those of each request",
    "string_type": "a text is needed",
    "string_unicode": HALF_CHARACTER,
    "string_too_short": EMPTY,
    "string_too_long": "is longer than {max_length} characters; send shorter texts",
    "list_type": "a list is needed",
    "int_type": "a whole number is needed",
    "float_type": "a number is needed",
    "finite_number": "a finite number is needed",
    "greater_than": "more than {gt} is needed",
    "greater_than_equal": "at least {ge} is needed",
    "less_than_equal": "at most {le} is allowed",
    "too_short": "at least {min_length} is needed",
    "too_long": "at most {max_length} are allowed in a request, here are {actual_length}",
    "literal_error": "allowed are {expected}",
}
"""pydantic's type of error -> the words of the library."""


def problem_line(errors: Sequence[Mapping[str, Any]], body: Any, shape: tuple[int, int]) -> str:
    """What is wrong with a body, one clause for each field; `shape` of the model's latents."""
    clauses = []
    for field, parts in groupby(errors, key=lambda error: error["loc"][1:2]):
        clauses.append(_field_problem(*field, parts=list(parts), body=body, shape=shape))
    return "; ".join(clauses[:3]) + (f" (and {len(clauses) - 3} more)" if len(clauses) > 3 else "")


def _field_problem(
    field: str = "", *, parts: list[Mapping[str, Any]], body: Any, shape: tuple[int, int]
) -> str:
    if not field:
        return 'body: a JSON object is needed, such as {"texts": ["a coil of rope"]}'
    if field == "latents" and isinstance(body, dict) and isinstance(body.get(field), list):
        try:
            latents_array(body[field], shape)
        except UserError as error:
            return str(error)
    # a field of several types has errors of each: the one that gets furthest is of the type that was meant
    part = max(parts, key=lambda part: (not part["type"].endswith("_type"), len(_indices(part))))
    bounds = {key: f"{one:g}" if isinstance(one, float) else one for key, one in part.get("ctx", {}).items()}
    words = _WORDS[part["type"]].format(**bounds) if part["type"] in _WORDS else str(part["msg"])
    if part["type"] == "string_pattern_mismatch":
        words = EMPTY if bounds["pattern"] == _ANYTHING else NO_BLANK
    value, place = part.get("input"), "".join(f"[{index}]" for index in _indices(part))
    is_word = isinstance(value, str) and 0 < len(value) <= 40 and value.isprintable()
    shown = f"={value!r}" if is_word or isinstance(value, int | float) else ""
    return f"{field}{place}{shown}: {words}"


def _indices(error: Mapping[str, Any]) -> list[int]:
    return [part for part in error["loc"][2:] if isinstance(part, int)]
