"""Small parts of the engine: stages of the batch, the clock, the profile, a compiler that fails."""

import gzip
import json
import os
import subprocess
import sys

import pytest
import torch

from mmldlm.data.loader import plan_steps
from mmldlm.errors import UserError
from mmldlm.metrics import read_log
from mmldlm.training.graphs import Graphs, LaunchWatch
from mmldlm.training.log_window import StepClock
from mmldlm.training.profile import _is_kernel, busy_share
from mmldlm.training.recovery import Attempts
from mmldlm.training.start import Beside, one_block, rehearse
from tests.runs import make_trainer
from tests.stores import write_store


def lines(trainer):
    return [line for line in read_log(trainer.run.training_log) if "loss" in line]


STAGES = "batch.schedule=[{until: 4, tokens_per_step: 64}, {until: 8, micro_tokens: 64}]"


def test_a_batch_that_grows_does_so_at_its_steps(store, tmp_path):
    trainer = make_trainer(tmp_path, store, STAGES, "train.log_every=1")
    trainer.fit()
    sizes = [(line["micro_tokens"], line["micro_batches"]) for line in lines(trainer)]
    assert sizes[:4] == [(80, 1)] * 4
    assert [count > 3 for _, count in sizes[4:8]] == [True] * 4
    assert sizes[8:] == [(272, 1)] * 4


