"""Ways to decode: text samplers, guidance, candidates and rounds, compared with each other, with what they cost.

Every way decodes the same latents with the true length, in the largest number of steps, and is compared with the plain
decode of the run: its own sampler and guidance, the most probable tokens, one text. The check of candidates sees
nothing of the true text: it has the latent and the candidates alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from mmldlm.config import Config, EvaluationConfig, leaves_condition_out
from mmldlm.corruption.times import sees_latents
from mmldlm.errors import UserError
from mmldlm.evaluation.context import Context, Pairs
from mmldlm.evaluation.inversion import (
    Decoded,
    decode_keys,
    inversion_options,
    score_texts,
    text_scores,
)
from mmldlm.evaluation.results import Way, WayScores, WaysToDecode
from mmldlm.sampling.decode import decode_latents
from mmldlm.sampling.judge import Encode
from mmldlm.sampling.self_check import checked_stages
from mmldlm.statistics import LESS, Estimate, Quantity, difference

COMPARED = ("token_accuracy", "tokens_aligned", "exact_match", "bleu", "reencoded_cosine")
MODEL, ENCODER = "model", "encoder"


@dataclass(frozen=True)
class WayTexts:
    """The texts of one way, and what they cost."""

    way: Way
    tokens: list[np.ndarray]
    passes: np.ndarray
    """(n,) passes of the network, those of the model as its own judge included."""
    num_encoded: np.ndarray
    """(n,) texts that were turned back into latents."""
    seconds: float


def has_ways(config: EvaluationConfig) -> bool:
    """Whether the settings name any way to decode besides the plain one."""
    return bool(config.candidates or config.refine or config.text_samplers or config.guidances)


def require_possible(config: Config, *, text: bool, latent: bool, encoder: bool) -> None:
    """Reject what cannot work, before anything is measured or trained.

    `text`, `latent`: whether the run has a loss on them; `encoder`: whether the encoder is at hand.
    """
    asked, corruption = config.evaluation, config.corruption
    if not has_ways(asked):
        return
    if not (text and sees_latents(corruption)):
        why = "never saw a latent" if text else "has no loss on text"
        raise UserError(
            f"evaluation.candidates, refine, text_samplers, guidances: this run {why}, so nothing can be decoded; "
            "leave them out"
        )
    if any(guidance != 1.0 for guidance in asked.guidances) and not leaves_condition_out(corruption):
        raise UserError(
            f"evaluation.guidances={asked.guidances}: guidance compares with a text without its latent, which this "
            "run never saw (no joint mode, and corruption.condition_dropout=0); leave them out"
        )
    choose_judge(asked, own=latent, encoder=encoder)


def choose_judge(config: EvaluationConfig, *, own: bool, encoder: bool) -> str | None:
    """Which side turns candidates back into latents; None where there is nothing to choose from."""
    if max(config.candidates, default=1) == 1 and not config.refine:
        return None
    asked = f"evaluation.candidates={config.candidates}, refine={config.refine}"
    if config.check == MODEL and not own:
        raise UserError(
            f"{asked}: evaluation.check=model needs a run with a loss on latents (t2l); use evaluation.check=encoder"
        )
    if config.check == ENCODER and not encoder:
        raise UserError(
            f"{asked}: evaluation.check=encoder needs the encoder and tokenizer of the pair store, which are not used "
            "here; use them, or evaluation.check=model"
        )
    if not own and not encoder:
        raise UserError(
            f"{asked}: candidates are turned back into latents, but this run has no loss on latents (t2l) and the "
            "encoder is not used; evaluate with the encoder, or without candidates and rounds"
        )
    return ENCODER if config.check == ENCODER or not own else MODEL


def judge_of(context: Context) -> str | None:
    """The side that turns candidates of an evaluation back into latents."""
    return choose_judge(context.config, own=context.active.latent, encoder=context.can_encode)


def measure_ways(context: Context, truth: Pairs, plain: Decoded) -> WaysToDecode | None:
    """A row for each way; `plain` is the run's own decode with the true length, in the largest number of steps."""
    if not has_ways(context.config):
        return None
    judge = judge_of(context)
    if judge == ENCODER:
        context.notes.append(
            "the encoder chose among candidates, so their re-encoded cosine is the largest of several and not an "
            "independent test; evaluation.check=model keeps the two apart"
        )
    sampling = context.model.config.sampling
    base = plain.quantities(truth)
    rows = [
        _way_scores(context, truth, base, texts, plain.num_sampling_steps)
        for sampler in context.config.text_samplers or [sampling.text_sampler]
        for guidance in context.config.guidances or [sampling.guidance]
        for texts in decode_ways(context, truth, plain.num_sampling_steps, Way(sampler, guidance), judge)
    ]
    return WaysToDecode(
        num_documents=len(truth.tokens),
        num_sampling_steps=plain.num_sampling_steps,
        judge=judge,
        candidate_temperature=context.config.candidate_temperature,
        plain=Way(sampling.text_sampler, sampling.guidance),
        rows=rows,
    )


