"""Encoders: anything that turns texts into latents.

An encoder is built in, a sentence-transformers model, a Python object with `encode`, a function, or `module:name`. What
the user's own code returns is checked batch by batch. A store describes its encoder so that it can be opened again.

Shapes: N texts, S latent slots, C latent channels.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

import numpy as np

from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError, first_line
from mmldlm.preparation.sentence_encoder import SentenceEncoder, Tokenized, check_dimension, cut_dimension
from mmldlm.reports import counted
from mmldlm.untrusted import misfit

BATCH_SIZE = 256
"""Texts that an encoder of the user's gets at once, unless it is set."""
PROBE_VALUES = 16
"""Numbers of the first latent that a store remembers, to recognise its encoder."""
PROBE_TOLERANCE = 1e-2
"""Of their norm; other devices and batch sizes change the last digits."""
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*(\.\w+)*")


@runtime_checkable
class Encoder(Protocol):
    """What makes latents of texts: any object with this method.

    >>> class Lengths:
    ...     def encode(self, texts):
    ...         return [[float(len(text)), float(text.count(" "))] for text in texts]
    >>> isinstance(Lengths(), Encoder)
    True
    """

    def encode(self, texts: list[str], /) -> Any:
        """Latents of the texts, in their order: an array (N, C), or (N, S, C) for several vectors per text."""


AnyEncoder = str | Encoder | Callable[[list[str]], Any]
"""A name, an object with `encode`, or a function of texts."""


class Probe(TypedDict):
    """The first numbers of the latent of one text, by which an encoder is recognised."""

    text: str
    latent: list[float]


class Description(TypedDict):
    """What a store or a model says about its encoder."""

    name: str
    kind: NotRequired[str]
    prompt: NotRequired[str]
    normalize: NotRequired[bool]
    dimension: NotRequired[int | None]
    sha256: NotRequired[str | None]


class EncoderUnavailableError(UserError):
    """No encoder is known for some latents, or it cannot be found from its description alone."""


