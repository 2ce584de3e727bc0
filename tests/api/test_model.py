"""`mmldlm.load` and `Model`: every form in which people may write it, and what they may get wrong."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

import mmldlm
from mmldlm.api.files import Inputs
from mmldlm.api.model import Model
from mmldlm.api.values import latents_array, one_latent
from mmldlm.cli.records import latents_of
from mmldlm.config import ModelConfig, ModeWeights
from mmldlm.corruption.joint import Corruption
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.latents import cosine
from mmldlm.model.denoiser import Denoiser
from mmldlm.runtime import sampling_precision
from mmldlm.sampling.predictor import ModelPredictor
from tests.runs import write_recipe
from tests.stores import write_store
from tests.tiny_models import NUM_CHANNELS, VOCAB_SIZE, FakeEncoder, make_run, make_store

TEXTS = ["w3 w1 w7", "w4 w4", "w9 w2 w5 w6", "w8", "w11 w12"]
QUICK = {"steps": 3, "temperature": 1.0}


def build(root: Path, num_slots: int = 1, **settings) -> Model:
    model = mmldlm.load(make_run(root / "run", make_store(root / "store", num_slots=num_slots), **settings))
    model.encoder = FakeEncoder(num_slots)
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return build(tmp_path_factory.mktemp("slots"), num_slots=3)


def test_what_a_model_says_about_itself(model: Model) -> None:
    assert (model.num_slots, model.num_channels, model.step) == (1, NUM_CHANNELS, 7)
    assert model.modes == ("l2t", "t2l", "joint")
    assert model.device == torch.device("cpu")
    assert "step=7" in repr(model)


@pytest.mark.parametrize("which", ["model", "slots"])
def test_round_trip_in_the_encoders_own_space(which: str, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(which)
    shape = (len(TEXTS), model.num_slots, model.num_channels)
    assert model.embed(TEXTS).shape == model.encode(TEXTS).shape == shape
    texts = model.decode(model.embed(TEXTS), lengths=[3, 2, 4, 1, 2], **QUICK)
    assert [len(text.split()) for text in texts] == [3, 2, 4, 1, 2]
    assert all(isinstance(text, str) and text.tokens.dtype == np.int64 for text in texts)
    pairs = model.generate(3, latent_steps=2, **QUICK)
    assert pairs.latents.shape == (3, *shape[1:])
    assert len(pairs.texts) == 3
    assert abs(pairs.latents.mean() - 3.0) < 1.5  # where the encoder's latents are, not around 0


def test_the_same_texts_whatever_the_batch(model: Model) -> None:
    """Alone, in any order, or together; another seed gives another sample."""
    latents = model.embed(TEXTS)
    together = model.decode(latents, **QUICK)
    assert [model.decode(latents[i : i + 1], **QUICK)[0] for i in range(len(TEXTS))] == together
    assert model.decode(latents[::-1], **QUICK) == together[::-1]
    assert model.decode(latents, **QUICK) == together
    assert model.decode(latents, seed=1, **QUICK) != together
    encoded = model.encode(TEXTS, steps=4)
    assert np.allclose(np.concatenate([model.encode([text], steps=4) for text in TEXTS]), encoded, atol=1e-5)
    assert model.generate(4, **QUICK).texts[:2] == model.generate(2, **QUICK).texts


def test_ids_draw_several_samples_of_one_document(model: Model) -> None:
    """Without them, the same document gives the same sample."""
    latents = np.repeat(model.embed(TEXTS[:1]), 4, axis=0)
    calls = {
        "decode": lambda **ids: model.decode(latents, lengths=6, **QUICK, **ids),
        "infill": lambda **ids: model.infill(["w3 ____{6}"] * 4, **QUICK, **ids),
        "paraphrase": lambda **ids: model.paraphrase(["w3 w1 w7 w2 w9"] * 4, **QUICK, **ids),
    }
    for name, call in calls.items():
        assert len(set(call())) == 1, name
        assert len(set(call(ids=range(4)))) > 1, name
        assert call(ids=range(4)) == call(ids=np.arange(4)), name
    with pytest.raises(UserError, match=r"ids: .* 2 whole numbers are needed"):
        model.paraphrase(["w3", "w1"], ids=range(3))


def test_numpy_torch_and_lists_are_taken_alike(model: Model) -> None:
    latents = model.embed(TEXTS)
    expected = model.decode(latents, **QUICK)
    for same in (torch.from_numpy(latents), latents[:, 0], latents.astype(np.float64), latents.tolist()):
        assert model.decode(same, **QUICK) == expected
    ends = torch.from_numpy(latents)
    between = model.interpolate(ends[0], ends[1], points=3, lengths=2)
    assert isinstance(between.latents, torch.Tensor)
    assert torch.allclose(between.latents[0], ends[0], atol=1e-5)
    assert torch.allclose(between.latents[2], ends[1], atol=1e-5)
    assert isinstance(model.score(TEXTS, ends, draws=1), torch.Tensor)


def test_one_text_in_one_text_out(model: Model) -> None:
    assert model.infill("w3 ____ w1").split()[::2] == ["w3", "w1"]
    assert [text.split()[0] for text in model.infill(["w3 ____{2}", "w4 ____"])] == ["w3", "w4"]
    assert isinstance(model.paraphrase("w3 w1"), str)
    assert isinstance(model.paraphrase(["w3 w1"]), list)
    assert model.embed("w3").shape == (1, 1, NUM_CHANNELS)
    assert len(model.infill("w3 ____", model.embed(TEXTS))) == len(TEXTS)  # one text for all latents


def test_nothing_in_nothing_out(model: Model) -> None:
    none = np.empty((0, 1, NUM_CHANNELS), np.float32)
    assert model.embed([]).shape == model.encode([]).shape == model.generate(0).latents.shape == none.shape
    assert model.decode(none) == model.decode([]) == model.infill([]) == model.paraphrase([]) == []
    assert model.score([]).shape == (0,)
    assert [part.shape for part in model.score([], errors=True)] == [(0,), (0,)]
    assert model.neighbours([], among=TEXTS) == []
    assert model.decode(none, lengths=[]) == model.generate(0, lengths=[]).texts == []
    assert model.infill(["w3 ____"], none) == model.infill("w3 ____", none) == []


def test_paraphrases_keep_what_they_do_not_vary(model: Model) -> None:
    text = "w3 w1 w7 w2 w9 w4"
    for vary in ("both", "text", "latent"):
        varied = model.paraphrase(text, strength=0.3, vary=vary, **QUICK)
        same = [a == b for a, b in zip(text.split(), varied.split(), strict=False)]
        assert all(same) is False or vary != "latent"
        assert any(same) or vary == "latent"
        assert (
            len(model.paraphrase(text, strength=1, vary=vary, **QUICK).split()) > 0
        )  # a whole number serves too


def test_unknown_words_are_reported_by_every_method_that_reads_texts(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    calls = (model.embed, model.encode, model.score, model.tokenize, model.paraphrase, model.infill)
    for call in (*calls, lambda texts: model.interpolate(texts[0], "w1", points=2)):
        caplog.clear()
        call(["w1 zz ____"] if call == model.infill else ["w1 zz"])
        assert caplog.text.count("does not know") == caplog.text.count("'zz'") == 1


def test_candidates_and_rounds_bring_a_text_nearer(model: Model) -> None:
    latents = model.embed(TEXTS)
    plain = model.decode(latents, **QUICK)
    checked = model.decode(latents, candidates=3, refine=1, **QUICK)
    assert all(text.check is None for text in plain)
    assert all(text.check.cosine >= text.check.first_cosine for text in checked)
    again = cosine(model.encode([str(text) for text in checked]), latents)
    assert again == pytest.approx([text.check.cosine for text in checked], abs=1e-5)
    by_encoder = model.decode(latents, candidates=3, check="encoder", **QUICK)
    assert [text.check.cosine for text in by_encoder] == pytest.approx(
        cosine(model.embed([str(text) for text in by_encoder]), latents), abs=1e-5
    )


def test_guidance_leads_away(model: Model) -> None:
    latents = model.embed(TEXTS)
    plain = model.decode(latents, **QUICK)
    assert model.decode(latents, guidance=3.0, **QUICK) != plain
    by_text = model.decode(latents, guidance=3.0, against="w4 w4", **QUICK)
    assert by_text == model.decode(latents, guidance=3.0, against=model.embed("w4 w4"), **QUICK)


def test_scores_are_bounds_of_single_texts(model: Model) -> None:
    latents = model.embed(TEXTS)
    together = model.score(TEXTS, latents, draws=4)
    assert (together > 0).all()
    alone = [model.score([text], row[None], draws=4)[0] for text, row in zip(TEXTS, latents, strict=True)]
    assert alone == pytest.approx(together.tolist(), rel=1e-4)
    assert model.score(TEXTS).shape == (len(TEXTS),)


def test_neighbours_in_texts_latents_and_stores(model: Model) -> None:
    near = model.neighbours(TEXTS, among=TEXTS, k=2)
    assert [row[0].cosine for row in near] == pytest.approx(np.ones(len(TEXTS)))
    assert all(row[0].text in TEXTS and row[0].cosine >= row[1].cosine for row in near)
    by_latents = model.neighbours(model.embed(TEXTS), among=model.embed(TEXTS), k=2)
    assert [[n.index for n in row] for row in by_latents] == [[n.index for n in row] for row in near]
    assert by_latents[0][0].text is None
    split = model.open_store().split("train")
    own = model.neighbours(split.read(np.arange(3)).latents, among=model.open_store(), k=1)
    assert [row[0].index for row in own] == [0, 1, 2]
    assert [row[0].text for row in own] == split.read_texts(np.arange(3))


def test_a_saved_model_is_the_same_model(model: Model, tmp_path: Path) -> None:
    model.save(tmp_path / "copy")
    copy = mmldlm.load(str(tmp_path / "copy"))
    latents = model.embed(TEXTS)
    assert copy.decode(latents, **QUICK) == model.decode(latents, **QUICK)
    assert np.array_equal(copy.encode(TEXTS), model.encode(TEXTS))


def test_progress_reaches_its_end(model: Model) -> None:
    seen: list[tuple[int, int]] = []
    model.decode(model.embed(TEXTS), steps=4, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


WRONG = {
    "channels": (lambda m: m.decode(np.zeros((2, 1, 5))), r"latents of shape \(2, 1, 5\).*4 channels"),
    "axis": (lambda m: m.decode(np.zeros(4)), r"latents of shape \(4,\).* one latent: pass \[latents\]"),
    "nan": (lambda m: m.decode(np.full((2, 1, 4), np.nan)), "latents: 2 of 2 contain NaN"),
    "words": (lambda m: m.decode(["a", "b"]), r"values of type.*model\.encode\(texts\) makes"),
    "ragged": (lambda m: m.decode([[1.0], [1.0, 2.0]]), "latents: not an array"),
    "lengths": (lambda m: m.decode(np.zeros((2, 4)), lengths=[1]), "lengths: 1 number for 2 documents"),
    "length": (lambda m: m.decode(np.zeros((2, 4)), lengths=0), "lengths=0"),
    "long": (lambda m: m.decode(np.zeros((1, 4)), lengths=100_000), "lengths=100000: .* 1 to 10000"),
    "order": (lambda m: m.decode(np.zeros((1, 4)), order="left"), "order=left"),
    "block": (lambda m: m.decode(np.zeros((1, 4)), order="margin:3"), "order=margin:3"),
    "steps": (lambda m: m.decode(np.zeros((1, 4)), steps=0), "^steps=0"),
    "encode steps": (lambda m: m.encode("w1", steps=0), "^steps=0"),
    "half a step": (lambda m: m.decode(np.zeros((1, 4)), steps=1.5), "^steps=1.5: a whole number"),
    "hot": (lambda m: m.decode(np.zeros((1, 4)), temperature="hot"), "temperature='hot': a number"),
    "too large": (lambda m: m.decode(np.full((1, 4), 1e300)), "latents: 1 of 1 contain NaN or infinity"),
    "another size": (
        lambda m: m.decode(np.array([[1.0] * 4, [1e30] * 4])),
        r"latents: 1 of 2 are \de\+\d\d standard deviations away .* at index 1",
    ),
    "scored, another size": (lambda m: m.score(["w1"], np.full((1, 4), 1e9)), "latents: 1 of 1 are"),
    "against, another size": (
        lambda m: m.decode(np.zeros((1, 4)), guidance=2, against=np.full((1, 4), 1e9)),
        "against: 1 of 1 are",
    ),
    "score's seed": (lambda m: m.score(["w1"], seed=-1), "seed=-1: a whole number of at least 0"),
    "ids": (lambda m: m.decode(np.zeros((2, 4)), ids=np.arange(3)), r"ids: .*2 whole numbers"),
    "ragged lengths": (lambda m: m.decode(np.zeros((2, 4)), lengths=[[1], [2, 3]]), "lengths: not an array"),
    "ragged end": (lambda m: m.interpolate([[1], [2, 3]], "w1"), "a: not an array"),
    "None": (lambda m: m.encode(None), "texts=None"),
    "surrogate": (lambda m: m.encode("\ud800"), r"texts\[0\]: holds half of a surrogate pair"),
    "seed": (lambda m: m.decode(np.zeros((1, 4)), seed=-1), "seed=-1"),
    "check": (lambda m: m.decode(np.zeros((1, 4)), candidates=2, check="us"), "check='us'"),
    "no seed": (lambda m: m.decode(np.zeros((1, 4)), seed=None), "seed=None: a whole number"),
    "many steps": (lambda m: m.decode(np.zeros((1, 4)), steps=10**9), "steps=1000000000: .* at most 1000000"),
    "long blocks": (lambda m: m.decode(np.zeros((1, 4)), order=f"block:{10**20}"), "block_length=1000"),
    "complex": (lambda m: m.decode(torch.zeros(1, 4, dtype=torch.complex64)), "values of type complex64"),
    "columns": (
        lambda m: m.encode(pandas.DataFrame({"text": ["w1"]})),
        r"a DataFrame; give .*texts\['text'\]",
    ),
    "names": (lambda m: m.encode({"text": ["w1"]}), "texts: is a dict; give the texts in it"),
    "device": (lambda m: mmldlm.load(m.source, device=None), "device=None: allowed are auto, cpu"),
    "candidates": (lambda m: m.decode(np.zeros((1, 4)), candidates=0), "candidates=0"),
    "against": (lambda m: m.decode(np.zeros((1, 4)), against="w1"), "against: has an effect only with"),
    "two against": (
        lambda m: m.decode(np.zeros((3, 4)), guidance=2, against=np.zeros((2, 4))),
        "against: 2 latents; 1 or 3",
    ),
    "empty": (lambda m: m.encode(["w1", " "]), r"texts\[1\]: is empty"),
    "no text": (lambda m: m.encode(["w1", 3]), r"texts\[1\]: is a int"),
    "no blank": (lambda m: m.infill("w1 w2"), "holds no blank"),
    "guided blank": (lambda m: m.infill("w1 ____", guidance=2), "guidance: has no effect without latents"),
    "blanks": (lambda m: m.infill(["w1 ____", "w2 ____"], np.zeros((3, 4))), "latents: 3 for 2 texts"),
    "strength": (lambda m: m.paraphrase("w1", strength=0), "strength=0"),
    "vary": (lambda m: m.paraphrase("w1", vary="all"), "vary='all'"),
    "kept length": (lambda m: m.paraphrase("w1", lengths=3), "lengths: a text of which"),
    "points": (lambda m: m.interpolate("w1", "w2", points=1), "points=1"),
    "end": (lambda m: m.interpolate("w1", np.zeros((2, 4))), "b: 2 latents; exactly one"),
    "turns": (lambda m: m.generate(1, turns="both"), "turns=both"),
    "n": (lambda m: m.generate(-1), "n=-1"),
    "k": (lambda m: m.neighbours("w1", among=["w2"], k=0), "k=0"),
    "long text": (lambda m: m.score(["w1", "w1 " * 999]), "document 1 has 999 tokens"),
    "pairs": (lambda m: m.score(["w1"], np.zeros((2, 4))), "latents: 2 for 1 text;"),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_clear_line_names_the_argument(model: Model, name: str) -> None:
    act, message = WRONG[name]
    with pytest.raises(UserError, match=message) as error:
        act(model)
    assert "\n" not in str(error.value)


def test_modes_that_were_not_trained(tmp_path: Path) -> None:
    model = build(tmp_path, modes=ModeWeights(l2t=1, t2l=0, joint=0))
    assert model.modes == ("l2t",)
    with pytest.raises(UserError, match="not trained to produce latents"):
        model.encode("w1")
    with pytest.raises(UserError, match="not trained to produce latents"):
        model.generate(1)
    with pytest.raises(UserError, match="always saw a latent"):
        model.score(["w1"])
    with pytest.raises(UserError, match="check='model'"):
        model.decode(model.embed("w1"), candidates=2)
    assert model.decode(model.embed("w1"), candidates=2, check="encoder")


def test_a_model_without_an_encoder(tmp_path: Path) -> None:
    model = build(tmp_path)
    del model.codec.encoder
    model.loaded.encoder = None
    with pytest.raises(UserError, match="no encoder is known"):
        model.embed("w1")
    with pytest.raises(UserError, match=r"no encoder is known.*--encode-with model"):
        latents_of(model, Inputs(texts=["w1"]), "encoder")
    assert latents_of(model, Inputs(texts=["w1"]), "model").shape == (1, 1, NUM_CHANNELS)
    assert model.encode("w1").shape == (1, 1, NUM_CHANNELS)


def test_a_run_without_export_and_without_its_store(tmp_path: Path) -> None:
    """As one that still trains, or was killed: its own folder is enough."""
    store = write_store(tmp_path / "store", num_train=60, num_slots=2)
    run = mmldlm.train(str(write_recipe(tmp_path, store.path)), run=tmp_path / "run")
    latents = store.split("validation").read(np.arange(3)).latents
    expected = mmldlm.load(run).decode(latents, lengths=4, **QUICK)
    shutil.rmtree(tmp_path / "run" / "export")
    shutil.rmtree(store.path)
    model = mmldlm.load(run)
    assert model.step == run.step
    assert model.decode(latents, lengths=4, **QUICK) == expected
    assert all(word.isdigit() for word in expected[0].split())  # a store without a tokenizer: token ids
    with pytest.raises(UserError, match="no tokenizer"):
        model.encode("a text")


def test_sources_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        mmldlm.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match="source=3"):
        mmldlm.load(3)
    with pytest.raises(UserError, match="device=abacus"):
        mmldlm.load(tmp_path, device="abacus")


def test_a_name_on_the_hub_offline_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"nobody/nothing: there is no such folder here.*Hub") as error:
        mmldlm.load("nobody/nothing")
    assert "\n" not in str(error.value)


def test_a_name_on_the_hub_is_downloaded(
    model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model.save(tmp_path / "snapshot")
    asked: list[str] = []

    def download(name: str) -> str:
        asked.append(name)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert mmldlm.load("somebody/model").step == 7
    assert asked == ["somebody/model"]


def test_import_is_quick() -> None:
    code = "import sys, mmldlm; assert 'torch' not in sys.modules; mmldlm.load; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_single_latents() -> None:
    assert one_latent(np.zeros(4), (1, 4), "a").shape == (1, 1, 4)
    assert one_latent(np.zeros((3, 4)), (3, 4), "a").shape == (1, 3, 4)
    assert latents_array(torch.zeros(2, 4, dtype=torch.bfloat16), (1, 4)).dtype == np.float32


def test_a_misspelt_run_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str) -> str:
        raise AssertionError(f"asked the Hub for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    store = make_store(tmp_path / "store")
    make_run(tmp_path / "saved" / "wordnet", store)
    make_run(tmp_path / "others" / "small", store)
    for name, meant in (
        ("saved/wordnte", "saved/wordnet"),
        ("others/smal", "others/small"),
        ("wordnt", "saved/wordnet"),
    ):
        with pytest.raises(UserError, match=rf"no such run or export; did you mean {meant}\?"):
            mmldlm.load(name)


def test_neighbours_among_the_folder_of_a_store(model: Model) -> None:
    folder = Path(model.loaded.config.data.store)
    near = model.neighbours(["w3 w1"], among=PairStore.open(folder), k=2)
    assert model.neighbours(["w3 w1"], among=str(folder), k=2) == near
    assert model.neighbours(["w3 w1"], among=folder, k=2) == near


def test_neighbours_in_a_store_of_another_encoder_are_rejected(model: Model, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other", vocab_size=50, num_channels=8)
    with pytest.raises(UserError, match="another tokenizer or encoder"):
        model.neighbours(["w3 w1"], among=other)
    with pytest.raises(UserError, match=r"among of shape \(.*4 channels"):
        model.neighbours(["w3 w1"], among=other.split("train"))


def test_pairs_are_shown_in_one_line(model: Model) -> None:
    shown = repr(model.generate(5, latent_steps=1, **QUICK))
    assert shown.startswith("Pairs(5: [")
    assert shown.endswith(f", ...], latents (5, 1, {NUM_CHANNELS}))")
    assert "\n" not in shown


def test_products_may_be_computed_in_bf16(model: Model) -> None:
    """Numbers differ from those in fp32, by no more than rounding."""
    whole, half = (mmldlm.load(model.source, "cpu", precision=name) for name in ("fp32", "bf16"))
    latents = model.embed(TEXTS)
    exact, rounded = (one.score(TEXTS, latents, draws=2) for one in (whole, half))
    assert not np.array_equal(exact, rounded)
    assert rounded == pytest.approx(exact, rel=0.03)
    assert len(half.decode(latents, temperature=0)) == len(TEXTS)
    with pytest.raises(UserError, match=r"precision='fp8': allowed are fp32, bf16"):
        mmldlm.load(model.source, precision="fp8")


@pytest.mark.parametrize(("has", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_a_cpu_samples_in_bf16_where_it_has_instructions_for_it(
    has: bool, chosen: str, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: has)
    sampling_precision.cache_clear()
    with caplog.at_level("INFO"):
        loaded = [mmldlm.load(model.source, "cpu").loaded for _ in range(2)]
    sampling_precision.cache_clear()
    assert [one.precision for one in loaded] == [chosen, chosen]
    frozen = ModelPredictor.of(loaded[0]).frozen
    assert frozen is not None
    assert frozen.dtype == {"bf16": torch.bfloat16, "fp32": torch.float32}[chosen]
    assert sum("instructions for bf16" in line for line in caplog.messages) == 1
    assert mmldlm.load(model.source, "cpu", precision="fp32").loaded.precision == "fp32"


def test_lengths_are_chosen_unless_one_candidate_is_requested(model: Model) -> None:
    latents = np.random.default_rng(0).normal(3.0, 1.0, (20, 1, NUM_CHANNELS)).astype(np.float32)
    best, three = (
        model.decode(latents, temperature=0),
        model.decode(latents, temperature=0, candidates=model.loaded.config.sampling.num_lengths),
    )
    likeliest = model.decode(latents, temperature=0, candidates=1)
    assert best == three != likeliest
    assert best[0].check is None
    assert three[0].check is not None
    assert all(map(np.array_equal, [text.tokens for text in best], [text.tokens for text in three]))


def test_weights_of_an_own_loop_are_a_model_like_any_other(model: Model, tmp_path: Path) -> None:
    store, loaded = model.open_store(), model.loaded
    own = Model.of(loaded.denoiser, store, loaded.corruption, step=7, encoder=FakeEncoder())
    latents = model.embed(TEXTS)
    assert own.modes == model.modes
    assert [list(text.tokens) for text in own.decode(latents, **QUICK)] == [
        list(text.tokens) for text in model.decode(latents, **QUICK)
    ]
    own.save_pretrained(tmp_path / "published")
    again = mmldlm.load(tmp_path / "published")
    assert again.decode(latents, **QUICK) == own.decode(latents, **QUICK)
    assert (again.step, again.loaded.fingerprint) == (7, store.fingerprint)
    result = mmldlm.evaluate(own, num=4, num_decoded=2, num_generated=2, steps=[1])
    assert result.inversion.tokens_right.value >= 0


def test_a_model_of_an_own_loop_has_weights_of_its_own(model: Model) -> None:
    store = model.open_store()
    denoiser = Denoiser(ModelConfig(preset="tiny", depth=1), replace(store.shape, max_length=40))
    own = Model.of(denoiser, store, Corruption(vocab_size=VOCAB_SIZE))
    assert own.max_length == 40  # that of the network, whatever the store holds
    assert denoiser.training
    assert all(parameter.requires_grad for parameter in denoiser.parameters())
    before = own.loaded.denoiser.slot_embed.clone()
    with torch.no_grad():
        denoiser.slot_embed.add_(1.0)
    assert torch.equal(own.loaded.denoiser.slot_embed, before)


def test_a_model_of_other_data_is_one_clear_line(model: Model, tmp_path: Path) -> None:
    store, corruption = model.open_store(), model.loaded.corruption
    denoiser, other = model.loaded.denoiser, make_store(tmp_path / "other", num_slots=2)
    for arguments, message in (
        (
            (denoiser, other, corruption),
            "denoiser: built with num_slots=1, and .*/other has 2; pass the pair store",
        ),
        (
            (denoiser, store, Corruption(vocab_size=5)),
            "corruption: made with vocab_size=5, and .* has 20; give",
        ),
        ((torch.nn.Linear(1, 1), store, corruption), "denoiser: is a Linear; a Denoiser is needed"),
        ((denoiser, str(store.path), corruption), "store: is a str; a PairStore is needed"),
    ):
        with pytest.raises(UserError, match=message):
            Model.of(*arguments)
