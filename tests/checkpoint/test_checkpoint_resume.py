"""Damage is noticed, told, and passed over; what was good is used."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmldlm.checkpoint.files import (
    DamagedError,
    check_file,
    clean,
    point_latest,
    published,
    read_latest,
    read_manifest,
    retire,
)
from mmldlm.checkpoint.load import load_checkpoint, load_latest
from mmldlm.checkpoint.save import Saver
from mmldlm.checkpoint.state import Snapshot
from mmldlm.errors import UserError

FILES = ("model.safetensors", "optimizer.safetensors", "meta.json", "manifest.json")


def raise_it(error: Exception) -> None:
    raise error


def silent(message: str) -> None:
    pytest.fail(message)


def save(folder: Path, *steps: int, value: float = 0.0, keep: int = 3) -> None:
    saver = Saver(folder, keep=keep, on_error=raise_it)
    for step in steps:
        tensors = {
            "model": {"w": torch.full((50,), step + value)},
            "optimizer": {"step.w": torch.tensor(float(step))},
        }
        saver.save(Snapshot(step, tensors, {"position": step * 10, "value": value}), wait=True)
        assert saver.last_saved == step
    saver.close()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def grow(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\n")


@pytest.mark.parametrize("damage", [truncate, empty, flip, grow, os.unlink], ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", FILES)
def test_each_damage_to_each_file(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "step_00000002" / name)
    messages: list[str] = []
    found = load_latest(tmp_path, report=messages.append)
    assert found is not None
    assert (found.step, found.meta["position"]) == (1, 10)
    assert torch.equal(found.tensors["model"]["w"], torch.full((50,), 1.0))
    assert len(messages) == 1
    assert f"step_00000002/{name}" in messages[0]
    assert "step_00000001 is used instead" in messages[0]


def test_every_single_byte_of_a_manifest_counts(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_00000001" / "manifest.json"
    good = path.read_bytes()
    for place in range(len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(DamagedError):
            read_manifest(path.parent)
    path.write_bytes(good)
    assert read_manifest(path.parent).step == 1


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), place=st.floats(0, 1), content=st.binary(min_size=1, max_size=40))
def test_random_damage_never_gives_wrong_tensors_or_a_traceback(
    tmp_path: Path, name: str, place: float, content: bytes
) -> None:
    folder = tmp_path / "run"
    if not folder.exists():
        save(folder, 1, 2)
    path = folder / "step_00000002" / name
    good = path.read_bytes()
    start = int(place * len(good))
    path.write_bytes(good[:start] + content + good[start + len(content) :])
    found = load_latest(folder, report=lambda message: None)
    assert found is not None
    assert found.step == (2 if path.read_bytes() == good else 1)
    path.write_bytes(good)


def test_nothing_saved_is_none_and_all_damaged_is_an_error(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "nowhere", report=silent) is None
    assert load_latest(tmp_path, report=silent) is None
    save(tmp_path, 1)
    flip(tmp_path / "step_00000001" / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.safetensors.*differs.*start from the beginning"):
        load_latest(tmp_path, report=silent)


def test_only_the_groups_that_are_wanted_are_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip(tmp_path / "step_00000001" / "optimizer.safetensors")
    found = load_checkpoint(tmp_path / "step_00000001", groups=("model", "ema"))
    assert found.tensors.keys() == {"model"}


def test_loaded_tensors_do_not_depend_on_the_files(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = load_latest(tmp_path, report=silent)
    assert found is not None
    shutil.rmtree(tmp_path / "step_00000001")
    found.tensors["model"]["w"] += 1
    assert torch.equal(found.tensors["model"]["w"], torch.full((50,), 2.0))


def test_a_step_published_again_replaces_the_old_one_and_is_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    save(tmp_path, 2, value=0.5)  # after a rollback from 3 to 1
    found = load_latest(tmp_path, report=silent)
    assert found is not None
    assert (found.step, found.meta["value"]) == (2, 0.5)
    assert read_latest(tmp_path) == tmp_path / "step_00000002"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001", "step_00000002", "step_00000003"]


def test_retention_keeps_the_newest_and_does_not_count_damaged_ones(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, keep=2)
    assert [path.name for path in published(tmp_path)] == ["step_00000003", "step_00000004"]
    truncate(tmp_path / "step_00000004" / "model.safetensors")
    retire(tmp_path, 1)
    assert (tmp_path / "step_00000003").exists()
    found = load_latest(tmp_path, report=lambda message: None)
    assert found is not None
    assert found.step == 3


def test_everything_is_flushed_before_it_gets_its_name_and_deleted_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut is worse than a kill: what was not flushed is lost, and renames can overtake writes."""
    save(tmp_path, 1, keep=1)
    calls: list[str] = []
    spied = {name: getattr(os, name) for name in ("fsync", "rename", "replace", "rmdir")}

    def name_of(target: object) -> str:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        return re.sub(r"-[0-9a-f]{12}", "", path.removeprefix(str(tmp_path)).lstrip("/"))

    for name, call in spied.items():

        def spy(*args: Any, _name: str = name, _call: Any = call, **kwargs: Any) -> Any:
            calls.append(" ".join([_name, *(name_of(arg) for arg in args)]).strip())
            return _call(*args, **kwargs)

        monkeypatch.setattr(os, name, spy)
    save(tmp_path, 2, keep=1)
    staged = ".staging-step_00000002"
    assert set(calls[:3]) == {f"fsync {staged}/{name}" for name in FILES[:3]}
    assert calls[3:] == [
        f"fsync {staged}/manifest.json",
        f"fsync {staged}",
        f"rename {staged} step_00000002",
        "fsync",
        "replace .new-latest latest",
        "fsync",
        "rename step_00000001 .trash-step_00000001",
        calls[-1],
    ]
    assert "rmdir" in calls[-1]


