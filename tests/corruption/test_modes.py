"""Modes over the course of a run: one pure function of step and epoch."""

import re
from dataclasses import replace

import numpy as np
import pytest

from mmldlm.config import MODES, CorruptionConfig, ModeStage, ModeWeights, StageWeights
from mmldlm.corruption.times import (
    describe_modes,
    draw_times,
    mode_weights_at,
    modes_of_run,
    stage_at,
    weights_beside_derived,
    without_schedule,
)
from mmldlm.types import When

L2T, T2L, JOINT = (StageWeights(**{mode: 1.0}) for mode in MODES)
POSITIONS = np.arange(400)
KEYS = POSITIONS.astype(np.uint64) * np.uint64(977)


def weights(config, step=0, epoch=0.0):
    found = mode_weights_at(config, step, epoch)
    return found.l2t, found.t2l, found.joint


def modes_of(times):
    """Mode of each document, from what is to be produced."""
    return [
        {(True, False): "l2t", (False, True): "t2l", (True, True): "joint"}[pair]
        for pair in zip(times.text_is_target.tolist(), times.latent_is_target.tolist(), strict=True)
    ]


def test_without_a_schedule_the_weights_hold_always():
    config = CorruptionConfig(ModeWeights(2, 1, 0))
    assert weights(config) == weights(config, 10**9, 1e6) == (2, 1, 0)
    assert modes_of_run(config) is config.mode_weights
    assert without_schedule(config) == config


def test_stages_end_before_their_step_and_then_the_plain_weights_hold():
    stages = [ModeStage(until=3, mode_weights=L2T), ModeStage(until=5, mode_weights=T2L, frozen=["text"])]
    config = CorruptionConfig(ModeWeights(1, 2, 3), mode_schedule=stages)
    assert [weights(config, step) for step in range(7)] == [(1, 0, 0)] * 3 + [(0, 1, 0)] * 2 + [(1, 2, 3)] * 2
    assert [stage_at(config, step).number for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert [stage_at(config, step).frozen for step in (2, 3, 5)] == [(), ("text",), ()]


def test_stages_by_epoch_do_not_look_at_the_step():
    config = CorruptionConfig(mode_schedule=[ModeStage(until_epoch=1.5, mode_weights=T2L)])
    assert weights(config, 10**6, 1.4999) == (0, 1, 0)
    assert weights(config, 0, 1.5) == (1, 1, 1)


@pytest.mark.parametrize("by_epoch", [False, True])
def test_turns_repeat_for_ever_and_each_is_a_stage_of_its_own(by_epoch):
    ends = [{"until_epoch": end} if by_epoch else {"until": end} for end in (2, 5)]
    stages = [ModeStage(**end, mode_weights=which) for end, which in zip(ends, (L2T, T2L), strict=True)]
    config = CorruptionConfig(ModeWeights(0, 0, 1), mode_schedule=stages, mode_repeat=True)
    times = [{"step": 0, "epoch": float(t)} if by_epoch else {"step": t} for t in range(13)]
    assert "".join("lt"[int(weights(config, **t)[1])] for t in times) == "llttt" * 2 + "llt"
    assert [stage_at(config, **t).number for t in times] == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5]
    run = modes_of_run(config)
    assert (run.l2t, run.t2l, run.joint) == (0.5, 0.5, 0)  # the plain weights never hold


def test_a_ramp_is_a_straight_line_between_shares():
    stages = [
        ModeStage(until=10, mode_weights=StageWeights(l2t=7), ramp=True),
        ModeStage(until=30, mode_weights=StageWeights(l2t=1, t2l=1), ramp=True),
    ]
    config = CorruptionConfig(ModeWeights(0, 0, 5), mode_schedule=stages)
    assert weights(config, 0) == (1, 0, 0)
    assert weights(config, 5) == pytest.approx((0.75, 0.25, 0))
    assert weights(config, 10) == pytest.approx((0.5, 0.5, 0))
    assert weights(config, 25) == pytest.approx((0.125, 0.125, 0.75))
    assert weights(config, 30) == (0, 0, 5)
    assert stage_at(config, 0).modes == {"l2t", "t2l"}  # what is trained does not change inside a stage
    assert stage_at(config, 10).modes == set(MODES)
    turns = replace(config, mode_repeat=True)  # the last stage goes over to the first
    assert weights(turns, 20) == pytest.approx((0.75, 0.25, 0))
    assert weights(turns, 29.99) == pytest.approx((1, 0, 0), abs=1e-3)
    assert stage_at(turns, 20).modes == {"l2t", "t2l"}


