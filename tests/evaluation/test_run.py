"""The whole evaluation through the command line, on a synthetic store with a small model."""

from __future__ import annotations

import errno
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from mmldlm import reports
from mmldlm.api.evaluate import evaluate as measure
from mmldlm.checkpoint.export import Export, write_export
from mmldlm.checkpoint.load import LoadedModel, load_model
from mmldlm.cli.evaluate import evaluate
from mmldlm.config import Config, CorruptionConfig, DataConfig, EvaluationConfig, ModelConfig, ModeWeights
from mmldlm.config.recipe import config_to_dict
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import Bounds
from mmldlm.evaluation.compare import Evaluated, compare_results
from mmldlm.evaluation.report import load_evaluated, write_report
from mmldlm.evaluation.results import Evaluation, Way
from mmldlm.evaluation.run import Tools, evaluate_model
from mmldlm.evaluation.tables import make_tables
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.weights import init_weights
from mmldlm.sampling.options import require_conditional
from mmldlm.statistics import Estimate
from tests.batches import small_config
from tests.stores import write_store

pytestmark = pytest.mark.usefixtures("quick_pictures")
SMALL = EvaluationConfig(
    num_documents=12,
    num_decoded=5,
    num_draws=2,
    step_counts=[2, 1],
    length_groups=[8, 16],
    num_generated=6,
    batch_tokens=128,
)
CPU = torch.device("cpu")


