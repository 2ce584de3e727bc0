"""The documents that a sampler works on, one after the other, on the device of the network; and the steps they take.

Shapes: N documents, T tokens, S latent slots, C latent channels, n documents of a whole call.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.data.tokenizer import split_texts
from mmldlm.errors import UserError
from mmldlm.layout import Layout, packed_layout
from mmldlm.types import Parcel, map_tensors, to_device

Modality = Literal["text", "latent"]
Sent = TypeVar("Sent")
Arrange = Callable[[np.ndarray, int], Layout]
"""Lengths of documents and their number of slots to a layout, which may be filled up at its end."""


@dataclass(frozen=True)
class Step:
    """One move of one modality to an earlier time."""

    modality: Modality
    time: float
    next_time: float
    step_idx: int


def make_steps(modality: Modality, num_steps: int, latest_time: float = 1.0) -> list[Step]:
    """Equal steps from the latest time to 0."""
    times = np.linspace(latest_time, 0.0, num_steps + 1)
    return [Step(modality, float(times[i]), float(times[i + 1]), i) for i in range(num_steps)]


def interleave(latent_steps: list[Step], text_steps: list[Step]) -> list[Step]:
    """Both chains in one order: whichever would be later in time moves next, the latent before the text."""
    steps = [*latent_steps, *text_steps]
    return sorted(steps, key=lambda step: (-step.next_time, step.modality))


@dataclass(frozen=True)
class Indices:
    """Which documents and tokens of a pack."""

    documents: Tensor
    tokens: Tensor


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of a pack are. All packs of a chain share it, so the network's layout is computed once."""

    lengths: np.ndarray
    num_slots: int
    device: torch.device
    arrange: Arrange = packed_layout
    parts: dict[bytes, tuple[Indices, Places]] = field(default_factory=dict)
    """By which documents are in it: its indices on the device, and its own places."""

    @cached_property
    def document(self) -> np.ndarray:
        """(T,) document of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def position(self) -> np.ndarray:
        """(T,) place of each token in its document."""
        return np.arange(len(self.document)) - np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)

    @cached_property
    def layout(self) -> Layout:
        """Where the network finds each token and slot, on the device."""
        return send(self.arrange(self.lengths, self.num_slots), self.device)

    @cached_property
    def device_document(self) -> Tensor:
        return self.layout.document[: len(self.document)]

    @cached_property
    def device_position(self) -> Tensor:
        return self.layout.position[: len(self.document)]

    def count(self, tokens: np.ndarray) -> np.ndarray:
        """(N,) how many tokens of each document are true in a (T,) bool."""
        return np.bincount(self.document[tokens], minlength=len(self.lengths))

    def part(self, documents: np.ndarray) -> tuple[Indices, Places]:
        """Indices of some documents, (N,) bool, and of their tokens, and where these are among themselves."""
        key = documents.tobytes()
        if key not in self.parts:
            arrays = (np.flatnonzero(documents), np.flatnonzero(documents[self.document]))
            places = Places(self.lengths[documents], self.num_slots, self.device, self.arrange)
            self.parts[key] = (send(Indices(*map(torch.from_numpy, arrays)), self.device), places)
        return self.parts[key]


@dataclass(frozen=True, eq=False)
class Tally:
    """How many passes of the network each document of a call has cost."""

    passes: np.ndarray
    """(n,) int64, counted up in place."""
    index: np.ndarray
    """(N,) which documents of the call these are."""

    def add(self) -> None:
        """One more pass for each of these documents."""
        np.add.at(self.passes, self.index, 1)


@dataclass
class Watch:
    """Whether the predictions of a chain were numbers; asked when it is done, since an answer waits for the device."""

    bad: list[Tensor] = field(default_factory=list)

    def see(self, values: Tensor) -> None:
        """Remember whether all of these are finite."""
        self.bad.append(values.isfinite().all().logical_not())

    def flags(self) -> Tensor:
        """Of each prediction, whether it held anything else."""
        return torch.stack(self.bad) if self.bad else torch.empty(0, dtype=torch.bool)

    def check(self) -> None:
        """Reject a model that predicted anything else."""
        reject_bad(self.flags())


def reject_bad(flags: Tensor) -> None:
    """Reject a model with a prediction that is not a number."""
    if bool(flags.any()):
        raise UserError(
            "the model predicts NaN or infinity, so nothing can be sampled from it; "
            "use an earlier checkpoint, and look at the losses of the run"
        )


@dataclass(frozen=True)
class LatentMemory:
    """What a multistep solver remembers of the previous step."""

    clean: Tensor
    """(N, S, C) the clean latents that were predicted."""
    time: float


@dataclass(frozen=True)
class Pack:
    """How far each document has come. A sampler's step turns a pack into the next one."""

    noisy_tokens: Tensor
    """(T,) int64"""
    noisy_latents: Tensor
    """(N, S, C) float32"""
    text_time: Tensor
    """(N,) float32"""
    latent_time: Tensor
    """(N,) float32"""
    lengths: np.ndarray
    """(N,) int64"""
    keys: np.ndarray
    """(N,) uint64"""
    free: np.ndarray | None = None
    """(T,) bool, tokens that the sampler is to find, masked at the start; None: all."""
    noise: Tensor | None = None
    """(N, S, C) the documents' own latent noise; computed where it is needed and None."""
    against: Tensor | None = None
    """(N, S, C) clean latents that guidance leads the text away from; None: it compares with no latent at all."""
    memory: LatentMemory | None = None
    tally: Tally | None = None
    places: Places = None  # type: ignore[assignment]
    """Computed from the lengths where it is not handed on."""
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        if self.places is None or self.places.lengths is not self.lengths:
            places = Places(self.lengths, self.noisy_latents.shape[1], self.noisy_tokens.device)
            object.__setattr__(self, "places", places)

    @property
    def document(self) -> np.ndarray:
        """(T,) document of each token."""
        return self.places.document

    @property
    def position(self) -> np.ndarray:
        """(T,) place of each token in its document."""
        return self.places.position

    @property
    def layout(self) -> Layout:
        """Where the network finds each token and slot."""
        return self.places.layout

    @property
    def num_free(self) -> np.ndarray:
        """(N,) tokens of each document that the sampler is to find."""
        return self.lengths if self.free is None else self.places.count(self.free)

    def select(self, documents: np.ndarray) -> Part:
        """Some of the documents, (N,) bool."""
        indices, places = self.places.part(documents)
        kept, tokens = indices.documents, indices.tokens
        pack = Pack(
            noisy_tokens=self.noisy_tokens[tokens],
            noisy_latents=self.noisy_latents[kept],
            text_time=self.text_time[kept],
            latent_time=self.latent_time[kept],
            lengths=places.lengths,
            keys=self.keys[documents],
            noise=None if self.noise is None else self.noise[kept],
            against=None if self.against is None else self.against[kept],
            tally=None if self.tally is None else Tally(self.tally.passes, self.tally.index[documents]),
            places=places,
            watch=self.watch,
        )
        return Part(pack, kept, tokens)

    def split_tokens(self) -> list[np.ndarray]:
        """The tokens of each document; waits for the device."""
        return split_texts(self.noisy_tokens.cpu().numpy(), self.lengths)


