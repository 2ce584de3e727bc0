"""The ladder is what it says: one change a rung, one left out, and every setting known."""

import itertools

import pytest

from mmldlm.benchmark.arms import (
    SWITCHES,
    Arm,
    again,
    interleave,
    ladder,
    parse_arm,
    plan_ladder,
    reference_settings,
    select,
)
from mmldlm.config import BatchConfig
from mmldlm.config.recipe import load_recipe
from mmldlm.errors import UserError

SWITCHED_ON = {switch.on for switch in SWITCHES if switch.gpu_only}


def difference(left: Arm, right: Arm) -> int:
    return len(set(left.settings) ^ set(right.settings)) // 2


@pytest.mark.parametrize("on_gpu", [True, False])
def test_every_rung_changes_one_switch_and_every_switch_is_left_out_once(on_gpu):
    arms = [arm for arm in ladder("full", on_gpu) if on_gpu or not arm.gpu_only]
    top = next(idx for idx, arm in enumerate(arms) if arm.name == "everything")
    rungs, others = arms[: top + 1], arms[top + 1 :]
    usable = [switch for switch in SWITCHES if on_gpu or not switch.gpu_only]
    assert rungs[0].settings == reference_settings()
    assert len(rungs) == 1 + len(usable)
    assert all(difference(low, high) == 1 for low, high in itertools.pairwise(rungs))
    left_out = [arm for arm in others if arm.name.startswith("without ")]
    assert len(left_out) == len(usable) - 1, "leaving out the last one is the rung below the top"
    assert all(difference(arm, rungs[-1]) == 1 for arm in left_out)
    assert {arm.name for arm in others} - {arm.name for arm in left_out} >= {
        "checkpointing block",
        "defaults",
    }


def test_every_arm_is_made_of_known_settings():
    for arm in [*ladder("full", True), *ladder("full", False)]:
        load_recipe("reference", list(arm.settings))
        assert arm.comparable


def test_without_a_gpu_no_arm_that_runs_turns_a_switch_of_a_gpu_on():
    arms = ladder("full", on_gpu=False)
    assert all(arm.gpu_only for arm in arms if set(arm.settings) & SWITCHED_ON)
    assert {arm.name for arm in arms if arm.gpu_only} >= {"bf16", "attention tiles"}


def test_no_two_arms_are_the_same_and_the_short_ladder_is_part_of_the_full_one():
    full = ladder("full", True)
    assert len({arm.settings for arm in full}) == len({arm.name for arm in full}) == len(full)
    assert [arm.name for arm in ladder("short", True)] == ["baseline", "bf16", "everything"]
    assert all(arm in full for arm in ladder("short", True))
    assert ladder("none", True) == []


def test_rounds_hold_every_arm_once_and_begin_at_different_places():
    arms = [Arm("a"), again(Arm("a")), *(Arm(name) for name in "bcdefg")]
    rounds = [interleave(arms, repeat, 4) for repeat in range(4)]
    assert rounds[0] == arms, "the baseline against itself comes first"
    assert all(sorted(arm.name for arm in one) == sorted(arm.name for arm in arms) for one in rounds)
    assert len({one[0].name for one in rounds}) == 4
    places = {arm.name: idx for idx, arm in enumerate(rounds[1])}
    apart = abs(places["a"] - places["a again"])
    assert min(apart, len(arms) - apart) >= 3, "later, drift shows between the two"


def test_an_arm_of_ones_own():
    arm = parse_arm("wide rows: speed.chunk_rows=4096 model.width=512")
    assert (arm.name, arm.settings) == ("wide rows", ("speed.chunk_rows=4096", "model.width=512"))
    assert not arm.comparable
    assert parse_arm("as it is:").settings == ()


@pytest.mark.parametrize("text", ["no colon", ": speed.compile=true", "a,b: speed.compile=true"])
def test_an_arm_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError, match=r"--arm .*: an arm is written 'name: section\.key=value"):
        parse_arm(text)


def test_a_selection_keeps_the_baseline_and_refuses_what_is_not_there():
    arms = [Arm("baseline"), Arm("x"), Arm("y")]
    assert [arm.name for arm in select(arms, ["y"], "baseline")] == ["baseline", "y"]
    assert select(arms, [], "x") == arms
    with pytest.raises(UserError, match="no arm is called 'z'; the arms are baseline, x, y"):
        select(arms, ["z"], "baseline")
    with pytest.raises(UserError, match="--arm x: two arms have this name"):
        select([*arms, Arm("x")], [], "baseline")


PLAN = [
    "baseline", "data loading", "activation checkpointing", "larger batch", "DDP", "fused optimizer", "compile",
    "flash attention", "accumulation without sync", "defaults",
]  # fmt: skip


@pytest.mark.parametrize("on_gpu", [True, False])
def test_the_plan_is_climbed_in_its_order_and_every_step_keeps_the_ones_before(on_gpu):
    arms = plan_ladder(BatchConfig(tokens_per_step=4096), 64, on_gpu)
    assert [arm.name for arm in arms] == PLAN
    assert [arm.name for arm in arms if arm.absent] == ["DDP", "accumulation without sync"]
    assert [arm.name for arm in arms if arm.gpu_only] == ["flash attention"]
    for arm in arms:
        assert arm.comparable
        load_recipe("small", list(arm.settings))
    climbed = [arm for arm in arms[:-1] if not arm.absent and (on_gpu or not arm.gpu_only)]
    for low, high in itertools.pairwise(climbed):
        assert set(high.settings) - set(low.settings) == set(high.change.removeprefix("+ ").split())
    assert "batch.micro_tokens=1024" in arms[0].settings
    assert "batch.micro_tokens=2048" in arms[-2].settings


def test_the_plan_expects_what_its_authors_wrote():
    arms = plan_ladder(BatchConfig(tokens_per_step=4096), 64, on_gpu=True)
    speeds = [arm.expected.speed for arm in arms if arm.expected]
    memory = [arm.expected.memory for arm in arms if arm.expected]
    assert speeds == [1.0, 1.1, 1.1, 1.3, 1.5, 1.8]
    assert memory == [1.0, 1.0, 0.65, 0.65, 0.65, 0.65]


def test_a_step_that_cannot_be_cut_in_four_says_so():
    batch = BatchConfig(tokens_per_step=None, documents_per_step=1)
    step = next(arm for arm in plan_ladder(batch, 64, on_gpu=True) if arm.name == "larger batch")
    assert "too few documents" in step.absent
