"""Ways to decode in a world where it is known how often each of them is right, and at what cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import CorruptionConfig, EvaluationConfig, ModeWeights
from mmldlm.corruption.joint import Corruption
from mmldlm.data.store import Documents
from mmldlm.errors import UserError
from mmldlm.evaluation.context import Context, Pairs, Selection
from mmldlm.evaluation.decoding import decode_ways, measure_ways, require_possible
from mmldlm.evaluation.generation import measure_agreement
from mmldlm.evaluation.inversion import AllDecoded, invert, measure_round_trip
from mmldlm.evaluation.results import Way, WaysToDecode
from mmldlm.latents import Normalizer
from mmldlm.layout import Layout
from mmldlm.model.denoiser import DataShape
from mmldlm.types import DenoiserOutput
from tests.evaluation.toys import LENGTH, MAX_LENGTH, TEXTS, VOCAB, joint_distribution, oracle_model

COUNT, NUM_CHANNELS = 300, 8
CODES = torch.from_numpy(np.random.default_rng(0).normal(size=(len(TEXTS), NUM_CHANNELS)).astype(np.float32))
"""(Q, C) the latent of every text."""
RIGHT = 0.4
"""How much the toy believes in the right text; the rest goes to one that is wrong at every position."""


class Misled:
    """Believes in a wrong text more than in the right one, but knows the latent of every text.

    Without a latent all tokens are equally likely to it.
    """

    length_head = None
    shape = DataShape(VOCAB, 1, NUM_CHANNELS, MAX_LENGTH)

    def __call__(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> DenoiserOutput:
        seen = noisy_tokens.view(-1, LENGTH)
        texts = torch.from_numpy(TEXTS)
        right = texts[torch.cdist(noisy_latents[:, 0], CODES).argmin(1)]
        chance = torch.full((*seen.shape, VOCAB), 1e-12, dtype=torch.float64)
        for text, belief in ((right, RIGHT), ((right + 1) % VOCAB, 1 - RIGHT)):
            fits = ((seen == text) | (seen == VOCAB)).all(1).double() * belief
            chance = chance + torch.nn.functional.one_hot(text, VOCAB) * fits[:, None, None]
        chance = torch.where((latent_time == 1)[:, None, None], 1.0, chance)
        logits = (chance / chance.sum(-1, keepdim=True)).log()
        known = CODES[(seen.clamp(max=VOCAB - 1) @ torch.tensor([9, 3, 1])).long()]
        return DenoiserOutput(logits.reshape(-1, VOCAB), known[:, None], None)

    @staticmethod
    def token_logits(hidden: Tensor) -> Tensor:
        return hidden


def require(context: Context) -> None:
    config, active = replace(context.model.config, evaluation=context.config), context.active
    require_possible(config, text=active.text, latent=active.latent, encoder=context.can_encode)


def misled_model(modes: ModeWeights | None = None, dropout: float = 0.1) -> LoadedModel:
    config = CorruptionConfig(
        prediction_type="clean", mode_weights=modes or ModeWeights(), condition_dropout=dropout
    )
    model = oracle_model(joint_distribution())
    model.corruption, model.denoiser = (
        Corruption(config, vocab_size=VOCAB, seed=0, row_multiple=8),
        cast(Any, Misled()),
    )
    model.normalizer = Normalizer(np.zeros(NUM_CHANNELS, np.float32), np.ones(NUM_CHANNELS, np.float32))
    model.config = replace(model.config, corruption=config)
    return model


def as_words(lists: Any) -> list[str]:
    return [" ".join(map(str, row)) for row in lists]


def encode(texts: list[str]) -> np.ndarray:
    """The encoder of the toy world."""
    ids = [int("".join(text.split()), VOCAB) for text in texts]
    return CODES[ids].numpy()[:, None]


def context_of(model: LoadedModel, tools: tuple[Any, Any] = (None, None), **settings: Any) -> Context:
    chosen = np.random.default_rng(1).integers(0, len(TEXTS), COUNT)
    documents = Documents(
        TEXTS[chosen].reshape(-1), np.full(COUNT, LENGTH), CODES[chosen].numpy()[:, None], np.arange(COUNT)
    )
    selection = Selection(cast(Any, None), np.arange(COUNT), documents, 0)
    config = EvaluationConfig(step_counts=[LENGTH], **settings)
    return Context(model, config, selection, 0, lambda *event: None, *tools)


def measure(context: Context) -> WaysToDecode:
    truth = Pairs.of(context.selection.documents, context.decode_text)
    plain = invert(context, truth, truth.latents, LENGTH)
    require(context)
    found = measure_ways(context, truth, plain)
    assert found is not None
    return found


@pytest.mark.parametrize("sampler", ["confidence", "first_hitting"])
def test_the_check_finds_the_right_text_as_often_as_it_is_among_the_candidates(sampler: str) -> None:
    """The first is wrong, each other right with the toy's belief; guidance g makes that RIGHT^g / (both^g)."""
    context = context_of(
        misled_model(), candidates=[5, 1, 2], text_samplers=[sampler], guidances=[1.0, 2.0]
    )  # fmt: skip
    found = measure(context)
    assert found.judge == "model"
    assert [row.way.num_candidates for row in found.rows] == [1, 2, 5] * 2
    for row in found.rows:
        guidance, count = row.way.guidance, row.way.num_candidates
        right = RIGHT**guidance / (RIGHT**guidance + (1 - RIGHT) ** guidance)
        expected = 1 - (1 - right) ** (count - 1)
        spread = np.sqrt(expected * (1 - expected) / COUNT)
        assert abs(row.scores.exact_match.value - expected) <= 4 * spread
        assert row.scores.exact_match.low <= row.scores.exact_match.value <= row.scores.exact_match.high
        assert row.scores.token_accuracy.value == pytest.approx(
            row.scores.exact_match.value
        )  # all or nothing
        assert row.exact_match_gain == row.scores.exact_match  # for the plain decode has none right
        steps = LENGTH * (1 if guidance == 1 else 2)  # guidance asks twice; the judge reads each text once
        passes, read = (steps, 0) if count == 1 else (count * (steps + 1), count)
        assert (row.passes.value, row.num_encoded.value) == (passes, read)
        assert row.seconds > 0
    recorded = context.quantities["held_out"]
    assert recorded[f"checked/{LENGTH}/{sampler}/2/5/0/exact_match"].better == "more"
    assert recorded[f"checked/{LENGTH}/{sampler}/2/5/0/passes"].better == "less"


