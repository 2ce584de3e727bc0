"""Files in, files out: every kind, interrupted and continued; blanks as people write them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from mmldlm.api import files as stream
from mmldlm.api.files import ArrayFile, LineFile
from mmldlm.api.values import parse_blanks
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.latents import between
from mmldlm.sampling.decode import some_blanks
from tests.sampling.commands import call, make_small_run, mistake, samples, use_fake_encoder
from tests.tiny_models import FakeEncoder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_run(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_encoder(monkeypatch)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
        with pytest.raises(UserError, match="blank"):
            parse_blanks(tokenizer, text, 9)


def test_share_of_blanks() -> None:
    tokens, keys = [np.arange(400), np.arange(3)], np.array([5, 6], np.uint64)
    masked = [int((text == 999).sum()) for text in some_blanks(tokens, keys, 0.25, 999)]
    assert 70 < masked[0] < 130
    assert [int((text == 999).sum()) for text in some_blanks(tokens, keys, 0.0, 999)] == [1, 1]
    assert [int((text == 999).sum()) for text in some_blanks(tokens, keys, 1.0, 999)] == [400, 3]


def test_points_lie_on_the_arc() -> None:
    first, second = np.array([[3.0, 0.0]]), np.array([[0.0, 1.0]])
    points = between(first, second, 3)[:, 0]
    assert points == pytest.approx(np.array([[3, 0], [2 * 0.5**0.5, 2 * 0.5**0.5], [0, 1]]), abs=1e-6)
    assert between(first, -first, 3)[:, 0] == pytest.approx(np.array([[3, 0], [0, 0], [-3, 0]]), abs=1e-6)
    assert between(first, first, 2)[:, 0] == pytest.approx(np.array([[3, 0], [3, 0]]))


def test_a_file_in_and_a_file_out(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PART", 3)
    texts = [f"w{i} w{i + 1} w{i + 2}" for i in range(8)]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n\n")
    latents = FakeEncoder().encode(texts)
    np.save(tmp_path / "in.npy", latents[:, 0])
    records = [{"text": t, "latent": x.tolist()} for t, x in zip(texts, latents, strict=True)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    expected = samples("decode", run, *[w for text in texts for w in ("--text", text)], "--length", 4)
    for name in ("in.txt", "in.jsonl", "in.npy"):
        out = tmp_path / f"{name}.out.jsonl"
        result = call("decode", run, "--in", tmp_path / name, "--out", out, "--length", 4)
        assert result.exit_code == 0, result.exception
        assert "8 documents written" in result.stdout
        if name != "in.npy":
            assert lines(out) == expected
        assert [len(record["tokens"]) for record in lines(out)] == [4] * 8
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".jsonl"] * 4 + [".npy", ".txt"]
    call("encode", run, "--in", tmp_path / "in.txt", "--out", tmp_path / "encoded.jsonl")
    call("encode", run, "--in", tmp_path / "in.txt", "--out", tmp_path / "encoded.npy")
    encoded = np.load(tmp_path / "encoded.npy")
    assert encoded.shape == latents.shape
    kept = np.array([record["latent"] for record in lines(tmp_path / "encoded.jsonl")], np.float32)
    assert np.array_equal(kept, encoded)
    (tmp_path / "blanks.jsonl").write_text(
        '{"infill": "w1 ____", "text": "w1"}\n{"infill": "____ w2", "text": "w2"}\n'
    )
    (tmp_path / "blanks.txt").write_text("w1 ____\n____ w2\n")
    for name in ("blanks.jsonl", "blanks.txt"):
        call("infill", run, "--in", tmp_path / name, "--out", tmp_path / "filled.jsonl")
        first, second = (record["tokens"] for record in lines(tmp_path / "filled.jsonl"))
        assert (first[0], second[1]) == (1, 2)
    call("paraphrase", run, "--in", tmp_path / "in.txt", "--out", tmp_path / "varied.jsonl")
    assert [record["original"] for record in lines(tmp_path / "varied.jsonl")] == texts


@pytest.mark.parametrize("how", ["", "--candidates 2 --refine 1"])
def test_an_interrupted_file_is_continued(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(stream, "PART", 2)
    (tmp_path / "in.txt").write_text("".join(f"w{i} w{i}\n" for i in range(7)))
    words = (run, *how.split(), "--in", tmp_path / "in.txt", "--out")
    assert call("decode", *words, tmp_path / "whole.jsonl").exit_code == 0
    interrupt_third_call(monkeypatch)
    out = tmp_path / "out.jsonl"
    assert call("decode", *words, out).exit_code != 0
    assert not out.exists()
    (part,) = tmp_path.glob(".out.jsonl.*.part")
    assert len(part.read_text().splitlines()) == 4
    part.write_bytes(part.read_bytes() + b'{"torn')
    other = call("decode", *words, out, "--seed", 1)  # another request has nothing to do with it
    assert "earlier" not in other.stdout
    out.unlink()
    result = call("decode", *words, out)
    assert "4 of them by an earlier call" in result.stdout
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob(".*.part"))


def test_an_interrupted_array_is_continued(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PART", 2)
    (tmp_path / "in.txt").write_text("".join(f"w{i} w{i}\n" for i in range(7)))
    words = (run, "--in", tmp_path / "in.txt", "--encode-with", "encoder", "--out")
    assert call("encode", *words, tmp_path / "whole.npy").exit_code == 0
    interrupt_third_call(monkeypatch)
    assert call("encode", *words, tmp_path / "out.npy").exit_code != 0
    (part,) = tmp_path.glob(".out.npy.*.part")
    part.write_bytes(part.read_bytes() + b"torn")
    assert "4 of them by an earlier call" in call("encode", *words, tmp_path / "out.npy").stdout
    assert np.array_equal(np.load(tmp_path / "out.npy"), np.load(tmp_path / "whole.npy"))
    assert not list(tmp_path.glob(".*.part"))


def interrupt_third_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, encode = [], FakeEncoder.encode

    def interrupted(self: FakeEncoder, texts: list[str]) -> np.ndarray:
        calls.append(texts)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encode(self, texts)

    monkeypatch.setattr(FakeEncoder, "encode", interrupted)


def test_lines_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = LineFile(tmp_path / "x.jsonl", [1])
    output.write([{"a": 1}])
    write = os.write

    def torn(fd: int, content: Any) -> int:
        write(fd, bytes(content)[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", torn)
    with pytest.raises(KeyboardInterrupt):
        output.write([{"b": 2}])
    monkeypatch.setattr(os, "write", write)
    output.close()
    again = LineFile(tmp_path / "x.jsonl", [1])
    assert again.num_done == 1
    again.write([{"c": 3}])
    again.finish()
    assert (tmp_path / "x.jsonl").read_text() == '{"a": 1}\n{"c": 3}\n'


def test_an_output_without_documents_leaves_nothing(tmp_path: Path) -> None:
    for output in (LineFile(tmp_path / "x.jsonl", [1]), ArrayFile(tmp_path / "x.npy", [1], (3, 1, 4))):
        output.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{}\n", "line 1 must hold one of the fields text, latent, infill"),
        (
            b'{"text": "w1"}\n{"latent": [1, 2, 3, 4]}\n',
            "line 2 must hold text, as line 1 does, and no other of the fields text, latent, infill",
        ),
        (b'{"text": "w1"}\nnonsense\n', "line 2 is not a JSON object"),
        (b'{"text": 3}\n', "line 1: text is not a text"),
        (b'{"latent": [1, 2]}\n', "line 1: latent is not a list of 1 x 4 numbers"),
        (b'{"latent": [1, 2, 3, NaN]}\n', "line 1: latent contains NaN"),
        (b'{"text": "w1"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        (b'{"text": "w1"}\n\n{"text": " "}\n', "line 3: text: is empty; it holds no token"),
        (b'{"text": "w1"}\n{"text": "\\ud800"}\n', "line 2: text: holds half of a surrogate pair"),
        (b"\n\n", "holds no document"),
    ],
)
def test_bad_files_are_reported_with_their_line(
    run: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    for command in ("decode", "encode") if b"latent" not in content else ("decode",):
        line = mistake(command, run, "--in", path, "--out", tmp_path / "out.jsonl", "--encode-with", "model")
        assert line.startswith(f"{path}: ")
        assert message in line
    assert not list(tmp_path.glob(".*"))


def test_a_bad_row_of_an_array_is_named(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PART", 2)
    latents = np.ones((5, 4), np.float32)
    latents[3, 1] = np.nan
    np.save(tmp_path / "in.npy", latents)
    message = mistake("decode", run, "--in", tmp_path / "in.npy", "--out", tmp_path / "out.jsonl")
    assert "the latent at index 3 contains NaN" in message


def test_a_file_that_holds_something_else(run: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", np.ones((2, 4)))
    for command in ("encode", "infill", "paraphrase"):
        message = mistake(command, run, "--in", tmp_path / "in.npy", "--out", tmp_path / "out.jsonl")
        assert message.startswith("--in: a file of texts")


def test_a_file_of_blanks_is_not_decoded(run: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"infill": "w1 ____"}\n')
    for length in ((), ("--length", "original")):
        message = mistake(
            "decode", run, "--in", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl", *length
        )
        assert message.startswith("--in: a file of texts is needed")


def test_the_file_that_is_read_is_not_written(run: Path, tmp_path: Path) -> None:
    path, link = tmp_path / "in.jsonl", tmp_path / "link.jsonl"
    path.write_text('{"text": "w1", "author": "A"}\n')
    link.symlink_to(path)
    for out in (path, link):
        message = mistake("encode", run, "--in", path, "--out", out)
        assert message == f"{out}: is the file that is read; name another one to write"
    assert "author" in path.read_text()
