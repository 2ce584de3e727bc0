"""A local Ray: the same bytes as without, whatever is killed; sources at fsspec addresses."""

import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import mmldlm
from mmldlm.errors import UserError
from mmldlm.preparation import sources
from mmldlm.preparation.ray_engine import RayEngine, RayOptions

TEXTS = [f"sentence number {number} about item {number * 7 % 13}" for number in range(300)]
SHARD = 40


def kill_once(marker: str | None) -> None:
    """SIGKILL for the first process that comes here while there is a file that says so."""
    if marker and Path(marker).exists():
        Path(marker).unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class Letters:
    """Counts letters; the first process that meets item 11 is killed, if there is a file that says so."""

    name = "letters"

    def __init__(self, marker: str | None = None) -> None:
        self.marker = marker

    def encode(self, texts: list[str]) -> np.ndarray:
        if any("item 11" in text for text in texts):
            kill_once(self.marker)
        return np.array([[text.count(letter) for letter in "abcdefgh"] for text in texts], np.float32)


class DeadlyRow(dict):
    """The first other process that reads it is killed."""

    def __init__(self, text: str, marker: str, reader: int) -> None:
        super().__init__(text=text)
        self.marker, self.reader = marker, reader

    def __reduce__(self) -> tuple[object, ...]:
        return DeadlyRow, (super().__getitem__("text"), self.marker, self.reader)

    def __getitem__(self, key: str) -> object:
        if os.getpid() != self.reader:
            kill_once(self.marker)
        return super().__getitem__(key)


@pytest.fixture(scope="module")
def cluster():
    """Two CPUs, as a notebook has that uses Ray already."""
    ray = pytest.importorskip("ray")
    ray.init(
        address="local", num_cpus=2, object_store_memory=2**27, include_dashboard=False, log_to_driver=False
    )
    yield ray
    assert ray.is_initialized(), "a Ray of the user's was shut down"
    ray.shutdown()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of some sentences, some of them twice, in files of all the kinds that several processes can share."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, words = random.Random(5), [f"word{number}" for number in range(300)] + ["Mr.", "U.S.", "item 11"]

    def sentence() -> str:
        return " ".join(draw.choice(words) for _ in range(draw.randint(1, 20))).capitalize() + draw.choice(
            ".!?"
        )

    texts = ["  ", *(" ".join(sentence() for _ in range(draw.randint(1, 5))) for _ in range(300))]
    texts += texts[40:80]
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "a.jsonl").write_text("\ufeff" + "".join(lines[:150]))
    with gzip.open(folder / "b.jsonl.gz", "wt") as packed:
        packed.writelines(lines[150:170])
    pq.write_table(pa.table({"text": texts[170:270]}), folder / "c.parquet", row_group_size=9)
    (folder / "d.txt").write_bytes("\r\n".join(texts[270:]).encode())
    held_out = folder.parent / "held_out.jsonl"
    held_out.write_text("".join(lines[200:210]))
    return folder, held_out


@pytest.mark.parametrize(
    "options",
    [
        {
            "cut": "sentences",
            "text_unit": "line",
            "min_tokens": 4,
            "test": 0.1,
            "derive": 1,
            "limit": 100,
            "seed": 3,
        },
        pytest.param(
            {"cut": "paragraphs", "derive": 2, "max_tokens": 24, "validation_source": True},
            marks=pytest.mark.soak,
        ),
        pytest.param({"cut": "chunks"}, marks=pytest.mark.soak),
    ],
)
def test_the_store_is_that_of_the_plain_engine(tmp_path, corpus, cluster, monkeypatch, options):
    folder, held_out = corpus
    options = {"encoder": Letters(), "shard_documents": SHARD, **options}
    if options.get("validation_source"):
        options["validation_source"] = held_out
    monkeypatch.setattr(sources, "SMALLEST_PORTION", 5000)
    assert (
        len(list(sources.Sources(tuple(folder.iterdir()), (), SimpleNamespace(text_unit="line")).divided()))
        > 8
    )
    plain = mmldlm.prepare(folder, tmp_path / "plain", **options)
    store = mmldlm.prepare(folder, tmp_path / "ray", engine="ray", workers=2, **options)
    assert plain.manifest.counts["duplicates"] > 0
    assert contents(store.path) == contents(plain.path)


