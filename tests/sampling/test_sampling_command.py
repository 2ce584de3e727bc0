"""What else `mmldlm sample` can do: blanks, paraphrases, points between texts, neighbours, checks, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sampling_cli import LONGEST, NUM_CHANNELS, FakeEncoder, call, call_json, make_run, make_store
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from mmldlm.config import ModeWeights
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.preparation.encoders import SentenceEncoder
from mmldlm.sampling import stream
from mmldlm.sampling.blanks import parse_blanks
from mmldlm.sampling.neighbours import nearest
from mmldlm.sampling.records import some_blanks
from mmldlm.sampling.sources import between
from mmldlm.sampling.stream import LineFile


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> PairStore:
    return make_store(tmp_path_factory.mktemp("command") / "store", 0)


@pytest.fixture(scope="module")
def run(store: PairStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("command") / "run", store)


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SentenceEncoder, "reopen", classmethod(lambda cls, spec, device="auto": FakeEncoder())
    )


def told(*words: Any) -> str:
    result = call(*words)
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_blanks_are_read_as_people_write_them() -> None:
    backend = Backend(models.WordLevel({"the": 0, "of": 1, "?": 2, "[MASK]": 3}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["[MASK]"])
    tokenizer = Tokenizer(backend, "toy")
    for text, ids in {
        "the ____ of": [0, 9, 1],
        "____": [9],
        "the ______ ____{3} of": [0, 9, 9, 9, 9, 1],
        "[MASK] of [MASK]{2}": [9, 1, 9, 9],
        "of____the": [1, 9, 0],
    }.items():
        assert parse_blanks(tokenizer, text, 9).tolist() == ids
    for text in ("the of", "a ___ b", "____{0}", "____{99999}"):
        with pytest.raises(UserError, match="--infill"):
            parse_blanks(tokenizer, text, 9)


def test_blanks_are_filled_in(run: Path, encoder: None) -> None:
    alone = call_json(run, "--mode", "l2t", "--infill", "w1 ____ w3 ____{2}")["samples"]
    assert len(alone) == 1
    tokens = alone[0]["tokens"]
    assert len(tokens) == 5
    assert (tokens[0], tokens[2]) == (1, 3)
    assert alone[0]["infill"] == "w1 ____ w3 ____{2}"
    words = ("--mode", "l2t", "--infill", "w1 ____ w3", "--text", "w1 w2 w3", "--text", "w4")
    both = call_json(run, *words, "--guidance", 2)["samples"]
    assert [(record["tokens"][0], record["tokens"][2]) for record in both] == [(1, 3)] * 2
    among = call_json(run, "--mode", "l2t", "--infill", "____", "--infill", "w1 ____ w3 ____{2}")["samples"]
    assert among[1] == alone[0]
    assert "blanks" in call(run, *words).stdout
    three = ("--infill", "____", "--infill", "w1 ____", "--infill", "w2 ____")
    assert "as many of both" in told(run, "--mode", "l2t", *three, "--text", "w1", "--text", "w2")
    assert "no effect without a latent" in told(run, "--mode", "l2t", "--infill", "____", "--guidance", 2)


def test_guidance_leads_away_from_a_text(run: Path, store: PairStore, encoder: None, tmp_path: Path) -> None:
    words = ("--mode", "l2t", "--from-split", "validation", "-n", 4, "--length", 9, "--guidance", 3)
    plain = call_json(run, *words)["samples"]
    away = call_json(run, *words, "--against", "w1 w2 w3 w4")["samples"]
    assert away != plain
    np.save(tmp_path / "away.npy", FakeEncoder().encode(["w1 w2 w3 w4"]))
    assert call_json(run, *words, "--against", tmp_path / "away.npy")["samples"] == away
    np.save(tmp_path / "two.npy", np.ones((2, NUM_CHANNELS)))
    assert "1 or 4 are needed" in told(run, *words, "--against", tmp_path / "two.npy")
    assert "--guidance other than 1" in told(run, *words[:-2], "--against", "w1")


def test_paraphrases(run: Path, encoder: None) -> None:
    text = "w1 w2 w3 w4 w5 w6 w7 w8"
    words = ("--mode", "l2t", "--paraphrase", text)
    for vary in ("text", "both"):
        for strength, most in ((1e-6, 1), (1.0, 8)):
            (record,) = call_json(run, *words, "--strength", strength, "--vary", vary)["samples"]
            changed = sum(token != i + 1 for i, token in enumerate(record["tokens"]))
            assert len(record["tokens"]) == 8
            assert changed <= most
    assert changed > 2
    (record,) = call_json(run, *words, "--vary", "latent", "--length", 4, "--num-latent-steps", 2)["samples"]
    assert len(record["tokens"]) == 4
    assert record["original"] == text


def test_share_of_blanks() -> None:
    tokens, keys = [np.arange(400), np.arange(3)], np.array([5, 6], np.uint64)
    masked = [int((text == 999).sum()) for text in some_blanks(tokens, keys, 0.25, 999)]
    assert 70 < masked[0] < 130
    assert [int((text == 999).sum()) for text in some_blanks(tokens, keys, 0.0, 999)] == [1, 1]
    assert [int((text == 999).sum()) for text in some_blanks(tokens, keys, 1.0, 999)] == [400, 3]


def test_points_between_two_texts(run: Path, encoder: None) -> None:
    words = ("--mode", "l2t", "--interpolate", "w1 w2", "w3 w4 w5", "--length", 6)
    samples = call_json(run, *words, "--points", 4)["samples"]
    assert [record["at"] for record in samples] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert len(call_json(run, *words)["samples"]) == 5
    first, second = np.array([[3.0, 0.0]]), np.array([[0.0, 1.0]])
    points = between(first, second, 3)[:, 0]
    assert points == pytest.approx(np.array([[3, 0], [2 * 0.5**0.5, 2 * 0.5**0.5], [0, 1]]), abs=1e-6)
    assert between(first, -first, 3)[:, 0] == pytest.approx(np.array([[3, 0], [0, 0], [-3, 0]]), abs=1e-6)
    assert between(first, first, 2)[:, 0] == pytest.approx(np.array([[3, 0], [3, 0]]))


def test_neighbours_are_the_nearest_training_texts(
    run: Path, store: PairStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = store.split("train")
    known = train.read(np.arange(len(train))).latents[:, 0].astype(np.float64)
    asked = store.split("validation").read(np.arange(3)).latents
    unit = known / np.linalg.norm(known, axis=1, keepdims=True)
    near = (asked[:, 0] / np.linalg.norm(asked[:, 0], axis=1, keepdims=True)) @ unit.T
    expected = np.argsort(-near, axis=1)[:, :4]
    for part in (7, 8192):
        monkeypatch.setattr("mmldlm.sampling.neighbours.PART", part)
        index, cosines = nearest(train, asked, 4)
        assert index.tolist() == expected.tolist()
        assert cosines == pytest.approx(np.take_along_axis(near, expected, 1), abs=1e-5)
    words = ("--mode", "l2t", "--from-split", "validation", "-n", 3, "--neighbours", 4)
    samples = call_json(run, *words)["samples"]
    texts = [[each["text"] for each in record["neighbours"]] for record in samples]
    assert texts == [train.read_texts(row) for row in expected]
    assert "nearest" in call(run, *words).stdout
    assert len(call_json(run, "--mode", "joint", "-n", 2, "--neighbours", 2)["samples"][1]["neighbours"]) == 2


@pytest.mark.parametrize("check", ["model", "encoder"])
def test_candidates_and_rounds_say_what_they_cost(run: Path, encoder: None, check: str) -> None:
    words = ("--mode", "l2t", "--from-split", "validation", "-n", 3, "--length", 5)
    plain = call_json(run, *words)["samples"]
    one = call_json(run, *words, "--candidates", 1, "--refine", 1, "--check", check)["samples"]
    many = call_json(run, *words, "--candidates", 3, "--refine", 1, "--check", check)["samples"]
    assert {"cosine", "first_cosine", "passes", "num_encoded", "num_accepted"} <= many[0].keys()
    assert "cosine" not in plain[0]
    for first, best in zip(one, many, strict=True):
        assert best["first_cosine"] == pytest.approx(first["first_cosine"])
        assert best["cosine"] >= first["first_cosine"]
        assert first["passes"] > 5  # at least one for each place that is tried
        assert best["passes"] > 5
        assert first["num_encoded"] > 1 + 5
        assert best["num_encoded"] > 3 + 5


@pytest.mark.parametrize("check", ["model", "encoder"])
def test_replacing_rounds(run: Path, encoder: None, check: str) -> None:
    words = ("--mode", "l2t", "--from-split", "validation", "-n", 3, "--candidates", 3, "--check", check)
    agreed = call_json(run, *words, "--length", 6)["samples"]
    better = call_json(run, *words, "--length", 6, "--refine", 2)["samples"]
    for before, after in zip(agreed, better, strict=True):
        assert before["num_encoded"] == 3
        assert len(before["tokens"]) == len(after["tokens"])
        assert after["first_cosine"] == pytest.approx(before["first_cosine"])
        assert after["cosine"] >= before["cosine"]
        assert (after["num_accepted"] == 0) == (after["tokens"] == before["tokens"])
        assert after["num_encoded"] > 3 + 2 * len(after["tokens"])


def test_at_temperature_zero_only_the_first_candidate_is_the_most_probable_text(
    run: Path, encoder: None
) -> None:
    """Else all candidates would be one text, and a round would decode what was there before."""
    words = ("--mode", "l2t", "--from-split", "validation", "-n", 8, "--length", 6, "--temperature", 0)
    plain = call_json(run, *words)["samples"]
    for more in (("--candidates", 4), ("--refine", 4)):
        checked = call_json(run, *words, *more, "--check", "encoder")["samples"]
        assert any(one["tokens"] != other["tokens"] for one, other in zip(plain, checked, strict=True))
        for one, other in zip(plain, checked, strict=True):
            assert (one["tokens"] == other["tokens"]) == (other["cosine"] == other["first_cosine"])


def test_texts_through_the_model_itself(run: Path) -> None:
    found = call_json(run, "--mode", "l2t", "--text", "w1 w2", "--encode-with", "model")["samples"]
    assert found[0]["original"] == "w1 w2"


def test_samplers_are_options(run: Path) -> None:
    words = (run, "--mode", "joint", "-n", 2, "--length", 9)
    plain = call_json(*words)
    for option, value in (
        ("--text-sampler", "ancestral"), ("--latent-sampler", "heun"), ("--joint-order", "text_first"),
    ):  # fmt: skip
        report = call_json(*words, option, value)
        assert report["options"][option[2:].replace("-", "_")] == value
        if option != "--latent-sampler":  # the untrained latent head says the same at every time
            assert report["samples"] != plain["samples"]


def test_longer_texts_than_in_training_are_not_taken_in_silence(run: Path, encoder: None) -> None:
    long = " ".join(["w1"] * (LONGEST + 1))
    result = call(run, "--mode", "t2l", "--text", long, "--text", "w1")
    assert result.exit_code == 0
    assert result.stderr.count("note: texts have more than 9 tokens, the most in training") == 1
    assert "note" not in call(run, "--mode", "t2l", "--text", "w1").stderr


def test_a_file_in_and_a_file_out(
    run: Path, encoder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PART", 3)
    texts = [f"w{i} w{i + 1} w{i + 2}" for i in range(8)]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n\n")
    latents = FakeEncoder().encode(texts)
    np.save(tmp_path / "in.npy", latents[:, 0])
    records = [{"text": t, "latent": x.tolist()} for t, x in zip(texts, latents, strict=True)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = [word for text in texts for word in ("--text", text)]
    expected = call_json(run, "--mode", "l2t", *words, "--length", 4)["samples"]
    for name in ("in.txt", "in.jsonl", "in.npy"):
        out = tmp_path / f"{name}.out.jsonl"
        result = call(run, "--mode", "l2t", "--in", tmp_path / name, "--out", out, "--length", 4)
        assert result.exit_code == 0, result.exception
        assert "8 documents written" in result.stdout
        found = [json.loads(line) for line in out.read_text().splitlines()]
        if name != "in.npy":
            assert found == expected
        assert [len(record["tokens"]) for record in found] == [4] * 8
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl"] * 4 + [".npy", ".txt"]
    encoded = tmp_path / "encoded.jsonl"
    call(run, "--mode", "t2l", "--in", tmp_path / "in.txt", "--out", encoded)
    assert len(encoded.read_text().splitlines()) == 8
    (tmp_path / "blanks.jsonl").write_text('{"infill": "w1 ____"}\n{"infill": "____ w2"}\n')
    filled = tmp_path / "filled.jsonl"
    call(run, "--mode", "l2t", "--in", tmp_path / "blanks.jsonl", "--out", filled)
    first, second = (json.loads(line)["tokens"] for line in filled.read_text().splitlines())
    assert (first[0], second[1]) == (1, 2)


@pytest.mark.parametrize("how", ["", "--candidates 2 --refine 1"])
def test_an_interrupted_file_is_gone_on_with(
    run: Path, encoder: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(stream, "PART", 2)
    (tmp_path / "in.txt").write_text("".join(f"w{i} w{i}\n" for i in range(7)))
    words = (run, "--mode", "l2t", *how.split(), "--in", tmp_path / "in.txt", "--out")
    assert call(*words, tmp_path / "whole.jsonl").exit_code == 0
    calls, encode = [], FakeEncoder.encode

    def interrupted(self: FakeEncoder, texts: list[str]) -> np.ndarray:
        calls.append(texts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, texts)

    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(FakeEncoder, "encode", interrupted)
    assert call(*words, out).exit_code != 0
    assert not out.exists()
    (part,) = tmp_path.glob(".out.jsonl.*.part")
    assert len(part.read_text().splitlines()) == 4
    part.write_bytes(part.read_bytes() + b'{"torn')
    other = call(*words, out, "--seed", 1)  # other words have nothing to do with it
    assert "earlier" not in other.stdout
    out.unlink()
    result = call(*words, out)
    assert "4 of them by an earlier call" in result.stdout
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("words", ["--candidates 2", "--refine 1", "--length 2"])
def test_a_file_of_blanks_takes_no_words_that_it_would_ignore(run: Path, tmp_path: Path, words: str) -> None:
    path = tmp_path / "blanks.jsonl"
    path.write_text('{"infill": "w1 ____", "text": "w1"}\n')
    asked = ("--mode", "l2t", "--in", path, "--out", tmp_path / "out.jsonl", "--encode-with", "model")
    message = f"--in {path}: texts with blanks do not go with {words.split()[0]}; leave it out"
    assert told(run, *asked, *words.split()) == message
    assert call(run, *asked, "--candidates", 1, "--refine", 0).exit_code == 0


def test_a_model_without_t2l_is_checked_by_the_encoder(
    store: PairStore, tmp_path: Path, encoder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", store, modes=ModeWeights(l2t=1, t2l=0, joint=0))
    words = (run, "--mode", "l2t", "--text", "w1 w2", "--length", 3, "--candidates", 2)
    with monkeypatch.context() as patch:
        patch.setattr("mmldlm.sampling.self_check.decode_latents", None)  # refused before any work
        assert told(*words).startswith("--check model: this model was not trained to produce latents")
    assert call_json(*words, "--check", "encoder")["samples"][0]["num_encoded"] == 2


def test_lines_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = LineFile(tmp_path / "x.jsonl", [1])
    lines.write([{"a": 1}])
    write = os.write

    def torn(fd: int, content: Any) -> int:
        write(fd, bytes(content)[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", torn)
    with pytest.raises(KeyboardInterrupt):
        lines.write([{"b": 2}])
    monkeypatch.setattr(os, "write", write)
    lines.close()
    again = LineFile(tmp_path / "x.jsonl", [1])
    assert again.num_lines == 1
    again.write([{"c": 3}])
    again.finish()
    assert (tmp_path / "x.jsonl").read_text() == '{"a": 1}\n{"c": 3}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n", "line 1 does not hold one of text, latent, infill"),
        ('{"text": "w1"}\n{"latent": [1, 2, 3, 4]}\n', "line 2 does not hold text"),
        ('{"text": "w1"}\nnonsense\n', "line 2 is no JSON object"),
        ('{"text": 3}\n', "line 1: text is no text"),
        ('{"latent": [1, 2]}\n', "line 1: latent is no list of 1 x 4 numbers"),
        ('{"latent": [1, 2, 3, NaN]}\n', "line 1: latent holds NaN"),
        ("\n\n", "holds no document"),
    ],
)
def test_bad_files_are_told_with_their_line(run: Path, tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    found = told(run, "--mode", "l2t", "--in", path, "--out", tmp_path / "out.jsonl")
    assert found.startswith(f"--in {path}: ")
    assert message in found
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--mode l2t --in a.txt", "--in: needs --out FILE.jsonl"),
        ("--mode l2t --in a.csv --out a.jsonl", "--in a.csv: the name of the file ends in .txt"),
        ("--mode l2t --in missing.txt --out a.jsonl", "--in missing.txt: cannot be read"),
        ("--mode l2t --in a.txt --out a.jsonl --json", "--in: does not go with --json"),
        ("--mode l2t --infill ____ --length 3", "--infill: does not go with --length"),
        ("--mode l2t --infill w1", "holds no blank"),
        ("--mode l2t --infill ____{99999999999}", "a blank of 99999999999 tokens; allowed are 1 to 10000"),
        ("--mode t2l --text w1 --infill ____", "--infill: has no effect with --mode t2l"),
        ("--mode joint --candidates 2", "--candidates: has no effect with --mode joint"),
        ("--mode l2t --text w1 --strength 0.5", "--strength: has an effect only with --paraphrase"),
        ("--mode l2t --paraphrase w1 --strength 0", "--strength 0.0: allowed is more than 0"),
        ("--mode l2t --paraphrase w1 --vary all", "--vary all: allowed are latent, text, both"),
        ("--mode l2t --paraphrase w1 --length 3", "--length: a text of which tokens stay"),
        ("--mode l2t --interpolate w1 w2 --points 1", "--points 1: allowed is at least 2"),
        ("--mode l2t --text w1 --candidates 0", "--candidates 0: allowed is at least 1"),
        ("--mode l2t --text w1 --check encoder", "--check: has an effect only with --candidates or --refine"),
        ("--mode l2t --text w1 --joint-order text_first", "--joint-order: has no effect with --mode l2t"),
        ("--mode l2t --infill ____ --neighbours 3", "--neighbours: these texts have no latent"),
        ("--mode joint --latent-sampler euler", "latent_sampler=euler: allowed are ddim"),
        ("--mode joint --guidance 1000", "guidance=1000.0: allowed"),
    ],
)
def test_mistakes_are_told_in_one_line(run: Path, words: str, message: str) -> None:
    assert message in told(run, *words.split(" "))


def test_a_closed_pipe_is_no_accident(run: Path) -> None:
    words = [sys.executable, "-m", "mmldlm", "sample", str(run), "--mode", "joint"]
    process = subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # as `| head` does, before the first line
    said = process.stderr.read().decode()
    assert process.wait() == 141  # what a shell says of a tool that SIGPIPE ended
    assert said == ""


def test_a_file_that_is_no_utf8_is_told_with_its_line(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"w1 w2\nw3 \xff\n")
    found = told(run, "--mode", "l2t", "--in", path, "--out", tmp_path / "out.jsonl")
    assert found.startswith(f"--in {path}: line 2 is no UTF-8")


def test_a_store_that_has_moved_is_asked_for(run: Path, store: PairStore) -> None:
    away = store.path.rename(store.path.with_name("elsewhere"))
    try:
        assert "say where with --data STORE" in told(run, "--mode", "l2t", "--from-split", "validation")
    finally:
        away.rename(store.path)
