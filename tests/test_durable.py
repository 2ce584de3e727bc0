"""Files that survive: what is told when they cannot be written."""

import errno
import os

import pytest

from mmldlm import durable
from mmldlm.reports import publish


@pytest.fixture
def full_disk(monkeypatch):
    def write(fd, piece):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize("make", [
    lambda path: durable.replace_file(path, b"new"),
    lambda path: publish(path, {"a.json": b"new"}),
], ids=["file", "report"])  # fmt: skip
def test_a_full_disk_is_told_with_what_was_being_made_and_leaves_what_was_there(
    request, tmp_path, make, existed
):
    target = tmp_path / "made"
    if existed:
        make(target)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="No space left") as error:
        make(target)
    assert error.value.filename == str(target)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_error_that_names_its_file_keeps_the_name(tmp_path):
    with pytest.raises(FileNotFoundError) as error, durable.naming(tmp_path / "made"):
        (tmp_path / "missing").read_bytes()
    assert error.value.filename == str(tmp_path / "missing")