def test_a_hot_candidate_is_right_by_chance_alone() -> None:
    """At a very high temperature each of the 27 texts is drawn equally often."""
    found = measure(context_of(misled_model(), candidates=[28], candidate_temperature=1e6))
    expected = 1 - (1 - 1 / len(TEXTS)) ** 27
    spread = np.sqrt(expected * (1 - expected) / COUNT)
    assert abs(found.rows[-1].scores.exact_match.value - expected) <= 4 * spread
    assert (
        found.rows[0].scores.exact_match.value == 0.0
    )  # the first takes the most probable tokens all the same


def test_the_encoder_judges_where_the_model_has_no_way_back() -> None:
    tools = (as_words, encode)
    alone = context_of(misled_model(ModeWeights(1, 0, 0)), tools, candidates=[5])
    found = measure(alone)
    assert found.judge == "encoder"
    assert any("the encoder chose" in note for note in alone.notes)
    own = measure(context_of(misled_model(), tools, candidates=[5]))
    assert own.judge == "model"
    for mine, theirs in zip(own.rows, found.rows, strict=True):  # both judges know everything
        assert mine.scores.exact_match == theirs.scores.exact_match
        assert mine.scores.reencoded_cosine == theirs.scores.reencoded_cosine
        assert mine.bleu_gain == theirs.bleu_gain
    assert found.rows[1].passes.value == 5 * LENGTH  # those of the encoder are not the network's
    forced = measure(context_of(misled_model(), tools, candidates=[5], check="encoder"))
    assert forced.judge == "encoder"


def test_what_cannot_work_is_refused_before_anything_is_measured() -> None:
    only_text, only_latent = ModeWeights(1, 0, 0), ModeWeights(0, 1, 0)
    for context, told in (
        (context_of(misled_model(only_text), candidates=[4]), "no loss on latents (t2l) and the encoder is not used"),
        (context_of(misled_model(only_text), refine=1), "candidates=[], refine=1"),
        (context_of(misled_model(only_text), (as_words, encode), candidates=[4], check="model"), "check=encoder"),
        (context_of(misled_model(), candidates=[4], check="encoder"), "or evaluation.check=model"),
        (context_of(misled_model(only_latent), candidates=[4]), "no loss on text"),
        (context_of(misled_model(only_text, dropout=0.0), guidances=[1.0, 2.0]), "guidances=[1.0, 2.0]"),
    ):  # fmt: skip
        with pytest.raises(UserError) as caught:
            require(context)
        assert told in str(caught.value)
        assert "\n" not in str(caught.value)
    for settings in ({}, {"candidates": [1]}, {"text_samplers": ["margin"]}, {"guidances": [1.0]}):
        require(context_of(misled_model(only_text, dropout=0.0), **settings))


