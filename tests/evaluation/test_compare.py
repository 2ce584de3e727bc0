"""Paired comparisons against differences that are known, and through the command line."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from mmldlm.api.evaluate import compare
from mmldlm.cli.evaluate import compare as compare_command
from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import calibration_error, equal_mass
from mmldlm.evaluation.compare import Comparison, Evaluated, compare_results, folder_name
from mmldlm.evaluation.report import (
    CHANCE_NOTE,
    comparison_tables,
    load_evaluated,
    number_files,
    write_comparison,
)
from mmldlm.evaluation.results import (
    Agreement,
    Beside,
    Diversity,
    DocumentSet,
    Evaluation,
    Generation,
    Histogram,
    Retrieval,
)
from mmldlm.evaluation.text_bound import text_costs
from mmldlm.json_lines import encode
from mmldlm.reports import BLUE, Table, publish, show_tables
from mmldlm.statistics import SAME, Estimate, Quantity, bootstrap, bootstrap_p_value
from tests.evaluation.empty_results import empty_evaluation
from tests.evaluation.toys import LENGTH, TEXTS, Oracle, draw_documents, joint_distribution, oracle_model

COUNT = 200


def evaluated(label: str, values: np.ndarray, ids: np.ndarray | None = None, **more: Any) -> Evaluated:
    """A result whose text bound has these nats; every document has ten tokens."""
    bound = Quantity("text bound", "less", values, np.full(len(values), 10.0))
    quantities = {"text_bound/right": bound, "bits_per_byte/right": bound}
    quantities |= {"t2l/retrieval_at_1": Quantity("retrieval@1", "more", np.ones(len(values)))}
    known = (np.arange(len(values)) if ids is None else ids).tolist()
    result = empty_evaluation(label, {"held_out": DocumentSet(known, quantities)}, **more)
    return Evaluated(label, result, Path(label))


def test_a_small_difference_shows_because_the_documents_are_paired() -> None:
    """Documents differ by 100 nats, the runs by 1; unpaired it could not be seen."""
    rng = np.random.default_rng(0)
    hard = rng.normal(1000, 100, COUNT)
    first, other = evaluated("a", hard), evaluated("b", hard - 1 + rng.normal(0, 1, COUNT))
    row = compare_results([first, other])["text_bound/right"]
    assert row.difference.value == pytest.approx(-0.1, abs=0.03)  # per token
    assert row.difference.standard_error == pytest.approx(0.1 / np.sqrt(COUNT), rel=0.15)
    assert row.difference.low < -0.1 + 0.03 < 0
    assert row.p_value < 0.01
    assert row.verdict == "b is better"
    assert compare_results([other, first])["text_bound/right"].verdict == "b is better"


def test_the_same_result_has_no_difference_at_all() -> None:
    one = evaluated("a", np.random.default_rng(0).normal(50, 9, COUNT))
    comparison = compare_results([one, one])
    for row in comparison.pairs[0].rows:
        assert row.verdict == SAME
        assert row.p_value == 1.0
        assert row.difference.value == 0.0


def test_chance_alone_seldom_gives_a_verdict() -> None:
    """Of 100 comparisons without a difference about 5 say there is one."""
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(100):
        hard = rng.normal(50, 9, 60)
        pair = [evaluated(name, hard + rng.normal(0, 1, 60)) for name in "ab"]
        hits += compare_results(pair)["text_bound/right"].verdict != SAME
    assert 0 < hits < 15


def test_documents_are_matched_by_id_and_the_rest_is_told() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(50, 9, COUNT)
    order = rng.permutation(COUNT)[:150]
    comparison = compare_results([evaluated("a", values), evaluated("b", values[order] + 10, order)])
    row = comparison["text_bound/right"]
    assert row.num_documents == 150
    assert row.difference.value == pytest.approx(1.0)
    assert row.difference.standard_error == pytest.approx(0.0, abs=1e-9)
    assert row.verdict == "a is better"
    assert comparison.notes == ["a has 200 documents; compared are the 150 shared ones"]
    with pytest.raises(UserError, match="share none") as caught:
        compare_results([evaluated("a", values), evaluated("b", values, np.arange(COUNT) + 1000)])
    assert "\n" not in str(caught.value)


def test_what_means_something_else_is_left_out_and_said() -> None:
    values = np.random.default_rng(0).normal(50, 9, COUNT)
    comparison = compare_results([evaluated("a", values), evaluated("b", values, num_candidates=99)])
    names = {row.name for row in comparison.pairs[0].rows}
    assert names == {"text_bound/right", "bits_per_byte/right"}
    assert "retrieval is left out: retrieval.num_candidates is 20 in a, 99 in b" in comparison.notes
    comparison = compare_results([evaluated("a", values), evaluated("b", values, fingerprint="other")])
    assert [row.name for row in comparison.pairs[0].rows] == ["bits_per_byte/right"]


def test_p_values_are_as_rare_as_they_say() -> None:
    """Two runs that differ by chance alone, on documents that are hard for both."""
    rng, found = np.random.default_rng(0), []
    for seed in range(200):
        hard, weights = 9.0 * rng.gamma(2.0, size=40), rng.integers(5, 30, 40)
        left, right = (Quantity("", "less", hard * weights + rng.normal(0, 9, 40), weights) for _ in range(2))
        values = bootstrap(lambda rows, a=left, b=right: b.statistic(rows) - a.statistic(rows), 40, seed, 300)
        found.append(bootstrap_p_value(values))
    assert 0.01 <= np.mean(np.array(found) < 0.05) <= 0.1
    assert 0.13 <= np.mean(np.array(found) < 0.2) <= 0.28
    assert 0.4 <= np.mean(np.array(found) < 0.5) <= 0.6


def test_few_documents_are_told() -> None:
    values = np.random.default_rng(0).normal(50, 9, COUNT)
    few = compare_results([evaluated("a", values[:9]), evaluated("b", values[:9])])
    assert any(note.startswith("9 documents are few") for note in few.notes)
    assert not any(
        "are few" in note for note in compare_results([evaluated("a", values), evaluated("b", values)]).notes
    )


def test_p_values_by_hand() -> None:
    assert bootstrap_p_value(np.array([1.0, 2.0, 3.0, -1.0])) == pytest.approx(2 * 2 / 5)
    assert bootstrap_p_value(np.ones(999)) == pytest.approx(0.002)
    assert bootstrap_p_value(np.zeros(9)) == 1.0


def save(folder: Path, one: Evaluated) -> Path:
    publish(folder, number_files(one.result))
    return folder


def test_the_command_compares_runs_reports_and_results(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    hard = rng.normal(50, 9, COUNT)
    save(tmp_path / "a" / "reports" / "validation", evaluated("<b>first", hard))
    for name in ("test", "validation"):
        save(tmp_path / "b" / "reports" / name, evaluated("second", hard - 5 + rng.normal(0, 1, COUNT)))
    app = typer.Typer()
    app.command()(compare_command)

    def call(*words: object) -> str:
        done = CliRunner().invoke(
            app, [str(word) for word in words], catch_exceptions=False, standalone_mode=False
        )
        assert done.exception is None, done.exception
        return done.stdout

    out, third = tmp_path / "out", tmp_path / "b" / "reports" / "test" / "result.json"
    text = call(tmp_path / "a", third, "--out", out)
    assert "second is better" in text
    assert CHANCE_NOTE in " ".join(text.split())
    found = json.loads((out / "comparison.json").read_text())
    assert found["pairs"][0]["num_shared"] == COUNT
    assert Comparison.from_json(found)["text_bound/right"].verdict == "second is better"
    assert "| text bound |" in (out / "comparison.md").read_text()
    html = (out / "comparison.html").read_text()
    assert "<b>first" not in html
    assert html.count("<svg") == 1
    words = (tmp_path / "a", tmp_path / "b", third, "--split", "validation", "--json")
    assert len(json.loads(call(*words).splitlines()[-1])["pairs"]) == 2
    for expected, words in (
        ("choose one with split", (tmp_path / "a", tmp_path / "b")),
        ("no report on the split 'x'", (tmp_path / "a", third, "--split", "x")),
    ):
        with pytest.raises(UserError, match=expected):
            call(*words)
    (tmp_path / "b" / "reports" / "test" / "documents.json").write_text("{}")
    with pytest.raises(UserError, match="does not belong"):
        load_evaluated(third)


def test_runs_of_one_recipe_have_comparisons_of_their_own(tmp_path: Path) -> None:
    def result(run: str, name: str, split: str = "validation") -> Evaluated:
        found = evaluated(name, np.ones(2))
        return Evaluated(run, found.result, tmp_path / run / "reports" / split)

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
    show_tables([Table("title", "", ["", "first", "second", "third"], [["bound"] + 3 * ["123.456"]])])
    assert "…" not in capsys.readouterr().out


def test_a_result_survives_the_way_through_json_and_compares_with_itself() -> None:
    one = evaluated("a", np.random.default_rng(0).normal(50, 9, COUNT)).result
    files = number_files(one)
    back = Evaluation.from_json(json.loads(files["result.json"]), json.loads(files["documents.json"]))
    assert back == one
    comparison = compare(one, back)
    assert comparison["text_bound/right"].difference.value == pytest.approx(0.0, abs=1e-5)
    assert Comparison.from_json(json.loads(encode(comparison.to_json()))) == comparison
    with pytest.raises(KeyError, match="compared are"):
        comparison["nothing"]


def test_a_result_of_another_format_or_a_damaged_one_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="its format is x") as caught:
        Evaluation.from_json({"format": "x"})
    assert "\n" not in str(caught.value)
    values = evaluated("a", np.ones(COUNT)).result.to_json()
    del values["model"]["step"]
    with pytest.raises(UserError, match="it is damaged"):
        Evaluation.from_json(values)


def generating(label: str, repeated: float, cosine: float, strangers: float = 0.0) -> Evaluated:
    """A result with generated pairs: their share of repeated tokens (8 % in real texts) and their agreement."""
    rng = np.random.default_rng(0)
    words = np.full(COUNT, 10.0)
    share = Quantity("repeated", "less", words * repeated + rng.normal(0, 0.01, COUNT), words)
    quantities = {
        "generated/repeated_1": share,
        "generated/agreement/own": Quantity("agreement", "more", cosine + rng.normal(0, 0.01, COUNT)),
        "generated/memorised_whole": Quantity("training text", "less", rng.random(COUNT) < repeated),
    }
    ids = list(range(COUNT))
    result = empty_evaluation(
        label, {"held_out": DocumentSet(ids, {}), "generated": DocumentSet(ids, quantities)}
    )

    def beside(mine: float, real: float) -> Beside:
        return Beside(Estimate(mine, 0.0, mine, mine), Estimate(real, 0.0, real, real))

    none = beside(0.0, 0.0)
    diversity = Diversity(
        none, beside(1.0 - repeated, 0.8), none, beside(repeated, 0.08), none, none, self_bleu=None
    )
    agreement = Agreement(Estimate(cosine, 0.0, cosine, cosine), strangers)
    generation = Generation(COUNT, COUNT, {}, "modelled", diversity, None, agreement, None, None, [])
    return Evaluated(label, replace(result, generation=generation), Path(label))


def test_a_collapsed_model_is_not_better_at_anything() -> None:
    good, bad = generating("good", 0.09, 0.6), generating("bad", 0.966, 0.9)
    for pair in ([good, bad], [bad, good]):
        comparison = compare_results(pair)
        assert comparison["generated/agreement/own"].verdict == "none: bad has collapsed"
        assert comparison["generated/repeated_1"].verdict == "good is better"
        assert comparison.notes == [
            "bad has collapsed: 96.6 % of its tokens repeat one of the same text (8.0 % in held-out texts)"
        ]


def test_agreement_counts_only_beside_diversity() -> None:
    good, dull = generating("good", 0.09, 0.6), generating("dull", 0.2, 0.9)
    comparison = compare_results([good, dull])
    assert comparison["generated/agreement/own"].verdict == "none: dull is less diverse"
    assert comparison["generated/repeated_1"].verdict == "good is better"
    better = compare_results([dull, generating("best", 0.09, 0.95)])
    assert better["generated/agreement/own"].verdict == "best is better"
    assert better.notes == []


def test_the_picture_shows_no_winner_where_the_verdict_is_withheld(tmp_path: Path) -> None:
    def page(*pair: Evaluated) -> str:
        write_comparison(tmp_path, compare_results(pair))
        return (tmp_path / "comparison.html").read_text().replace(BLUE.upper(), BLUE)

    good, bad = generating("good", 0.09, 0.6), generating("bad", 0.966, 0.9)
    assert f"stroke: {BLUE}" in page(bad, generating("best", 0.09, 0.95))
    assert f"stroke: {BLUE}" not in page(good, bad)


def test_random_words_that_repeat_less_than_real_texts_win_nothing() -> None:
    for pair in (
        [generating("good", 0.08, 0.9), generating("noise", 0.01, 0.1)],
        [generating("noise", 0.01, 0.1), generating("good", 0.08, 0.9)],
    ):
        comparison = compare_results(pair)
        assert comparison["generated/agreement/own"].verdict == "good is better"
        assert comparison["generated/repeated_1"].verdict == "none: good repeats no more than held-out texts"
        assert comparison["generated/memorised_whole"].verdict.startswith("none: random words")


def encoding(label: str, cosine: float, stranger: float, retrieved: float) -> Evaluated:
    """A result whose own latents have these cosines, and are among the ten nearest of 200 so often."""
    rng = np.random.default_rng(0)
    values = Quantity("cosine", "more", cosine + rng.normal(0, 0.01, COUNT))
    names = ("t2l/cosine", "round_trip/latent/own")
    documents = {"held_out": DocumentSet(list(range(COUNT)), dict.fromkeys(names, values))}
    own, other, near = (Estimate(value, 0.0, value, value) for value in (cosine, stranger, retrieved))
    retrieval = Retrieval(own, other, near, near, 0.005, 0.05, 9.0, COUNT, COUNT, Histogram([], [], []))
    return Evaluated(label, replace(empty_evaluation(label, documents), retrieval=retrieval), Path(label))


def test_one_latent_for_all_texts_wins_no_cosine() -> None:
    good, mean = encoding("good", 0.31, 0.1, 0.8), encoding("mean", 0.37, 0.37, 0.05)
    for pair in ([good, mean], [mean, good]):
        for name in ("t2l/cosine", "round_trip/latent/own"):
            assert compare_results(pair)[name].verdict == "none: latents of mean do not depend on the text"
    best = encoding("best", 0.5, 0.1, 0.9)
    assert compare_results([mean, best])["t2l/cosine"].verdict == "best is better"


def test_one_latent_for_all_generated_texts_wins_no_agreement() -> None:
    """Texts may be as diverse as real ones: the mean latent agrees with itself."""
    good, mean = generating("good", 0.09, 0.6), generating("mean", 0.09, 1.0, strangers=1.0)
    for pair in ([good, mean], [mean, good]):
        verdict = compare_results(pair)["generated/agreement/own"].verdict
        assert verdict == "none: latents of mean do not depend on the text"


def under_strangers(label: str, cost: float) -> Evaluated:
    """A result with this cost under the right condition, and this times ten under another document's."""
    rng = np.random.default_rng(0)
    right, wrong = (Quantity("cost", "less", size + rng.normal(0, 0.01, COUNT)) for size in (cost, 10 * cost))
    names = (
        "text_bound/{}", "bits_per_byte/{}", "bits_per_character/{}", "latent_bound/{}",
        "calibration/{}/equal_width", "calibration/{}/equal_mass",
    )  # fmt: skip
    quantities = {name.format("right"): right for name in names}
    quantities |= {name.format("shuffled"): wrong for name in names}
    documents = {"held_out": DocumentSet(list(range(COUNT)), quantities)}
    return Evaluated(label, empty_evaluation(label, documents), Path(label))


