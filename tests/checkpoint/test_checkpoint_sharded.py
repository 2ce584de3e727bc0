"""Checkpoints that several ranks wrote: read in whole or by rows, rejected where rows are missing; a full disk."""

import errno
import json

import pytest
import torch
import torch.distributed as dist

from mmldlm import durable
from mmldlm.checkpoint.files import PIECES, DamagedError, entry, plan, publish, read_rows, stage, stream
from mmldlm.checkpoint.load import load_checkpoint, load_latest
from mmldlm.checkpoint.sharded import ShardPlace, ShardSaver, own_part
from mmldlm.checkpoint.state import Snapshot
from mmldlm.types import Piece

WHOLE = torch.arange(21.0).view(7, 3)
STEPS = torch.tensor(5.0)


def write(folder, number, start, rows, shape=(7, 3), **more):
    path = folder / f"model-{number}.safetensors"
    notes = {PIECES: json.dumps({"w": [start, *shape], "exp_avg.w": [start, *shape]})}
    tensors = {"w": WHOLE[start : start + rows], "exp_avg.w": -WHOLE[start : start + rows], **more}
    path.write_bytes(b"".join(stream(plan(tensors), notes)))
    return path


@pytest.fixture
def parts(tmp_path):
    return [write(tmp_path, 0, 0, 3, step=STEPS), write(tmp_path, 1, 3, 3), write(tmp_path, 2, 6, 1)]


def test_rows_of_several_files_are_one_tensor_in_any_order(parts):
    read = read_rows(parts[::-1], {})
    assert torch.equal(read["w"], WHOLE)
    assert torch.equal(read["exp_avg.w"], -WHOLE)
    assert read["step"] == 5.0


@pytest.mark.parametrize(("start", "rows"), [(0, 7), (0, 2), (2, 3), (5, 2), (6, 1), (7, 0)])
def test_a_rank_reads_its_rows_however_they_were_divided(parts, start, rows):
    read = read_rows(parts, {"w": Piece(start, rows, (7, 3))})
    assert torch.equal(read["w"], WHOLE[start : start + rows])
    assert torch.equal(read["exp_avg.w"], -WHOLE[start : start + rows])
    assert read["step"] == 5.0


def test_rows_that_are_missing_or_do_not_belong_are_rejected(parts, tmp_path):
    for wrong in ([parts[0], parts[2]], parts[:2], parts[1:]):
        with pytest.raises(ValueError, match="missing"):
            read_rows(wrong, {})
    for shape in ((7, 4), (2**40, 3), (7, 3, 1)):
        with pytest.raises(ValueError, match=r"missing|do not belong"):
            read_rows([*parts[:2], write(tmp_path, 3, 6, 1, shape)], {})


def test_a_checkpoint_without_all_rows_is_damaged(tmp_path, parts):
    staging = stage(tmp_path / "checkpoints", 4)
    files = [entry("meta.json", "meta", durable.write_file(staging / "meta.json", [b"{}"]))]
    for part in parts[:2]:
        files.append(entry(part.name, "model", durable.write_file(staging / part.name, [part.read_bytes()])))
    path = publish(tmp_path / "checkpoints", staging, 4, files)
    with pytest.raises(DamagedError, match="rows from 6 to 7 are missing"):
        load_checkpoint(path)


def test_replicas_share_the_writing_and_the_main_rank_writes_the_rest(monkeypatch):
    tensors = {"optimizer": {f"exp_avg.p{n}": torch.zeros(2, 3) for n in range(4)} | {"step.p0": STEPS}}
    pieces = {f"p{n}": Piece(2, 2, (4, 3)) for n in range(4)}
    written = []
    for rank in range(2):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        written.append(set(own_part(Snapshot(1, tensors), ShardPlace(pieces, rank, 2, None))))
    assert len(written[0] - {"optimizer/step.p0"}) == len(written[1]) == 2
    assert written[0] | written[1] == {f"optimizer/{name}" for name in tensors["optimizer"]}


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_full_disk_costs_an_old_checkpoint_or_the_new_one(tmp_path, monkeypatch, group):
    errors = []
    place = ShardPlace({"w": Piece(0, 7, (7, 3))}, 0, 1, group)
    saver = ShardSaver(tmp_path, place, keep=2, on_error=errors.append)

    def save(step):
        saver.save(Snapshot(step, {"model": {"w": WHOLE + step}}, {}), wait=True)

    save(1)
    save(2)
    write_file, room = durable.write_file, []

    def full(path, chunks):
        if not (tmp_path / "step_00000001").exists() and room:
            return write_file(path, chunks)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(durable, "write_file", full)
    room.append(True)
    save(3)  # the oldest goes, and there is room
    assert not errors
    room.clear()
    save(4)
    assert [error.step for error in errors] == [4]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    monkeypatch.setattr(durable, "write_file", write_file)
    newest = load_latest(tmp_path, report=pytest.fail)
    assert newest.step == 3
    assert torch.equal(newest.tensors["model"]["w"], WHOLE + 3)
