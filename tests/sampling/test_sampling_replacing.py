"""Replacing rounds, where the right answer is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch import Tensor

from mmldlm.api.values import Codec
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.latents import Normalizer, cosine
from mmldlm.layout import Layout
from mmldlm.model.denoiser import DataShape
from mmldlm.sampling import judge as judge_module
from mmldlm.sampling.decode import decode_latents, encode_tokens
from mmldlm.sampling.judge import NUM_REPLACEMENTS, Checked, Judge, Proposals, Ragged, Swaps, slices
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack, document_keys
from mmldlm.sampling.predictor import ModelPredictor, guided_logits
from mmldlm.sampling.self_check import checked_stages, decode_checked
from mmldlm.types import DenoiserOutput
from tests.sampling.sampling_oracles import random_model, spy

OPTIONS = SamplingOptions(num_sampling_steps=3, batch_tokens=60)
LENGTHS = np.array([5, 9, 2, 1, 12, 7])
LATENTS = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
KEYS = document_keys(4, 6)
GREEDY = replace(OPTIONS, temperature=0.0)
VOCAB, LONGEST = 50, 12


def check(model: LoadedModel, **settings: Any) -> Checked:
    settings = {"keys": KEYS, "lengths": LENGTHS, "num_rounds": 2} | settings
    return decode_checked(
        model, settings.pop("latents", LATENTS), settings.pop("options", OPTIONS), **settings
    )


class Knowing:
    """Decodes badly, but has the right token among the most probable ones whatever else it sees.

    A document's latent holds a one in the channel of each (place, token) of its text, so it tells the text.
    """

    length_head = None
    shape = DataShape(VOCAB, 1, LONGEST * VOCAB, LONGEST)

    def __init__(self, rank: int) -> None:
        self.rank = rank
        """How many other tokens are more probable than the right one."""

    def __call__(
        self, tokens: Tensor, latents: Tensor, text_time: Tensor, latent_time: Tensor, layout: Layout
    ) -> DenoiserOutput:
        truth = latents.view(len(latents), LONGEST, VOCAB)
        sizes = (truth.amax(-1) > 0).sum(1)
        right = torch.cat([truth[i, :size].argmax(-1) for i, size in enumerate(sizes.tolist())])
        ahead = (torch.arange(VOCAB)[None] - right[:, None]) % VOCAB  # 0 for the right one
        logits = torch.where(ahead == 0, 0.0, torch.where(ahead <= self.rank, 1.0 + ahead, -1.0 * ahead))
        return DenoiserOutput(logits, torch.zeros_like(latents), None)

    @staticmethod
    def token_logits(hidden: Tensor) -> Tensor:
        return hidden


def knowing_model(rank: int) -> LoadedModel:
    model = random_model()
    model.denoiser = cast(Any, Knowing(rank))
    return model


def bag(texts: list[np.ndarray]) -> np.ndarray:
    """An encoder that is linear in the set of (place, token)."""
    found = np.zeros((len(texts), 1, LONGEST * VOCAB), np.float32)
    for i, text in enumerate(texts):
        found[i, 0, np.arange(len(text)) * VOCAB + text] = 1.0
    return found


def truth_texts() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, VOCAB, length) for length in LENGTHS]


def test_replacing_reaches_the_text_wherever_its_tokens_are_proposed() -> None:
    """Each right token raises the cosine by itself, so one round makes all replacements, the next finds none."""
    truth = truth_texts()
    settings: dict[str, Any] = {"latents": bag(truth), "encode": bag, "options": GREEDY}
    first = check(knowing_model(NUM_REPLACEMENTS), num_rounds=0, **settings)
    assert all((a != b).all() for a, b in zip(first.tokens, truth, strict=True))
    found = check(knowing_model(NUM_REPLACEMENTS), num_rounds=3, **settings)
    assert all(map(np.array_equal, found.tokens, truth))
    assert found.cosine == pytest.approx(np.ones(6))
    assert found.num_accepted.tolist() == [1] * 6
    # the text holds the most probable tokens, so the right one is the last of the others that are asked for; one rank
    # farther down it is never tried
    missed = check(knowing_model(NUM_REPLACEMENTS + 1), num_rounds=3, **settings)
    assert not any((a == b).any() for a, b in zip(missed.tokens, truth, strict=True))
    assert missed.num_accepted.tolist() == [0] * 6


def test_cost_is_what_was_asked_and_finished_texts_are_left_alone() -> None:
    truth = truth_texts()
    found = check(knowing_model(3), latents=bag(truth), encode=bag, options=GREEDY, num_rounds=5)
    # two rounds: the one that repairs everything, and the one that finds nothing to do
    num_steps = np.minimum(LENGTHS, GREEDY.num_sampling_steps)
    assert (found.passes - num_steps).tolist() == (2 * LENGTHS).tolist()
    sizes = [
        len({1, min(2, n), min(3, n), *(x for x in (n // 4, n // 2) if x), n}) - 1 for n in LENGTHS.tolist()
    ]
    assert found.num_encoded.tolist() == (1 + 2 * NUM_REPLACEMENTS * LENGTHS + sizes).tolist()
    model = random_model()
    record = spy(model)
    own = check(model)
    assert own.passes.sum() == sum(call.layout.num_documents for call in record)


def test_cosine_never_falls_and_speaks_of_the_text() -> None:
    model = random_model()
    rounds = [check(model, num_rounds=number) for number in range(4)]
    for before, after in pairwise(rounds):
        assert (after.cosine >= before.cosine).all()
        assert ((after.cosine > before.cosine) == (after.num_accepted > before.num_accepted)).all()
    assert (rounds[1].cosine > rounds[0].cosine).sum() >= 4
    assert [len(text) for text in rounds[-1].tokens] == LENGTHS.tolist()
    again = cosine(encode_tokens(model, rounds[-1].tokens, OPTIONS, keys=KEYS), LATENTS)
    assert rounds[-1].cosine == pytest.approx(again, abs=1e-4)
    assert (rounds[-1].first_cosine == rounds[0].cosine).all()


class Misled(Knowing):
    """Holds the right tokens for improbable, and reads every text as `bag` does."""

    def __init__(self, nats: float) -> None:
        super().__init__(NUM_REPLACEMENTS)
        self.nats = nats

    def __call__(
        self, tokens: Tensor, latents: Tensor, text_time: Tensor, latent_time: Tensor, layout: Layout
    ) -> DenoiserOutput:
        if (text_time == 0).all():
            read = bag([text.numpy() for text in tokens.split(layout.lengths.tolist())])
            return DenoiserOutput(torch.zeros(len(tokens), VOCAB), torch.from_numpy(read), None)
        output = super().__call__(tokens, latents, text_time, latent_time, layout)
        return replace(output, token_hidden=self.nats * output.token_hidden)


@pytest.mark.parametrize(
    ("nats", "encode", "right"), [(0.01, None, True), (100.0, None, False), (100.0, bag, True)]
)
def test_where_the_model_checks_itself_improbable_tokens_must_gain_more(
    nats: float, encode: Any, right: bool
) -> None:
    """A right token gains at least 1 / 12 of cosine; the most improbable one costs 0.01 x 8 x `nats` there."""
    truth, model = truth_texts(), random_model()
    model.denoiser = cast(Any, Misled(nats))
    texts = check(model, latents=bag(truth), encode=encode, options=GREEDY, num_rounds=3).tokens
    assert all(map(np.array_equal, texts, truth)) == right
    assert any((a == b).any() for a, b in zip(texts, truth, strict=True)) == right


def test_a_text_depends_neither_on_others_nor_on_packs() -> None:
    model = random_model()
    together = check(model)
    others = [check(model, options=replace(OPTIONS, batch_tokens=400))]
    parts = [slice(i, i + 1) for i in range(6)]
    alone = [check(model, latents=LATENTS[p], keys=KEYS[p], lengths=LENGTHS[p]) for p in parts]
    others.append(
        Checked(
            [one.tokens[0] for one in alone],
            *(np.concatenate([getattr(one, name) for one in alone]) for name in (
                "cosine", "first_cosine", "passes", "num_encoded", "num_accepted"
            )),
        )
    )  # fmt: skip
    for other in others:
        assert all(map(np.array_equal, together.tokens, other.tokens))
        assert together.cosine == pytest.approx(other.cosine, abs=1e-5)
        for name in ("passes", "num_encoded", "num_accepted"):
            assert getattr(together, name).tolist() == getattr(other, name).tolist()


def test_chunks_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    together = check(model, num_rounds=1)
    monkeypatch.setattr(judge_module, "CHUNK_TOKENS", 64)
    found = check(model, num_rounds=1)
    assert all(map(np.array_equal, together.tokens, found.tokens))
    assert together.num_encoded.tolist() == found.num_encoded.tolist()


def test_a_model_that_predicts_noise_can_do_it() -> None:
    options = replace(OPTIONS, num_encode_steps=1)
    found = check(random_model(prediction_type="noise"), options=options, num_rounds=1)
    assert (found.cosine >= found.first_cosine).all()
    assert (found.cosine > found.first_cosine).any()


@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_proposals_are_the_most_probable_others_with_one_token_masked(guidance: float) -> None:
    model = random_model()
    options = replace(OPTIONS, guidance=guidance)
    texts = decode_latents(model, LATENTS, options, lengths=LENGTHS, keys=KEYS)
    judge = Judge(model, LATENTS, options, options, KEYS, None, LATENTS[::-1].copy())
    record, passes = spy(model), np.zeros(6, np.int64)
    documents, owner, place = np.array([4, 0, 1]), np.array([0, 0, 1, 2, 2]), np.array([0, 11, 3, 8, 2])
    asked = Ragged.of([texts[i] for i in documents])
    found, prior = Proposals(judge).propose(asked, documents, owner, place, passes)
    assert passes.tolist() == [int(n * (1 if guidance == 1 else 2)) for n in (1, 2, 0, 0, 2, 0)]
    process = model.corruption.text
    for call in record:  # the share of one masked token
        share = process.schedule.mask_probability(call.text_time)
        parts = (call.tokens == process.mask_id).split((1 / share).round().int().tolist())
        assert [int(part.sum()) for part in parts] == [1] * call.layout.num_documents
    for row, (i, at) in enumerate(zip(documents[owner], place, strict=True)):
        one = texts[i].copy()
        one[at] = process.mask_id
        time = process.schedule.time_of(torch.tensor([1 / len(one)]))
        pack = Pack(
            torch.from_numpy(one), torch.from_numpy(LATENTS[[i]]), time,
            torch.zeros(1), np.array([len(one)]), KEYS[[i]], against=torch.from_numpy(LATENTS[::-1].copy()[[i]]),
        )  # fmt: skip
        logits = guided_logits(ModelPredictor.of(model), pack, guidance)(torch.tensor([at]))[0]
        best = [token for token in logits.argsort(descending=True).tolist() if token != texts[i][at]]
        assert found[row].tolist() == best[:NUM_REPLACEMENTS]
        less = (logits[best[:NUM_REPLACEMENTS]] - logits[texts[i][at]]).clamp(max=0).numpy()
        assert prior[row] == pytest.approx(judge_module.TOKEN_PRIOR * less, abs=1e-6)


def test_long_texts_are_tried_in_other_places_until_the_last_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 12 places 2 are drawn in a round: what found nothing there goes on, and ends at the text."""
    monkeypatch.setattr(judge_module, "MAX_PROBED", 2)
    truth = truth_texts()
    found = check(knowing_model(3), latents=bag(truth), encode=bag, options=GREEDY, num_rounds=60)
    assert all(map(np.array_equal, found.tokens, truth))
    tries = (found.num_encoded - 1) // (2 * NUM_REPLACEMENTS)
    assert tries[4] >= 60  # longer than 2, so never known to be finished
    assert found.num_encoded[2] < 4 * 2 * NUM_REPLACEMENTS


