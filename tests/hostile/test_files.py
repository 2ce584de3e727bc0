"""A corpus of hostile files, made by code: exports, runs, stores, tokenizers, encoders and text of strangers.

Each is rejected with one line. Nothing of it is executed, and no memory is asked for that the file does not have.
"""

from __future__ import annotations

import ast
import gzip
import importlib
import io
import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import mmldlm
from mmldlm.checkpoint.export import TOKENIZER, WEIGHTS
from mmldlm.cli import main as command
from mmldlm.cli.data import app as data_app
from mmldlm.data.format import MANIFEST, checksum
from mmldlm.data.store import PairStore
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.preparation import readers
from mmldlm.preparation.readers import MOST_CHARACTERS, MOST_LINE
from mmldlm.preparation.sentence_encoder import SentenceEncoder
from mmldlm.preparation.settings import PrepareSettings
from mmldlm.preparation.sources import resolve
from tests import warm
from tests.tiny_models import make_run, make_store

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    make_run(folder / "run", make_store(folder / "store"))
    return folder


@pytest.fixture
def export(base: Path, tmp_path: Path) -> Path:
    copy = Path(shutil.copytree(base / "run" / "export", tmp_path / "export"))
    for name in ("manifest.json", "config.json"):
        (copy / name).unlink()
    return copy


def rewrite_notes(export: Path, change: Change) -> None:
    """Change what the header of the weights says about settings and data."""
    content = (export / WEIGHTS).read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    notes = {
        key: json.loads(value) if value[:1] in '{["' else value
        for key, value in header["__metadata__"].items()
    }
    change(notes)
    header["__metadata__"] = {
        key: value if key == "format" else json.dumps(value) for key, value in notes.items()
    }
    text = json.dumps(header).encode()
    (export / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


EXPORTS: dict[str, Change] = {
    "128 TB of width": lambda notes: notes["config"]["model"].update(width=2**40),
    "endless depth": lambda notes: notes["config"]["model"].update(depth=2**40),
    "another depth": lambda notes: notes["config"]["model"].update(depth=2),
    "heads of no width": lambda notes: notes["config"]["model"].update(head_width=0),
    "vocabulary of a trillion": lambda notes: notes["data"].update(vocab_size=10**12),
    "longest document of a trillion": lambda notes: notes["data"].update(max_length=10**12),
    "slots of a trillion": lambda notes: notes["data"].update(num_slots=10**12),
    "no channels": lambda notes: notes["data"].update(num_channels=0),
    "negative channels": lambda notes: notes["data"].update(num_channels=-4),
    "words for numbers": lambda notes: notes["data"].update(vocab_size="20"),
    "true for one": lambda notes: notes["data"].update(num_slots=True),
    "no vocabulary": lambda notes: notes["data"].pop("vocab_size"),
    "no fingerprint": lambda notes: notes["data"].pop("fingerprint"),
    "no normaliser": lambda notes: notes["data"].pop("normalizer"),
    "short normaliser": lambda notes: notes["data"].update(normalizer={"mean": [0.0], "scale": [1.0]}),
    "normaliser of zeros": lambda notes: notes["data"].update(normalizer={"mean": [0.0] * 4, "scale": [0.0] * 4}),
    "normaliser of words": lambda notes: notes["data"].update(normalizer={"mean": "abcd", "scale": "abcd"}),
    "array of a terabyte": lambda notes: notes["data"].update(
        normalizer={"$array": {"dtype": "float64", "shape": [2**37], "base64": ""}}
    ),
    "encoder as a list": lambda notes: notes["data"].update(encoder=["os:system"]),
    "step as a word": lambda notes: notes["data"].update(step="x"),
    "environment in the settings": lambda notes: notes["config"].update(name="${oc.env:HOME}"),
    "unknown setting": lambda notes: notes["config"]["model"].update(backdoor=1),
    "settings as a list": lambda notes: notes.update(config=[1]),
    "no settings": lambda notes: notes.pop("config"),
    "settings of another type": lambda notes: notes["config"].update(model=7),
    "deep nesting": lambda notes: notes["config"].update(name=json.loads("[" * 900 + "]" * 900)),
    "aliases of nothing": lambda notes: notes.update(aliases={"token_embed.weight": "nothing"}),
    "aliases as a list": lambda notes: notes.update(aliases=[1]),
    "another format": lambda notes: notes.update(mmldlm="export-99"),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTS)
def test_exports(name: str, export: Path) -> None:
    rewrite_notes(export, EXPORTS[name])
    with pytest.raises(UserError, match=str(export)) as error:
        mmldlm.load(export, device="cpu")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 900


def test_a_hostile_export_allocates_nothing(export: Path) -> None:
    """Under a limit on memory, the wide network is still one line."""
    rewrite_notes(export, EXPORTS["128 TB of width"])
    code = f"""
import resource, mmldlm.api.model
from mmldlm.errors import UserError
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
try:
    mmldlm.api.model.load({str(export)!r}, device="cpu")
except UserError as error:
    print("one line:", error)
"""
    done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("one line:"), done.stderr[-600:]


def test_a_tokenizer_with_more_words_than_the_model_is_rejected(export: Path) -> None:
    path = export / TOKENIZER / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["w3"] = 5000
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"has 5001 tokens, and the model knows 20"):
        mmldlm.load(export, device="cpu").tokenize(["w3"])


