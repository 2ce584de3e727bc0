"""Paired comparisons against differences that are known, and through the command line."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from mmldlm.cli.evaluate import evaluate, show
from mmldlm.errors import UserError
from mmldlm.evaluation.compare import (
    NO_DIFFERENCE,
    Evaluated,
    compare,
    folder_name,
    load_evaluated,
    p_value,
)
from mmldlm.evaluation.quantities import Quantity
from mmldlm.evaluation.report import json_bytes
from mmldlm.evaluation.run import RESULT_FORMAT
from mmldlm.evaluation.statistics import bootstrap
from mmldlm.evaluation.tables import Table

COUNT = 200


def evaluated(label: str, values: np.ndarray, ids: np.ndarray | None = None, **more: Any) -> Evaluated:
    """A result whose text bound has these nats; every document has ten tokens."""
    bound = Quantity("text bound", "less", values, np.full(len(values), 10.0))
    result = {
        "format": RESULT_FORMAT,
        "model": {"name": label, "step": 7, "num_parameters": 1_000_000},
        "data": {"split": "validation", "fingerprint": more.pop("fingerprint", "same")},
        "settings": {},
        "retrieval": {"num_candidates": more.pop("num_candidates", 20)},
    }
    quantities = {"text_bound/right": bound, "bits_per_byte/right": bound}
    quantities |= {"t2l/retrieval_at_1": Quantity("retrieval@1", "more", np.ones(len(values)))}
    held_out = {
        "id": (np.arange(len(values)) if ids is None else ids).tolist(),
        "quantities": {name: quantity.to_json() for name, quantity in quantities.items()},
    }
    return Evaluated(label, Path(label), result, {"held_out": held_out})


def row_of(comparison: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in comparison["comparisons"][0]["rows"] if row["name"] == name)


def test_a_small_difference_shows_because_the_documents_are_paired() -> None:
    """Documents differ by 100 nats, the runs by 1; unpaired it could not be seen."""
    rng = np.random.default_rng(0)
    hard = rng.normal(1000, 100, COUNT)
    first, other = evaluated("a", hard), evaluated("b", hard - 1 + rng.normal(0, 1, COUNT))
    row = row_of(compare([first, other]), "text_bound/right")
    assert row["difference"]["value"] == pytest.approx(-0.1, abs=0.03)  # per token
    assert row["difference"]["standard_error"] == pytest.approx(0.1 / np.sqrt(COUNT), rel=0.15)
    assert row["difference"]["low"] < -0.1 + 0.03 < 0
    assert row["p_value"] < 0.01
    assert row["verdict"] == "b is better"
    assert row_of(compare([other, first]), "text_bound/right")["verdict"] == "b is better"


def test_the_same_result_has_no_difference_at_all() -> None:
    one = evaluated("a", np.random.default_rng(0).normal(50, 9, COUNT))
    comparison = compare([one, one])
    for row in comparison["comparisons"][0]["rows"]:
        assert row["verdict"] == NO_DIFFERENCE
        assert row["p_value"] == 1.0
        assert row["difference"]["value"] == 0.0


def test_chance_alone_seldom_gives_a_verdict() -> None:
    """Of 100 comparisons without a difference about 5 say there is one."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        hard = rng.normal(50, 9, 60)
        pair = [evaluated(name, hard + rng.normal(0, 1, 60)) for name in "ab"]
        hits += row_of(compare(pair), "text_bound/right")["verdict"] != NO_DIFFERENCE
    assert 0 < hits < 15


def test_documents_are_matched_by_id_and_the_rest_is_told() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(50, 9, COUNT)
    order = rng.permutation(COUNT)[:150]
    comparison = compare([evaluated("a", values), evaluated("b", values[order] + 10, order)])
    row = row_of(comparison, "text_bound/right")
    assert row["num_documents"] == 150
    assert row["difference"]["value"] == pytest.approx(1.0)
    assert row["difference"]["standard_error"] == pytest.approx(0.0, abs=1e-9)
    assert row["verdict"] == "a is better"
    assert comparison["notes"] == ["a has 200 documents; compared are the 150 shared ones"]
    with pytest.raises(UserError, match="none is shared") as caught:
        compare([evaluated("a", values), evaluated("b", values, np.arange(COUNT) + 1000)])
    assert "\n" not in str(caught.value)


def test_what_means_something_else_is_left_out_and_said() -> None:
    values = np.random.default_rng(0).normal(50, 9, COUNT)
    comparison = compare([evaluated("a", values), evaluated("b", values, num_candidates=99)])
    names = {row["name"] for row in comparison["comparisons"][0]["rows"]}
    assert names == {"text_bound/right", "bits_per_byte/right"}
    assert "retrieval is left out: retrieval.num_candidates is 20 in a, 99 in b" in comparison["notes"]
    comparison = compare([evaluated("a", values), evaluated("b", values, fingerprint="other")])
    assert [row["name"] for row in comparison["comparisons"][0]["rows"]] == ["bits_per_byte/right"]


