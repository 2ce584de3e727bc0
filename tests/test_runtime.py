"""Which device and which path a run gets, on machines that are not here: torch.accelerator is replaced."""

import contextlib
import gc
import logging
import os
import platform
import subprocess
import sys
import types

import pytest
import torch

from mmldlm import runtime
from mmldlm.config import find_problems
from mmldlm.config.recipe import load_recipe
from mmldlm.errors import UserError
from mmldlm.runtime import choose_device, settle_runtime


def machine(monkeypatch, kind, count=1):
    """A machine with this kind of accelerator; anything of torch.cuda that is called raises."""
    present = None if kind is None else torch.device(kind)
    fake = types.SimpleNamespace(
        current_accelerator=lambda check_available=False: present, device_count=lambda: count
    )
    monkeypatch.setattr(torch, "accelerator", fake)
    if kind != "cuda":
        for name in (
            "get_device_capability",
            "is_bf16_supported",
            "get_device_name",
            "Stream",
            "synchronize",
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *args, **more: pytest.fail("torch.cuda was called"))


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_auto_takes_the_accelerator_that_is_there(monkeypatch, kind):
    machine(monkeypatch, kind, count=2)
    assert choose_device() == torch.device(kind)
    assert choose_device(kind) == torch.device(kind)
    assert choose_device(f"{kind}:1") == choose_device(torch.device(kind, 1)) == torch.device(kind, 1)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("kind", [None, "meta"])
def test_auto_is_the_cpu_where_there_is_no_accelerator_that_we_run_on(monkeypatch, kind):
    machine(monkeypatch, kind)
    assert choose_device() == torch.device("cpu")


@pytest.mark.parametrize(("kind", "device", "option", "message"), [
    (None, "cuda", "train.device", "train.device=cuda: not available, no accelerator was found; use auto or cpu"),
    ("mps", "cuda", "device", "device=cuda: not available, this machine has mps; use auto or cpu"),
    ("cuda", "cuda:2", "--device", "--device cuda:2: this machine has 2, counted from 0"),
    ("cuda", "tpu", "--device", "--device tpu: allowed are auto, cpu, cuda, mps, xpu, or cuda:1"),
    ("cuda", "cuda:x", "device", "device=cuda:x: allowed are auto"),
    ("cuda", "", "device", "device=: allowed are auto"),
])  # fmt: skip
def test_a_device_that_is_not_there_is_one_line(monkeypatch, kind, device, option, message):
    machine(monkeypatch, kind, count=2)
    with pytest.raises(UserError) as error:
        choose_device(device, option=option)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_other_accelerators_run_the_plain_path(monkeypatch, caplog, kind):
    machine(monkeypatch, kind)
    with caplog.at_level(logging.INFO, runtime.__name__):
        settled = settle_runtime(load_recipe("demo"), choose_device())
    assert (settled.precision, settled.attention, settled.compile, settled.fused) == (
        "fp32",
        "rows",
        False,
        False,
    )
    assert not settled.pin_memory
    assert not settled.constant_shapes
    (line,) = caplog.messages
    assert line.startswith(f"{kind}: the plain path is used (fp32, attention by rows")
    assert settle_runtime(load_recipe("demo", ["speed.precision=bf16"]), choose_device()).precision == "bf16"


@pytest.mark.parametrize("words", [
    ["speed.precision=fp16"], ["speed.compile=true"], ["speed.cuda_graphs=true"], ["speed.attention=varlen"],
    ["speed.fused_kernels=true"],
])  # fmt: skip
def test_what_only_cuda_has_is_rejected_elsewhere(monkeypatch, words):
    machine(monkeypatch, "mps")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=words[0].split("=")[0]):
        settle_runtime(load_recipe("demo", words), choose_device())


def test_the_setting_takes_the_same_names():
    for name in ("auto", "cpu", "cuda", "cuda:1", "mps", "xpu:0"):
        assert find_problems(load_recipe("demo", [f"train.device={name}"])) == []
    with pytest.raises(UserError, match=r"train.device=gpu: allowed are auto, cpu, cuda, mps, xpu"):
        load_recipe("demo", ["train.device=gpu"])


def test_garbage_waits_while_a_graph_is_recorded(monkeypatch):
    """A graph of an earlier run, destroyed during a recording, spoils the recording."""
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    assert gc.isenabled()
    with contextlib.suppress(RuntimeError), runtime.recording(None, None, None):
        assert not gc.isenabled()
        raise RuntimeError("of the work")
    assert gc.isenabled()


def test_a_run_on_a_cpu_keeps_the_pages_of_its_tensors():
    """Else every step waits for the system to clear fresh ones, the longer the larger its tensors."""
    program = (
        "import resource, torch\n"
        "from mmldlm.config import Config\n"
        "from mmldlm.runtime import return_pages, start_runtime\n"
        "config = Config()\n"
        "config.train.device = 'cpu'\n"
        "start_runtime(config)\n"
        "resident = lambda: int(open('/proc/self/statm').read().split()[1])\n"
        "faults = []\n"
        "for _ in range(24):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(2**24)\n"
        "    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
        "kept = resident()\n"
        "return_pages()\n"
        "print(faults[0], max(faults[12:]), kept - resident())\n"
    )
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("only glibc returns large blocks at once")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, later, returned = map(int, done.stdout.split())
    assert later < 0.2 * first
    assert returned > 0.9 * 2**26 / os.sysconf("SC_PAGE_SIZE")
