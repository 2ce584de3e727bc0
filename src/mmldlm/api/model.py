"""A trained model to use: latents to text, text to latents, both from nothing, and texts with blanks.

    model = mmldlm.load("saved/wordnet")
    model.decode(model.embed(["a coil of rope"]))

Latents go in and come out in the encoder's own space; those that come out are (n, slots, channels). What is sampled
depends on the seed and on the text or latent itself, never on its place in a batch or on the size of the batch. The
examples below use a small `model` that knows the words w0 to w19.
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mmldlm import randomness
from mmldlm.api.hub import Sharing, apply_generation_config
from mmldlm.api.scoring import Scoring
from mmldlm.api.values import (
    Check,
    Codec,
    Ids,
    Latents,
    Lengths,
    Pairs,
    SampledText,
    Texts,
    latents_array,
    lengths_array,
    like,
    local_folder,
    matched,
    one_each,
    one_latent,
    parse_blanks,
    require_at_least,
    require_choice,
    source_ids,
    text_list,
    without_blanks,
)
from mmldlm.checkpoint.export import export_of_parts
from mmldlm.checkpoint.load import LoadedModel, build_model, load_model
from mmldlm.config import chosen_modes
from mmldlm.corruption.joint import Corruption
from mmldlm.corruption.times import modes_of_run
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.latents import between
from mmldlm.model.denoiser import Denoiser
from mmldlm.preparation.encoders import AnyEncoder
from mmldlm.runtime import choose_device
from mmldlm.sampling.decode import (
    Progress,
    decode_latents,
    encode_tokens,
    generate,
    infill_tokens,
    paraphrase_tokens,
)
from mmldlm.sampling.judge import Encode
from mmldlm.sampling.options import SamplingOptions, for_joint, lengths_tried
from mmldlm.sampling.pack import content_ids, document_keys
from mmldlm.sampling.self_check import decode_checked, drawn_options

logger = logging.getLogger(__name__)


def load(
    source: str | os.PathLike[str], device: str | torch.device = "auto", *, encoder: AnyEncoder | None = None,
    precision: str | None = None,
) -> Model:  # fmt: skip
    """A model from a run folder (also one that is still training), an export folder, or a name on the Hugging Face Hub.

    `builtin:NAME` is the model that an installed package mmldlm_NAME carries. `source` may also be the run that
    `mmldlm.train` returned. `device`: "auto" takes a GPU where there is one.
    `encoder` is needed only for `embed`, and only where your own Python code made the training latents: the object, or
    "module:name". `precision`: fp32 or bf16, the type of the matrix products; None: bf16 on a GPU or CPU that has
    instructions for it (CPUs: AVX-512 BF16), else fp32.

    >>> load(run).num_channels
    4
    """
    path = local_folder(source)
    if precision is not None:
        require_choice("precision", precision, ("fp32", "bf16"))
    loaded = load_model(path, choose_device(device, option="device"), precision)
    apply_generation_config(path, loaded.config.sampling)
    named = isinstance(source, str) and path != Path(source).expanduser()  # builtin:NAME, or on the Hub
    return Model(loaded, str(source if named else path), encoder)


class Model(Sharing, Scoring):
    """A trained model. `mmldlm.load` makes one of a run or an export, `Model.of` of weights at hand.

    `num_slots` and `num_channels` describe its latents, `max_length` is the longest text of training, `step` the
    training step of the weights, `device` where the network is.
    """

    def __init__(self, loaded: LoadedModel, source: str = "", encoder: AnyEncoder | None = None) -> None:
        self.loaded, self.source = loaded, source
        shape = loaded.denoiser.shape
        self.num_slots, self.num_channels = shape.num_slots, shape.num_channels
        self.max_length = shape.max_length
        self.device, self.step = loaded.device, loaded.step
        self.codec = Codec(loaded, encoder)
        self._shape, self._normalised = self.codec.latent_shape, self.codec.normalized

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], device: str | torch.device = "auto") -> Model:
        """The same as `mmldlm.load`."""
        return load(source, device)

    @classmethod
    def of(
        cls, denoiser: Denoiser, store: PairStore, corruption: Corruption, *, step: int = 0,
        encoder: AnyEncoder | None = None,
    ) -> Model:  # fmt: skip
        """A model of weights from a training loop of one's own; it can do all that one from `mmldlm.load` can.

        The weights are copied. `store` and `corruption` are those of the training; where an export names other settings
        of the training, they are the defaults. `encoder`: as for `load`.

        >>> from mmldlm.config import ModelConfig
        >>> store = model.open_store()
        >>> denoiser = Denoiser(ModelConfig(preset="tiny", depth=1), store.shape)
        >>> own = Model.of(denoiser, store, Corruption(vocab_size=store.shape.vocab_size), step=100)
        >>> own.step, len(own.decode(store.splits["validation"].latents))
        (100, 6)
        """
        export = export_of_parts(denoiser, store, corruption, step)
        device = denoiser.slot_embed.device
        return cls(build_model(export, device, source="denoiser"), "own loop", encoder)

    @property
    def encoder(self) -> Any:
        """The encoder that made the training latents. Assign an object with `encode(texts)` to use your own."""
        return self.codec.encoder

    @encoder.setter
    def encoder(self, encoder: Any) -> None:
        self.codec.encoder = encoder

    def __repr__(self) -> str:
        latents = f"{self.num_slots} x {self.num_channels}"
        return f"<Model {self.source} step={self.step} modes={','.join(self.modes)} latents={latents} {self.device}>"

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes that the model was trained in.

        >>> model.modes
        ('l2t', 't2l', 'joint')
        """
        return tuple(chosen_modes(modes_of_run(self.loaded.config.corruption)))

    def tokenize(self, texts: Texts) -> list[np.ndarray]:
        """Token ids of each text.

        >>> [tokens.tolist() for tokens in model.tokenize(["w3 w1", "w4"])]
        [[3, 1], [4]]
        """
        return self.codec.tokenize(text_list(texts))

    def embed(self, texts: Texts) -> np.ndarray:
        """(n, S, C) latents of texts by the encoder that made the training latents.

        >>> model.embed(["w3 w1", "w4"]).shape
        (2, 1, 4)
        """
        listed = text_list(texts)
        self.codec.note_unknown(listed)
        return self.codec.embed(listed)

    def encode(
        self, texts: Texts, *, steps: int | None = None, guidance: float | None = None,
        solver: str | None = None, ids: Ids | None = None, seed: int = 0,
        progress: Progress | None = None,
    ) -> np.ndarray:  # fmt: skip
        """(n, S, C) latents of texts by the model itself (t2l), without the encoder.

        One step, the default, gives the mean of what the model predicts; more steps draw one possible latent.
        `solver`: ddim, dpmpp_2m or heun. `guidance` above 1 follows the text more strongly. `ids`: as in `decode`.

        >>> model.encode(["w3 w1", "w4"]).shape
        (2, 1, 4)
        """
        listed = text_list(texts)
        options = self._options(seed, encode_steps=steps, guidance=guidance, solver=solver)
        if not listed:
            return latents_array([], self._shape)
        keys = _keys(seed, listed, ids)
        latents = encode_tokens(self.loaded, self.tokenize(listed), options, keys=keys, progress=progress)
        return self.loaded.normalizer.denormalize(latents)

    def decode(
        self, latents: Latents, *, steps: int | None = None, lengths: Lengths | None = None,
        candidates: int | None = None, refine: int = 0, check: str = "model", temperature: float | None = None,
        top_p: float | None = None, guidance: float | None = None, against: str | Latents | None = None,
        order: str | None = None, ids: Ids | None = None, seed: int = 0,
        progress: Progress | None = None,
    ) -> list[SampledText]:  # fmt: skip
        """A text for each latent (l2t). Arguments that are None have the values of the run's settings.

        `lengths`: tokens of each text; None: at temperature 0 the likeliest few (`sampling.num_lengths` of the run, 3
        unless set) are decoded and the text that the model itself reads back best is kept, at so many times the cost;
        `candidates=1` takes the likeliest alone. `order`: confidence, margin, ancestral,
        first_hitting, block, or block:16 for blocks of 16 tokens. `candidates`: decode so many texts and keep the one
        whose own latent, read back by the model (`check="encoder"`: by the encoder), is nearest; `refine`: rounds that
        then replace tokens to bring it nearer. `guidance` above 1 follows the latent more strongly; with `against`, a
        text or latents, it leads away from those. `ids`: numbers that make the randomness of each document its own; by
        default a hash of its latent, so equal latents give equal texts. `ids=range(n)` draws n samples of a latent that
        is given n times.

        >>> texts = model.decode(model.encode(["w3 w1"]), lengths=2, temperature=0)
        >>> len(texts), len(texts[0].split()), len(texts[0].tokens)
        (1, 2, 2)
        """
        array = latents_array(latents, self._shape)
        require_at_least("candidates", 1 if candidates is None else candidates, 1)
        require_at_least("refine", refine, 0)
        require_choice("check", check, ("model", "encoder"))
        options = self._options(
            seed, steps=steps, temperature=temperature, top_p=top_p, guidance=guidance, order=order
        )
        counts = lengths_array(lengths, len(array))
        if not len(array):
            return []
        normalised, away = self._normalised(array), self.codec.against(against, options.guidance, len(array))
        keys = _keys(seed, array, ids)
        num = candidates or (lengths_tried(self.loaded, options) if counts is None else 1)
        if num == 1 and refine == 0:
            tokens = decode_latents(
                self.loaded, normalised, options, lengths=counts, keys=keys, progress=progress, against=away
            )
            return self._sampled(tokens)
        checked = decode_checked(
            self.loaded, normalised, options, keys=keys, lengths=counts, num_candidates=num,
            num_rounds=refine, drawn=drawn_options(self.loaded, options), encode=self._reader(check),
            against=away, progress=progress,
        )  # fmt: skip
        checks = [Check(*values) for values in checked.rows()] if candidates or refine else None
        return self._sampled(checked.tokens, checks)

    def generate(
        self, n: int = 1, *, steps: int | None = None, latent_steps: int | None = None,
        lengths: Lengths | None = None, temperature: float | None = None, top_p: float | None = None,
        guidance: float | None = None, order: str | None = None, solver: str | None = None,
        turns: str | None = None, seed: int = 0, progress: Progress | None = None,
    ) -> Pairs:  # fmt: skip
        """Texts and their latents from nothing (joint). `turns`: interleaved, latent_first or text_first. Order, turns
        and temperature are the `joint_` settings of the run where they are None.

        >>> pairs = model.generate(2, steps=4, latent_steps=4)
        >>> len(pairs.texts), pairs.latents.shape
        (2, (2, 1, 4))
        """
        require_at_least("n", n, 0)
        options = SamplingOptions.from_arguments(
            for_joint(self.loaded.config.sampling), seed=seed, steps=steps, latent_steps=latent_steps,
            temperature=temperature, top_p=top_p, guidance=guidance, order=order, solver=solver, turns=turns,
        )  # fmt: skip
        counts = lengths_array(lengths, n)
        if "joint" not in self.modes:
            logger.warning("in training, text and latent were never noisy together (mode joint)")
        if n == 0:
            return Pairs([], latents_array([], self._shape))
        keys = document_keys(seed, n)
        tokens, latents = generate(self.loaded, n, options, lengths=counts, keys=keys, progress=progress)
        return Pairs(self._sampled(tokens), self.loaded.normalizer.denormalize(latents))

    def infill(
        self, texts: Texts, latents: Latents | None = None, *, steps: int | None = None,
        temperature: float | None = None, top_p: float | None = None, guidance: float | None = None,
        against: str | Latents | None = None, order: str | None = None, ids: Ids | None = None,
        seed: int = 0, progress: Progress | None = None,
    ) -> Any:  # fmt: skip
        """Texts whose blanks are filled in, a `SampledText` for a str and a list of them for a list.

        ____ stands for one token, ____{3} for three.
        With `latents`, one per text or one for all, the texts are filled to suit them; without, from the text around
        the blanks alone.

        >>> model.infill("w3 ____ w1").split()[::2]
        ['w3', 'w1']
        """
        listed = text_list(texts)
        array = None if latents is None else latents_array(latents, self._shape)
        if array is None and guidance not in (None, 1):
            raise UserError("guidance: has no effect without latents; pass latents, or leave it out")
        options = self._options(
            seed, steps=steps, temperature=temperature, top_p=top_p, order=order,
            guidance=1.0 if array is None else guidance,
        )  # fmt: skip
        if array is not None and len(array) != len(listed):
            listed, array = matched(listed, array)
        if not listed:
            return []
        mask_id = self.loaded.corruption.text.mask_id
        blanks = self.codec.note_long([parse_blanks(self.codec.tokenizer, text, mask_id) for text in listed])
        self.codec.note_unknown([without_blanks(self.codec.tokenizer, text) for text in listed], blanks)
        if ids is None:
            ids = content_ids(listed)
            ids = ids if array is None else randomness.make_key(ids, content_ids(array))
        tokens = infill_tokens(
            self.loaded, blanks, options, latents=None if array is None else self._normalised(array),
            keys=document_keys(seed, source_ids(ids, len(listed))),
            against=self.codec.against(against, options.guidance, len(listed)),
            progress=progress,
        )  # fmt: skip
        sampled = self._sampled(tokens)
        return sampled[0] if isinstance(texts, str) and len(sampled) == 1 else sampled

    def interpolate(self, a: str | Latents, b: str | Latents, points: int = 5, **options: Any) -> Pairs:
        """Texts of the latents from `a` to `b`, two texts or two latents, both ends included.

        Further keywords are those of `decode`.

        >>> model.interpolate("w3 w1", "w4", points=3, lengths=2).latents.shape
        (3, 1, 4)
        """
        require_at_least("points", points, 2)
        self.codec.note_unknown([end for end in (a, b) if isinstance(end, str)])
        first, second = (
            self.codec.embed(text_list(end)) if isinstance(end, str) else one_latent(end, self._shape, name)
            for name, end in (("a", a), ("b", b))
        )
        latents = between(first[0], second[0], points)
        return Pairs(self.decode(latents, **options), like(latents, a))

    def paraphrase(
        self, texts: Texts, *, strength: float = 0.5, vary: str = "both", latents: Latents | None = None,
        steps: int | None = None, latent_steps: int | None = None, lengths: Lengths | None = None,
        temperature: float | None = None, top_p: float | None = None, guidance: float | None = None,
        order: str | None = None, solver: str | None = None, ids: Ids | None = None, seed: int = 0,
        progress: Progress | None = None,
    ) -> Any:  # fmt: skip
        """Texts near the given ones, a `SampledText` for a str and a list of them for a list.

        The latent is noised to time `strength`, or that share of the tokens is masked, or both, as `vary` says: both,
        latent or text. `latents` are those of the texts; None: the encoder makes them. `lengths` has an
        effect with `vary="latent"` only, where no token stays. `ids`: as in `decode`.

        >>> len(model.paraphrase("w3 w1 w7", strength=0.4).split())
        3
        """
        listed = text_list(texts)
        require_choice("vary", vary, ("both", "latent", "text"))
        if not isinstance(strength, int | float | np.number) or not 0 < strength <= 1:
            raise UserError(f"strength={strength!r}: more than 0 and at most 1 is needed")
        if lengths is not None and vary != "latent":
            raise UserError(
                'lengths: a text of which tokens stay keeps its length; leave it out, or vary="latent"'
            )
        options = self._options(
            seed, steps=steps, latent_steps=latent_steps, temperature=temperature, top_p=top_p,
            guidance=guidance, order=order, solver=solver,
        )  # fmt: skip
        array = one_each(self.codec.embed(listed) if latents is None else latents, listed, self._shape)
        counts = lengths_array(lengths, len(listed))
        if not listed:
            return []
        tokens = paraphrase_tokens(
            self.loaded, self.tokenize(listed), self._normalised(array), options, strength=float(strength),
            what=vary, lengths=counts, keys=_keys(seed, listed, ids), progress=progress,
        )  # fmt: skip
        sampled = self._sampled(tokens)
        return sampled[0] if isinstance(texts, str) else sampled

    def _options(self, seed: int, **arguments: Any) -> SamplingOptions:
        """The settings of the run, with the arguments that are not None in their place."""
        return SamplingOptions.from_arguments(self.loaded.config.sampling, seed=seed, **arguments)

    def _reader(self, check: str) -> Encode | None:
        """What turns candidates back into latents; None: the model itself."""
        if check == "encoder":
            return self.codec.embed_tokens
        if not self.loaded.trained.latent:
            raise UserError(
                "check='model': this model was not trained to produce latents (t2l), so it cannot read a text back; "
                "use check='encoder'"
            )
        return None

    def _sampled(self, tokens: list[np.ndarray], checks: list[Check] | None = None) -> list[SampledText]:
        known: Sequence[Check | None] = checks or [None] * len(tokens)
        rows = zip(self.codec.texts_of(tokens), tokens, known, strict=True)
        return [SampledText(*row) for row in rows]


def _keys(seed: int, contents: Sequence[str] | np.ndarray, ids: Ids | None) -> np.ndarray:
    """Each document's own source of randomness: by its id, or by what it holds."""
    return document_keys(seed, content_ids(contents) if ids is None else source_ids(ids, len(contents)))
