"""A whole evaluation: choose held-out documents, measure what was trained, return one result."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import TypeVar

import numpy as np

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import MODES, EvaluationConfig
from mmldlm.corruption.times import modes_of_run
from mmldlm.data.store import PairStore
from mmldlm.evaluation.bounds import Bounds
from mmldlm.evaluation.context import (
    Context,
    DecodeText,
    EncodeText,
    Pairs,
    ReferenceLM,
    Selection,
    Tokenize,
    select_documents,
)
from mmldlm.evaluation.decoding import has_ways, judge_of, measure_ways, require_possible
from mmldlm.evaluation.generation import measure_generation
from mmldlm.evaluation.inversion import collect_examples, measure_inversion, measure_round_trip
from mmldlm.evaluation.latent_bound import measure_latent_bounds
from mmldlm.evaluation.results import DataInfo, Evaluation, ModelInfo, Similarity
from mmldlm.evaluation.retrieval import ScoredPairs, measure_retrieval, measure_similarity
from mmldlm.evaluation.text_bound import measure_text_bounds
from mmldlm.reports import counted
from mmldlm.runtime import versions
from mmldlm.statistics import NUM_RESAMPLES

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
    """A causal language model that scores generated texts."""
    special_ids: frozenset[int] = frozenset()
    """Tokens that frame or pad a text; documents should hold none."""
    scored_pairs: ScoredPairs | None = None
    """Pairs of texts with the similarity that people gave them."""


def evaluate_model(
    model: LoadedModel,
    store: PairStore,
    split: str,
    config: EvaluationConfig,
    tools: Tools,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Everything about a model on one split; the same arguments give the same numbers.

    `config.num_decoded` of the chosen documents (0: all) are decoded at each number of sampling steps, which costs
    most of the time.
    """
    selection = select_documents(model, store, split, config.num_documents, seed)
    context = Context(model, config, selection, seed, _silent, tools.decode_text, tools.encode)
    changed, trained = replace(model.config, evaluation=config), context.active
    require_possible(changed, text=trained.text, latent=trained.latent, encoder=context.can_encode)
    if progress is not None:
        context.progress = _Overall(progress, planned_work(context)).update
    data = _describe_data(context, selection, tools.special_ids)
    clock = _Clock()
    text, calibration = clock.timed("text_bound", lambda: measure_text_bounds(context))
    latent = clock.timed("latent_bound", lambda: measure_latent_bounds(context))
    inversion = decoding = round_trip = None
    examples = []
    if context.decodes:
        truth = Pairs.of(selection.documents.first(config.num_decoded), context.decode_text)
        inversion, decoded = clock.timed("inversion", lambda: measure_inversion(context, truth))
        decoding = clock.timed("decoding", lambda: measure_ways(context, truth, decoded.length_given[-1]))
        examples = collect_examples(decoded)
        if context.active.latent:
            round_trip = clock.timed("round_trip", lambda: measure_round_trip(context, decoded))
    retrieval = clock.timed("retrieval", lambda: measure_retrieval(context))
    similarity = clock.timed("similarity", lambda: _similarity(context, tools))
    name = model.config.data.train_split
    train = store.split(name) if name in store.manifest.splits else None  # what may have been memorised
    generation = clock.timed("generation", lambda: measure_generation(context, train, tools.reference_lm))
    return Evaluation(
        model=_describe_model(model),
        data=data,
        settings={**asdict(config), "seed": seed, "num_resamples": NUM_RESAMPLES},
        bounds=Bounds(text, latent),
        calibration=calibration,
        inversion=inversion,
        decoding=decoding,
        round_trip=round_trip,
        retrieval=retrieval,
        similarity=similarity,
        generation=generation,
        examples=examples,
        notes=context.notes,
        versions=versions(),
        seconds=clock.seconds,
        documents=context.documents(),
    )


def _similarity(context: Context, tools: Tools) -> Similarity | None:
    if tools.scored_pairs is None:
        return None
    if tools.tokenize is None:
        context.notes.append("the scored pairs are not used: the pair store was made without a tokenizer")
        return None
    return measure_similarity(context, tools.scored_pairs, tools.tokenize)


@dataclass(frozen=True)
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, part: str, measure: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = measure()
        self.seconds[part] = round(time.perf_counter() - start, 2)
        return result