def test_killed_workers_change_nothing(tmp_path, cluster):
    """One that reads and one that encodes."""
    markers = [tmp_path / name for name in ("kill reader", "kill encoder")]
    plain = mmldlm.prepare(TEXTS, tmp_path / "plain", encoder=Letters(), shard_documents=SHARD)
    rows = [*TEXTS[:200], DeadlyRow(TEXTS[200], str(markers[0]), os.getpid()), *TEXTS[201:]]
    for marker in markers:
        marker.touch()
    lines: list[str] = []
    options = {"engine": "ray", "workers": 2, "shard_documents": SHARD, "note": lines.append}
    store = mmldlm.prepare(rows, tmp_path / "ray", encoder=Letters(str(markers[1])), **options)
    assert not any(marker.exists() for marker in markers), "no worker was killed"
    assert contents(store.path) == contents(plain.path)
    assert any(line.startswith("Ray: 2 workers") for line in lines)


class Deadly(Letters):
    """Ends every process that encodes a certain text."""

    def encode(self, texts):
        if TEXTS[7] in texts:
            os._exit(1)
        return super().encode(texts)


@pytest.mark.soak
def test_a_job_that_kills_every_worker_ends_the_command(tmp_path, cluster):
    with pytest.raises(UserError, match="a Ray worker cannot work"):
        mmldlm.prepare(
            TEXTS, tmp_path / "ray", encoder=Deadly(), engine="ray", workers=2, shard_documents=SHARD
        )
    deadline = time.monotonic() + 60
    while cluster.available_resources().get("CPU") != cluster.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, "a worker that Ray has started again holds a CPU for ever"
        time.sleep(0.2)


def test_a_mistake_is_the_same_line_as_without_ray(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(sources, "SMALLEST_PORTION", 50_000)
    lines = [json.dumps({"text": f"{text} {number}"}) for number in range(10) for text in TEXTS]
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines[:2900], "{no JSON", *lines[2900:]]))
    (tmp_path / "good.jsonl").write_text("\n".join(lines))

    def ragged(texts: list[str]) -> list[list[int]]:
        return [[1] * (1 + ("item 11 9" in text)) for text in texts]

    for name, reported, options in (
        ("bad", "bad.jsonl:2901: not JSON", {}),
        ("good", "rows of different lengths", {"encoder": ragged}),
        ("good", "dimension=9", {"dimension": 9}),
    ):
        messages = []
        for engine in ("plain", "ray"):
            where = tmp_path / f"{name}.jsonl", tmp_path / "out" / engine
            with pytest.raises(UserError) as error:
                mmldlm.prepare(*where, engine=engine, **({"encoder": Letters()} | options))
            messages.append(str(error.value))
        assert messages[0] == messages[1]
        assert reported in messages[0]
        assert "\n" not in messages[0]
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


def test_what_ray_cannot_do_is_one_clear_line(tmp_path):
    for options, reported in (
        ({"engine": "spark"}, "engine=spark: allowed are plain, ray"),
        ({"workers": 2}, "workers=2: belongs to engine=ray"),
        ({"engine": "ray", "ray_address": "127.0.0.1:1"}, "ray_address=127.0.0.1:1: no Ray cluster answers"),
        ({"engine": "ray", "ray_address": "head:port"}, "ray_address=head:port: no Ray cluster answers"),
        ({"engine": "ray", "ray_address": "ray://head:10001"}, "does not work through the Ray Client"),
    ):
        with pytest.raises(UserError, match=r"^[^\n]*$") as error:
            mmldlm.prepare(TEXTS, tmp_path / "s", encoder=Letters(), **options)
        assert reported in str(error.value)


@pytest.mark.parametrize("joined", [True, False])
def test_a_ray_that_was_there_before_stays_and_one_of_our_own_ends_after_an_error(monkeypatch, joined):
    """As in a notebook that uses Ray already."""
    calls = []
    fake = SimpleNamespace(
        is_initialized=lambda: joined, init=lambda **_: calls.append("init"),
        nodes=lambda: [{"Alive": alive, "Resources": {"CPU": 8.0 - 7 * alive}} for alive in (True, True, False)],
        shutdown=lambda: calls.append("shutdown"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", fake)
    engine = RayEngine(RayOptions(workers=5), print)
    with pytest.raises(UserError, match="workers=5: the cluster has 2 CPUs"), engine:
        pass
    assert calls == ([] if joined else ["init", "shutdown"])
    calls.clear()
    with pytest.raises(KeyboardInterrupt), RayEngine(RayOptions(workers=1), print):
        raise KeyboardInterrupt
    assert calls == ([] if joined else ["init", "shutdown"])


@pytest.mark.parametrize(
    ("workers", "words"),
    [(1, "1 workers with 16 cpus"), (2, "2 workers with 8 cpus"), (5, "5 workers with 4 cpus")],
)
def test_a_worker_fits_into_a_machine(monkeypatch, workers, words):
    """Else Ray would wait for a larger one for ever."""
    nodes = [{"Alive": True, "Resources": {"CPU": cpus}} for cpus in (16.0, 8.0)]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True, nodes=lambda: nodes))
    lines: list[str] = []
    with RayEngine(RayOptions(workers=workers), lines.append):
        assert lines == [f"Ray: {words} each"]


