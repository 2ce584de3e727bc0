"""What the self-check buys: text samplers, guidance, candidates and rounds beside each other, with what they cost.

Every way decodes the same latents with the true length, in the largest number of steps, and is compared with the plain
decode of the run: its own sampler and guidance, the most probable tokens, one text. Nothing true is seen by the check:
it knows the given latent and the candidates alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mmldlm.config import leaves_condition_out
from mmldlm.errors import UserError
from mmldlm.evaluation.context import Context
from mmldlm.evaluation.inversion import Decoded, Truth, decode_keys, inversion_options, score_texts
from mmldlm.evaluation.quantities import LESS, Quantity
from mmldlm.evaluation.statistics import estimate, mean_estimate
from mmldlm.sampling.decode import decode_latents
from mmldlm.sampling.judge import Encode
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.self_check import checked_stages

COMPARED = ("token_accuracy", "exact_match", "bleu", "reencoded_cosine")
MODEL, ENCODER = "model", "encoder"


@dataclass(frozen=True)
class Way:
    """One way to decode."""

    text_sampler: str
    guidance: float
    num_candidates: int = 1
    num_rounds: int = 0

    def name(self) -> str:
        """Part of the name of its quantities."""
        return f"{self.text_sampler}/{self.guidance:g}/{self.num_candidates}/{self.num_rounds}"

    def title(self) -> str:
        """For people; what is as usual is not said."""
        parts = [self.text_sampler]
        parts += [f"guidance {self.guidance:g}"] if self.guidance != 1.0 else []
        parts += [f"{self.num_candidates} candidates"] if self.num_candidates > 1 else []
        parts += [f"{self.num_rounds} rounds"] if self.num_rounds else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Found:
    """What one way gave, and what it cost."""

    way: Way
    tokens: list[np.ndarray]
    passes: np.ndarray
    """(n,) passes of the network, those of the model as its own judge included."""
    num_encoded: np.ndarray
    """(n,) texts that were turned back into latents."""
    seconds: float


def is_asked(context: Context) -> bool:
    """Whether the settings name any way to decode besides the plain one."""
    config = context.config
    return bool(config.candidates or config.refine or config.text_samplers or config.guidances)


def require_possible(context: Context) -> None:
    """Refuse what cannot work, before anything is measured."""
    if not is_asked(context):
        return
    config, corruption = context.config, context.model.config.corruption
    if not context.decodes:
        why = "never saw a latent" if context.active.text else "has no loss on text"
        raise UserError(
            f"evaluation.candidates, refine, text_samplers, guidances: this run {why}, so nothing can be decoded; "
            "leave them out"
        )
    if any(guidance != 1.0 for guidance in config.guidances) and not leaves_condition_out(corruption):
        raise UserError(
            f"evaluation.guidances={config.guidances}: guidance compares with a text without its latent, which this "
            "run never saw (no joint mode, and corruption.condition_dropout=0); leave them out"
        )
    choose_judge(context)


def choose_judge(context: Context) -> str | None:
    """Who turns candidates back into latents; None where there is nothing to choose from."""
    config, own = context.config, context.active.latent
    if max(config.candidates, default=1) == 1 and not config.refine:
        return None
    asked = f"evaluation.candidates={config.candidates}, refine={config.refine}"
    encoder = context.encode is not None and context.decode_text is not None
    if config.check == MODEL and not own:
        raise UserError(
            f"{asked}: evaluation.check=model needs a run with a loss on latents (t2l); use evaluation.check=encoder"
        )
    if config.check == ENCODER and not encoder:
        raise UserError(
            f"{asked}: evaluation.check=encoder needs the encoder and tokenizer of the pair store, which are not used "
            "here; use evaluation.check=model"
        )
    if not own and not encoder:
        raise UserError(
            f"{asked}: candidates are turned back into latents, but this run has no loss on latents (t2l) and the "
            "encoder is not used; evaluate with the encoder, or without candidates and rounds"
        )
    return ENCODER if config.check == ENCODER or not own else MODEL


def measure_self_check(context: Context, truth: Truth, plain: Decoded) -> dict[str, Any] | None:
    """A row for each way; `plain` is the run's own decode with the true length, in the largest number of steps."""
    if not is_asked(context):
        return None
    judge = choose_judge(context)
    if judge == ENCODER:
        context.notes.append(
            "the encoder chose among candidates, so their re-encoded cosine is the largest of several and not a test "
            "of its own; evaluation.check=model keeps the two apart"
        )
    sampling = context.model.config.sampling
    base = plain.quantities(truth)
    rows = [
        _row(context, truth, base, found, plain.num_sampling_steps)
        for sampler in context.config.text_samplers or [sampling.text_sampler]
        for guidance in context.config.guidances or [sampling.guidance]
        for found in decode_ways(context, truth, plain.num_sampling_steps, Way(sampler, guidance), judge)
    ]
    return {
        "num_documents": len(truth.tokens),
        "num_sampling_steps": plain.num_sampling_steps,
        "judge": judge,
        "candidate_temperature": context.config.candidate_temperature,
        "plain": asdict(Way(sampling.text_sampler, sampling.guidance)),
        "rows": rows,
    }


