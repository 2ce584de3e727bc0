"""Files of scored pairs are read in every form that people have them; the correlation is that of an oracle."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from mmldlm.config import EvaluationConfig
from mmldlm.errors import UserError
from mmldlm.evaluation.context import Context
from mmldlm.evaluation.results import SIMILARITY
from mmldlm.evaluation.retrieval import measure_similarity, read_scored_pairs
from tests.evaluation.toys import joint_distribution, oracle_model

ROWS = [("a b", "a c", 4.5), ("d, e", "f", 1.0), ('say "x"', "y", 0.0)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def forms(folder: Path) -> list[Path]:
    """The same pairs in every form that is read."""
    tabs = ["\t".join(map(str, row)) for row in ROWS]
    quoted = [f'"{a.replace(chr(34), chr(34) * 2)}","{b}",{score}' for a, b, score in ROWS]
    named = [{"sentence1": a, "sentence2": b, "score": score, "genre": "x"} for a, b, score in ROWS]
    return [
        write(folder / "plain.tsv", tabs),
        write(folder / "head.tsv", ["left\tright\thow alike", *tabs, ""]),
        write(
            folder / "named.tsv", ["genre\tscore\ttext1\ttext2", *(f"x\t{s}\t{a}\t{b}" for a, b, s in ROWS)]
        ),
        write(folder / "plain.csv", quoted),
        write(folder / "named.csv", ["sentence1,sentence2,score", *quoted]),
        write(folder / "named.jsonl", [json.dumps(row) for row in named]),
        write(folder / "lists.jsonl", [json.dumps(row) for row in ROWS]),
    ]


def test_every_form_gives_the_same_pairs(tmp_path: Path) -> None:
    read = [read_scored_pairs(path) for path in forms(tmp_path)]
    for one in read:
        assert list(zip(one.left, one.right, one.scores, strict=True)) == ROWS, one.path
        assert one.ids == read[0].ids


@pytest.mark.parametrize(
    ("name", "lines", "told"),
    [
        ("x.txt", ["a\tb\t1"], ".tsv, .csv or .jsonl"),
        ("x.tsv", ["a\tb\t1", "a\tb"], "line 2"),
        ("x.tsv", ["a\tb\t1", "a\t \t2"], "line 2"),
        ("x.jsonl", ['{"text1": "a", "text2": "b"}'], "line 1"),
        ("x.jsonl", ["not json"], "line 1"),
        ("x.tsv", ["a\tb\t1", "a\tb\tnan", "a\tb\t2"], "line 2"),
        ("x.tsv", ["a\tb\t1", "a\tb\t2"], "at least 3"),
        ("x.tsv", ["a\tb\t1"] * 3, "all scores are 1"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, name: str, lines: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        read_scored_pairs(write(tmp_path / name, lines))
    assert "\n" not in str(caught.value)


COUNT = 20
WORDS = [f"{side}{idx}" for side in ("left", "right") for idx in range(COUNT)]


def at_angles(texts: list[str], turned: bool) -> np.ndarray:
    """Left texts at angle 0, right ones at an angle that grows with their number, or falls where turned."""
    numbers = [int(text.removeprefix("left").removeprefix("right")) for text in texts]
    angles = [
        0.0 if text.startswith("left") else (COUNT - number if turned else number) / COUNT
        for text, number in zip(texts, numbers, strict=True)
    ]
    return np.array([[[np.cos(angle), np.sin(angle)]] for angle in angles])


class KnownLatents(Context):
    """The model's own latents are those of `at_angles`."""

    def own_latents(self, tokens, ids, progress=None):  # type: ignore[no-untyped-def]
        return at_angles([WORDS[int(text[0])] for text in tokens], turned=True)


def test_latents_that_follow_the_scores_correlate_fully_and_the_encoder_is_told_apart(tmp_path: Path) -> None:
    lines = [f"left{idx}\tright{idx}\t{idx}" for idx in range(COUNT)]
    pairs = read_scored_pairs(write(tmp_path / "pairs.tsv", lines))
    selection = cast(Any, SimpleNamespace(documents=SimpleNamespace(ids=np.arange(3))))
    model = oracle_model(joint_distribution())
    context = KnownLatents(
        model,
        EvaluationConfig(),
        selection,
        0,
        lambda *_: None,
        None,
        lambda texts: at_angles(texts, turned=False),
    )
    result = measure_similarity(context, pairs, lambda texts: [[WORDS.index(text)] * 9 for text in texts])
    assert result is not None
    assert result.own.value == pytest.approx(1.0)
    assert result.encoder.value == pytest.approx(-1.0)  # a larger angle is a smaller cosine
    assert result.difference.value == pytest.approx(2.0)
    assert len(context.ids[SIMILARITY]) == COUNT
    assert sum("are cut to 5 tokens" in note for note in context.notes) == 2
