"""`mmldlm selftest`: ticks where all is well, crosses with remedies where it is not."""

import os
import sys

import pytest

from mmldlm.distributed.ranks import Ranks
from mmldlm.launch import selftest
from tests import warm
from tests.distributed.pair import environment
from tests.stores import write_store


def test_two_ranks_pass_and_a_missing_store_is_a_cross_with_a_remedy(tmp_path):
    command = [sys.executable, "-m", "mmldlm", "selftest", "--nproc", "2", "--store", "nowhere"]
    done = warm.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "✓ rendezvous: 2 ranks on 1 machines" in lines
    assert any(line.startswith("✓ all-reduce: ") and "(gloo)" in line for line in lines)
    assert any(
        line.startswith("✗ store: rank 0: nowhere: no such pair store") and "->" in line for line in lines
    )
    assert lines[-1].endswith(" checks failed")
    assert not any("store content" in line for line in lines)
    assert done.stderr == ""


def test_one_rank_checks_its_store_and_disk(tmp_path):
    write_store(tmp_path / "store", num_train=10, num_valid=2)
    checks = {
        check.name: check for check in selftest.check_ranks(Ranks(), tmp_path / "store", tmp_path / "saved")
    }
    assert checks["store"].passed
    assert "12 documents" in checks["store"].detail
    assert list((tmp_path / "saved").iterdir()) == [], "the probe is removed"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_disk_that_cannot_be_written_fails(tmp_path):
    tmp_path.chmod(0o500)
    assert not selftest.check_folder("disk", tmp_path).passed


def test_a_folder_in_the_place_of_a_file_fails(tmp_path):
    (tmp_path / "file").write_text("")
    check = selftest.check_folder("disk", tmp_path / "file")
    assert not check.passed
    assert check.line().startswith("✗ disk: ")
    assert "-> choose a folder" in check.line()


def test_a_rank_that_differs_is_named(monkeypatch):
    monkeypatch.setattr(selftest, "_gather", lambda ranks, value: [value, "torch 1.0", value])
    check = selftest._check_same(Ranks(), "versions", "torch 2.0", "install the same")
    assert not check.passed
    assert check.detail == "rank 1 has torch 1.0, rank 0 has torch 2.0"


def test_a_gpu_that_another_machine_lacks_is_a_cross_too(monkeypatch, tmp_path):
    bad = selftest.Check("GPUs", False, "1 x H200 for 2 ranks", "use at most 1 ranks per node")
    every = lambda ranks, value: [value, bad if getattr(value, "name", "") == "GPUs" else value]  # noqa: E731
    monkeypatch.setattr(selftest, "_gather", every)
    checks = selftest.check_ranks(Ranks(), None, tmp_path / "saved")
    assert "✗ GPUs: rank 1: 1 x H200 for 2 ranks -> use at most 1 ranks per node" in [
        check.line() for check in checks
    ]


def test_names_of_network_cards_may_differ_between_machines(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert "eth7" not in selftest._variables()
    assert "NCCL_ALGO=Ring" in selftest._variables()
