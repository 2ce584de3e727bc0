"""A whole evaluation: choose held-out documents, measure what was trained, return one plain result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.config import MODES, EvaluationConfig
from mmldlm.corruption.times import modes_of_run
from mmldlm.data.store import PairStore
from mmldlm.evaluation import inversion, likelihood
from mmldlm.evaluation.examples import collect_examples
from mmldlm.evaluation.inversion import Decoded, DecodeText, EncodeText, Truth
from mmldlm.evaluation.retrieval import retrieve
from mmldlm.evaluation.selection import Selection, select_documents, take_first
from mmldlm.evaluation.statistics import NUM_RESAMPLES, Progress
from mmldlm.evaluation.text_scores import bleu_signature
from mmldlm.runtime import versions
from mmldlm.sampling.checks import trained_parts

RESULT_FORMAT = "mmldlm-evaluation-1"


def evaluate_model(
    model: LoadedModel,
    store: PairStore,
    split: str,
    config: EvaluationConfig,
    *,
    decode_text: DecodeText | None,
    encode: EncodeText | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything about a model on one split, as plain values; the same arguments give the same numbers.

    `config.num_decoded` of the chosen documents (0: all) are decoded at each number of sampling steps, which costs
    most of the time. Without `decode_text` there is no BLEU, without `encode` no re-encoded cosine.
    """
    selection = select_documents(model, store, split, config.num_documents, seed)
    run = _Run(model, config, selection, seed, progress or _silent)
    decoded = Truth.of(take_first(selection.documents, config.num_decoded), decode_text)
    result = {
        "format": RESULT_FORMAT,
        "model": _describe_model(model),
        "data": selection.describe(),
        "settings": {
            **asdict(config),
            "seed": seed,
            "num_resamples": NUM_RESAMPLES,
        },
        "text_bound": run.timed("text_bound", run.measure_bound),
        "inversion": run.timed("inversion", lambda: run.measure_inversion(decoded, decode_text, encode)),
        "retrieval": run.timed("retrieval", run.measure_retrieval),
    }
    return result | {
        "examples": run.examples,
        "notes": run.notes,
        "seconds": run.seconds,
        "versions": versions(),
        "documents": run.per_document,
    }


def _silent(part: str, done: int, total: int) -> None:
    """No one watches."""