def write_run(folder: Path, store: PairStore, **changes: object) -> Path:
    """A run folder with an export of random weights and a training log."""
    corruption = CorruptionConfig(
        mode_weights=changes.pop("mode_weights", ModeWeights()), condition_dropout=0.1
    )  # type: ignore[arg-type]
    model: ModelConfig = small_config(**changes)
    config = Config(
        data=DataConfig(store=str(store.path)), model=model, corruption=corruption, evaluation=SMALL
    )
    manifest = store.manifest
    shape = DataShape(manifest.vocab_size, manifest.num_slots, manifest.num_channels, 24)
    denoiser = Denoiser(model, shape)
    init_weights(denoiser, 0)
    data = {**asdict(shape), "fingerprint": store.fingerprint, "normalizer": manifest.normalizer, "step": 7}
    folder.mkdir()
    write_export(folder / "export", Export(denoiser.state_dict(), config_to_dict(config), data))
    lines = [{"step": step, "text_loss": 4.0 / step, "latent_loss": 1.0 / step} for step in (1, 2, 3)]
    lines += [
        {
            "step": 3,
            "valid_text_loss": 2.0,
            "text_accuracy": 0.5,
            "latent_loss": None,
            "nonfinite": ["latent_loss"],
        }
    ]
    (folder / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PairStore:
    return write_store(tmp_path_factory.mktemp("data") / "store", num_train=30, num_valid=20)


@pytest.fixture(scope="module")
def run(store: PairStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", store)


@pytest.fixture(scope="module")
def model(run: Path) -> LoadedModel:
    return load_model(run, CPU)


def as_words(lists: object) -> list[str]:
    return [" ".join(f"w{token}" for token in row) for row in lists]  # type: ignore[attr-defined]


def encode(texts: list[str]) -> np.ndarray:
    """A stand-in for the encoder of the synthetic store."""
    return np.array([[[len(text)] + [1.0] * 7] for text in texts], dtype=np.float32)


TOOLS = Tools(decode_text=as_words, encode=encode)


@pytest.fixture(scope="module")
def result(model: LoadedModel, store: PairStore) -> Evaluation:
    """The whole evaluation, for tests that only look at it."""
    return evaluate_model(model, store, "validation", SMALL, TOOLS)


def test_the_same_arguments_give_the_same_numbers(
    model: LoadedModel, store: PairStore, result: Evaluation
) -> None:
    seen: list[tuple[int, int]] = []
    again = evaluate_model(
        model, store, "validation", SMALL, TOOLS, progress=lambda *event: seen.append(event)
    )
    assert again == result
    for about, one in result.documents.items():
        for name, quantity in one.quantities.items():
            assert np.array_equal(again.documents[about].quantities[name].values, quantity.values)
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)
    assert len({done for done, _ in seen}) > 10


def test_a_comparison_of_tokenizers_names_those_that_lose_text(
    model: LoadedModel, store: PairStore, result: Evaluation
) -> None:
    """A tokenizer that loses case, say, has fewer bits per byte, so the better figure is no better model."""
    config = replace(SMALL, num_decoded=2, num_generated=0, step_counts=[1], num_documents=12)
    lossy = Tools(decode_text=lambda lists: [text[1:] for text in as_words(lists)])
    losing = evaluate_model(model, store, "validation", config, lossy)
    losing = replace(losing, data=replace(losing.data, fingerprint="other"))
    pair = [Evaluated("whole", result), Evaluated("losing", losing)]
    (note,) = [note for note in compare_results(pair).notes if "tokenizer of" in note]
    assert note.startswith("the tokenizer of losing does not reproduce 12 of 12 texts")
    assert not any("tokenizer of" in note for note in compare_results([pair[0], pair[0]]).notes)


def test_the_result_is_complete_plain_json(store: PairStore, result: Evaluation) -> None:
    plain = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert Evaluation.from_json(plain) == result
    assert result.data.num_documents == 12
    assert result.inversion.num_documents == len(result.examples) == 5
    for points in (result.inversion.length_given, result.inversion.length_modelled):
        assert [point.num_sampling_steps for point in points] == [1, 2]
        assert all(point.bleu is not None and point.reencoded_cosine is not None for point in points)
    assert all(point.right_length.value == 1.0 for point in result.inversion.length_given)
    assert result.inversion.tokens_right == result.inversion.length_given[-1].token_accuracy
    assert result.retrieval.num_candidates == 20
    assert result.retrieval.chance_at_10 == 0.5
    assert result.notes == []
    held_out = result.documents["held_out"]
    assert len(held_out.ids) == 12
    nats = held_out.quantities["text_bound/right"]
    assert len(nats) == 12
    assert nats.values.sum() / nats.weights.sum() == pytest.approx(
        result.bounds.text.right.nats_per_token.value
    )
    sizes = [len(text.encode()) for text in store.split("validation").read_texts(np.arange(20))]
    bits = held_out.quantities["bits_per_byte/right"]
    assert set(bits.weights.astype(int)) <= set(sizes)
    assert bits.estimate(0).value == pytest.approx(nats.values.sum() / np.log(2) / bits.weights.sum())


def test_special_tokens_are_counted_where_a_store_kept_them(model: LoadedModel, store: PairStore) -> None:
    documents = store.split("validation").read(np.arange(20))
    config = replace(SMALL, num_documents=0, num_decoded=2, num_generated=0)
    tools = Tools(special_ids=frozenset({5, 9}))
    result = evaluate_model(model, store, "validation", config, tools)
    assert result.data.num_special_tokens == np.isin(documents.tokens, [5, 9]).sum() > 0
    assert any("special ones" in note for note in result.notes)


def test_groups_of_length_add_up_to_the_whole(model: LoadedModel, store: PairStore) -> None:
    result = evaluate_model(model, store, "validation", replace(SMALL, num_decoded=0), TOOLS)
    inversion = result.inversion
    assert sum(group.num_documents for group in inversion.by_length) == 12
    assert len(inversion.by_length) == 3
    lengths = {group.shortest: group for group in inversion.by_length}
    assert set(lengths) == {1, 9, 17}
    for idx in range(2):
        right = sum(
            group.num_documents * group.length_given[idx].exact_match.value for group in inversion.by_length
        )
        assert right / 12 == pytest.approx(inversion.length_given[idx].exact_match.value)
    again = result.round_trip.latent.encoder
    assert again == inversion.length_given[-1].reencoded_cosine
    assert result.round_trip.text.right_length.value == 1.0
    table = next(table for table in make_tables(result) if table.title == "Latent to text, by length")
    steps = ["1, true", "2, true", "1, modelled", "2, modelled"]
    assert [
        row[1] for row in table.rows
    ] == 3 * steps  # accuracy against steps for each length, not at the last alone


def test_generated_pairs_are_measured_beside_real_ones(
    model: LoadedModel, store: PairStore, result: Evaluation
) -> None:
    made = result.generation
    assert made.num_documents == made.num_real == len(made.examples) == 6
    assert made.memorised.num_searched == 30
    assert made.distance.latent_frechet.real_low <= made.distance.latent_frechet.real
    assert -1 <= made.agreement.encoder.value <= 1
    small = replace(SMALL, num_documents=6, num_decoded=2, num_draws=1, step_counts=[1])
    on_train = evaluate_model(model, store, "train", small, TOOLS).generation
    assert on_train.memorised.whole.real.value == 1.0  # here the real ones are the training data
    small = replace(small, num_generated=0)
    assert evaluate_model(model, store, "validation", small, TOOLS).generation is None


def test_one_decoded_document_and_one_generated_pair_have_nothing_to_be_compared_with(
    model: LoadedModel, store: PairStore, tmp_path: Path
) -> None:
    one = replace(SMALL, num_documents=4, num_decoded=1, num_draws=1, step_counts=[1], num_generated=1)
    result = evaluate_model(model, store, "validation", one, TOOLS)
    assert result.inversion.num_documents == result.generation.num_documents == 1
    assert result.inversion.cosine_reference is None
    assert result.inversion.best.reencoded_cosine is not None
    assert result.generation.diversity.self_bleu is None
    assert math.isnan(result.generation.agreement.own_strangers)
    assert not re.search(r"unrelated\D* nan", write_report(tmp_path, result).read_text())


def test_what_was_not_trained_is_left_out_and_said(store: PairStore, tmp_path: Path) -> None:
    encoder_only = load_model(write_run(tmp_path / "a", store, mode_weights=ModeWeights(0, 1, 0)), CPU)
    result = evaluate_model(encoder_only, store, "validation", SMALL, Tools())
    assert result.bounds.text is None
    assert result.inversion is None
    assert result.retrieval.num_queries == 12
    assert any("no loss on text" in note for note in result.notes)

    decoder_only = load_model(
        write_run(tmp_path / "b", store, mode_weights=ModeWeights(1, 0, 0), length="given"), CPU
    )
    decoder_only.config.corruption.condition_dropout = 0.0
    result = evaluate_model(decoder_only, store, "validation", SMALL, Tools())
    assert result.retrieval is None
    assert result.inversion.length_modelled == []
    assert result.inversion.length_given[0].bleu is None
    assert result.bounds.text.right.length_nats_per_document is None
    for word in ("no loss on latents", "does not model the length", "without a tokenizer", "'no latent'"):
        assert any(word in note for note in result.notes), word


def test_a_model_of_text_alone_has_a_bound_and_decodes_nothing(store: PairStore, tmp_path: Path) -> None:
    text_only = load_model(write_run(tmp_path / "a", store, mode_weights=ModeWeights(1, 0, 0)), CPU)
    text_only.config.corruption.condition_dropout = 1.0
    result = evaluate_model(text_only, store, "validation", SMALL, Tools())
    assert result.bounds.text.none.nats_per_token.value > 0
    assert (result.inversion, result.retrieval, result.round_trip) == (None, None, None)
    assert any("never saw a latent" in note for note in result.notes)
    with pytest.raises(UserError, match="never saw a latent"):
        evaluate_model(text_only, store, "validation", replace(SMALL, guidances=[2.0]), Tools())
    with pytest.raises(UserError, match="fill blanks"):
        require_conditional(text_only)


def test_documents_longer_than_the_model_are_left_out_and_counted(
    model: LoadedModel, store: PairStore
) -> None:
    longest = int(np.sort(store.split("validation").lengths)[-5]) - 1
    short = replace(model)
    short.denoiser = load_model_again(model, longest)
    result = evaluate_model(short, store, "validation", replace(SMALL, num_documents=0), Tools())
    left_out = int((store.split("validation").lengths > longest).sum())
    assert result.data.num_too_long == left_out > 0
    assert result.data.num_documents == 20 - left_out
    assert any(str(left_out) in note for note in result.notes)
    shortest = int(store.split("validation").lengths.min())
    short.denoiser = load_model_again(model, shortest - 1)
    reason = f"20 have more than {shortest - 1} tokens, the longest text of its training"
    with pytest.raises(UserError, match=reason) as caught:
        evaluate_model(short, store, "validation", SMALL, Tools())
    assert "\n" not in str(caught.value)


def load_model_again(model: LoadedModel, max_length: int) -> Denoiser:
    """The same kind of network for shorter documents."""
    denoiser = Denoiser(model.config.model, replace(model.denoiser.shape, max_length=max_length))
    init_weights(denoiser, 0)
    return denoiser.eval()


app = typer.Typer()
app.command()(evaluate)


def call(*words: object) -> str:
    """stdout of the command; errors are raised as they are."""
    result = CliRunner().invoke(
        app, [str(word) for word in words], catch_exceptions=False, standalone_mode=False
    )
    assert result.exception is None, result.exception
    return result.stdout


def test_the_command_writes_a_self_contained_report(
    run: Path, quick_pictures: dict[str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, render in quick_pictures.items():
        monkeypatch.setattr(reports, name, render)
    last = call(run, "--json", "--no-encoder", "--num-decoded", 4).splitlines()[-1]
    result = json.loads(last)
    folder = run / "reports" / "validation"
    assert result["report"] == str(folder / "report.html")
    assert "documents" not in result
    assert json.loads((folder / "result.json").read_text())["bounds"] == result["bounds"]
    again = measure(run, num_decoded=4, encoder=False)  # the command is a thin way to call this
    assert again == Evaluation.from_json(result)
    documents = json.loads((folder / "documents.json").read_text())
    assert {"text_bound/right", "latent_bound/none", "t2l/cosine"} <= documents["held_out"][
        "quantities"
    ].keys()
    markdown = (folder / "report.md").read_text()
    assert f"| nats / token | {again.bounds.text.right.nats_per_token.value:.3f} |" in markdown
    names = {path.stem for path in folder.glob("*.png")}
    assert {"latent_gain", "accuracy_steps", "latent_similarity", "losses", "time_curve"} <= names
    html = (folder / "report.html").read_text()
    assert html.count("<svg") == len(names)
    outside = re.findall(r'(?:src|href)\s*=\s*"(?!#)[^"]*"|url\((?!#)[^)]*\)|@import', html)
    assert [link for link in outside if "xlink" not in link] == []
    assert "<script" not in html


def test_the_command_prints_tables_and_where_the_report_is(run: Path, tmp_path: Path) -> None:
    ways = ["evaluation.candidates=[1,2]", "evaluation.refine=1", "evaluation.guidances=[1,2]"]
    ways += ["evaluation.text_samplers=[confidence,margin]"]
    words = ("-n", 6, "--steps", "3", "--no-encoder", "--split", "train", "--num-generated", 0, *ways)
    text = call(run, "--out", tmp_path / "here", *words)
    for word in ("Text bound", "Latent bound", "shuffled", "retrieval@10", "Round trips", "report:"):
        assert word in text
    one = load_evaluated(tmp_path / "here")
    result = one.result
    assert result.data.split == "train"
    rows = result.decoding.rows
    each = [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert [row.way for row in rows] == [
        Way(name, scale, *way) for name in ("confidence", "margin") for scale in (1, 2) for way in each
    ]
    plain = result.inversion.best
    assert rows[0].scores.token_accuracy == plain.token_accuracy
    assert rows[0].scores.exact_match == plain.exact_match
    assert rows[0].token_accuracy_gain == rows[0].exact_match_gain == Estimate(0.0, 0.0, 0.0, 0.0)
    html, markdown = ((tmp_path / "here" / f"report.{kind}").read_text() for kind in ("html", "md"))
    for page in (text, html, markdown):
        assert "Ways to decode, against the plain one" in page
    assert f"| margin | 2 | 2 | 1 | {100 * rows[-1].scores.token_accuracy.value:.1f} % |" in markdown
    assert "What more work in decoding gains" in html
    names = {row.name for row in compare_results([one, one]).pairs[0].rows}
    assert {
        f"checked/3/margin/2/2/1/{score}" for score in ("token_accuracy", "exact_match", "passes")
    } <= names
    other = replace(one, result=replace(result, decoding=replace(result.decoding, judge="encoder")))
    comparison = compare_results([other, one])
    assert not any(row.name.startswith("checked/") for row in comparison.pairs[0].rows)
    assert any("decoding.judge is encoder" in note for note in comparison.notes)


def test_another_store_leaves_the_report_on_the_own_one_alone(store: PairStore, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", store)
    write_store(tmp_path / "other", num_train=30, num_valid=20, seed=1)
    moved = shutil.copytree(store.path, tmp_path / "elsewhere" / store.path.name)
    words = ("-n", 4, "--num-decoded", 2, "--steps", "1", "--no-encoder", "--num-generated", 0)
    call(run, *words)
    first = (run / "reports" / "validation" / "result.json").read_bytes()
    call(run, *words, "--data", tmp_path / "other")
    assert (run / "reports" / "validation" / "result.json").read_bytes() == first
    assert (run / "reports" / "validation-of-other" / "report.html").is_file()
    call(run, *words, "--data", moved)
    assert sorted(path.name for path in (run / "reports").iterdir()) == ["validation", "validation-of-other"]


def test_mistakes_are_one_clear_line(run: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other", num_train=30, num_valid=5, encoder="another")
    cases = [
        ((tmp_path / "nothing",), "no such run"),
        ((run, "--data", other.path), "fingerprint"),
        ((run, "--data", tmp_path / "missing"), "no such pair store"),
        ((run, "--split", "tset"), "no split 'tset'"),
        ((run, "--steps", "1,two"), "--steps 1,two"),
        ((run, "--steps", "0"), r"evaluation.step_counts=\[0\]"),
        ((run, "evaluation.candidates=[1,some]"), "evaluation.candidates"),
        ((run, "evaluation.candidates=[0]"), r"evaluation.candidates=\[0\]: numbers of texts from 1"),
        ((run, "evaluation.text_samplers=[fast]"), "'fast' is no text sampler; allowed are confidence"),
        ((run, "evaluation.guidances=[nan]"), "evaluation.guidances"),
        (
            (run, "evaluation.candidate_temperature=0"),
            "evaluation.candidate_temperature=0.0: allowed is more",
        ),
        ((run, "evaluation.check=me"), "evaluation.check=me: allowed are auto, model, encoder"),
        (
            (run, "evaluation.candidates=[2]", "evaluation.check=encoder", "--no-encoder"),
            "needs the encoder and tokenizer",
        ),
        ((run, "optim.lr=1"), "settings of optim belong to the training"),
        ((run, "evaluation.candidate=[1]"), "did you mean evaluation.candidates"),
        ((run, "--device", "tpu"), "device=tpu"),
        ((run, "--sts", tmp_path / "no.tsv"), "no.tsv: cannot be read"),
        ((run, "--reference-lm", tmp_path), "no causal language model"),
        ((run, "--out", run / "training_log.jsonl" / "x"), "is a file"),
    ]
    for words, expected in cases:
        with pytest.raises(UserError, match=expected) as caught:
            call(*words)
        assert "\n" not in str(caught.value)


def test_a_hostile_text_cannot_break_the_page(
    run: Path, model: LoadedModel, store: PairStore, tmp_path: Path
) -> None:
    result = evaluate_model(
        model,
        store,
        "validation",
        SMALL,
        Tools(decode_text=lambda lists: ["<script>alert(1)</script> & "] * len(lists)),
    )
    text = replace(result.bounds.text, right=replace(result.bounds.text.right, perplexity=float("inf")))
    # pictures without any text
    result = replace(result, bounds=Bounds(text, None), retrieval=None, round_trip=None)
    (tmp_path / "mine.png").write_bytes(b"not ours")
    html = write_report(tmp_path, result, training_log=None).read_text()
    assert "<script" not in html
    assert "∞" in html
    assert (tmp_path / "mine.png").read_bytes() == b"not ours"
    assert not (tmp_path / "losses.png").exists()
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["nonfinite"] == ["bounds.text.right.perplexity"]


def test_a_full_disk_leaves_the_report_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("plot.png", "result.json", "report.html")
    reports.publish(tmp_path / "old", dict.fromkeys(names, b"old") | {"gone.png": b"old"})
    (tmp_path / "old" / "mine.txt").write_text("not ours")

    def full(path: Path, chunks: list[bytes]) -> None:
        if "report.html" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        path.write_bytes(b"".join(chunks))

    with monkeypatch.context() as patch:
        patch.setattr(reports, "write_file", full)
        for folder in ("old", "new"):
            with pytest.raises(OSError, match="No space"):
                reports.publish(tmp_path / folder, dict.fromkeys(names, b"new"), stale=["gone.png"])
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    found = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    assert found == dict.fromkeys((*names, "gone.png"), b"old") | {"mine.txt": b"not ours"}
    reports.publish(tmp_path / "old", dict.fromkeys(names, b"new"), stale=["gone.png"])
    found = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    assert found == dict.fromkeys(names, b"new") | {"mine.txt": b"not ours"}