def test_candidates_and_rounds_stand_beside_each_other() -> None:
    """Every way from the same candidates: rounds only bring texts nearer, and each row says what it alone cost."""
    context = context_of(misled_model(), (as_words, encode), candidates=[1, 5], refine=4, check="encoder")
    rows = measure(context).rows
    assert [(row.way.num_candidates, row.way.num_rounds) for row in rows] == [(1, 0), (1, 4), (5, 0), (5, 4)]
    cosines = np.array([row.scores.reencoded_cosine.value for row in rows]).reshape(2, 2)
    assert (cosines[:, 1] >= cosines[:, 0]).all()
    assert cosines[0, 1] > cosines[0, 0] + 0.1
    read = np.array([row.num_encoded.value for row in rows]).reshape(2, 2)
    assert read[:, 0].tolist() == [0, 5]
    assert read[1, 1] - read[1, 0] >= LENGTH * (VOCAB - 1)
    recorded = context.quantities["held_out"]
    for name in ("1/4", "5/0", "5/4"):
        assert f"checked/{LENGTH}/confidence/1/{name}/bleu" in recorded
    assert all(row.seconds > 0 for row in rows)


def test_nothing_is_measured_unless_asked() -> None:
    context = context_of(misled_model())
    truth = Pairs.of(context.selection.documents, None)
    assert measure_ways(context, truth, cast(Any, None)) is None


def test_latents_on_another_scale_change_nothing() -> None:
    """The encoder's latents may have any mean and scale: the network is asked about normalised ones everywhere."""
    plain, moved = context_of(misled_model(), candidates=[3]), context_of(misled_model(), candidates=[3])
    mean, scale = np.full(NUM_CHANNELS, 30.0, np.float32), np.full(NUM_CHANNELS, 0.25, np.float32)
    moved.model.normalizer = Normalizer(mean, scale)
    documents = replace(moved.selection.documents, latents=plain.selection.documents.latents * scale + mean)
    moved.selection = replace(moved.selection, documents=documents)
    found = []
    for context in (plain, moved):
        truth = Pairs.of(context.selection.documents, None)
        decoded = invert(context, truth, truth.latents, LENGTH)
        (way, *_) = decode_ways(context, truth, LENGTH, Way("confidence", 1.0), None)
        own = context.own_latents(truth.tokens, truth.ids)
        found.append((decoded.tokens, way.tokens, own))
    assert np.array_equal(*(np.concatenate(tokens) for tokens, _, _ in found))
    assert np.array_equal(*(np.concatenate(tokens) for _, tokens, _ in found))
    assert found[1][2] == pytest.approx(found[0][2] * scale + mean, abs=1e-4)


class Crooked(Misled):
    """Reads every text as the one before it, whose latent it then decodes as the text itself."""

    def __call__(self, noisy_tokens: Tensor, *inputs: Any) -> DenoiserOutput:
        output, seen = super().__call__(noisy_tokens, *inputs), noisy_tokens.view(-1, LENGTH)
        before = (seen.clamp(max=VOCAB - 1) - 1) % VOCAB
        return replace(output, latent_prediction=CODES[before @ torch.tensor([9, 3, 1])][:, None])


def test_the_way_from_text_to_text_leads_over_the_models_own_latent() -> None:
    """From the encoder's latents nothing comes back here, from the model's own ones everything does."""
    model = misled_model()
    model.denoiser = cast(Any, Crooked())
    context = context_of(model)
    truth = Pairs.of(context.selection.documents, None)
    given = invert(context, truth, truth.latents, LENGTH)
    assert given.accuracy.mean() == 0.0
    trips = measure_round_trip(context, AllDecoded(truth, [given], []))
    assert trips.text.token_accuracy.value == 1.0
    # there: each latent becomes the text after its own, and that is read as its own again
    assert trips.latent.own.value == pytest.approx(1.0)
    assert trips.latent.own_of_true_text.value < 0.9


def test_generated_pairs_agree_where_each_latent_is_that_of_its_own_text() -> None:
    context = context_of(misled_model(), (as_words, encode))
    tokens = list(TEXTS)
    latents = CODES.numpy()[:, None]
    found = measure_agreement(context, Pairs(tokens, latents, as_words(tokens), np.arange(len(tokens))))
    assert found.own.value == pytest.approx(1.0)
    assert found.encoder.value == pytest.approx(1.0)
    assert max(abs(found.own_strangers), abs(found.encoder_strangers)) < 0.5
    turned = measure_agreement(
        context, Pairs(tokens, np.roll(latents, 1, axis=0), as_words(tokens), np.arange(len(tokens)))
    )
    assert max(turned.own.value, turned.encoder.value) < 0.5