def test_which_replacements_are_tried_together() -> None:
    text = np.repeat([0, 2, 3, 4], [1, 2, 5, 20])
    swaps = Swaps(text, *(np.zeros(len(text)),) * 4)
    who, size = swaps.tries(5)
    found = {i: size[who == i].tolist() for i in range(5)}
    assert found == {0: [1], 1: [], 2: [1, 2], 3: [1, 2, 3, 5], 4: [1, 2, 3, 5, 10, 20]}


def test_replacements_that_spoil_each_other_are_not_made_together() -> None:
    """Two replacements help alone but not together: the better one is made, and the text is then as good as it gets."""
    model = random_model()
    values = {(1, 0): 0.8, (0, 1): 0.7, (1, 1): 0.1}

    def encode(texts: list[np.ndarray]) -> np.ndarray:
        start = decode_latents(model, target, OPTIONS, lengths=np.array([2]), keys=KEYS[:1])[0]
        height = np.array([values.get(tuple((text != start).astype(int)), 0.5) for text in texts])
        found = np.zeros((len(texts), 2, 3), np.float32)
        found[:, 0, 0], found[:, 0, 1] = height, np.sqrt(1 - height**2)
        return found

    target = np.zeros((1, 2, 3), np.float32)
    target[0, 0, 0] = 1.0
    found = check(model, latents=target, keys=KEYS[:1], lengths=np.array([2]), encode=encode)
    assert found.cosine[0] == pytest.approx(0.8 / 2)  # the mean of two slots, of which one has no direction
    assert found.num_accepted[0] == 1


