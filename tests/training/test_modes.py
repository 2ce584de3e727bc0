"""Stages of the modes in a run: what has no loss stands still to the bit, and no stop or rollback changes anything."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from mmldlm.data.loader import make_loader, plan_steps
from mmldlm.errors import Interrupted, UserError
from mmldlm.metrics import read_log
from mmldlm.model.weights import other_rows, part_of
from mmldlm.training import setup
from mmldlm.training.checkpoints import WHOLE
from tests.data.test_loader import contents
from tests.runs import make_trainer
from tests.stores import write_store
from tests.training.test_loop import StopAt, curve, same, weights

STAGES = (
    "corruption.mode_schedule=[{until: 4, mode_weights: {l2t: 1}}, "
    "{until: 8, mode_weights: {t2l: 1}, frozen: [shared]}]"
)
TURNS = (
    "corruption.mode_schedule=[{until_epoch: 0.3, mode_weights: {l2t: 1}}, "
    "{until_epoch: 0.5, mode_weights: {t2l: 1}}]"
)
RAMP = "corruption.mode_schedule=[{until: 9, mode_weights: {t2l: 1}, ramp: true}]"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=120).path


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    trainer = make_trainer(tmp_path_factory.mktemp("whole"), store, STAGES)
    trainer.fit()
    return trainer


def changes(trainer):
    return [
        (line["step"], line["stage"], line["losses"], line["frozen"])
        for line in map(json.loads, trainer.run.events.read_text().splitlines())
        if line["event"] == "modes"
    ]


def copies(trainer):
    return {name: tensor.clone() for name, tensor in weights(trainer).items()}


def parameter_of(name):
    """The parameter that a weight, an average or a moment belongs to."""
    head, _, rest = name.partition(".")
    name = name.removeprefix("ema ")
    return rest if head in ("exp_avg", "exp_avg_sq", "step", "momentum_buffer") else name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_has_no_loss_or_is_frozen_does_not_move_in_any_way(store, tmp_path, optimizer):
    trainer = make_trainer(tmp_path, store, STAGES, f"optim.name={optimizer}", "train.frozen=[length_head]")
    run, seen = trainer.train_step, [(copies(trainer), None)]

    def one_step(*args):
        run(*args)
        seen.append((copies(trainer), trainer.stepper.trained))

    trainer.train_step = one_step
    trainer.fit()
    moved = set()
    for (before, _), (after, trained) in itertools.pairwise(seen):
        for name, tensor in after.items():
            parameter = parameter_of(name)
            if name not in before:  # a moment is made when its parameter is trained for the first time
                assert parameter in trained.names
                continue
            if parameter not in trained.names:
                assert torch.equal(tensor, before[name]), name
            elif tensor.shape == trainer.setup.denoiser.get_parameter(parameter).shape:
                rows = trained.still.get(parameter, slice(0, 0))
                assert torch.equal(tensor[rows], before[name][rows]), name
                if not torch.equal(tensor[other_rows(rows)], before[name][other_rows(rows)]):
                    moved.add((id(trained), name))
    stages = [trained for _, trained in seen[1:]]
    for trained in stages:  # all else does move, if not at the first step, where some weights are zero
        for name in trained.names:
            assert {(id(trained), name), (id(trained), f"ema {name}")} <= moved, name
    assert [len(set(map(id, part))) for part in (stages[:4], stages[4:8], stages[8:])] == [1, 1, 1]
    assert not any(part_of(name) == "shared" for name in stages[4].names)
    names = {parameter_of(name) for name in trainer.snapshot().tensors["optimizer"]}
    assert names == {n for n, _ in trainer.setup.denoiser.named_parameters() if part_of(n) != "length_head"}


def test_each_change_is_in_the_ledger_once(whole):
    assert changes(whole) == [(4, 1, ["latent"], ["shared"]), (8, 2, ["text", "latent", "length"], [])]


@pytest.mark.parametrize("at", [4, 7])
def test_a_stop_before_at_or_after_a_change_leaves_no_trace(store, whole, tmp_path, at):
    first = make_trainer(tmp_path, store, STAGES)
    first.hooks.reporter = StopAt(first, at)
    with pytest.raises(Interrupted):
        first.fit()
    second = make_trainer(tmp_path, store, STAGES)
    second.fit()
    assert same(weights(second), weights(whole))
    assert curve(second) == curve(whole)
    assert changes(second) == changes(whole)


@pytest.mark.parametrize(
    ("share", "old", "words", "told"),
    [
        (0.5, True, [], True),
        (0.0, True, [], False),
        (0.5, False, [], False),
        (0.5, True, ["corruption.mode_weights={l2t: 1}"], True),  # conditions are dropped
        (0.5, True, ["corruption.mode_weights={l2t: 1}", "corruption.condition_dropout=0"], False),
    ],
)
def test_a_run_from_before_whole_documents_alone_were_joint_is_told_so(
    store, tmp_path, caplog, share, old, words, told
):
    trainer = make_trainer(tmp_path, store, *words)
    snapshot = trainer.snapshot()
    if old:
        del snapshot.meta[WHOLE]
    trainer.checkpoints.latest = lambda: snapshot
    trainer.setup.train_split = SimpleNamespace(derived_share=share)
    assert trainer._resume_or_start()
    assert ("derived documents" in caplog.text) == told


def test_other_stages_are_refused_on_resume(store, whole):
    for word in ("corruption.mode_choice=batch", "train.frozen=[text]", RAMP):
        with pytest.raises(UserError, match=word.split("=")[0]):
            make_trainer(whole.run.path.parent, store, STAGES, word).fit()


@pytest.mark.parametrize(
    "words",
    [(STAGES,), (TURNS, "corruption.mode_repeat=true"), (RAMP,), ("corruption.mode_choice=batch",)],
    ids=["stages", "turns", "ramp", "batch"],
)
def test_documents_and_counts_do_not_depend_on_ranks_micro_batches_workers_or_where_reading_begins(
    store, tmp_path, words
):
    reader = make_trainer(tmp_path, store, *words).setup.reader()
    small = make_trainer(tmp_path, store, *words, "batch.micro_tokens=64").setup.reader()
    first = plan_steps(reader.order, reader.split.lengths, reader.plan, 0)
    steps = list(itertools.islice(first, 12))
    rest = list(
        itertools.islice(plan_steps(reader.order, reader.split.lengths, reader.plan, steps[7].start, 7), 5)
    )
    assert rest == steps[7:]
    loader = make_loader(reader, iter(steps), num_workers=2, prefetch=1, pin_memory=False)
    modes = set()
    for where, from_worker in zip(steps, loader, strict=True):
        made, cut = reader.make(where), small.make(where)
        ranks = [replace(small, rank=rank, world_size=2).make(where) for rank in (0, 1)]
        assert contents(made) == contents(cut) == contents(from_worker)
        assert contents(made) == sorted(document for part in ranks for document in contents(part))
        assert made.counts == cut.counts == from_worker.counts == ranks[0].counts == ranks[1].counts
        modes.add((made.counts.tokens > 0, made.counts.slots > 0))
    assert len(modes) > 1


def test_the_loss_of_a_scheduled_run_does_not_depend_on_micro_batches(store, whole, tmp_path):
    trainer = make_trainer(tmp_path, store, STAGES, "batch.micro_tokens=64")
    trainer.fit()
    for ours, theirs in zip(curve(trainer), curve(whole), strict=True):
        for key in ("loss", "text_loss", "latent_loss", "length_loss", "grad_norm"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=1e-4), (ours["step"], key)


def test_a_block_is_compiled_once_for_each_pattern_of_frozen_parameters(store, tmp_path, monkeypatch):
    counter = CompileCounter()

    def compile_blocks(denoiser, **options):
        for block in denoiser.blocks:
            block.compile(fullgraph=True, dynamic=False, backend=counter)

    monkeypatch.setattr(setup, "compile_blocks", compile_blocks)
    words = (TURNS.replace("_epoch: 0.", ": "), "corruption.mode_repeat=true", "speed.compile=true")
    trainer = make_trainer(tmp_path, store, *words, "speed.scored_rows=false", "train.steps=9")
    run, compiled = trainer.train_step, []

    def one_step(*args):
        run(*args)
        compiled.append(counter.frame_count)

    trainer.train_step = one_step
    torch._dynamo.reset()
    try:
        trainer.fit()
    finally:
        torch._dynamo.reset()
    # a plain block and the last one of l2t; from step 3 on the last one of t2l; nothing new in later turns
    assert compiled == [2] * 3 + [3] * 6


def test_losses_are_told_of_the_steps_that_have_them(store, tmp_path):
    """Where each step has one mode, a mean over all steps would tell a text loss that is too small."""
    words = ("corruption.mode_choice=batch", "corruption.mode_weights.joint=0", "train.steps=12")
    trainer = make_trainer(tmp_path, store, *words, "train.log_every=12", "train.valid_every=0")
    add, seen = trainer.window.add, []

    def added(result, batch):
        seen.append((result.terms, batch.counts))
        add(result, batch)

    trainer.window.add = added
    trainer.fit()
    (line,) = [line for line in read_log(trainer.run.training_log) if "loss" in line]
    text = [float(terms.text) for terms, counts in seen if counts.tokens]
    latent = [float(terms.latent) for terms, counts in seen if counts.slots]
    assert 0 < len(text) < 12
    assert len(text) + len(latent) == 12
    assert line["text_loss"] == pytest.approx(sum(text) / len(text), rel=1e-5)
    assert line["latent_loss"] == pytest.approx(sum(latent) / len(latent), rel=1e-5)
    assert line["loss"] == pytest.approx(sum(float(terms.loss) for terms, _ in seen) / 12, rel=1e-5)