def decode_ways(
    context: Context, truth: Truth, num_sampling_steps: int, first: Way, judge: str | None
) -> Iterator[Found]:
    """The plain way of a sampler and a guidance, then that with candidates and rounds."""
    config, model = context.config, context.model
    options = replace(
        inversion_options(model, num_sampling_steps, config.batch_tokens),
        text_sampler=first.text_sampler,
        guidance=first.guidance,
    )
    keys, latents = decode_keys(context.seed, truth.ids), model.normalizer.normalize(truth.latents)
    lengths = np.array([len(tokens) for tokens in truth.tokens])
    passes = np.zeros(len(keys), np.int64)
    start = time.perf_counter()
    tokens = decode_latents(
        model, latents, options, lengths=lengths, keys=keys, passes=passes,
        progress=context.watch(f"plain, {first.title()}"),
    )  # fmt: skip
    yield Found(first, tokens, passes, np.zeros_like(passes), time.perf_counter() - start)
    counts = [count for count in config.candidates or [1] if count > 1 or config.refine]
    if judge is None or not counts:
        return
    stages = checked_stages(
        model, latents, options, keys=keys, lengths=lengths, counts=counts,
        num_rounds=config.refine, drawn=_drawn(context, options),
        encode=_encode(context) if judge == ENCODER else None,
        progress=context.watch(f"self-check, {first.title()}"),
    )  # fmt: skip
    for stage in stages:
        if stage.num_candidates > 1 or stage.num_rounds:
            way = replace(first, num_candidates=stage.num_candidates, num_rounds=stage.num_rounds)
            yield Found(way, stage.found.tokens, stage.found.passes, stage.found.num_encoded, stage.seconds)


def _drawn(context: Context, options: SamplingOptions) -> SamplingOptions:
    return replace(options, temperature=context.config.candidate_temperature)


def _encode(context: Context) -> Encode:
    encode, decode_text = context.encode, context.decode_text
    assert encode is not None
    assert decode_text is not None
    return lambda tokens: encode(decode_text([text.tolist() for text in tokens]))


def _row(
    context: Context, truth: Truth, base: dict[str, Quantity], found: Found, num_sampling_steps: int
) -> dict[str, Any]:
    """Scores, differences to the plain decode, and cost."""
    way = found.way
    decoded = score_texts(truth, found.tokens, num_sampling_steps, context.decode_text, context.encode)
    quantities = {name: value for name, value in decoded.quantities(truth).items() if name in COMPARED}
    passes = Quantity("passes of the network", LESS, found.passes)

    def record(name: str, quantity: Quantity) -> dict[str, float]:
        title = f"{quantity.title}, {way.title()}, {num_sampling_steps} steps"
        return context.record(
            f"checked/{num_sampling_steps}/{way.name()}/{name}", replace(quantity, title=title)
        )

    return {
        **asdict(way),
        **dict.fromkeys(COMPARED),
        **{name: record(name, quantity) for name, quantity in quantities.items()},
        "difference": dict.fromkeys(COMPARED)
        | {name: difference(quantity, base[name], context.seed) for name, quantity in quantities.items()},
        "passes": record("passes", passes),
        "num_encoded": mean_estimate(found.num_encoded, context.seed).to_json(),
        "seconds": round(found.seconds, 3),
    }


def difference(quantity: Quantity, base: Quantity, seed: int) -> dict[str, float]:
    """How much more than the base, on the same documents in every resample."""
    return estimate(
        lambda rows: quantity.statistic(rows) - base.statistic(rows), len(quantity), seed
    ).to_json()