@dataclass
class _Run:
    """One evaluation under way."""

    model: LoadedModel
    config: EvaluationConfig
    selection: Selection
    seed: int
    progress: Progress
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    per_document: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.active = trained_parts(self.model)
        documents = self.selection.documents
        self.per_document |= {"id": documents.ids.tolist(), "num_tokens": documents.lengths.tolist()}
        if self.selection.num_too_long:
            self.notes.append(
                f"{self.selection.num_too_long} documents of the split are left out: they have more tokens "
                f"than the model was trained for ({self.model.denoiser.shape.max_length})"
            )

    def timed(self, part: str, measure: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
        start = time.perf_counter()
        result = measure()
        self.seconds[part] = round(time.perf_counter() - start, 2)
        return result

    def measure_bound(self) -> dict[str, Any] | None:
        if not self.active.text:
            self.notes.append("the text bound and decoding are left out: this run has no loss on text")
            return None
        corruption = self.model.config.corruption
        if modes_of_run(corruption).joint == 0 and corruption.condition_dropout == 0:
            self.notes.append(
                "'no latent' lies outside what this run was trained on: it has no joint mode and "
                "corruption.condition_dropout=0"
            )
        bounds = {
            latent: likelihood.text_bound(
                self.model,
                self.selection.documents,
                latent=latent,
                num_draws=self.config.num_draws,
                batch_tokens=self.config.batch_tokens,
                seed=self.seed,
                progress=self.progress,
            )
            for latent in likelihood.LATENTS
        }
        self.per_document["nats"] = {name: _rounded(bound.nats) for name, bound in bounds.items()}
        others = likelihood.LATENTS[1:]
        gains = {name: likelihood.gain(bounds[name], bounds["right"], self.seed).to_json() for name in others}
        return {**{name: bound.to_json() for name, bound in bounds.items()}, "gain": gains}

    def measure_inversion(
        self, truth: Truth, decode_text: DecodeText | None, encode: EncodeText | None
    ) -> dict[str, Any] | None:
        if not self.active.text:
            return None
        self._note_what_is_missing(decode_text, encode)
        given = self._decode_all(truth, decode_text, encode, length_given=True)
        modelled = (
            self._decode_all(truth, decode_text, encode, length_given=False) if self.active.length else []
        )
        self.examples = collect_examples(truth, given, modelled)
        self.per_document["token_accuracy"] = {
            str(decoded.num_sampling_steps): _rounded(decoded.accuracy) for decoded in given
        }
        options = inversion.inversion_options(
            self.model, max(self.config.step_counts), self.config.batch_tokens
        )
        reference = inversion.reference_cosines(truth, encode, self.seed) if encode and truth.texts else None
        return {
            "num_documents": len(truth.tokens),
            "num_tokens": sum(map(len, truth.tokens)),
            "length_given": [decoded.to_json(truth, self.seed) for decoded in given],
            "length_modelled": [decoded.to_json(truth, self.seed) for decoded in modelled],
            "cosine_reference": reference,
            "sampling": {key: value for key, value in asdict(options).items() if key in _DECODE_SETTINGS},
            "bleu_signature": bleu_signature() if decode_text else None,
        }

    def _note_what_is_missing(self, decode_text: DecodeText | None, encode: EncodeText | None) -> None:
        if not self.active.length:
            self.notes.append("texts are decoded with their true length: this run does not model the length")
        if decode_text is None:
            self.notes.append("no BLEU and no re-encoded cosine: the pair store was made without a tokenizer")
        elif encode is None:
            self.notes.append("no re-encoded cosine: the encoder was not used")

    def _decode_all(
        self, truth: Truth, decode_text: DecodeText | None, encode: EncodeText | None, *, length_given: bool
    ) -> list[Decoded]:
        counts = sorted(set(self.config.step_counts))
        whole = sum(counts) * len(truth.tokens)
        name = f"decoding, length {'given' if length_given else 'modelled'}"

        def decode(steps: int) -> Decoded:
            before = sum(count for count in counts if count < steps) * len(truth.tokens)
            return inversion.invert(
                self.model,
                truth,
                steps,
                length_given=length_given,
                decode_text=decode_text,
                encode=encode,
                batch_tokens=self.config.batch_tokens,
                seed=self.seed,
                progress=lambda done, _: self.progress(name, before + done, whole),
            )

        return [decode(steps) for steps in counts]

    def measure_retrieval(self) -> dict[str, Any] | None:
        if not self.active.latent:
            self.notes.append("t2l is left out: this run has no loss on latents")
            return None
        result = retrieve(
            self.model,
            self.selection,
            batch_tokens=self.config.batch_tokens,
            seed=self.seed,
            progress=lambda done, total: self.progress("text to latent", done, total),
        )
        self.per_document |= {"cosine": _rounded(result.cosine), "rank": result.rank.tolist()}
        return result.to_json(self.seed)


_DECODE_SETTINGS = ("text_sampler", "temperature", "top_p", "guidance")


def _describe_model(model: LoadedModel) -> dict[str, Any]:
    config, weights = model.config, modes_of_run(model.config.corruption)
    return {
        "name": config.name,
        "step": model.step,
        "fingerprint": model.fingerprint,
        "num_parameters": sum(parameter.numel() for parameter in model.denoiser.parameters()),
        "preset": config.model.preset,
        "shape": asdict(model.denoiser.shape),
        "mode_weights": {mode: getattr(weights, mode) for mode in MODES},
        "condition_dropout": config.corruption.condition_dropout,
        "prediction_type": config.corruption.prediction_type,
        "length": config.model.length,
        "device": str(model.device),
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 5) for value in values]