def test_leftovers_of_crashes_are_put_in_order(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    os.rename(tmp_path / "step_00000002", tmp_path / ".aside-step_00000002-0123456789ab")
    for name in (".staging-step_00000003-0123456789ab", ".trash-step_00000000-0123456789ab"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    (tmp_path / ".new-latest-0123456789ab").symlink_to("step_00000001")
    found = load_latest(tmp_path, report=silent)  # reading needs no cleaning
    assert found is not None
    assert found.step == 2
    clean(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_00000001", "step_00000002"]
    assert read_latest(tmp_path) == tmp_path / "step_00000002"


def test_latest_as_text_where_links_are_impossible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "symlink", refuse)
    save(tmp_path, 1, 2)
    assert (tmp_path / "latest").read_text() == "step_00000002\n"
    assert read_latest(tmp_path) == tmp_path / "step_00000002"
    monkeypatch.undo()
    point_latest(tmp_path, "step_00000001")
    assert os.readlink(tmp_path / "latest") == "step_00000001"


def test_a_folder_called_latest_and_foreign_hidden_files_are_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / ".new-ideas").write_text("mine")
    save(tmp_path, 1)
    assert "latest could not be moved" in caplog.text
    assert sorted(os.listdir(tmp_path)) == [".new-ideas", "latest", "step_00000001"]
    found = load_latest(tmp_path, report=silent)
    assert found is not None


def test_a_manifest_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_00000001" / "manifest.json"
    from mmldlm.checkpoint import files as module

    body = json.loads(path.read_bytes())["manifest"]
    body["files"][0]["name"] = "../../secret"
    path.write_bytes(module._serialize(body))
    with pytest.raises(DamagedError, match="is not a manifest"):
        read_manifest(path.parent)


def test_a_newer_format_says_so(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step_00000001" / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 9'))
    with pytest.raises(UserError, match=r"format 9.*update mmldlm"):
        load_checkpoint(path.parent)


def test_files_of_several_ranks_are_read_as_one_group(tmp_path: Path) -> None:
    from mmldlm import durable
    from mmldlm.checkpoint.files import entry, plan, publish, stage, stream

    staging = stage(tmp_path, 5)
    files = [entry("meta.json", "meta", durable.write_file(staging / "meta.json", [b"{}"]))]
    for rank in range(2):
        name = f"model.rank{rank}.safetensors"
        written = durable.write_file(staging / name, stream(plan({f"w{rank}": torch.full((3,), rank)}), {}))
        files.append(entry(name, "model", written))
    publish(tmp_path, staging, 5, files)
    found = load_latest(tmp_path, report=silent)
    assert found is not None
    assert found.tensors["model"].keys() == {"w0", "w1"}
    assert check_file(tmp_path / "step_00000005", files[1]).name == "model.rank0.safetensors"
