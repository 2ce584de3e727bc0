"""A whole evaluation: choose held-out documents, measure what was trained, return one plain result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.config import MODES, EvaluationConfig
from mmldlm.corruption.times import modes_of_run
from mmldlm.data.store import PairStore, Split
from mmldlm.evaluation.bounds import measure_latent_bound, measure_text_bound
from mmldlm.evaluation.checked import measure_self_check, require_possible
from mmldlm.evaluation.context import Context, DecodeText, EncodeText, Tokenize
from mmldlm.evaluation.examples import collect_examples
from mmldlm.evaluation.generation import measure_generation
from mmldlm.evaluation.inversion import Truth, measure_inversion
from mmldlm.evaluation.reference_lm import ReferenceLM
from mmldlm.evaluation.retrieval import measure_retrieval
from mmldlm.evaluation.round_trip import measure_round_trips
from mmldlm.evaluation.selection import select_documents, take_first
from mmldlm.evaluation.similarity import ScoredPairs, measure_similarity
from mmldlm.evaluation.statistics import NUM_RESAMPLES, Progress
from mmldlm.runtime import versions

RESULT_FORMAT = "mmldlm-evaluation-2"
T = TypeVar("T")


@dataclass(frozen=True)
class Tools:
    """What an evaluation may use besides the model; every number that needs a missing one is left out."""

    decode_text: DecodeText | None = None
    """Token ids to text."""
    tokenize: Tokenize | None = None
    """Text to token ids."""
    encode: EncodeText | None = None
    """The encoder that made the latents."""
    reference_lm: ReferenceLM | None = None
    """A causal language model that reads generated texts."""
    special_ids: frozenset[int] = frozenset()
    """Tokens that frame or fill a text; documents should hold none."""
    scored_pairs: ScoredPairs | None = None
    """Pairs of texts with the likeness that people see."""


def evaluate_model(
    model: LoadedModel,
    store: PairStore,
    split: str,
    config: EvaluationConfig,
    tools: Tools,
    *,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Everything about a model on one split, as plain values; the same arguments give the same numbers.

    `config.num_decoded` of the chosen documents (0: all) are decoded at each number of sampling steps, which costs
    most of the time.
    """
    selection = select_documents(model, store, split, config.num_documents, seed)
    context = Context(model, config, selection, seed, progress or _silent, tools.decode_text, tools.encode)
    require_possible(context)
    if selection.num_too_long:
        context.notes.append(
            f"{selection.num_too_long} documents of the split are left out: they have more tokens "
            f"than the model was trained for ({model.denoiser.shape.max_length})"
        )
    num_special = int(np.isin(selection.documents.tokens, list(tools.special_ids)).sum())
    if num_special:
        context.notes.append(
            f"{num_special:,} tokens are special ones ([CLS] and the like), which this store was made to keep; they "
            "are counted like all others, so numbers differ from those without them"
        )
    clock = _Clock({})
    measured = _measure(context, tools, _train_split(model, store), clock)
    return {
        "format": RESULT_FORMAT,
        "model": _describe_model(model),
        "data": selection.describe() | {"num_special_tokens": num_special},
        "settings": {**asdict(config), "seed": seed, "num_resamples": NUM_RESAMPLES},
        **measured,
        "notes": context.notes,
        "seconds": clock.seconds,
        "versions": versions(),
        "documents": context.documents_json(),
    }


def _measure(context: Context, tools: Tools, train: Split | None, clock: _Clock) -> dict[str, Any]:
    """Part by part; a part that cannot be measured is null."""
    found: dict[str, Any] = {
        "text_bound": clock.timed("text_bound", lambda: measure_text_bound(context)),
        "latent_bound": clock.timed("latent_bound", lambda: measure_latent_bound(context)),
        "inversion": None,
        "self_check": None,
        "round_trips": None,
        "examples": [],
    }
    if context.decodes:
        chosen = take_first(context.selection.documents, context.config.num_decoded)
        truth = Truth.of(chosen, context.decode_text)
        found["inversion"], decoded = clock.timed("inversion", lambda: measure_inversion(context, truth))
        found["self_check"] = clock.timed(
            "self_check", lambda: measure_self_check(context, truth, decoded.given[-1])
        )
        found["examples"] = collect_examples(truth, decoded.given, decoded.modelled)
        if context.active.latent:
            found["round_trips"] = clock.timed("round_trips", lambda: measure_round_trips(context, decoded))
    found["retrieval"] = clock.timed("retrieval", lambda: measure_retrieval(context))
    found["similarity"] = clock.timed("similarity", lambda: _similarity(context, tools))
    found["generation"] = clock.timed(
        "generation", lambda: measure_generation(context, train, tools.reference_lm)
    )
    return found


def _similarity(context: Context, tools: Tools) -> dict[str, Any] | None:
    if tools.scored_pairs is None:
        return None
    if tools.tokenize is None:
        context.notes.append("--sts is not used: the pair store was made without a tokenizer")
        return None
    return measure_similarity(context, tools.scored_pairs, tools.tokenize)


def _train_split(model: LoadedModel, store: PairStore) -> Split | None:
    """The training data, where this store has it: what may have been learnt by heart."""
    name = model.config.data.train_split
    return store.split(name) if name in store.manifest.splits else None


@dataclass(frozen=True)
class _Clock:
    seconds: dict[str, float]

    def timed(self, part: str, measure: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = measure()
        self.seconds[part] = round(time.perf_counter() - start, 2)
        return result


def _silent(part: str, done: int, total: int) -> None:
    """No one watches."""


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
        "text_schedule": config.corruption.text_schedule,
        "latent_schedule": config.corruption.latent_schedule,
        "length": config.model.length,
        "device": str(model.device),
    }