class Part(NamedTuple):
    """Some of the documents of a pack, or all."""

    pack: Pack
    documents: Tensor | None = None
    """Which ones; None: all."""
    tokens: Tensor | None = None
    """Which tokens of the whole pack are theirs; None: all."""

    def of_documents(self, values: Tensor) -> Tensor:
        """Values of the documents of the whole pack -> those of these."""
        return values if self.documents is None else values[self.documents]

    def of_pack(self, rows: Tensor) -> Tensor:
        """Rows of these tokens -> rows of the whole pack."""
        return rows if self.tokens is None else self.tokens[rows]


def send(value: Sent, device: torch.device) -> Sent:
    """The same dataclass on the device; its tensors travel as one, and the host does not wait."""
    if device.type == "cpu":
        return value
    parcel = Parcel.of(value)
    return parcel.with_buffer(send_tensor(parcel.buffer, device)).open()


def send_tensor(value: Tensor, device: torch.device) -> Tensor:
    """The same tensor on the device; the host does not wait, which it would for memory that is not page-locked."""
    return (value.pin_memory() if device.type == "cuda" else value).to(device, non_blocking=True)


class Fetched(Generic[Sent]):
    """A dataclass on its way from the device to the host.

    On a CUDA GPU `wait` waits for this copy alone: what is launched later goes on meanwhile.
    """

    def __init__(self, value: Sent, device: torch.device) -> None:
        self._value, self._on_host, self._copied = value, device.type == "cpu", None
        if device.type == "cuda":
            self._value, self._on_host = to_device(value, "cpu"), True  # into page-locked memory
            self._copied = torch.cuda.Event(blocking=True)  # a waiting thread leaves its core to others
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> Sent:
        """The dataclass on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value if self._on_host else map_tensors(self._value, Tensor.cpu)


def document_keys(seed: int, count_or_ids: int | np.ndarray | Sequence[int]) -> np.ndarray:
    """(n,) the documents' own sources of randomness, from their ids or, given a count, from their places."""
    ids = np.arange(count_or_ids) if isinstance(count_or_ids, int | np.integer) else np.asarray(count_or_ids)
    return randomness.make_key(seed, ids)


def content_ids(contents: Sequence[str] | np.ndarray) -> np.ndarray:
    """(n,) uint64 ids that follow from the content alone, so that order and batches do not matter."""
    data = [
        item.encode("utf-8", "surrogatepass") if isinstance(item, str) else item.tobytes()
        for item in contents
    ]
    digests = [hashlib.blake2b(item, digest_size=8).digest() for item in data]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def latent_noise(keys: np.ndarray, shape: tuple[int, ...]) -> Tensor:
    """(N, S, C) the documents' own latent noise for slots and channels of this shape."""
    noise = randomness.normal(keys, randomness.LATENT_NOISE, math.prod(shape))
    return torch.from_numpy(noise).view(-1, *shape)


def group_documents(lengths: np.ndarray, num_slots: int, batch_tokens: int) -> list[np.ndarray]:
    """Indices of the documents of each pack: sorted by length, each pack as full as `batch_tokens` allows.

    A document that is larger than that gets a pack of its own.
    """
    order = np.argsort(lengths, kind="stable")
    groups: list[list[int]] = []
    room = -1
    for index in order:
        size = int(lengths[index]) + num_slots
        if size > room:
            groups.append([])
            room = batch_tokens
        groups[-1].append(int(index))
        room -= size
    return [np.array(group) for group in groups]