def nearly_equal(texts: list[np.ndarray]) -> np.ndarray:
    """An encoder to which all texts are much the same; how much, their tokens say."""
    angle = np.array([0.5 + 0.002 * (text.sum() % 50) for text in texts])
    found = np.zeros((len(texts), 2, 3), np.float32)
    found[:, 0, 0], found[:, 0, 1] = np.cos(angle), np.sin(angle)
    return found


def test_stages_are_what_each_way_gives_alone() -> None:
    model, drawn = random_model(), {"keys": KEYS, "lengths": LENGTHS, "encode": nearly_equal}
    stages = list(checked_stages(
        model, LATENTS, OPTIONS, **drawn, counts=[1, 3], num_rounds=1,
    ))  # fmt: skip
    assert [(s.num_candidates, s.num_rounds) for s in stages] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for stage in stages:
        alone = check(model, **drawn, num_candidates=stage.num_candidates, num_rounds=stage.num_rounds)
        assert all(map(np.array_equal, alone.tokens, stage.checked.tokens))
        for name in ("cosine", "passes", "num_encoded"):
            assert getattr(alone, name).tolist() == getattr(stage.checked, name).tolist()
    for start, end in (stages[:2], stages[2:]):
        assert (end.checked.cosine >= start.checked.cosine).all()