def test_a_low_cost_under_the_wrong_condition_wins_nothing() -> None:
    comparison = compare_results([under_strangers("a", 2.0), under_strangers("b", 1.0)])
    for row in comparison.pairs[0].rows:
        wrong = "shuffled" in row.name
        assert row.verdict == ("none: won by ignoring the condition" if wrong else "b is better"), row.name


def test_random_latents_are_not_better_at_being_far_from_strangers() -> None:
    def result(label: str, cosine: float) -> Evaluated:
        values = Quantity("cosine", "less", cosine + np.random.default_rng(0).normal(0, 0.01, COUNT))
        documents = {"held_out": DocumentSet(list(range(COUNT)), {"t2l/stranger_cosine": values})}
        return Evaluated(label, empty_evaluation(label, documents), Path(label))

    comparison = compare_results([result("good", 0.3), result("random", 0.0)])
    assert comparison["t2l/stranger_cosine"].verdict == "none: won by ignoring the condition"


@pytest.mark.parametrize("side", ["text", "latent"])
def test_who_costs_more_with_the_right_condition_wins_nothing_by_what_it_saves(side: str) -> None:
    """An exact model, made overconfident, pays more with the right latent, and much more with a wrong one."""

    def result(label: str, right: float, shuffled: float) -> Evaluated:
        rng = np.random.default_rng(0)
        quantities = {
            f"{side}_bound/right": Quantity("cost", "less", right + rng.normal(0, 0.01, COUNT)),
            f"{side}_gain/shuffled": Quantity("gain", "more", shuffled - right + rng.normal(0, 0.01, COUNT)),
        }
        documents = {"held_out": DocumentSet(list(range(COUNT)), quantities)}
        return Evaluated(label, empty_evaluation(label, documents), Path(label))

    exact, sharp, good = result("exact", 0.9, 1.05), result("sharp", 1.15, 1.63), result("good", 0.7, 1.4)
    name = f"{side}_gain/shuffled"
    for pair in ([exact, sharp], [sharp, exact]):
        assert compare_results(pair)[name].verdict == "none: sharp costs more nats"
    assert compare_results([exact, good])[name].verdict == "good is better"


