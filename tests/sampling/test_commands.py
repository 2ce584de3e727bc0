"""`mmldlm encode`, `decode`, `generate`, `infill`, `interpolate`, `paraphrase` with a small random model."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import mmldlm
from mmldlm.cli.main import main
from mmldlm.config import ModeWeights
from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.latents import cosine
from mmldlm.preparation.encoders import SentenceEncoder
from mmldlm.untrusted import printable
from tests import warm
from tests.sampling.commands import call, make_small_run, mistake, report, samples, use_fake_encoder
from tests.tiny_models import LONGEST, NUM_CHANNELS, FakeEncoder, make_run, make_store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_small_run(tmp_path_factory.mktemp("commands"))


@pytest.fixture(scope="module")
def store(run: Path) -> PairStore:
    return PairStore.open(run.parent / "store")


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_encoder(monkeypatch)


def test_texts_are_decoded_beside_the_original(run: Path, encoder: None) -> None:
    result = call("decode", run, "--text", "w1 w2 w3", "--text", "w4 [bold]", "--length", "original")
    assert result.exit_code == 0, result.exception
    for shown in ("original", "text", "w1 w2 w3", "w4 [bold]"):
        assert shown in result.stdout
    words = ("--text", "w1 w2 w3", "--length", "original", "--temperature", 0.5)
    described = report("decode", run, *words)
    assert described["command"] == "decode"
    assert described["options"]["temperature"] == 0.5
    assert described["step"] == 7
    assert [len(record["tokens"]) for record in described["samples"]] == [3]
    assert described["samples"][0]["original"] == "w1 w2 w3"


def test_a_text_is_decoded_the_same_alone_and_among_others(run: Path, encoder: None) -> None:
    alone = samples("decode", run, "--text", "w1 w2")
    assert samples("decode", run, "w1 w2") == alone
    among = samples("decode", run, "--text", "w5", "--text", "w3 w4 w5", "--text", "w1 w2")
    other = samples("decode", run, "--text", "w1 w2", "--seed", 1, "--length", 9)
    assert alone[0] == among[2]
    assert other[0]["tokens"] != alone[0]["tokens"]


def test_latents_of_a_file(run: Path, store: PairStore, tmp_path: Path) -> None:
    latents = store.split("validation").read(np.arange(4)).latents
    np.save(tmp_path / "three.npy", latents)
    np.save(tmp_path / "two.npy", latents[:, 0].astype(np.float64))
    first = samples("decode", run, "--latents", tmp_path / "three.npy", "--length", 5)
    assert first == samples("decode", run, "--latents", tmp_path / "two.npy", "--length", 5)
    assert [len(record["tokens"]) for record in first] == [5] * 4
    assert "original" not in first[0]
    expected = mmldlm.load(run).decode(latents, lengths=5)
    assert [record["text"] for record in first] == expected


def test_pairs_of_a_split(run: Path, store: PairStore, tmp_path: Path) -> None:
    out, split = tmp_path / "texts.jsonl", store.split("validation")
    words = ("--from-split", "validation", "-n", 100, "--length", "original", "--out", out)
    decoded = samples("decode", run, *words)
    assert [len(record["tokens"]) for record in decoded] == split.lengths.tolist()
    assert [record["original"] for record in decoded] == split.read_texts(np.arange(6))
    assert [json.loads(line) for line in out.read_text().splitlines()] == decoded
    again = samples("decode", run, "--from-split", "validation", "-n", 2, "--length", "original")
    assert again == decoded[:2]


def test_texts_become_latents_in_the_encoders_space(run: Path, encoder: None, tmp_path: Path) -> None:
    out = tmp_path / "latents.npy"
    records = samples("encode", run, "w1 w2", "w9", "--out", out)
    latents = np.load(out)
    assert latents.shape == (2, 1, NUM_CHANNELS)
    assert np.array_equal(np.array([record["latent"] for record in records], np.float32), latents)
    assert np.abs(latents - 3.0).max() < 2.0  # the untrained latent head predicts 0: the mean of the data
    assert "w1 w2" in call("encode", run, "w1 w2").stdout
    call("encode", run, "w1 w2", "--encode-with", "encoder", "--out", out)
    assert np.array_equal(np.load(out), FakeEncoder().encode(["w1 w2"]))
    assert len(samples("encode", run, "--from-split", "validation", "-n", 3)) == 3


def test_encoding_works_without_the_encoder(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cls: type, spec: dict, device: str = "auto") -> None:
        raise UserError("encoder 'synthetic': cannot be loaded")

    monkeypatch.setattr(SentenceEncoder, "reopen", classmethod(fail))
    result = call("encode", run, "w1 w2")
    assert result.exit_code == 0, result.exception
    assert "cannot be loaded" in mistake("decode", run, "--text", "w1 w2")
    assert samples("decode", run, "--text", "w1 w2", "--encode-with", "model")[0]["original"] == "w1 w2"


def test_generate_makes_as_many_as_asked(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.npy"
    made = samples("generate", run, "-n", 5, "--out", out)
    assert len(made) == len(np.load(out)) == 5
    assert all(1 <= len(record["tokens"]) <= LONGEST for record in made)
    assert samples("generate", run, "-n", 2) == made[:2]
    assert samples("generate", run / "export", "-n", 2) == made[:2]
    assert len(samples("generate", run)) == 8
    # bf16 would round away what an untrained network predicts
    few = ("-n", 2, "--length", 9, "--precision", "fp32")
    plain = samples("generate", run, *few, "--order", "confidence")
    for option, value in (("--order", "ancestral"), ("--turns", "interleaved"), ("--order", "block:2")):
        words = ("--order", "confidence") if option == "--turns" else ()
        assert samples("generate", run, *few, *words, option, value) != plain
    assert report("generate", run, "--solver", "heun")["options"]["solver"] == "heun"


def test_blanks_are_filled_in(run: Path, encoder: None) -> None:
    alone = samples("infill", run, "w1 ____ w3 ____{2}")
    assert len(alone) == 1
    tokens = alone[0]["tokens"]
    assert len(tokens) == 5
    assert (tokens[0], tokens[2]) == (1, 3)
    assert alone[0]["infill"] == "w1 ____ w3 ____{2}"
    both = samples("infill", run, "w1 ____ w3", "--about", "w1 w2 w3", "--about", "w4", "--guidance", 2)
    assert [(record["tokens"][0], record["tokens"][2]) for record in both] == [(1, 3)] * 2
    assert samples("infill", run, "____", "w1 ____ w3 ____{2}")[1] == alone[0]
    assert "blanks" in call("infill", run, "w1 ____").stdout
    three = ("____", "w1 ____", "w2 ____")
    assert "as many of both" in mistake("infill", run, *three, "--about", "w1", "--about", "w2")


def test_paraphrases(run: Path, encoder: None) -> None:
    text = "w1 w2 w3 w4 w5 w6 w7 w8"
    for vary in ("text", "both"):
        for strength, most in ((1e-6, 1), (1.0, 8)):
            (record,) = samples("paraphrase", run, text, "--strength", strength, "--vary", vary)
            changed = sum(token != i + 1 for i, token in enumerate(record["tokens"]))
            assert len(record["tokens"]) == 8
            assert changed <= most
    assert changed > 2
    words = ("--vary", "latent", "--length", 4, "--latent-steps", 2)
    (record,) = samples("paraphrase", run, text, *words)
    assert len(record["tokens"]) == 4
    assert record["original"] == text


def test_points_between_two_texts(run: Path, encoder: None, tmp_path: Path) -> None:
    words = ("w1 w2", "w3 w4 w5", "--length", 6)
    between = samples("interpolate", run, *words, "--points", 4, "--out", tmp_path / "between.npy")
    assert [record["at"] for record in between] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert np.load(tmp_path / "between.npy").shape == (4, 1, NUM_CHANNELS)
    assert len(samples("interpolate", run, *words)) == 5


def test_guidance_leads_away_from_a_text(run: Path, encoder: None, tmp_path: Path) -> None:
    words = ("--from-split", "validation", "-n", 4, "--length", 9, "--guidance", 3)
    plain = samples("decode", run, *words)
    away = samples("decode", run, *words, "--against", "w1 w2 w3 w4")
    assert away != plain
    np.save(tmp_path / "away.npy", FakeEncoder().encode(["w1 w2 w3 w4"]))
    assert samples("decode", run, *words, "--against", tmp_path / "away.npy") == away
    np.save(tmp_path / "two.npy", np.ones((2, NUM_CHANNELS)))
    assert "1 or 4 are needed" in mistake("decode", run, *words, "--against", tmp_path / "two.npy")


def test_neighbours_are_the_nearest_training_texts(run: Path, store: PairStore) -> None:
    train = store.split("train")
    known = train.read(np.arange(len(train))).latents
    asked = store.split("validation").read(np.arange(3)).latents
    near = np.array([[cosine(a[None], b[None])[0] for b in known] for a in asked])
    expected = np.argsort(-near, axis=1)[:, :4]
    words = ("--from-split", "validation", "-n", 3, "--neighbours", 4)
    decoded = samples("decode", run, *words)
    texts = [[each["text"] for each in record["neighbours"]] for record in decoded]
    assert texts == [train.read_texts(row) for row in expected]
    assert "nearest" in call("decode", run, *words).stdout
    assert len(samples("generate", run, "-n", 2, "--neighbours", 2)[1]["neighbours"]) == 2


@pytest.mark.parametrize("check", ["model", "encoder"])
def test_candidates_and_rounds_say_what_they_cost(run: Path, encoder: None, check: str) -> None:
    words = ("--from-split", "validation", "-n", 3, "--length", 5)
    plain = samples("decode", run, *words)
    one = samples("decode", run, *words, "--refine", 1, "--check", check)
    many = samples("decode", run, *words, "--candidates", 3, "--refine", 1, "--check", check)
    assert {"cosine", "first_cosine", "passes", "num_encoded", "num_accepted"} <= many[0].keys()
    assert "cosine" not in plain[0]
    for first, best in zip(one, many, strict=True):
        assert best["first_cosine"] == pytest.approx(first["first_cosine"])
        assert best["cosine"] >= first["first_cosine"]
        assert first["passes"] > 5  # at least one for each place that is tried
        assert first["num_encoded"] > 1 + 5
        assert best["num_encoded"] > 3 + 5


def test_at_temperature_zero_only_the_first_candidate_is_the_most_probable_text(
    run: Path, encoder: None
) -> None:
    """Else all candidates would be one text, and a round would decode what was there before."""
    words = ("--from-split", "validation", "-n", 8, "--length", 6, "--temperature", 0)
    plain = samples("decode", run, *words)
    for more in (("--candidates", 4), ("--refine", 4)):
        checked = samples("decode", run, *words, *more, "--check", "encoder")
        assert any(one["tokens"] != other["tokens"] for one, other in zip(plain, checked, strict=True))
        for one, other in zip(plain, checked, strict=True):
            assert (one["tokens"] == other["tokens"]) == (other["cosine"] == other["first_cosine"])


def test_a_model_without_t2l_is_checked_by_the_encoder(
    tmp_path: Path, encoder: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", make_store(tmp_path / "store"), modes=ModeWeights(l2t=1, t2l=0, joint=0))
    words = (run, "--text", "w1 w2", "--length", 3, "--candidates", 2)
    with monkeypatch.context() as patch:
        patch.setattr("mmldlm.sampling.self_check.decode_latents", None)  # rejected before any work
        assert mistake("decode", *words).startswith("--check 'model': this model was not trained to produce")
    assert samples("decode", *words, "--check", "encoder")[0]["num_encoded"] == 2


def test_longer_texts_than_in_training_are_not_taken_in_silence(
    run: Path, encoder: None, caplog: pytest.LogCaptureFixture
) -> None:
    long = " ".join(["w1"] * (LONGEST + 1))
    assert call("encode", run, long, "w1").exit_code == 0
    assert caplog.text.count("texts of more than 9 tokens, the most in training: 1 of 2") == 1
    caplog.clear()
    call("encode", run, "w1")
    assert not caplog.text


@pytest.mark.parametrize(
    "words",
    [
        ("decode", "--text", "w1 zz\x1b zz", "--text", "w1"),
        ("decode", "--text", "w1 zz\x1b zz", "--text", "w1", "--length", "original"),
        ("encode", "w1 zz\x1b zz", "w1"),
        ("encode", "w1 zz\x1b zz", "w1", "--encode-with", "encoder"),
        ("infill", "w1 zz\x1b ____", "____"),
        ("paraphrase", "w1 zz\x1b zz", "w1"),
        ("interpolate", "w1 zz\x1b zz", "w1"),
    ],
)
def test_words_that_the_tokenizer_does_not_know_are_reported_once(
    run: Path, encoder: None, caplog: pytest.LogCaptureFixture, words: tuple[str, ...]
) -> None:
    assert call(words[0], run, *words[1:]).exit_code == 0
    assert [record.message for record in caplog.records if "does not know" in record.message] == [
        "words that the tokenizer of this model does not know: 'zz\\x1b'"
        + (", 'zz'" if "zz\x1b zz" in " ".join(words) else "")
        + " (in 1 of 2 texts); the model sees the same unknown token for each and writes none of them"
    ]


def test_control_sequences_do_not_reach_the_terminal(run: Path, encoder: None) -> None:
    assert printable("a\x1b[31mred\x1b[0m\x07b\x9b2Jc\u202ed\tx\ny\x1b]0;title\x07z") == "aredbcd\tx\nyz"
    shown = call("encode", run, "w1 \x1b[2J\x1b]0;owned\x07w2").stdout
    assert "\x1b[2J" not in shown
    assert "owned" not in shown
    assert "w1" in shown


WRONG = [
    ("decode RUN", "one of TEXT, --latents, --from-split, --in is needed"),
    ("decode RUN --text a --from-split train", "only one of TEXT"),
    ("decode RUN --text w1 -n 3", "-n: has an effect only with --from-split"),
    ("decode RUN --text w1 --data x", "--data: has an effect only with --from-split or --neighbours"),
    ("decode RUN --text w1 --check encoder", "--check: has an effect only with --candidates or --refine"),
    ("decode RUN --text w1 --candidates 0 --encode-with model", "--candidates 0: a whole number"),
    ("decode RUN --text w1 --against w1 --encode-with model", "--against: has an effect only with a guidance"),
    ("decode RUN --text w1 --encode-with me", "--encode-with me: allowed are encoder, model"),
    ("decode RUN --latents missing.npy", "missing.npy: there is no such file"),
    ("decode RUN --from-split test", "no split 'test'"),
    ("decode RUN --from-split train -n 0", "-n 0: at least 1 pair"),
    ("decode RUN --from-split train --data missing", "missing"),
    ("decode RUN --from-split train --out made.npy", "--out made.npy: the name of the file must end in .jsonl"),
    ("decode RUN --from-split train --length 10", "--length 10: allowed are 'original' and 1 to 9"),
    ("decode RUN --in a.txt", "--in: needs --out FILE"),
    ("decode RUN --in a.csv --out a.jsonl", "a.csv: the name of an input file ends in .txt"),
    ("decode RUN --in missing.txt --out a.jsonl", "missing.txt: cannot be read"),
    ("decode RUN --in a.txt --out a.jsonl --json", "--in: needs --out FILE"),
    ("encode RUN", "one of TEXT, --from-split, --in is needed"),
    ("encode RUN w1 --steps 0", "--steps 0: allowed"),
    ("encode RUN w1 --solver euler", "--solver euler: allowed are ddim"),
    ("generate RUN -n 0", "-n 0: at least 1"),
    ("generate RUN --length x", "--length x: allowed"),
    ("generate RUN --length original", "--length original: there is no original"),
    ("generate RUN --temperature -1", "--temperature -1.0: allowed is at least 0"),
    ("generate RUN --order best", "--order best: allowed are"),
    ("generate RUN --steps 0", "--steps 0: allowed"),
    ("generate RUN --seed -3", "--seed -3: allowed"),
    ("generate RUN --guidance 1000", "--guidance 1000.0: allowed"),
    ("generate RUN --device tpu", "--device tpu"),
    ("generate RUN --data x", "--data: has an effect only with --neighbours"),
    ("generate RUN --out made.txt", "--out made.txt: the name of the file must end in .npy or .jsonl"),
    ("generate RUN --out nowhere/made.npy", "--out nowhere/made.npy: the folder nowhere does not exist"),
    ("generate nothing", "no such run or export"),
    ("infill RUN w1", "holds no blank"),
    ("infill RUN ____{99999999999}", "a blank of 99999999999 tokens; allowed are 1 to 10000"),
    ("infill RUN ____ --guidance 2", "--guidance: has no effect without latents"),
    ("infill RUN ____ --against w1", "--against: has an effect only with --about"),
    ("paraphrase RUN", "one of TEXT, --in is needed"),
    ("paraphrase RUN w1 --strength 0", "--strength 0.0: more than 0"),
    ("paraphrase RUN w1 --vary all", "--vary 'all': allowed are both, latent, text"),
    ("paraphrase RUN w1 --length 3", "--length: has an effect only with --vary latent"),
    ("interpolate RUN w1 w2 --points 1", "--points 1: at least 2"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[words for words, _ in WRONG])
def test_mistakes_are_one_line(run: Path, encoder: None, words: str, message: str) -> None:
    command, *rest = (str(run) if word == "RUN" else word for word in words.split(" "))
    assert message in mistake(command, *rest)


def test_an_output_that_cannot_be_written_is_rejected_before_the_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise UserError(f"{path}: the file system is read-only")

    monkeypatch.setattr("mmldlm.durable.require_writable", refuse)
    monkeypatch.setattr("mmldlm.api.model.load", None)  # nothing is loaded
    for command in ("encode", "decode", "generate", "infill", "interpolate", "paraphrase"):
        words = {"decode": ["--text", "w1"], "generate": [], "interpolate": ["w1", "w2"]}.get(command, ["w1"])
        assert "read-only" in mistake(command, run, *words, "--out", tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 1, 5)), "shape (2, 1, 5)"),
        (np.zeros(4), "shape (4,)"),
        (np.full((3, 4), np.nan), "3 of 3 contain NaN"),
        (np.array(["a", "b"]), "this model needs numbers"),
        (b"not an array", "cannot be read as an array"),
        (np.zeros((0, 4)), "holds no latent"),
    ],
)
def test_bad_files_of_latents(run: Path, tmp_path: Path, array: np.ndarray | bytes, message: str) -> None:
    path = tmp_path / "bad.npy"
    if isinstance(array, bytes):
        path.write_bytes(array)
    else:
        np.save(path, array)
    assert message in mistake("decode", run, "--latents", path)


def test_stores_of_the_same_encoder_only(run: Path, store: PairStore, tmp_path: Path) -> None:
    same, other = make_store(tmp_path / "same", 1), make_store(tmp_path / "other", 1, "another")
    assert call("decode", run, "--from-split", "train", "--data", same.path).exception is None
    message = mistake("decode", run, "--from-split", "train", "--data", other.path)
    assert "another tokenizer or encoder" in message
    away = store.path.rename(store.path.with_name("elsewhere"))
    try:
        assert "--data STORE" in mistake("decode", run, "--from-split", "validation")
    finally:
        away.rename(store.path)


def test_a_model_of_given_lengths_asks_for_them(store: PairStore, tmp_path: Path) -> None:
    run = make_run(tmp_path / "given", store, length="given")
    assert "lengths" in mistake("generate", run)
    assert len(samples("generate", run, "-n", 2, "--length", 4)[1]["tokens"]) == 4


def test_a_closed_pipe_ends_quietly(run: Path) -> None:
    words = [sys.executable, "-m", "mmldlm", "generate", str(run), "--json"]
    process = warm.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # as `| head` does, before the first line
    output = process.stderr.read().decode()
    assert process.wait() == 141  # the exit code of a tool that SIGPIPE ended
    assert output == ""


def test_a_terminal_that_lacks_characters_shows_their_codes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = []
    for more in ([], ["--json"]):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr(sys, "stdout", stdout)
        words = ["mmldlm", "encode", str(run), "w1 \u017c", "--encode-with", "model", *more]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as left:
            main()
        stdout.flush()
        assert not left.value.code
        printed.append(stdout.buffer.getvalue())  # type: ignore[attr-defined]
    assert b"w1 \\u017c" in printed[0]
    assert json.loads(printed[1])["samples"][0]["text"] == "w1 \u017c"
