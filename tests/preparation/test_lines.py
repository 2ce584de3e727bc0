"""What became of the lines of a text file is counted and reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mmldlm
from mmldlm.cli.main import app
from mmldlm.preparation.cutting import joined_lines
from mmldlm.preparation.parts import looks_like_lines
from tests import warm

TITLES = [f"Title {number} of a book" + " about the sea" * (number % 4) for number in range(400)]
PROSE = "\n".join(["It was a bright cold day in April and the clocks were all striking so"] * 40)


def _encode(texts: list[str]) -> list[list[float]]:
    return [[float(len(text))] for text in texts]


def _prepare(folder: Path, text: str, **options: object) -> tuple[mmldlm.PairStore, list[str]]:
    (folder / "a.txt").write_text(text)
    notes: list[str] = []
    store = mmldlm.prepare(folder / "a.txt", folder / "s", encoder=_encode, note=notes.append, **options)  # type: ignore[arg-type]
    return store, notes


@pytest.mark.parametrize("cut", ["none", "sentences", "chunks"])
def test_joined_lines_are_counted(tmp_path: Path, cut: str) -> None:
    """Of four lines one has no full stop, so the next one is joined to it where sentences are cut."""
    lines = [f"This is line {number}" + ("." if number % 4 else "") for number in range(400)]
    store, notes = _prepare(tmp_path, "\n".join(lines), cut=cut)
    counts = store.manifest.counts
    assert counts["lines"] == 400
    assert counts["lines_joined"] == 400 - len(store)
    assert len(store) == pytest.approx({"none": 30, "sentences": 305, "chunks": 30}[cut], abs=8)
    assert any("looks like one text per line" in note and "text_unit=line" in note for note in notes)


def test_lines_that_stay_apart_are_not_reported(tmp_path: Path) -> None:
    store, notes = _prepare(tmp_path, "\n".join(TITLES), text_unit="line")
    assert len(store) == 400
    assert store.manifest.counts.get("lines_joined", 0) == 0
    assert not any("one text per line" in note for note in notes)


def test_the_command_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(TITLES))
    (tmp_path / "own.py").write_text("def encode(texts):\n    return [[1.0 + len(text)] for text in texts]\n")
    words = ["prepare", "a.txt", "--out", "s", "--encoder", "own:encode"]
    done = warm.run(
        [sys.executable, "-m", "mmldlm", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    pairs = len(mmldlm.PairStore.open(tmp_path / "s"))
    assert f"400 lines, {pairs} pairs, {400 - pairs} lines joined" in done.stdout
    assert "--text-unit line" in done.stdout
    assert "a.txt: looks like one text per line" in done.stderr


def test_wrapped_prose_and_paragraphs_are_no_lists_of_lines() -> None:
    assert looks_like_lines("\n".join(TITLES))
    assert not looks_like_lines(PROSE)
    assert not looks_like_lines("\n\n".join(TITLES))
    assert not looks_like_lines("\n".join(TITLES[:5]))


def test_joined_lines_by_hand() -> None:
    text = "One line.\n\n  Two lines\u2028 of one\nsentence. Three.\nFour."
    assert joined_lines(text, ["One line.", "Two lines of one sentence.", "Three.", "Four."]) == 2
    assert joined_lines(text, ["One line. Two lines of one sentence. Three. Four."]) == 4
    assert joined_lines("", []) == 0


def test_text_that_the_tokenizer_does_not_know_is_counted_and_reported(tmp_path: Path) -> None:
    emoji = "\n".join(f"🎉🎉 😀 {number}" for number in range(100))
    store, notes = _prepare(tmp_path, emoji, text_unit="line", validation=0.0)
    assert store.num_unknown == {"train": 200}
    assert store.summary()["splits"]["train"]["num_unknown"] == 200
    assert len([note for note in notes if "builtin:minilm (train 66.7%)" in note]) == 1
    _, notes = _prepare(tmp_path, emoji, text_unit="line", validation=0.0)
    assert [("tokenizer=builtin:qwen" in note) for note in notes] == [False, True]
    prose, notes = _prepare(tmp_path / "s", PROSE)
    assert prose.num_unknown == {"train": 0}
    assert not any("unknown" in note for note in notes)
    shown = CliRunner().invoke(app, ["data", "inspect", str(store.path)]).output
    assert "66.67%" in shown
    (tmp_path / "rows.jsonl").write_text('{"text": "🎉 a", "latent": [1]}\n{"text": "b", "latent": [2]}\n')
    words = ["prepare", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "c"), "--validation", "0"]
    done = CliRunner().invoke(app, words)
    assert "train: 2 documents, 3 tokens, 1 of them unknown" in done.stdout
    assert "with --tokenizer builtin:qwen" in done.stderr


def test_one_of_a_thing_is_written_without_an_s(tmp_path: Path) -> None:
    (tmp_path / "row.jsonl").write_text('{"text": "rope", "latent": [1, 2]}\n' * 2)
    out = tmp_path / "s"
    words = ["prepare", str(tmp_path / "row.jsonl"), "--out", str(out), "--validation", "0"]
    done = CliRunner().invoke(app, words)
    assert done.stdout.startswith("train: 1 document, 1 token\nfrom 2 source documents; 1 duplicate\n")
    assert "1 shard and 4 other files" in CliRunner().invoke(app, ["data", "verify", str(out)]).stdout