def test_a_model_that_knows_little_is_not_the_better_calibrated_one() -> None:
    """The exact model against one that gives every token its share: both are calibrated, the second with one bucket."""
    joint = joint_distribution()
    documents, _ = draw_documents(joint, 300)
    shares = np.bincount(TEXTS.reshape(-1), np.repeat(joint.sum(0), LENGTH)) / LENGTH

    class Unigrams(Oracle):
        @staticmethod
        def token_logits(hidden: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(shares).log().expand(len(hidden), -1)

    def result(label: str, denoiser: Oracle) -> Evaluated:
        model = replace(oracle_model(joint), denoiser=denoiser)
        costs = text_costs(model, documents, latent="right", num_draws=8, batch_tokens=4096, seed=5)
        edges = equal_mass(costs.answers.confidence)
        error = calibration_error(costs.answers, edges, len(costs.nats), "calibration")
        quantities = {"text_bound/right": costs.quantity(), "calibration/right/equal_mass": error}
        held_out = {"held_out": DocumentSet(documents.ids.tolist(), quantities)}
        return Evaluated(label, empty_evaluation(label, held_out), Path(label))

    comparison = compare_results([result("exact", Oracle(joint)), result("unigrams", Unigrams(joint))])
    assert comparison["text_bound/right"].verdict == "exact is better"
    row = comparison["calibration/right/equal_mass"]
    assert row.other < row.first < 0.05
    assert row.difference.high < 0  # by chance alone
    assert row.verdict == "none: unigrams costs more nats"


def test_the_text_bound_in_other_units_takes_no_rows_of_the_table() -> None:
    comparison = compare_results([under_strangers("a", 2.0), under_strangers("b", 1.0)])
    (table,) = comparison_tables(comparison)
    assert len(comparison.pairs[0].rows) == len(table.rows) + 4
    assert "bits per byte" in table.about
    other = compare_results([evaluated("a", np.ones(COUNT)), evaluated("b", np.ones(COUNT), fingerprint="x")])
    (table,) = comparison_tables(other)  # between tokenizers these are all there is
    assert len(table.rows) == len(other.pairs[0].rows) == 1


def test_texts_of_single_words_have_collapsed() -> None:
    generation = generating("short", 0.0, 0.9).result.generation
    nothing = replace(
        generation.diversity.distinct_2, generated=Estimate(math.nan, math.nan, math.nan, math.nan)
    )
    short = replace(generation, diversity=replace(generation.diversity, distinct_2=nothing))
    assert short.collapsed == "its texts have no two tokens"