def test_progress_reaches_its_end() -> None:
    seen: list[float] = []
    list(checked_stages(
        random_model(), LATENTS, OPTIONS, keys=KEYS, lengths=LENGTHS, counts=[1, 2],
        num_rounds=2, progress=lambda done, total: seen.append(done / total),
    ))  # fmt: skip
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_texts_in_one_array() -> None:
    texts = [np.array([1, 2, 3]), np.array([4]), np.array([5, 6])]
    some = Ragged.of(texts).take(np.array([2, 0, 2]))
    changed = some.put(np.array([0, 2]), np.array([1, 0]), np.array([8, 9]))
    assert [text.tolist() for text in changed.split()] == [[5, 8], [1, 2, 3], [9, 6]]
    assert [text.tolist() for text in some.split()] == [[5, 6], [1, 2, 3], [5, 6]]
    assert [(s.start, s.stop) for s in slices(np.array([3, 3, 9, 1, 1, 4]), 6)] == [(0, 2), (2, 3), (3, 6)]


def with_special_tokens(model: LoadedModel, folder: Path, num_special: int) -> LoadedModel:
    """The model with a tokenizer whose last ids are special: they are not in the texts that are read."""
    words = {
        f"w{number}" if number < VOCAB - num_special else f"[S{number}]": number for number in range(VOCAB)
    }
    backend = Backend(WordLevel(words, unk_token="[S49]"))
    backend.add_special_tokens([word for word in words if word.startswith("[")])
    Tokenizer(backend, "toy").save(folder)
    model.tokenizer_path = folder / "tokenizer.json"
    return model


@pytest.mark.parametrize("num_special", [25, VOCAB])
def test_special_tokens_do_not_win_as_deletions(tmp_path: Path, num_special: int) -> None:
    """To this judge a text is the nearer the less of it can be read; rounds gain nothing from what nobody reads."""
    model = with_special_tokens(random_model(), tmp_path, num_special)
    target = np.zeros((6, 2, 3), np.float32)
    target[:, 0, 0] = 1.0

    def few_words(texts: list[np.ndarray]) -> np.ndarray:
        angle = np.array([len(words.split()) / 20 for words in Codec(model).texts_of(texts)])
        found = np.zeros((len(texts), 2, 3), np.float32)
        found[:, 0, 0], found[:, 0, 1] = np.cos(angle), np.sin(angle)
        return found

    plain = check(model, latents=target, encode=few_words, num_rounds=0)
    found = check(model, latents=target, encode=few_words)
    num_special_before, num_special_after = (
        [int((text >= VOCAB - num_special).sum()) for text in texts] for texts in (plain.tokens, found.tokens)
    )
    assert num_special_after == num_special_before
    assert found.num_accepted.tolist() == [0] * 6


def test_a_latent_of_zeros_is_near_to_nothing() -> None:
    """What normalising leaves of it is rounding, whose direction means nothing."""
    model, rng = random_model(), np.random.default_rng(5)
    model.normalizer = Normalizer(*(rng.normal(size=3).astype(np.float32) for _ in range(2)))
    zeros = model.normalizer.normalize(np.zeros((6, 2, 3), np.float32))
    assert model.normalizer.denormalize(zeros).any()
    plain = decode_latents(model, zeros, OPTIONS, lengths=LENGTHS, keys=KEYS)
    found = check(model, latents=zeros, num_candidates=3)
    assert not found.cosine.any()
    assert not found.num_accepted.any()
    assert all(map(np.array_equal, found.tokens, plain))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_judge_that_gives_no_numbers_is_told(bad: float) -> None:
    def broken(texts: list[np.ndarray]) -> np.ndarray:
        found = nearly_equal(texts)
        found[-1, 1, 2] = bad
        return found

    with pytest.raises(
        UserError, match="check=encoder: the encoder gives NaN or infinity for 1 of 6 decoded"
    ):
        check(random_model(), encode=broken)