CODE = "from pathlib import Path\nPath('executed').write_text('yes')\nclass Evil: pass\n"


def test_code_beside_a_tokenizer_is_not_run_and_nothing_is_asked(export: Path, tmp_path: Path) -> None:
    """A tokenizer that needs code of its own, in a process at whose input somebody says yes."""
    folder = export / TOKENIZER
    (folder / "tokenizer.json").unlink()
    auto_map = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto_map))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}})
    )
    (folder / "evil.py").write_text(CODE)
    code = f"import mmldlm\nmmldlm.load({str(export)!r}, device='cpu').tokenize(['w1'])"
    done = warm.run(
        [sys.executable, "-c", code],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert "UserError: tokenizer" in done.stderr
    assert "[y/N]" not in done.stdout
    assert not list(tmp_path.rglob("executed"))


def test_an_encoder_that_names_classes_of_its_own_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil.py").write_text(CODE)
    (tmp_path / "encoder").mkdir()
    for content in ([{"idx": 0, "name": "0", "path": "", "type": "evil.Evil"}], [1], {"a": 1}, "x"):
        (tmp_path / "encoder" / "modules.json").write_text(json.dumps(content))
        with pytest.raises(
            UserError, match=r"needs code of its own \(evil\.Evil\)|modules\.json cannot be read"
        ):
            SentenceEncoder.load(str(tmp_path / "encoder"), device="cpu")
    assert not (tmp_path / "executed").exists()


def _tokenizer(**model: Any) -> str:
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model})