def test_stages_resume_bit_by_bit_and_their_micro_batches_may_change(store, tmp_path):
    whole, half = (make_trainer(tmp_path / name, store, STAGES) for name in ("whole", "half"))
    whole.fit()
    run = half.train_step

    def one_step(*args):
        run(*args)
        if half.step == 5:  # the last checkpoint is that of step 4
            raise KeyboardInterrupt

    half.train_step = one_step
    with pytest.raises(KeyboardInterrupt):
        half.fit()
    again = make_trainer(tmp_path / "half", store, STAGES)
    again.fit()
    pairs = zip(whole.setup.denoiser.parameters(), again.setup.denoiser.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    other = STAGES.replace("micro_tokens: 64", "micro_tokens: 32")
    make_trainer(tmp_path / "half", store, other, "train.steps=13").fit()
    with pytest.raises(UserError, match=r"batch.schedule: .*64.* -> .*72"):
        make_trainer(
            tmp_path / "half",
            store,
            STAGES.replace("tokens_per_step: 64", "tokens_per_step: 72"),
            "train.steps=14",
        ).fit()


def test_stages_out_of_order_are_refused(store, tmp_path):
    with pytest.raises(UserError, match=r"batch.schedule: the stages end at \[8, 4\]"):
        make_trainer(tmp_path, store, "batch.schedule=[{until: 8}, {until: 4}]")
    with pytest.raises(UserError, match=r"batch.schedule\[0\].until=0"):
        make_trainer(tmp_path, store, "batch.schedule=[{tokens_per_step: 64}]")
    with pytest.raises(
        UserError, match=r"batch.schedule\[0\].tokens_per_step=8: the longest document has 24"
    ):
        make_trainer(tmp_path, store, "batch.schedule=[{until: 3, tokens_per_step: 8}]")


def test_on_a_cpu_all_waiting_counts():
    clock = StepClock(torch.device("cpu"))
    for waited in (0.5, 0.25):
        clock.begin(waited)
        clock.end()
    assert clock.read() == 0.75
    assert clock.read() == 0.0


@pytest.mark.parametrize(("ranges", "share"), [
    ([(0, 10)], 1.0), ([(0, 4), (6, 10)], 0.8), ([(0, 6), (2, 4), (5, 10)], 1.0), ([(6, 8), (0, 2)], 0.5),
])  # fmt: skip
def test_busy_is_what_at_least_one_kernel_covers(ranges, share):
    assert busy_share(ranges) == pytest.approx(share)


def test_labels_on_the_line_of_the_device_are_no_kernels():
    from types import SimpleNamespace

    def event(name, device="DeviceType.CUDA", label=False):
        return SimpleNamespace(name=name, device_type=device, is_user_annotation=label)

    assert _is_kernel(event("nvjet_gemm"))
    assert _is_kernel(event("void at::native::elementwise_kernel<128, 4, {lambda(int)#1}>(int)"))
    assert not _is_kernel(event("nvjet_gemm", device="DeviceType.CPU"))
    for name in ("ProfilerStep*", "Optimizer.step#AdamW.step"):
        assert not _is_kernel(event(name))
    assert not _is_kernel(event("a range of the user", label=True))


def test_a_profile_holds_a_trace_and_the_longest_operators(store, tmp_path):
    words = ["train.profile=true", "train.profile_wait=1", "train.profile_warmup=1", "train.profile_steps=2"]
    trainer = make_trainer(tmp_path, store, *words, "train.steps=5")
    trainer.fit()
    folder = trainer.run.path / "profile"
    trace = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    assert trace["traceEvents"]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["device_busy"] is None
    products = [row for row in summary["longest"] if row["name"] in ("aten::mm", "aten::addmm")]
    assert all(row["calls_per_step"] >= 10 for row in products)
    assert len(products) == 2
    assert 0 < sum(row["share"] for row in summary["longest"]) <= 1.0001
    assert (folder / "summary.md").read_text().startswith("# Profile of 2 steps")


def test_a_compiler_that_fails_is_switched_off_with_one_message(store, tmp_path, caplog):
    def broken(graph, inputs):
        raise RuntimeError("no code for this machine")

    trainer = make_trainer(tmp_path / "broken", store, "speed.compile=true", "speed.chunk_rows=64")
    for block in trainer.setup.denoiser.blocks:
        block.compile(backend=broken)
    trainer.fit()
    told = [record.message for record in caplog.records if "torch.compile failed" in record.message]
    assert len(told) == 1
    plain = make_trainer(tmp_path / "plain", store, "speed.chunk_rows=64")
    plain.fit()
    for ours, theirs in zip(lines(trainer), lines(plain), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.parametrize(("scored", "compiled"), [("true", [True, False]), ("false", [True, True])])
def test_a_last_block_whose_rows_vary_is_not_compiled(store, tmp_path, scored, compiled):
    setup = make_trainer(tmp_path, store, "speed.compile=true", f"speed.scored_rows={scored}").setup
    assert [block._compiled_call_impl is not None for block in setup.denoiser.blocks] == compiled


@pytest.mark.parametrize("words", [
    ["speed.activation_checkpointing=selective"], ["speed.activation_checkpointing=block"],
    ["speed.activation_checkpointing=budget", "speed.activation_budget=0.5"], ["speed.attention=reference"],
    ["data.num_workers=2"], ["batch.micro_documents=4"],
])  # fmt: skip
def test_no_switch_changes_the_loss(store, tmp_path, words):
    runs = [make_trainer(tmp_path / name, store, *more) for name, more in (("a", []), ("b", words))]
    for run in runs:
        run.fit()
    for ours, theirs in zip(*map(lines, runs), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_rows_take_documents_of_equal_length(tmp_path):
    equal = write_store(tmp_path / "store", min_length=8, max_length=8).path
    runs = [
        make_trainer(tmp_path / kind, equal, f"speed.attention={kind}")
        for kind in ("reference", "rows", "sdpa")
    ]
    for run in runs:
        run.fit()
    for plain, *others in zip(*map(lines, runs), strict=True):
        assert [other["loss"] for other in others] == pytest.approx([plain["loss"]] * 2, rel=1e-5)


def test_a_bf16_residual_stream_stays_near(store, tmp_path):
    runs = [make_trainer(tmp_path / kind, store, f"speed.residual={kind}") for kind in ("fp32", "bf16")]
    for run in runs:
        run.fit()
    found = [[line["loss"] for line in lines(run)] for run in runs]
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=5e-3)


def test_an_error_of_a_kernel_is_not_blamed_on_the_compiler_for_ever(store, tmp_path):
    trainer, calls = make_trainer(tmp_path, store, "speed.compile=true", "speed.chunk_rows=64"), []

    class KernelError(Exception):
        pass

    KernelError.__module__ = "triton.compiler.errors"

    def pass_over(micro_batch):
        calls.append(1)
        raise KernelError("no such tile")

    trainer.stepper.pass_over = pass_over
    with pytest.raises(KernelError):
        trainer.fit()
    assert len(calls) == 2


def test_recording_needs_a_gpu(store, tmp_path):
    with pytest.raises(UserError, match=r"speed.cuda_graphs=true: needs a CUDA GPU"):
        make_trainer(tmp_path, store, "speed.cuda_graphs=true", "train.device=cpu")


def test_a_profile_that_is_cut_short_counts_what_it_saw(store, tmp_path):
    words = [
        "train.profile=true",
        "train.profile_wait=1",
        "train.profile_warmup=1",
        "train.profile_steps=100",
    ]
    trainer = make_trainer(tmp_path, store, *words, "train.profile_details=false", "train.steps=5")
    trainer.fit()
    assert json.loads((trainer.run.path / "profile" / "summary.json").read_text())["steps"] == 3


WITHOUT_COMPILER = """
import sys, torch
from mmldlm.config import ModelConfig, OptimConfig
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.training.optim import Ema, build_optimizers
denoiser = Denoiser(ModelConfig(preset="tiny"), DataShape(20, 1, 4, 8))
optimizers = build_optimizers(denoiser, OptimConfig(name="muon"), fused=True)
average = Ema(denoiser, 0.9)
for parameter in denoiser.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizers.step(torch.amp.GradScaler("cpu", enabled=False), torch.zeros(()), None)
average.update(torch.zeros(()))
optimizers.zero_grad(set_to_none=True)
if sys.argv[1:]:
    from mmldlm.model.kernels.add_norm import add_norm
    x, parts = torch.ones(3, 16, requires_grad=True), torch.ones(2, 16)
    rows = torch.tensor([0, 0, 1], dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
    add_norm(x, x, parts, parts, parts, *rows, False)[1].sum().backward()
    assert x.grad is not None
assert not {"torch._dynamo", "sympy"} & set(sys.modules)
"""


@pytest.mark.parametrize("words", [[], ["fused"]])
def test_a_run_that_compiles_nothing_does_not_import_the_compiler(words: list[str]) -> None:
    if words:
        pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", WITHOUT_COMPILER, *words]
    subprocess.run(command, check=True, timeout=300, env=environment)


def test_a_rehearsal_changes_nothing(store, tmp_path):
    setup = make_trainer(tmp_path, store).setup
    batch = setup.reader().make(next(plan_steps(setup.order, setup.train_split.lengths, setup.plan, 0)))
    before = [parameter.clone() for parameter in setup.denoiser.parameters()]
    parts = (setup.config.model, setup.data_shape, setup.denoiser.kernels, setup.objective, setup.runtime)
    Beside("rehearsal", lambda: rehearse(*parts, batch.micro_batches[0].open())).wait()
    for parameter, value in zip(setup.denoiser.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.grad is None


def test_what_rehearses_is_on_the_device_as_a_whole(store, tmp_path):
    setup = make_trainer(tmp_path, store).setup
    denoiser = one_block(setup.config.model, setup.data_shape, torch.device("meta"))
    tensors = [*denoiser.parameters(), *denoiser.buffers()]
    assert len(denoiser.blocks) == 1
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_an_error_beside_the_main_thread_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise UserError("no memory")

    beside = Beside("weights", fail)
    beside.wait_or_ignore()
    with pytest.raises(UserError, match="no memory"):
        beside.wait()


def test_whether_launching_is_slow_is_measured_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def watch(key: str) -> LaunchWatch:
        return LaunchWatch(torch.device("cpu"), key, share=0.0)

    first = watch("this GPU")
    assert first.remembered() is None
    answers = [first.measure(lambda: "done") for _ in range(first.first + first.steps)]
    assert answers == [("done", None)] * (len(answers) - 1) + [("done", True)]
    assert watch("this GPU").remembered() is True
    assert watch("another GPU").remembered() is None


class Played:
    """What a recorded graph does, without a GPU: the work again, with its results in the same memory.

    Work is done while it is recorded, so the replay that follows at once does nothing.
    """

    def __init__(self, work):
        self.work, self.result, self.done = work, work(), True

    def replay(self):
        if not self.done:
            for old, new in zip(tensors(self.result), tensors(self.work()), strict=True):
                old.copy_(new)
        self.done = False


def tensors(result):
    return list(result if isinstance(result, tuple) else vars(result).values())


def trained_as_plain(store, tmp_path, *words):
    """The trainer of a run whose steps are recorded, after it has ended with the weights of one without."""
    plain, recorded = (make_trainer(tmp_path / name, store, *words) for name in ("plain", "recorded"))
    recorded.stepper.graphs = Graphs()
    plain.fit()
    recorded.fit()
    pairs = zip(plain.setup.denoiser.parameters(), recorded.setup.denoiser.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    return recorded


@pytest.mark.parametrize(("words", "fresh"), [((), True), (("batch.micro_tokens=80",), False)])
def test_recorded_steps_train_as_plain_ones_do(store, tmp_path, monkeypatch, words, fresh):
    def capture(self, work, name):
        graph = Played(work)
        return graph, graph.result

    monkeypatch.setattr(Graphs, "_capture", capture)
    recorded = trained_as_plain(store, tmp_path, *words)
    graphs = recorded.stepper.graphs
    assert graphs.fresh == fresh
    assert not graphs.broken
    assert graphs.recordings
    assert set(graphs._updates) == (set(graphs.recordings) if fresh else {"all"})
    kept = [parameter.grad is not None for parameter in recorded.setup.denoiser.parameters()]
    assert any(kept) != fresh


def test_a_recording_that_fails_leaves_no_gradient_behind(store, tmp_path, monkeypatch):
    def capture(self, work, name):
        work()
        raise RuntimeError("cannot be recorded")

    monkeypatch.setattr(Graphs, "_capture", capture)
    recorded = trained_as_plain(store, tmp_path)
    assert recorded.stepper.graphs.broken == "cannot be recorded"


@pytest.mark.parametrize("words", [(), ("batch.micro_tokens=80",)])
def test_an_update_for_whose_recording_there_is_no_memory_is_done_plainly(
    store, tmp_path, monkeypatch, words
):
    def capture(self, work, name):
        if name == "the update":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        graph = Played(work)
        return graph, graph.result

    monkeypatch.setattr(Graphs, "_capture", capture)
    recorded = trained_as_plain(store, tmp_path, *words)
    assert "out of memory" in recorded.stepper.graphs.broken


@pytest.mark.parametrize(("recorded", "kept"), [(0.002, True), (0.02, False)])
def test_ranks_record_only_where_the_slowest_of_them_gains(tmp_path, monkeypatch, recorded, kept):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    clock = [0.0]
    monkeypatch.setattr("mmldlm.training.graphs.time.perf_counter", lambda: clock[0])
    watch = LaunchWatch(torch.device("cpu"), "two", lambda own: max(own, 500))  # another rank is quicker
    assert watch.remembered() is None

    def step(seconds):
        clock[0] += seconds

    answers = [watch.measure(lambda: step(0.01))[1] for _ in range(9)]
    assert answers == [None] * 8 + [True]
    assert not watch.decided
    answers = [watch.measure(lambda: step(recorded))[1] for _ in range(13)]
    assert answers == [None] * 12 + [kept]
    assert watch.decided
    alone = LaunchWatch(torch.device("cpu"), "two")
    assert alone.remembered() is None  # the share of ranks says nothing about one process


@pytest.mark.parametrize("alone", [True, False])
def test_recording_that_nobody_asked_for_ends_where_memory_does(store, tmp_path, monkeypatch, alone):
    """While ranks try it, and once it is decided. Without it there was enough: no micro-batch is halved for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    trainer = make_trainer(tmp_path, store)
    watch = LaunchWatch(torch.device("cpu"), "two", None if alone else lambda own: max(own, 500))
    trainer.attempts = Attempts(trainer.stepper, watch)
    run, tried = trainer.stepper.pass_over, []

    def pass_over(micro_batch):
        if trainer.stepper.graphs is not None and len(micro_batch.noisy.tokens) > 150:
            tried.append(trainer.step)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return run(micro_batch)

    trainer.stepper.pass_over = pass_over
    trainer.fit()
    assert tried == [9]
    assert trainer.step == 12
    assert trainer.resizing.halvings == 0
    assert trainer.stepper.graphs is trainer.attempts.watch is None


def test_recording_goes_on_where_memory_runs_out_without_it_too(store, tmp_path, monkeypatch):
    """Then the micro-batch is too large, and a smaller one is recorded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    trainer = make_trainer(tmp_path, store)
    trainer.attempts = Attempts(trainer.stepper, LaunchWatch(torch.device("cpu"), "one"))
    run, tried = trainer.stepper.pass_over, []

    def pass_over(micro_batch):
        if trainer.step == 10 and len(micro_batch.noisy.tokens) > 150:
            tried.append(trainer.stepper.graphs is not None)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")
        return run(micro_batch)

    trainer.stepper.pass_over = pass_over
    trainer.fit()
    assert tried == [True, False]
    assert trainer.step == 12
    assert trainer.resizing.halvings == 1
    assert trainer.stepper.graphs is not None
