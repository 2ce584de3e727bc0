"""`mmldlm.evaluate` on a loaded model, on several slots, on a store that has moved, into a folder one cannot write."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import mmldlm
from mmldlm.api import evaluate as api
from mmldlm.config import EvaluationConfig
from mmldlm.evaluation.context import Context, Pairs, select_documents
from mmldlm.evaluation.inversion import decode_keys, inversion_options, score_texts
from mmldlm.latents import cosine
from mmldlm.sampling.self_check import checked_stages
from tests.tiny_models import FakeEncoder, make_run, make_store

pytestmark = pytest.mark.usefixtures("quick_pictures")
QUICK = {"num_decoded": 3, "num_generated": 4, "steps": [2]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one slot and one of three, each with its store."""
    root = tmp_path_factory.mktemp("runs")
    for name, num_slots in (("one", 1), ("three", 3)):
        make_run(root / name, make_store(root / f"{name}-store", num_slots=num_slots), dropout=0.1)
    return root


def as_words(tokens: list[np.ndarray]) -> list[str]:
    return [" ".join(f"w{token}" for token in text) for text in tokens]


def test_every_figure_works_with_several_slots(folder: Path) -> None:
    result = mmldlm.evaluate(folder / "three", **QUICK)
    for part in (
        result.bounds.text,
        result.bounds.latent,
        result.inversion,
        result.round_trip,
        result.retrieval,
    ):
        assert part is not None
    assert result.bounds.latent.num_dimensions == 3 * 4
    assert -1 <= result.retrieval.cosine.value <= 1
    assert mmldlm.Evaluation.from_json(result.to_json()) == result
    again = mmldlm.evaluate(
        mmldlm.load(folder / "three"), data=mmldlm.PairStore.open(folder / "three-store"), **QUICK
    )
    assert again == mmldlm.Evaluation.from_json(result.to_json() | {"command": None})


def test_sampling_and_evaluation_measure_the_same_similarity(folder: Path) -> None:
    """The check of candidates and the score of the kept text, with three slots, document by document."""
    model, encoder = mmldlm.load(folder / "three").loaded, FakeEncoder(3)
    selection = select_documents(model, mmldlm.PairStore.open(folder / "three-store"), "validation", 0, 0)
    context = Context(model, EvaluationConfig(), selection, 0, lambda *_: None, as_words, encoder.encode)
    truth = Pairs.of(selection.documents, as_words)
    stages = checked_stages(
        model, model.normalizer.normalize(truth.latents), inversion_options(model, 2, 512),
        keys=decode_keys(0, truth.ids), lengths=truth.lengths, counts=[3],
        encode=lambda tokens: encoder.encode(as_words(tokens)),
    )  # fmt: skip
    checked = list(stages)[-1].checked
    scored = score_texts(truth, checked.tokens, 2, context.decode_text, context.encode)
    np.testing.assert_allclose(scored.cosine, checked.cosine, atol=1e-6)
    slots = [cosine(encoder.encode(scored.texts)[:, [slot]], truth.latents[:, [slot]]) for slot in range(3)]
    np.testing.assert_allclose(scored.cosine, np.mean(slots, axis=0), atol=1e-6)


def test_a_run_that_lost_its_store_needs_another_one(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "one-store", tmp_path / "store")
    run = make_run(tmp_path / "run", mmldlm.PairStore.open(tmp_path / "store"))
    shutil.move(tmp_path / "store", tmp_path / "moved")
    with pytest.raises(mmldlm.UserError, match="is not here; name it") as caught:
        mmldlm.evaluate(run, **QUICK)
    assert "\n" not in str(caught.value)
    moved = mmldlm.evaluate(run, data=tmp_path / "moved", **QUICK)
    assert moved.data.store == str(tmp_path / "moved")


def test_arguments_of_other_types_are_one_clear_line(folder: Path) -> None:
    for arguments, expected in (
        ({"steps": 4}, r"steps=4: a list of whole numbers is needed, such as \[1, 4, 16\]"),
        ({"steps": "4"}, "steps='4'"),
        ({"data": ["a text"], "out": True}, "data: is a list; give the folder of a pair store"),
    ):
        with pytest.raises(mmldlm.UserError, match=expected):
            mmldlm.evaluate(folder / "one", **arguments)
    result = mmldlm.evaluate(
        folder / "one", steps=np.array([1, 2]), num=2, num_decoded=2, num_generated=0, encoder=False
    )
    assert [point.num_sampling_steps for point in result.inversion.length_given] == [1, 2]


def test_a_folder_that_cannot_be_written_is_reported_before_anything_is_computed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "evaluate_model", lambda *_, **__: pytest.fail("measured first"))
    (tmp_path / "file").write_text("")
    with pytest.raises(mmldlm.UserError, match="is a file"):
        mmldlm.evaluate(folder / "one", out=tmp_path / "file" / "report")
    with pytest.raises(mmldlm.UserError, match="name one"):
        mmldlm.evaluate(mmldlm.load(folder / "one"), out=True)


def test_progress_ends_at_its_total_and_a_report_is_written_where_asked(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    result = mmldlm.evaluate(
        folder / "one", out=tmp_path / "report", progress=lambda *event: seen.append(event), **QUICK
    )
    assert seen[-1] == (1000, 1000)
    assert result.report == str(tmp_path / "report" / "report.html")
    assert "mmldlm eval" in (tmp_path / "report" / "report.md").read_text()
    comparison = mmldlm.compare(tmp_path / "report", result, out=tmp_path / "compared")
    assert all(row.verdict == "no measurable difference" for row in comparison.pairs[0].rows)
    assert (tmp_path / "compared" / "comparison.html").is_file()
    with pytest.raises(mmldlm.UserError, match="two results"):
        mmldlm.compare(result)