def _silent(part: str, done: int, total: int) -> None:
    """Progress is not shown."""


def planned_work(context: Context) -> dict[str, tuple[int, float]]:
    """For each kind of part: how many parts there will be, and about how many passes of documents they take."""
    config, sampling = context.config, context.model.config.sampling
    count = len(context.selection.positions)
    decoded = min(config.num_decoded, count) or count
    most, encode = max(config.step_counts), sampling.num_encode_steps or sampling.num_latent_steps
    ways = max(len(config.text_samplers), 1) * max(len(config.guidances), 1) if has_ways(config) else 0
    checks = ways if judge_of(context) else 0
    work: dict[str, tuple[int, float]] = {}
    if context.active.text:
        work["text bound"] = 3, 3.0 * count * config.num_draws
    if context.active.latent:
        work["latent bound"] = 3, 3.0 * count * config.num_draws
        work["text to latent"] = 1, float(count * encode)
    if context.decodes:
        work["decoding"] = 1 + context.active.length, 2.0 * decoded * sum(config.step_counts)
        work["plain"] = ways, float(ways * decoded * most)
        work["self-check"] = checks, float(checks * decoded * (most + encode) * max([*config.candidates, 1]))
        if context.active.latent:
            work["round trip"] = 2, float(decoded * (most + encode))
    if context.active.text and context.active.latent:
        work["joint generation"] = 1, float(config.num_generated * sampling.num_sampling_steps)
    return {kind: (parts, passes) for kind, (parts, passes) in work.items() if passes}


class _Overall:
    """The progress of named parts as one number out of `TOTAL`, which never falls."""

    TOTAL = 1000

    def __init__(self, progress: Callable[[int, int], None], work: dict[str, tuple[int, float]]) -> None:
        self.progress, self.work = progress, work
        self.shares: dict[str, float] = {}
        self.last = 0

    def update(self, part: str, done: int, total: int) -> None:
        self.shares[part] = done / max(total, 1)
        done_work = 0.0
        for kind, (num_parts, passes) in self.work.items():
            share = sum(share for name, share in self.shares.items() if name.split(",")[0] == kind)
            done_work += passes * min(share / num_parts, 1.0)
        whole = sum(passes for _, passes in self.work.values())
        self.last = max(self.last, int(self.TOTAL * done_work / whole))
        self.progress(self.last, self.TOTAL)


def _describe_data(context: Context, selection: Selection, special_ids: frozenset[int]) -> DataInfo:
    store, documents = selection.split.store, selection.documents
    num_special = int(np.isin(documents.tokens, list(special_ids)).sum())
    if selection.num_too_long:
        context.notes.append(
            f"left out: {counted(selection.num_too_long, 'document')} of the split with more tokens "
            f"than the model was trained for ({context.model.denoiser.shape.max_length})"
        )
    if num_special:
        context.notes.append(
            f"{num_special:,} tokens are special ones ([CLS] and the like), which this store was made to keep; they "
            "are counted like all others, so numbers differ from those without them"
        )
    return DataInfo(
        store=str(store.path),
        split=selection.split.name,
        fingerprint=store.fingerprint,
        num_documents=len(selection.positions),
        num_tokens=int(documents.lengths.sum()),
        num_held_out=len(selection.split),
        num_too_long=selection.num_too_long,
        num_special_tokens=num_special,
        encoder=store.manifest.encoder,
        tokenizer=store.manifest.tokenizer,
    )


def _describe_model(model: LoadedModel) -> ModelInfo:
    config, weights = model.config, modes_of_run(model.config.corruption)
    return ModelInfo(
        name=config.name,
        step=model.step,
        fingerprint=model.fingerprint,
        num_parameters=sum(parameter.numel() for parameter in model.denoiser.parameters()),
        preset=config.model.preset,
        shape=asdict(model.denoiser.shape),
        mode_weights={mode: getattr(weights, mode) for mode in MODES},
        condition_dropout=config.corruption.condition_dropout,
        prediction_type=config.corruption.prediction_type,
        text_schedule=config.corruption.text_schedule,
        latent_schedule=config.corruption.latent_schedule,
        length=config.model.length,
        device=str(model.device),
    )
