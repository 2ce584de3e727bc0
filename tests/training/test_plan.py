"""The course of a run, as `--dry-run` draws it."""

import itertools
import re

import pytest

import mmldlm
from mmldlm.config import MODES
from mmldlm.data.loader import plan_steps
from mmldlm.metrics import read_log
from mmldlm.training.optim import lr_at
from mmldlm.training.plan import course_of, describe
from tests.runs import make_trainer
from tests.stores import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=120).path


def test_the_course_is_what_the_run_does(store, tmp_path):
    words = ("batch.schedule=[{until: 5, tokens_per_step: 128}]", "optim.schedule=wsd", "train.log_every=1")
    trainer = make_trainer(tmp_path, store, *words, "corruption.mode_weights.joint=2")
    course = course_of(trainer.setup)
    trainer.fit()
    logged = [line for line in read_log(trainer.run.training_log) if "lr" in line]
    assert course.steps == list(range(12))
    assert course.lr == pytest.approx([line["lr"] for line in logged])
    # a step takes whole documents, so it stays below its tokens by about half of one
    sizes = [line["batch_size"] for line in logged]
    assert sum(course.documents) == pytest.approx(sum(sizes), rel=0.15)
    assert course.tokens == pytest.approx([128.0] * 5 + [256.0] * 7)
    assert [course.modes[mode][3] for mode in MODES] == [0.25, 0.25, 0.5]
    assert describe(trainer.setup)["epochs"] == pytest.approx(sum(course.documents) / 120, abs=0.01)


def test_a_long_run_is_drawn_with_the_ends_of_its_stages(store, tmp_path):
    words = ("train.steps=1000000", "batch.schedule=[{until: 777, tokens_per_step: 128}]")
    setup = make_trainer(tmp_path, store, *words).setup
    course = course_of(setup)
    assert len(course.steps) <= 2002
    assert (course.steps[0], course.steps[-1]) == (0, 999_999)
    at = course.steps.index(777)
    assert (course.tokens[at - 1], course.tokens[at]) == (128.0, 256.0)
    assert course.lr[-1] == lr_at(999_999, 1_000_000, setup.config.optim)


@pytest.mark.parametrize("choice", ["document", "batch"])
def test_modes_are_drawn_as_the_dry_run_lists_them_where_documents_are_derived(tmp_path, choice):
    texts = [f"a coil of rope, the open sea and boat {number}" for number in range(30)]
    store = mmldlm.prepare(
        texts, tmp_path / "store", encoder=lambda texts: [[float(len(text)), 1.0] for text in texts], derive=4
    ).path
    words = (f"corruption.mode_choice={choice}", "corruption.mode_weights={l2t: 3, t2l: 1, joint: 1}")
    setup = make_trainer(tmp_path, store, *words).setup
    listed = dict(re.findall(r"(\w+) (\d+) %", describe(setup)["modes"].split(" of the documents")[0]))
    for shares in zip(*course_of(setup).modes.values(), strict=True):
        assert {mode: f"{100 * share:.0f}" for mode, share in zip(MODES, shares, strict=True)} == listed
    assert listed["joint"] == "20" if choice == "batch" else 0 < int(listed["joint"]) < 15
    drawn = dict.fromkeys(MODES, 0.0)
    for where in itertools.islice(plan_steps(setup.order, setup.train_split.lengths, setup.plan, 0), 150):
        step = setup.reader().make(where)
        l2t = step.num_documents - step.counts.slots
        t2l = step.num_documents - step.counts.documents
        for mode, number in zip(MODES, (l2t, t2l, step.num_documents - l2t - t2l), strict=True):
            drawn[mode] += number
        parts = [parcel.open().noisy for parcel in step.micro_batches]
        assert sum(float(part.latent_target.sum()) for part in parts) == step.counts.slots
    shares = {mode: 100 * number / sum(drawn.values()) for mode, number in drawn.items()}
    assert shares == pytest.approx({mode: float(share) for mode, share in listed.items()}, abs=2.5)