def test_p_values_are_as_rare_as_they_say() -> None:
    """Two runs that differ by chance alone, on documents that are hard for both."""
    rng, found = np.random.default_rng(0), []
    for seed in range(200):
        hard, weights = 9.0 * rng.gamma(2.0, size=40), rng.integers(5, 30, 40)
        left, right = (Quantity("", "less", hard * weights + rng.normal(0, 9, 40), weights) for _ in range(2))
        values = bootstrap(lambda rows, a=left, b=right: b.statistic(rows) - a.statistic(rows), 40, seed, 300)
        found.append(p_value(values))
    assert 0.01 <= np.mean(np.array(found) < 0.05) <= 0.1
    assert 0.13 <= np.mean(np.array(found) < 0.2) <= 0.28
    assert 0.4 <= np.mean(np.array(found) < 0.5) <= 0.6


def test_few_documents_are_told() -> None:
    values = np.random.default_rng(0).normal(50, 9, COUNT)
    few = compare([evaluated("a", values[:9]), evaluated("b", values[:9])])
    assert any(note.startswith("9 documents are few") for note in few["notes"])
    assert not any(
        "are few" in note for note in compare([evaluated("a", values), evaluated("b", values)])["notes"]
    )


def test_p_values_by_hand() -> None:
    assert p_value(np.array([1.0, 2.0, 3.0, -1.0])) == pytest.approx(2 * 2 / 5)
    assert p_value(np.ones(999)) == pytest.approx(0.002)
    assert p_value(np.zeros(9)) == 1.0


def save(folder: Path, one: Evaluated) -> Path:
    folder.mkdir(parents=True)
    documents = json_bytes(one.documents, indent=None)
    result = copy.deepcopy(one.result) | {"documents_sha256": hashlib.sha256(documents).hexdigest()}
    (folder / "documents.json").write_bytes(documents)
    (folder / "result.json").write_bytes(json_bytes(result))
    return folder


def test_the_command_compares_runs_reports_and_results(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(50, 9, COUNT)
    save(tmp_path / "a" / "reports" / "validation", evaluated("<b>first", hard))
    for name in ("test", "validation"):
        save(tmp_path / "b" / "reports" / name, evaluated("second", hard - 5 + rng.normal(0, 1, COUNT)))
    app = typer.Typer()
    app.command()(evaluate)

    def call(*words: object) -> str:
        done = CliRunner().invoke(
            app, [str(word) for word in words], catch_exceptions=False, standalone_mode=False
        )
        assert done.exception is None, done.exception
        return done.stdout

    out, third = tmp_path / "out", tmp_path / "b" / "reports" / "test" / "result.json"
    text = call("--compare", tmp_path / "a", third, "--out", out)
    assert "second is better" in text
    found = json.loads((out / "comparison.json").read_text())
    assert found["comparisons"][0]["num_shared"] == COUNT
    assert "| text bound |" in (out / "comparison.md").read_text()
    html = (out / "comparison.html").read_text()
    assert "<b>first" not in html
    assert html.count("<svg") == 1
    words = ("--compare", tmp_path / "a", tmp_path / "b", third, "--split", "validation", "--json")
    assert len(json.loads(call(*words).splitlines()[-1])["comparisons"]) == 2
    for expected, words in (
        ("choose one with --split", ("--compare", tmp_path / "a", tmp_path / "b")),
        ("no report on the split 'x'", ("--compare", tmp_path / "a", third, "--split", "x")),
    ):
        with pytest.raises(UserError, match=expected):
            call(*words)
    (tmp_path / "b" / "reports" / "test" / "documents.json").write_text("{}")
    with pytest.raises(UserError, match="does not belong"):
        load_evaluated(third)


def test_runs_of_one_recipe_have_comparisons_of_their_own(tmp_path: Path) -> None:
    def result(run: str, name: str, split: str = "validation") -> Evaluated:
        found = evaluated(name, np.ones(2))
        return Evaluated(run, tmp_path / run / "reports" / split, found.result, found.documents)

    first, second, third = (result(run, "laptop") for run in ("a", "b", "c"))
    assert folder_name([result("x", "first"), result("y", "second")]) == "compare-first-second"
    assert folder_name([first, second]) == "compare-a-b"
    assert folder_name([first, third]) == "compare-a-c"
    same = [folder_name([first, result("a", "laptop", split)]) for split in ("test", "other")]
    assert len(set(same)) == 2
    long = folder_name([result(f"{'run' * 20}{number}", "laptop") for number in range(20)])
    assert len(long) < 100


def test_a_narrow_terminal_folds_numbers_and_cuts_none_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda console: True))
    monkeypatch.setenv("COLUMNS", "24")
    show(
        "about",
        [Table("title", "", ["", "first", "second", "third"], [["bound"] + 3 * ["123.456"]])],
        [],
        tmp_path,
    )
    assert "…" not in capsys.readouterr().out
