"""Workers of a local Ray: the same bytes as without, also when a worker is killed; sources at fsspec addresses."""

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mmldlm
from mmldlm.errors import UserError
from mmldlm.preparation.engines import RayEncoders, RayOptions

TEXTS = [f"sentence number {number} about item {number * 7 % 13}" for number in range(300)]


class Letters:
    """Counts letters; the first process that meets item 11 is killed, if there is a file that says so."""

    name = "letters"

    def __init__(self, marker: str | None = None) -> None:
        self.marker = marker

    def encode(self, texts: list[str]) -> np.ndarray:
        if self.marker and any("item 11" in text for text in texts) and Path(self.marker).exists():
            Path(self.marker).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return np.array([[text.count(letter) for letter in "abcdefgh"] for text in texts], np.float32)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_killed_worker_changes_nothing_and_the_store_is_that_of_the_plain_engine(tmp_path):
    pytest.importorskip("ray")
    marker = tmp_path / "kill"
    plain = mmldlm.prepare(TEXTS, tmp_path / "plain", encoder=Letters(), shard_documents=40)
    marker.touch()
    lines: list[str] = []
    options = {"engine": "ray", "workers": 2, "shard_documents": 40, "note": lines.append}
    made = mmldlm.prepare(TEXTS, tmp_path / "ray", encoder=Letters(str(marker)), **options)
    assert not marker.exists(), "no worker was killed"
    assert len(made) == len(plain) == 300
    assert contents(made.path) == contents(plain.path)
    assert any(line.startswith("Ray: 2 workers") for line in lines)


def test_what_ray_cannot_do_is_one_clear_line(tmp_path):
    for options, reported in (
        ({"engine": "spark"}, "engine=spark: allowed are plain, ray"),
        ({"workers": 2}, "belong to engine=ray"),
    ):
        with pytest.raises(UserError, match=r"^[^\n]*$") as error:
            mmldlm.prepare(TEXTS, tmp_path / "s", encoder=Letters(), **options)
        assert reported in str(error.value)


@pytest.mark.parametrize("joined", [True, False])
def test_a_ray_that_was_there_before_stays_and_one_of_our_own_ends_after_an_error(monkeypatch, joined):
    """As in a notebook that uses Ray already."""
    calls = []
    fake = SimpleNamespace(
        is_initialized=lambda: joined, init=lambda **_: calls.append("init"), cluster_resources=lambda: {"CPU": 2.0},
        shutdown=lambda: calls.append("shutdown"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    encoders = RayEncoders(RayOptions(workers=5), Letters(), {}, print)
    with pytest.raises(UserError, match="workers=5: the cluster has 2 CPUs"), encoders:
        pass
    assert calls == ([] if joined else ["init", "shutdown"])


def test_files_at_an_address_are_read_as_local_ones(tmp_path):
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:50]))
    pq.write_table(pa.table({"text": TEXTS[50:90]}), folder / "b.parquet")
    (folder / "notes.md").write_text("not read")
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe(f"/corpus/{path.name}", path.read_bytes())
    local = mmldlm.prepare(folder, tmp_path / "local", encoder=Letters())
    remote = mmldlm.prepare("memory://corpus", tmp_path / "remote", encoder=Letters())
    assert remote.texts == local.texts
    assert len(mmldlm.prepare("memory://corpus/*.parquet", tmp_path / "some", encoder=Letters())) == 40
    for address, reported in (
        ("memory://nowhere", "no file to read there"),
        ("nonsense://x/y.jsonl", "nonsense"),
    ):
        with pytest.raises(UserError, match=r"^[^\n]*$") as error:
            mmldlm.prepare(address, tmp_path / "none", encoder=Letters())
        assert reported in str(error.value)