def decode_ways(
    context: Context, truth: Pairs, num_sampling_steps: int, first: Way, judge: str | None
) -> Iterator[WayTexts]:
    """The plain way of a sampler and a guidance, then the same with candidates and rounds."""
    config, model = context.config, context.model
    options = replace(
        inversion_options(model, num_sampling_steps, config.batch_tokens),
        text_sampler=first.text_sampler,
        guidance=first.guidance,
    )
    keys, latents = decode_keys(context.seed, truth.ids), model.normalizer.normalize(truth.latents)
    passes = np.zeros(len(keys), np.int64)
    start = time.perf_counter()
    tokens = decode_latents(
        model, latents, options, lengths=truth.lengths, keys=keys, passes=passes,
        progress=context.watch(f"plain, {first.title()}"),
    )  # fmt: skip
    yield WayTexts(first, tokens, passes, np.zeros_like(passes), time.perf_counter() - start)
    counts = [count for count in config.candidates or [1] if count > 1 or config.refine]
    if judge is None or not counts:
        return
    stages = checked_stages(
        model, latents, options, keys=keys, lengths=truth.lengths, counts=counts, num_rounds=config.refine,
        drawn=replace(options, temperature=config.candidate_temperature),
        encode=_encode(context) if judge == ENCODER else None,
        progress=context.watch(f"self-check, {first.title()}"),
    )  # fmt: skip
    for stage in stages:
        if stage.num_candidates > 1 or stage.num_rounds:
            way = replace(first, num_candidates=stage.num_candidates, num_rounds=stage.num_rounds)
            checked = stage.checked
            yield WayTexts(way, checked.tokens, checked.passes, checked.num_encoded, stage.seconds)


def _encode(context: Context) -> Encode:
    encode, decode_text = context.encode, context.decode_text
    assert encode is not None
    assert decode_text is not None
    return lambda tokens: encode(decode_text([text.tolist() for text in tokens]))


def _way_scores(
    context: Context, truth: Pairs, base: dict[str, Quantity], texts: WayTexts, num_sampling_steps: int
) -> WayScores:
    """Scores, differences to the plain decode, and cost."""
    way = texts.way
    decoded = score_texts(truth, texts.tokens, num_sampling_steps, context.decode_text, context.encode)
    quantities = decoded.quantities(truth)

    def record(name: str, quantity: Quantity) -> Estimate:
        if name not in (*COMPARED, "passes"):
            return quantity.estimate(context.seed)
        title = f"{quantity.title}, {way.title()}, {num_sampling_steps} steps"
        return context.record(
            f"checked/{num_sampling_steps}/{way.name()}/{name}", replace(quantity, title=title)
        )

    estimates = {name: record(name, quantity) for name, quantity in quantities.items()}
    gains = {
        name: difference(quantities[name], base[name], context.seed)
        for name in COMPARED
        if name in quantities
    }
    return WayScores(
        way=way,
        scores=text_scores(num_sampling_steps, estimates),
        token_accuracy_gain=gains["token_accuracy"],
        exact_match_gain=gains["exact_match"],
        bleu_gain=gains.get("bleu"),
        reencoded_cosine_gain=gains.get("reencoded_cosine"),
        passes=record("passes", Quantity("passes of the network", LESS, texts.passes)),
        num_encoded=Quantity("", LESS, texts.num_encoded).estimate(context.seed),
        seconds=round(texts.seconds, 3),
    )