def test_a_batch_has_one_mode_that_depends_on_seed_and_step_alone():
    config = CorruptionConfig(ModeWeights(2, 1, 1), mode_choice="batch")
    drawn = []
    for step in range(600):
        whole = modes_of(draw_times(POSITIONS[:7], KEYS[:7], config, 3, When(step)))
        other = modes_of(draw_times(POSITIONS[300:302], KEYS[1:3], config, 3, When(step, 9.0)))
        assert len({*whole, *other}) == 1
        drawn.append(whole[0])
    shares = [drawn.count(mode) / len(drawn) for mode in MODES]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=4 * (0.25 / 600) ** 0.5)
    assert drawn != [modes_of(draw_times(POSITIONS[:1], KEYS[:1], config, 4, When(s)))[0] for s in range(600)]
    # times and dropped conditions are still each document's own
    mixed = draw_times(POSITIONS, KEYS, config, 3, When(drawn.index("l2t")))
    assert len(set(mixed.text_time.tolist())) > 390
    assert 0 < (mixed.latent_time == 1).mean() < 0.2


def test_documents_follow_the_weights_of_their_step():
    config = CorruptionConfig(
        ModeWeights(0, 0, 1), mode_schedule=[ModeStage(until=4, mode_weights=StageWeights(l2t=3, t2l=1))]
    )
    early = modes_of(draw_times(POSITIONS, KEYS, config, 0, When(3)))
    assert early.count("l2t") == pytest.approx(300, abs=3)
    assert early.count("t2l") == pytest.approx(100, abs=3)
    assert set(modes_of(draw_times(POSITIONS, KEYS, config, 0, When(4)))) == {"joint"}


@pytest.mark.parametrize("mode", MODES)
def test_a_dropped_condition_is_never_scored_and_joint_has_none(mode):
    config = CorruptionConfig(
        condition_dropout=0.3, mode_schedule=[ModeStage(until=1, mode_weights=StageWeights(**{mode: 1.0}))]
    )
    times = draw_times(POSITIONS, KEYS, config, 0)
    conditions = {"l2t": times.latent_time, "t2l": times.text_time}
    targets = {"l2t": times.latent_is_target, "t2l": times.text_is_target}
    if mode == "joint":
        assert times.text_is_target.all()
        assert times.latent_is_target.all()
    else:
        assert set(conditions[mode].tolist()) == {0.0, 1.0}
        assert not targets[mode].any()
        assert conditions[mode].mean() == pytest.approx(0.3, abs=0.1)


def test_shares_are_told_as_they_are_drawn():
    two_set = CorruptionConfig(mode_weights=ModeWeights(l2t=2.0))  # the others stay at 1
    assert describe_modes(two_set) == "l2t 50 %, t2l 25 %, joint 25 % of the documents"
    staged = CorruptionConfig(
        mode_weights=ModeWeights(0.0, 1.0, 0.0),
        mode_schedule=[ModeStage(until=9, mode_weights=StageWeights(l2t=1.0))],
    )
    assert describe_modes(staged).startswith("l2t 50 %, t2l 50 %, joint 0 % of the documents, on average")


DERIVED = np.arange(len(POSITIONS)) % 10 != 0


def test_whole_documents_alone_are_joint_and_take_over_its_share():
    config = CorruptionConfig(ModeWeights(6, 3, 0.4), condition_dropout=0.5)
    many = np.arange(20_000)
    derived = many % 10 != 0
    keys = many.astype(np.uint64) * np.uint64(977)
    times = draw_times(many, keys, config, 3, derived=derived, derived_share=0.9)
    modes = np.array(modes_of(times))
    assert set(modes[derived]) == {"l2t", "t2l"}
    shares = {mode: (modes == mode).mean() for mode in MODES}
    assert shares["joint"] == pytest.approx(0.4 / 9.4, abs=3e-3)
    assert shares["l2t"] == pytest.approx(2 * shares["t2l"], rel=0.03)
    # a condition that is dropped has time 1
    assert (times.latent_time[derived & (modes == "l2t")] == 0).all()
    assert (times.text_time[derived & (modes == "t2l")] == 0).all()
    dropped = times.latent_time[~derived & (modes == "l2t")] == 1
    assert dropped.mean() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize(
    ("given", "share", "joint"),
    [
        ((6, 3, 1), 0.5, 0.2),  # 10 % of all are 20 % of the half that is whole
        ((6, 3, 1), 0.9, 0.5),  # they would be all of the whole ones: no more than half
        ((1, 1, 8), 0.9, 0.8),  # unless the weights themselves ask for more
        ((1, 1, 8), 1.0, 0.8),
    ],
)
def test_share_of_joint_among_whole_documents(given, share, joint):
    whole, derived = weights_beside_derived(ModeWeights(*given), share)
    assert whole.joint / (whole.l2t + whole.t2l + whole.joint) == pytest.approx(joint)
    assert (
        whole.l2t / whole.t2l
        == pytest.approx(given[0] / given[1])
        == pytest.approx(derived.l2t / derived.t2l)
    )
    assert derived.joint == 0