class OwnEncoder:
    """An encoder of the user's. Every batch that it returns is checked."""

    max_tokens = None

    def __init__(
        self,
        encoder: Encoder | Callable[[list[str]], Any],
        name: str,
        probe_text: str,
        *,
        prompt: str = "",
        normalize: bool = False,
        dimension: int | None = None,
        batch_size: int | None = None,
    ) -> None:
        self.name, self.prompt, self.normalize = name, prompt, normalize
        self._encode = _encode_function(encoder, name)
        self._shape: tuple[int, ...] | None = None
        self.batch_size = batch_size or BATCH_SIZE
        self.dimension = dimension
        first = self._batch([probe_text])
        self.num_slots, self.num_channels = first.shape[1:]
        self.dimension = self.num_channels
        values = [float(f"{value:.5g}") for value in first.reshape(-1)[:PROBE_VALUES]]
        self.probe: Any = {"text": probe_text, "latent": values}

    def describe(self) -> dict[str, Any]:
        """What the manifest says about this encoder."""
        return {
            "name": self.name,
            "kind": "python",
            "prompt": self.prompt,
            "normalize": self.normalize,
            "dimension": self.dimension,
            "probe": self.probe,
        }

    def accepts(self, tokenizer: Tokenizer) -> bool:
        """It takes texts, no tokens."""
        return False

    def tokenize(self, texts: list[str], tokens: object = None) -> Tokenized:
        """The texts as they are."""
        return Tokenized(texts, np.zeros(len(texts), np.int64), None)

    def embed(self, tokenized: Tokenized, progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Latents of the texts, float32 (N, S, C)."""
        return self.encode(tokenized.texts, progress)

    def encode(self, texts: list[str], progress: Callable[[int], None] | None = None) -> np.ndarray:
        """Latents of the texts, float32 (N, S, C), in their order. `progress` gets the size of each batch."""
        out = np.empty((len(texts), self.num_slots, self.num_channels), np.float32)
        for start in range(0, len(texts), self.batch_size):
            batch = texts[start : start + self.batch_size]
            out[start : start + len(batch)] = self._batch(batch)
            if progress is not None:
                progress(len(batch))
        return out

    def _batch(self, texts: list[str]) -> np.ndarray:
        try:
            output = self._encode([self.prompt + text for text in texts])
        except UserError:
            raise
        except Exception as error:  # code of the user's may raise anything
            raise UserError(
                f"encoder {self.name}: encode() raised {type(error).__name__}: {first_line(error)}"
            ) from error
        latents = as_latents(output, texts, f"encoder {self.name}: encode()")
        self._shape = self._shape or latents.shape[1:]
        if latents.shape[1:] != self._shape:
            raise UserError(
                f"encoder {self.name}: encode() returned latents of shape {latents.shape[1:]} (slots, channels), "
                f"before it was {self._shape}; every text needs the same shape"
            )
        check_dimension(self.dimension, self._shape[1], f"the encoder {self.name} has")
        return cut_dimension(latents, self.dimension or self._shape[1], self.normalize)


def as_latents(output: Any, texts: list[str], what: str) -> np.ndarray:
    """The output of an encoder as float32 (N, S, C); `what` returned it, for messages."""
    try:
        if hasattr(output, "detach"):  # a torch tensor, on whatever device
            output = output.detach().cpu().float().numpy()
        array = np.asarray(output)
    except ValueError as error:
        raise UserError(
            f"{what} returned rows of different lengths; every text needs the same shape"
        ) from error
    except (TypeError, RuntimeError) as error:  # such as a list of tensors on a device or with gradients
        raise UserError(
            f"{what} returned what is no array ({first_line(error)}); an array of numbers is needed"
        ) from error
    if array.dtype.kind not in "fiu":
        raise UserError(f"{what} returned {array.dtype} values; an array of numbers is needed")
    if array.ndim not in (2, 3):
        raise UserError(
            f"{what} returned an array of shape {array.shape}; (texts, channels) or (texts, slots, channels) is needed"
        )
    if len(array) != len(texts):
        raise UserError(f"{what} returned {counted(len(array), 'latent')} for {counted(len(texts), 'text')}")
    if not array.size:
        raise UserError(
            f"{what} returned an array of shape {array.shape}; a latent needs at least one channel"
        )
    latents = (array if array.ndim == 3 else array[:, None, :]).astype(np.float32)
    bad = ~np.isfinite(latents).all(axis=(1, 2))
    if bad.any():
        first = int(np.argmax(bad))
        raise UserError(
            f"{what} returned NaN or infinite values for {int(bad.sum())} of {counted(len(texts), 'text')}; "
            f"the first is {texts[first][:60]!r}"
        )
    return latents


def load_encoder(
    encoder: AnyEncoder,
    probe_text: Callable[[], str],
    *,
    prompt: str = "",
    normalize: bool | None = None,
    dimension: int | None = None,
    device: str = "auto",
    batch_size: int | None = None,
) -> SentenceEncoder | OwnEncoder:
    """An encoder ready for use; `probe_text` gives a text that an encoder of the user's is tried with.

    `normalize` None: latents of sentence-transformers models get unit length, those of other encoders stay as they are.
    """
    options: dict[str, Any] = {"prompt": prompt, "dimension": dimension, "batch_size": batch_size}
    if isinstance(encoder, str) and not is_own(encoder):
        return SentenceEncoder.load(encoder, normalize=normalize is not False, device=device, **options)
    name = encoder_name(encoder)
    target = import_encoder(encoder) if isinstance(encoder, str) else encoder
    return OwnEncoder(target, name, probe_text(), normalize=bool(normalize), **options)


def open_encoder(
    description: dict[str, Any] | None, *, device: str = "auto", encoder: AnyEncoder | None = None
) -> SentenceEncoder | OwnEncoder:
    """The encoder that a store or model describes, or `encoder` in its place if it gives the same latents.

    Raises `EncoderUnavailableError` where the description is not enough: the latents were given, or the encoder is code
    that the user has to name. A description can come from a stranger, so it runs only code of the working directory.
    """
    if description is None:
        if encoder is not None:
            return load_encoder(encoder, lambda: "A text.", device=device)
        raise EncoderUnavailableError(
            "no encoder is known: the latents of the training data were given as vectors; "
            "make latents with the encoder that made those, or with the model itself (encode)"
        )
    if problem := misfit(Description, description, "it"):
        raise UserError(
            f"the description of the encoder cannot be used ({problem}); pass the encoder in Python"
        )
    if description.get("kind") != "python":
        if encoder is not None and encoder != description["name"]:
            description = description | {"name": _other_name(encoder, description)}
        return SentenceEncoder.reopen(description, device)
    return _reopen_own(description, encoder)


def _other_name(encoder: AnyEncoder, description: dict[str, Any]) -> str:
    """Another place of the same sentence-transformers model."""
    if isinstance(encoder, str) and not is_own(encoder):
        return encoder
    raise UserError(
        f"encoder {encoder_name(encoder)}: the latents were made by the sentence-transformers model "
        f"{description['name']}; give its name or folder, or leave encoder unset"
    )


def _reopen_own(description: dict[str, Any], encoder: AnyEncoder | None) -> OwnEncoder:
    name, probe = description["name"], description.get("probe") or {}
    if problem := misfit(Probe, probe, "probe"):
        raise UserError(f"encoder {name}: its description cannot be used ({problem}); pass it in Python")
    target = _import_local(name) if encoder is None else encoder
    target = import_encoder(target) if isinstance(target, str) else target
    options = {key: description[key] for key in ("prompt", "normalize", "dimension") if key in description}
    opened = OwnEncoder(target, name, probe["text"], **options)
    expected, values = np.array(probe["latent"]), np.array(opened.probe["latent"])
    if expected.shape != values.shape or np.linalg.norm(expected - values) > PROBE_TOLERANCE * np.linalg.norm(
        expected
    ):
        raise UserError(
            f"encoder {name}: gives other latents for {probe['text'][:40]!r} than when the store was made; "
            "use the same version of the encoder with the same options"
        )
    return opened


def is_own(name: str) -> bool:
    """True for `module:function` and `module:object`."""
    return (
        not name.startswith("builtin:")
        and _MODULE_NAME.fullmatch(name) is not None
        and not Path(name).exists()
    )


def encoder_name(encoder: AnyEncoder) -> str:
    """The name by which a store remembers an encoder: its own, or that of its code."""
    if isinstance(encoder, str):
        return encoder
    name = getattr(encoder, "name", None)
    if isinstance(name, str) and name:
        return name
    code = encoder if hasattr(encoder, "__qualname__") else type(encoder)
    return f"{code.__module__}:{code.__qualname__}"


def import_encoder(name: str) -> Any:
    """The object that `module:name` stands for; modules of the working directory count."""
    module_name, _, path = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        target: Any = importlib.import_module(module_name)
    except Exception as error:  # a module may raise anything while it is imported
        raise UserError(
            f"encoder {name}: the module {module_name} cannot be imported ({type(error).__name__}: "
            f"{first_line(error)}); it is searched in {folder} and among the installed packages"
        ) from error
    for word in path.split("."):
        if not hasattr(target, word):
            raise UserError(f"encoder {name}: {module_name} has no {path!r}; check the spelling")
        target = getattr(target, word)
    return _instance(target, name) if isinstance(target, type) else target


def _instance(target: type, name: str) -> Any:
    try:
        return target()
    except Exception as error:  # a class of the user's may raise anything
        raise EncoderUnavailableError(
            f"encoder {name}: this class cannot be created without arguments ({first_line(error)}); "
            "pass an object (encoder=...), or name a module variable that holds one"
        ) from error


def _import_local(name: str) -> Any:
    """The encoder of a description, if it is code of the working directory."""
    module_name, _, path = name.partition(":")
    reason = "which is Python code outside the working directory"
    if is_own(name) and "." not in path and _is_local(module_name.split(".")[0]):
        try:
            target = import_encoder(name)
        except UserError as error:
            reason = f"which cannot be found again ({error})"
        else:
            if getattr(target, "__module__", module_name) == module_name or hasattr(target, "encode"):
                return target
    raise EncoderUnavailableError(
        f"the latents were made by the encoder {name}, {reason}; work in the folder of its code, or pass the encoder "
        "in Python, as an object or as module:name"
    )


def _is_local(module_name: str) -> bool:
    """Whether a module is a file of the working directory, and not of an environment inside it."""
    folder = Path.cwd()
    if module_name in sys.modules:
        origin = getattr(sys.modules[module_name], "__file__", None)
    else:
        spec = importlib.machinery.PathFinder.find_spec(module_name, [str(folder)])
        origin = spec.origin if spec else None
    if origin is None:
        return False
    path = Path(origin).resolve()
    return path.is_relative_to(folder.resolve()) and not {"site-packages", "dist-packages"} & set(path.parts)


def _encode_function(encoder: Any, name: str) -> Callable[[list[str]], Any]:
    if isinstance(encoder, type):
        raise UserError(f"encoder {name}: is a class; pass an object of it")
    if isinstance(encoder, Encoder) and callable(encoder.encode):
        return encoder.encode
    if callable(encoder):
        return encoder
    raise UserError(
        f"encoder {name}: {type(encoder).__name__} has no encode(texts) and is no function; "
        "pass an object with that method, a function, or a name"
    )