def processes_of(mark: str) -> list[int]:
    """Processes that have the mark in their environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def wait_until(condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


SLOW = """import time
from tests.preparation.test_ray import Letters

class Slow(Letters):
    def encode(self, texts):
        time.sleep(0.01 * len(texts) if len(texts) > 1 else 0)
        return super().encode(texts)

slow = Slow()
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGKILL, -signal.SIGKILL), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak)],
)
def test_a_command_that_was_stopped_leaves_no_process_and_is_continued(
    tmp_path, cluster, monkeypatch, number, code
):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    Path("slowly.py").write_text(SLOW)
    mark, root = uuid.uuid4().hex, str(Path(__file__).parents[2])
    environment = os.environ | {"MARK": mark, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    words = "prepare texts.jsonl --out ray --engine ray --workers 1 --encoder slowly:slow --shard-documents"

    def written() -> dict[Path, int]:
        """What should not be made twice."""
        files = (*Path("ray/cut").rglob("*.arrow"), *Path("ray/train").glob("*.arrow"))
        return {path: path.stat().st_mtime_ns for path in files if path.with_suffix(".json").exists()}

    command = [sys.executable, "-m", "mmldlm", *words.split(), str(SHARD)]
    process = subprocess.Popen(command, env=environment)
    wait_until(lambda: list(Path("ray/train").glob("*.json")) or process.poll() is not None)
    process.send_signal(number)
    assert process.wait(240) == code
    wait_until(
        lambda: not processes_of(mark) or number == signal.SIGKILL
    )  # then Ray's own need up to a minute
    before, shown = written(), []
    assert 1 < len(before) < 9
    seen = lambda *_: shown.append(before.items() <= written().items())  # noqa: E731
    options = {"encoder": "slowly:slow", "shard_documents": SHARD}
    store = mmldlm.prepare("texts.jsonl", "ray", engine="ray", progress=seen, **options)
    assert all(shown), "something finished was written again"
    assert contents(store.path) == contents(mmldlm.prepare("texts.jsonl", "plain", **options).path)


def ranged_files(fetched: list[int]) -> type:
    """A file system whose files fetch ranges of bytes, as those of s3:// and hf:// do."""
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.spec import AbstractBufferedFile

    class RangedFile(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            fetched.append(start)
            if "broken" in self.path:
                raise OSError("the network is gone")
            return Path(self.path).read_bytes()[start:end]

    class RangedFiles(LocalFileSystem):
        protocol = "ranged"

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return str(path).removeprefix("ranged://")

        def _open(self, path: str, mode: str = "rb", **_: object) -> RangedFile:
            return RangedFile(self, path, mode, block_size=2**12, size=Path(path).stat().st_size)

    return RangedFiles


def test_files_that_are_fetched_in_ranges_are_read_as_local_ones(tmp_path, monkeypatch):
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    fetched: list[int] = []
    fsspec.register_implementation("ranged", ranged_files(fetched), clobber=True)
    monkeypatch.setattr(sources, "SMALLEST_PORTION", 3000)
    texts = [f"{text} of {number}" for number in range(10) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:2000]))
    pq.write_table(pa.table({"text": texts[2000:]}), tmp_path / "b.parquet", row_group_size=100)
    store = mmldlm.prepare(f"ranged://{tmp_path}", tmp_path / "store", encoder=Letters(), validation=0)
    assert store.texts == texts
    assert len(fetched) > 2
    (source,) = sources.find_sources(sources.PrepareSettings((f"ranged://{tmp_path}/*.*",)))
    portions = list(source.divided())
    assert len(portions) > 20
    assert [document.text for portion in portions for document in source.documents(portion)] == texts
    (tmp_path / "a.jsonl").rename(tmp_path / "broken.jsonl")
    with pytest.raises(UserError, match=r"broken\.jsonl: cannot be read \(the network is gone\)"):
        mmldlm.prepare(f"ranged://{tmp_path}/broken.jsonl", tmp_path / "no store", encoder=Letters())


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