@pytest.mark.parametrize("given", [(0, 0, 1), (2, 1, 0)])
@pytest.mark.parametrize("choice", ["document", "batch"])
def test_derived_documents_are_like_others_where_there_is_joint_alone_or_none(given, choice):
    config = CorruptionConfig(ModeWeights(*given), condition_dropout=0.0, mode_choice=choice)
    plain = draw_times(POSITIONS, KEYS, config, 3)
    beside = draw_times(POSITIONS, KEYS, config, 3, derived=DERIVED, derived_share=0.9)
    assert modes_of(plain) == modes_of(beside)


def test_a_step_of_one_mode_holds_for_derived_documents_too():
    config = CorruptionConfig(ModeWeights(1, 1, 2), condition_dropout=0.0, mode_choice="batch")
    steps = [
        set(modes_of(draw_times(POSITIONS, KEYS, config, 3, When(step, 0.0), DERIVED, 0.9)))
        for step in range(24)
    ]
    assert all(len(modes) == 1 for modes in steps)
    assert {mode for modes in steps for mode in modes} == set(MODES)
    assert describe_modes(config, 0.9) == describe_modes(config)


def test_text_alone_stays_without_latents_on_derived_documents():
    config = CorruptionConfig(ModeWeights(1, 0, 0), condition_dropout=1.0)
    times = draw_times(POSITIONS, KEYS, config, 3, derived=DERIVED, derived_share=0.9)
    assert (times.latent_time == 1).all()


def test_modes_are_described_as_they_are_drawn_beside_derived_documents():
    config = CorruptionConfig(ModeWeights(6, 3, 1))
    text = "l2t 60 %, t2l 30 %, joint 10 % of the documents; joint takes whole documents alone, 20 % of them"
    # 40 of 90 documents that have a condition are whole, and a tenth of these lose it
    dropped = "; conditions are dropped in whole documents alone, in 4.4 % of l2t and t2l"
    assert describe_modes(config, 0.5) == text + dropped
    assert describe_modes(replace(config, condition_dropout=0.0), 0.5) == text
    # the share of joint among whole documents is that of the weights, and derived ones have none
    half = describe_modes(CorruptionConfig(ModeWeights(1, 0, 1), condition_dropout=0.0), 0.9)
    assert half == (
        "l2t 95 %, t2l 0 %, joint 5 % of the documents; joint takes whole documents alone, 50 % of them"
    )


@pytest.mark.parametrize("first", [JOINT, StageWeights(l2t=1, t2l=1, joint=1), L2T])
def test_stages_are_described_as_they_are_drawn_beside_derived_documents(first):
    config = CorruptionConfig(
        ModeWeights(1, 1, 0), condition_dropout=0.5, mode_schedule=[ModeStage(until=1, mode_weights=first)]
    )
    many = np.arange(40_000)
    derived, keys = many % 10 != 0, many.astype(np.uint64) * np.uint64(977)
    both = [draw_times(many, keys, config, 3, When(step), derived, 0.9) for step in (0, 1)]
    modes = np.concatenate([modes_of(times) for times in both])
    noisy = np.concatenate(
        [
            np.maximum(times.text_time * ~times.text_is_target, times.latent_time * ~times.latent_is_target)
            for times in both
        ]
    )
    shares = {mode: (modes == mode).mean() for mode in MODES}
    text = describe_modes(config, 0.9)
    said = dict(re.findall(r"(l2t|t2l|joint) (\d+) %", text))
    assert {mode: float(share) for mode, share in said.items()} == pytest.approx(
        {mode: 100 * share for mode, share in shares.items()}, abs=1.0
    )
    lost = (noisy == 1.0).sum() / (modes != "joint").sum()
    assert float(re.findall(r"in ([\d.]+) % of l2t", text)[0]) == pytest.approx(100 * lost, abs=0.4)
    assert ("joint takes whole" in text) == (first.l2t == first.joint)