TOKENIZERS = {
    "empty": "",
    "list": "[]",
    "deep": '{"model":' * 5000,
    "no vocabulary": _tokenizer(type="WordLevel", vocab={}, unk_token="x"),
    "id of four billion": _tokenizer(type="WordLevel", vocab={"x": 4294967290}, unk_token="x"),
    "word for an id": _tokenizer(type="WordLevel", vocab={"x": "y"}, unk_token="x"),
    "unigram of nothing": _tokenizer(type="Unigram", unk_id=7, vocab=[]),
    "merges of nothing": _tokenizer(type="BPE", vocab={"a": 0}, merges=["a b"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(TOKENIZERS[name])
    with pytest.raises(UserError, match="tokenizer") as error:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(error.value)


def resign(store: Path, change: Change) -> None:
    body = json.loads((store / MANIFEST).read_text())
    body.pop("checksum")
    change(body)
    (store / MANIFEST).write_text(json.dumps(body | {"checksum": checksum(body)}))


STORES: dict[str, Change] = {
    "channels of a trillion": lambda body: body.update(num_channels=10**12),
    "vocabulary of a trillion": lambda body: body.update(vocab_size=10**12),
    "words for numbers": lambda body: body.update(num_slots="1"),
    "splits as a list": lambda body: body.update(splits=[]),
    "a split without shards": lambda body: body["splits"]["train"].pop("shards"),
    "documents of a trillion": lambda body: body["splits"]["train"].update(num_documents=10**12),
    "tokens of a trillion": lambda body: body["splits"]["train"]["shards"][0].update(num_tokens=10**12),
    "negative documents": lambda body: body["splits"]["train"]["shards"][0].update(num_documents=-1),
    "longest of nothing": lambda body: body["splits"]["train"].update(max_length=0),
    "a shard outside": lambda body: body["splits"]["train"]["shards"][0].update(file="../../etc/passwd"),
    "an absolute file": lambda body: body["files"].update({"/etc/passwd": {"bytes": 1, "sha256": "x"}}),
    "a split outside": lambda body: body["splits"].update({"../up": body["splits"]["train"]}),
    "type of latents": lambda body: body.update(latent_dtype="object"),
    "normaliser of zeros": lambda body: body.update(normalizer={"mean": [0.0] * 4, "scale": [0.0] * 4}),
    "no normaliser": lambda body: body.update(normalizer={}),
    "tokenizer as a word": lambda body: body.update(tokenizer="x"),
    "deep nesting": lambda body: body.update(settings=json.loads("[" * 900 + "]" * 900)),
}  # fmt: skip


@pytest.mark.parametrize("name", STORES)
def test_stores(name: str, base: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(base / "store", tmp_path / "store"))
    resign(store, STORES[name])
    with pytest.raises(UserError, match=r"manifest\.json") as error:
        PairStore.open(store).summary()
    assert "\n" not in str(error.value)


def test_control_sequences_of_a_store_reach_no_terminal(base: Path, tmp_path: Path) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b2J[red]name[/red]"
    store = Path(shutil.copytree(base / "store", tmp_path / "store"))

    def change(body: dict[str, Any]) -> None:
        body["encoder"] = {evil: evil, "name": evil}
        body["counts"] = {evil: 3}
        body["splits"] = {evil: body["splits"]["validation"], **body["splits"]}

    resign(store, change)
    shown = CliRunner().invoke(data_app, ["inspect", str(store)]).output
    assert "[red]name[/red]" in shown
    assert not {"\x1b", "\x9b", "\x07"} & set(shown)


def test_control_sequences_in_errors_and_logs_reach_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mmldlm.metrics import text_log

    evil = "\x1b]0;title\x07\x1b[2Jname"
    monkeypatch.setattr(sys, "argv", ["mmldlm", "data", "inspect", str(tmp_path / evil)])
    with pytest.raises(SystemExit):
        command.main()
    shown = capsys.readouterr().err
    assert "name: no such pair store" in shown
    with text_log(tmp_path / "train.log") as log:
        log.warning("%s", evil)
    shown += (tmp_path / "train.log").read_text()
    assert not {"\x1b", "\x07"} & set(shown)


def read_all(path: Path) -> int:
    return sum(1 for _ in resolve(PrepareSettings((str(path),))))


def test_a_small_archive_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 MB of one letter are 40 kB of gzip: rejected before they are whole."""
    monkeypatch.setattr(readers, "MOST_UNPACKED", 2**25)
    packed = gzip.compress(b"a" * 40 * 2**20, compresslevel=1)
    for name in ("a.txt.gz", "a.json.gz", "a.arrow.gz", "a.parquet.gz", "a.jsonl.gz", "a.csv.gz"):
        (tmp_path / name).write_bytes(packed)
        with pytest.raises(UserError, match=r"once unpacked|a line of more than"):
            read_all(tmp_path / name)


def test_long_lines_and_texts_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "line.jsonl").write_text(json.dumps({"text": "a " * (MOST_LINE // 2)}))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a " * (MOST_CHARACTERS // 2 + 1)}))
    (tmp_path / "text.txt").write_text("a " * (MOST_CHARACTERS // 2 + 1))
    (tmp_path / "text.csv").write_text(f"text,b\n{'a ' * (MOST_CHARACTERS // 2 + 1)},1\n")
    for name in ("line.jsonl", "text.jsonl", "text.txt", "text.csv"):
        with pytest.raises(UserError, match=rf"{name}.*(a line of more|characters|field larger)"):
            read_all(tmp_path / name)


@pytest.mark.parametrize("row", [
    {"text": {"a": {"b": "c"}}}, {"text": ["a"]}, {"text": "a", "latent": {"a": 1}}, [["text"]], 5, None,
    {"text": "a", "latent": json.loads("[" * 80 + "1" + "]" * 80)}, {"text": "a", "latent": [[1], [1, 2]]},
])  # fmt: skip
def test_nested_rows(row: Any, tmp_path: Path) -> None:
    for name, content in (("a.jsonl", json.dumps(row)), ("a.json", json.dumps([row]))):
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=name):
            read_all(tmp_path / name)


def test_made_up_arrow_files_are_not_read_as_memory(tmp_path: Path) -> None:
    """Offsets far outside the buffer, as in a crafted file: one line, no crash."""
    import pyarrow as pa

    table = pa.table({"text": pa.array(["some text", "more"], pa.large_string())})
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table)
    content = sink.getvalue()
    place = content.index(np.array([0, 9, 13], "<i8").tobytes())
    crafted = content[:place] + np.array([0, 2**40, 2**40 + 4], "<i8").tobytes() + content[place + 24 :]
    (tmp_path / "a.arrow").write_bytes(crafted)
    with pytest.raises(UserError, match=r"a\.arrow: damaged file"):
        read_all(tmp_path / "a.arrow")


def test_a_run_whose_settings_and_heartbeat_have_no_end_is_listed(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("[" * 5000)
    (tmp_path / "run" / "heartbeat.json").write_text("[" * 200_000)
    assert mmldlm.list_runs(tmp_path)[0].steps is None


@pytest.mark.parametrize("name", ["fuzz_files", "measure_verification"])
def test_the_scripts_fit_the_library(name: str) -> None:
    """What they import exists; they are run by hand."""
    path = Path(__file__).parents[2] / "scripts" / f"{name}.py"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("mmldlm", "runwatch")):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.import_module(f"{node.module}.{alias.name}")


def test_a_small_table_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compressed Arrow buffers, plain or in a dictionary, and Parquet pages say what they unpack to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    monkeypatch.setattr(readers, "MOST_UNPACKED", 2**20)
    texts = pa.array(["a" * 2**16] * 64)
    table = pa.table({"text": texts})
    packed = pa.ipc.IpcWriteOptions(compression="zstd")
    words = pa.DictionaryArray.from_arrays(pa.array([0]), pa.array(["a" * 2**22]))
    for name, kind, content in (
        ("stream.arrow", pa.ipc.new_stream, table),
        ("file.arrow", pa.ipc.new_file, table),
        ("words.arrow", pa.ipc.new_stream, pa.table({"text": texts[:1], "words": words})),
    ):
        with kind(tmp_path / name, content.schema, options=packed) as out:
            out.write_table(content)
    pq.write_table(table, tmp_path / "plain.parquet", compression="zstd", use_dictionary=False)
    for path in tmp_path.iterdir():
        with pytest.raises(
            UserError, match=rf"{path.name}: [\d,]+ bytes would unpack to 4,[\d,]+, more than 64"
        ):
            read_all(path)


def test_a_text_stored_once_and_repeated_in_every_row_is_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a" * 2**20] * 1000}), tmp_path / "a.parquet", compression="zstd")
    before = pa.total_allocated_bytes()
    rows = readers.read_file(tmp_path / "a.parquet", readers.Fields())
    assert len(next(rows)[0].text or "") == 2**20
    assert pa.total_allocated_bytes() - before < 100 * 2**20
