"""What requests and answers of the service look like; the sizes of a model's latents are part of its schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, create_model

from mmldlm.api.model import Model


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
    texts, blanks = (_texts(limits, pattern, many) for pattern in (r"\S", "____"))
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


def _texts(limits: Limits, pattern: str, many: Any) -> Any:
    text = Annotated[str, Field(min_length=1, max_length=limits.characters, pattern=pattern)]
    return Annotated[list[text], many]  # type: ignore[valid-type]
