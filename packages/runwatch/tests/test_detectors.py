"""Each detector on a curve whose answer is known: it finds the fault, at the right step, and nothing else."""

import math
import random

import pytest
from runwatch.catalogue import BY_CODE
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts
from runwatch.parser import LineParser
from runwatch.records import Record
from runwatch.settings import MonitorSettings


def healthy(step, noise, total=400):
    """A line of a run that learns: falling noisy loss, warm-up and cosine rate, steady speed."""
    lr = 1e-3 * min(step / 20, 0.5 * (1 + math.cos(math.pi * step / total)))
    return {
        "loss": 2 + 3 / (1 + step / 50) + noise.gauss(0, 0.1),
        "lr": lr,
        "grad_norm": 1 + abs(noise.gauss(0, 0.3)),
        "tokens_per_second": 1000 * (1 + noise.gauss(0, 0.05)),
        "data_wait": 0.02,
        "batch_size": 32,
    }


def run_panel(change=lambda step, fields: None, steps=400, seed=0, facts=None):
    """A run with a fault injected by `change`; the panel after its last line."""
    noise, panel = random.Random(seed), Panel(facts=facts or RunFacts(total_steps=steps))
    for step in range(1, steps + 1):
        fields = healthy(step, noise, steps)
        change(step, fields)
        panel.observe_fields(step, fields, time=1000.0 + step)
    panel.tick(1000.0 + steps, live=True)
    return panel


def codes(panel):
    return {alert.code for alert in panel.book.alerts.values()}


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_no_alert(seed):
    assert codes(run_panel(seed=seed)) == set()


FAULTS = {
    "M101": (lambda s, f: s == 200 and f.update(loss=math.nan), 1),
    "M102": (lambda s, f: s == 200 and f.update(loss=3 * f["loss"]), 1),
    "M103": (lambda s, f: s >= 200 and f.update(loss=f["loss"] + (s - 200) * 0.05), 40),
    "M201": (lambda s, f: s == 200 and f.update(grad_norm=math.inf), 1),
    "M202": (lambda s, f: 200 <= s < 205 and f.update(grad_norm=30.0), 4),
    "M203": (lambda s, f: s >= 200 and f.update(grad_norm=1e-5), 6),
    "M204": (lambda s, f: s >= 200 and f.update(lr=0.0), 6),
    "M205": (lambda s, f: 200 <= s < 240 and f.update(skipped_steps=1), 1),
    "M301": (lambda s, f: s >= 200 and f.update(tokens_per_second=400.0), 5),
    "M302": (lambda s, f: s >= 200 and f.update(tokens_per_second=(1000, 450)[s % 2]), 45),
    "M303": (lambda s, f: s >= 200 and f.update(data_wait=0.6), 10),
    "M402": (lambda s, f: s >= 200 and f.update(batch_size=8), 6),
    "M801": (lambda s, f: s % 20 == 0 and f.update(valid_loss=2 + abs(s - 200) / 100), 120),
    "M802": (lambda s, f: f.update(latent_prediction_norm=1.0 if s < 200 else 0.01), 6),
    "M803": (lambda s, f: s % 20 == 0 and f.update(valid_text_loss=2.0, valid_text_loss_shuffled=2.001), 400),
}


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("seed", range(3))
def test_a_fault_is_found_in_time_and_alone(code, seed):
    change, delay = FAULTS[code]
    panel = run_panel(change, seed=seed)
    assert codes(panel) == {code}
    alert = next(iter(panel.book.alerts.values()))
    earliest = 1 if code == "M803" else 200
    assert earliest <= alert.first_step <= 200 + delay
    assert 0.5 <= alert.sure <= 1
    assert any(letter.isdigit() for letter in alert.evidence)


def test_a_flat_loss_is_a_plateau_unless_the_rate_has_decayed():
    def flat(step, fields):
        fields.update(loss=2.0 + 0.01 * math.sin(step), lr=1e-3)

    assert codes(run_panel(flat, steps=2000, facts=RunFacts())) == {"M104"}

    def decayed(step, fields):
        flat(step, fields)
        fields["lr"] = 1e-3 if step < 300 else 1e-4

    assert codes(run_panel(decayed, steps=2000, facts=RunFacts())) == set()


def test_the_mean_of_a_diffusion_loss_may_jump_when_no_bucket_does():
    """Few early times drawn: every bucket stays, the mean jumps. With buckets that is no spike; without, it is."""

    def drawn(step, fields):
        fields.update(loss=9.0 if step == 300 else 3.0 + 0.01 * math.sin(step))

    def with_buckets(step, fields):
        drawn(step, fields)
        fields["text_loss_by_time"] = [value + 0.01 * math.cos(step) for value in (1.0, 3.0, 9.0)]

    def all_buckets_jump(step, fields):
        with_buckets(step, fields)
        if step == 300:
            fields["text_loss_by_time"] = [3.0, 9.0, 27.0]

    assert codes(run_panel(drawn)) == {"M102"}
    assert codes(run_panel(with_buckets)) == set()
    assert codes(run_panel(all_buckets_jump)) == {"M102"}


@pytest.mark.parametrize("staged", [True, False])
def test_a_loss_may_be_another_in_another_stage_of_the_modes(staged):
    def change(step, fields):
        fields["loss"] *= 6.0 if step > 200 else 1.0
        if staged:
            fields["mode_stage"] = int(step > 200)

    assert bool(codes(run_panel(change)) & {"M102", "M103"}) != staged


def test_the_learning_rate_may_not_jump_after_a_resume_and_may_decay_to_zero():
    def restarted(step, fields):
        if step >= 300:
            fields["lr"] = 1e-3

    assert [a.subject for a in run_panel(restarted).book.alerts.values() if a.code == "M204"] == ["jump"]
    assert codes(run_panel(restarted, facts=RunFacts(lr_restarts=True))) == set()  # told so by its settings
    linear = run_panel(lambda s, f: f.update(lr=max(0.0, 1e-3 * (1 - s / 390))))
    assert codes(linear) == set()


def test_silence_is_a_stall_by_the_runs_own_pace_and_ends_with_the_next_line():
    panel = run_panel(steps=100)
    panel.tick(1100 + 59, live=True)
    assert codes(panel) == set()
    panel.tick(1100 + 61, live=True)
    assert panel.book.is_open("M501")
    panel.observe_fields(101, {"loss": 2.0}, time=1200.0)
    assert not panel.book.is_open("M501")


def test_a_run_that_has_ended_does_not_stall():
    facts = RunFacts(total_steps=100)
    panel = run_panel(steps=100, facts=facts)
    facts.ended = "finished"
    panel.tick(1e6, live=True)
    assert codes(panel) == set()


def test_the_root_cause_is_the_rank_that_failed_first_and_not_its_echo():
    panel = run_panel(steps=50)
    timeout = {"cause": "nccl", "traceback": True}
    panel.observe(Record(event="crash", rank=0, time=2000.0, text="DistBackendError: timeout", facts=timeout))
    panel.observe(Record(event="crash", rank=3, time=2005.0, text="KeyError: 'x'", facts={"traceback": True}))
    alert = panel.book.alerts["M502", ""]
    assert alert.evidence == "rank 3: KeyError: 'x'"
    assert alert.last_step is None or alert.last_step == 50


def test_a_straggler_is_named():
    panel = Panel()
    for step in range(60):
        for rank in range(4):
            late = 0.5 if rank == 2 else 0.01 * rank
            panel.observe(Record(step=step, time=1000.0 + step + late, rank=rank, values={"loss": 2.0}))
        panel.tick(1000.0 + step, live=True)
    assert [alert.subject for alert in panel.book.alerts.values()] == ["rank 2"]


def test_the_disk_alert_says_when():
    """1 GiB a minute with 60 GiB left is an hour, by arithmetic."""
    panel = Panel()
    for minute in range(10):
        free = (69 - minute) * 2**30
        panel.observe(Record(event="disk", time=60.0 * minute, facts={"free": free, "total": 500 * 2**30}))
    assert "full in about 60 minutes" in panel.book.alerts["M403", ""].evidence


def test_checkpoints_are_overdue_by_the_setting_or_by_habit():
    by_setting = run_panel(facts=RunFacts(total_steps=400, checkpoint_every=100))
    assert by_setting.book.alerts["M701", ""].first_step == 252  # 250 after the first line
    by_habit = Panel()
    for step in range(1, 400):
        by_habit.observe_fields(step, {"loss": 2.0}, time=float(step))
        if step in (50, 100, 150):
            by_habit.observe(Record(event="checkpoint", step=step))
    assert by_habit.book.alerts["M701", ""].first_step == 276


def test_alerts_are_told_once_cooled_down_and_resolved():
    settings = MonitorSettings(cooldown_seconds=100, resolve_lines=5)
    panel = Panel(settings)
    told = []
    for step in range(1, 401):
        bad = 100 <= step < 350
        fields = {"loss": math.nan if bad else 2.0}
        told += [(change.what, step) for change in panel.observe_fields(step, fields, time=float(step))]
    assert told == [("opened", 100), ("still", 200), ("still", 300), ("resolved", 354)]
    assert panel.book.alerts["M101", ""].count == 250


def test_every_code_is_documented_with_settings_that_exist():
    names = set(MonitorSettings.__dataclass_fields__)
    for kind in BY_CODE.values():
        assert set(kind.settings) <= names, kind.code
        assert kind.advice.endswith(".")
        assert kind.meaning.endswith(".")
    used = {name for kind in BY_CODE.values() for name in kind.settings}
    shared = {"resolve_lines", "cooldown_seconds"}
    assert names - used - shared == set()


def test_a_rank_that_the_trainer_names_is_a_straggler_until_it_names_another_or_none():
    panel = Panel()
    for step, rank in enumerate((3, 1, None), start=10):
        facts = {"rank": rank, "name": f"rank {rank} on node-1"}
        panel.observe(Record(step=step, event="straggler", facts=facts))
        alerts = panel.book.alerts
        assert {
            subject for (code, subject), alert in alerts.items() if code == "M601" and alert.status == "open"
        } == ({f"rank {rank}"} if rank is not None else set())
    assert alerts["M601", "rank 3"].evidence == "rank 3 on node-1: the others wait for it"


def test_a_rank_without_a_sign_of_life_is_reported_until_the_next_step():
    panel = Panel()
    panel.observe(Record(step=22, values={"loss": 7.5}))
    facts = {"rank": 1, "name": "rank 1 on node-1", "seconds": 30.0}
    panel.observe(Record(event="rank_silent", facts=facts))
    alert = panel.book.alerts["M601", "rank 1"]
    assert alert.status == "open"
    assert "rank 1 on node-1: no sign of life for 30.0 s" in alert.evidence
    panel.observe(Record(step=23, values={"loss": 7.4}))
    assert alert.status != "open"


def test_a_finished_run_that_is_started_again_is_no_restart_loop():
    panel = Panel()
    for _ in range(4):
        panel.observe(Record(event="resumed", step=400, time=1000.0))
        panel.observe(Record(event="finished", step=400, time=1001.0))
    assert not panel.book.is_open("M503")
    for _ in range(3):
        panel.observe(Record(event="resumed", step=80, time=2000.0))
    assert panel.book.is_open("M503")


def test_the_level_of_a_policy_loss_wanders_within_its_noise():
    """A signed loss has no size: that it lies above its best level means nothing until it leaves its noise."""

    def wander(step, fields):
        fields["loss"] = -0.012 + 0.007 * math.sin(step / 40) + 0.01 * math.sin(7.7 * step)

    assert "M103" not in codes(run_panel(wander))
    assert "M103" in codes(run_panel(lambda step, fields: fields.update(loss=-2.5 if step < 200 else 3.0)))


@pytest.mark.parametrize(
    ("high", "is_played", "expected"), [(40, True, False), (40, False, True), (4000, True, True)]
)
def test_where_rewards_stand_beside_the_loss_only_what_is_enormous_diverges(high, is_played, expected):
    panel = Panel()
    for step in range(1, 400):
        loss = (4.0 if step < 200 else high) * (1 + 0.1 * math.sin(step))
        panel.observe(Record(step=step, values={"loss": loss}, is_played=is_played))
    assert ("M103" in codes(panel)) == expected


@pytest.mark.parametrize(
    ("spacing", "has_times", "expected"), [(1, False, True), (50, False, False), (50, True, True)]
)
def test_times_of_single_steps_say_nothing_about_the_steps_between(spacing, has_times, expected):
    panel, now = Panel(), 1000.0
    for idx in range(300):
        seconds = (0.1, 0.25)[idx % 2]
        now += seconds * spacing
        values = {"loss": 2.0, "step_seconds": seconds}
        panel.observe(Record(step=idx * spacing, time=now if has_times else None, values=values))
    assert ("M302" in codes(panel)) == expected


def test_the_ends_of_epochs_say_nothing_about_how_steady_the_steps_between_are():
    panel = Panel()
    for step in range(
        20_000
    ):  # every tenth step, and the last of each epoch: then the first of the next is slow
        if step % 102 % 10 == 0 or step % 102 == 101:
            seconds = 4.0 if step % 102 == 0 else 0.5
            panel.observe(Record(step=step, values={"loss": 2.0, "step_seconds": seconds}))
    assert "M302" not in codes(panel)


@pytest.mark.parametrize("has_loss", [True, False])
def test_bars_of_a_program_that_never_told_a_loss_are_not_slow(has_loss):
    panel = Panel()
    for step in range(300):
        values = {"steps_per_second": 5.0 if step < 200 else 1.0} | ({"loss": 2.0} if has_loss else {})
        panel.observe(Record(step=step, values=values))
    assert ("M301" in codes(panel)) == has_loss


@pytest.mark.parametrize(("last", "expected"), [(20.0, True), (400.0, False)])
def test_a_loss_that_rises_while_rewards_are_lost_diverges(last, expected):
    panel = Panel()
    for step in range(1, 400):
        loss, reward = (4.0, 20.0 + step) if step < 200 else (40.0, last)
        panel.observe(Record(step=step, values={"loss": loss}, is_played=True, reward=reward))
    assert ("M103" in codes(panel)) == expected


def test_the_search_for_a_loss_scale_is_no_warning():
    def search(step, fields):
        fields["skipped_steps"] = float(step <= 12)

    alerts = run_panel(search).book.alerts.values()
    assert {(alert.code, alert.level) for alert in alerts} == {("M205", "info")}


def test_a_message_repeats_what_a_counter_says():
    panel = Panel()
    for step in range(1, 400):
        panel.observe_fields(step, {"loss": 2.0, "skipped_steps": float(step % 25 == 0)})
        if step % 25 == 0:
            panel.observe(Record(event="skipped", text="Gradient overflow.  Skipping step"))
    (alert,) = [alert for alert in panel.book.alerts.values() if alert.code == "M205"]
    assert (alert.count, alert.level) == (15, "info")


def test_a_running_mean_that_starts_again_with_every_epoch_does_not_diverge():
    noise, parser, panel = random.Random(3), LineParser(), Panel()
    for epoch in range(30):
        total, level = 0.0, 0.25 + 1 / (epoch + 1)
        for k in range(1, 201):
            total += level * noise.lognormvariate(0, 0.4)
            panel.observe(parser.parse(f"{k}/200 [====>.....] - ETA: 3s - loss: {total / k:.4f}"))
    assert not panel.book.alerts


def test_what_a_loss_has_come_back_from_is_noise():
    noise, panel, drift = random.Random(3), Panel(), 0.0
    for step in range(3000):
        drift = 0.8 * drift + noise.gauss(0, 0.3)
        panel.observe_fields(step, {"loss": (0.3 + 15 * math.exp(-step / 30)) * math.exp(drift)})
    assert "M103" not in codes(panel)


@pytest.mark.parametrize(("last", "expected"), [(1.9, {"M103"}), (1.2, set())])
def test_a_validation_that_nearly_doubles_while_training_rises_is_reported(last, expected):
    panel = Panel()
    for idx in range(6):
        panel.observe_fields(100 * idx, {"loss": 1.0 + 0.15 * idx})
        panel.observe_fields(100 * idx + 1, {"valid_loss": 1.0 if idx == 0 else last})
    assert codes(panel) == expected


def test_a_validation_near_zero_drifts_only_by_a_part_of_what_was_learned():
    panel = Panel()
    for idx in range(100):
        panel.observe_fields(2 * idx, {"loss": 0.08 / (idx + 1)})
        panel.observe_fields(
            2 * idx + 1, {"valid_loss": max(0.08 / (idx + 1) ** 2, 0.0003) if idx < 40 else 0.0005}
        )
    assert not panel.book.alerts


@pytest.mark.parametrize(
    "lines",
    [
        ["slurmstepd-node7: error: *** JOB 12 ON node7 CANCELLED AT 2026-01-01T10:00:00 ***"],
        ["Exited with exit code 1."],
        [
            "Traceback (most recent call last):",
            '  File "a.py", line 1',
            "ray.exceptions.RayTaskError(OddError): x",
        ],
    ],
)
def test_ends_as_schedulers_and_ray_report_them_are_crashes(lines):
    parser, panel = LineParser(), Panel()
    for line in lines:
        for record in parser.records(line):
            panel.observe(record)
    assert codes(panel) == {"M502"}


@pytest.mark.parametrize(("end", "level"), [(1.0, "warn"), (8.0, "error")])
def test_a_loss_that_comes_back_down_is_worth_a_warning(end, level):
    panel = Panel()
    for step in range(600):
        loss = 1.0 if step < 300 else 8.0 if step < 400 else end
        panel.observe(Record(step=step, values={"loss": loss * (1 + 0.02 * math.sin(step))}))
    assert [alert.level for alert in panel.book.alerts.values() if alert.code == "M103"] == [level]


@pytest.mark.parametrize(("by_lines", "expected"), [(False, True), (True, False)])
def test_lines_of_a_log_without_a_counter_have_no_speed(by_lines, expected):
    panel, now = Panel(), 1000.0
    for step in range(1, 300):
        now += (1.0, 9.0)[step % 2]
        panel.observe(Record(step=step, time=now, values={"loss": 2.0}, by_lines=by_lines))
    assert ("M302" in codes(panel)) == expected


def alerts_of(records):
    panel = Panel(MonitorSettings(), RunFacts())
    for record in records:
        panel.observe(record)
    return set(panel.book.alerts)


def test_a_rate_that_fell_in_stages_until_it_is_printed_as_zero_is_none():
    rates = [0.01] * 10 + [0.001] * 10 + [0.0001] * 10 + [0.00001] * 10 + [0.0] * 30
    records = [Record(step, values={"loss": 2.0, "lr": lr}) for step, lr in enumerate(rates)]
    assert not alerts_of(records)
    assert ("M204", "zero") in alerts_of(
        records[:20] + [Record(20 + n, values={"loss": 2.0, "lr": 0.0}) for n in range(9)]
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_of_two_kinds_of_batches_does_not_diverge(seed):
    noise = random.Random(seed)
    losses = [
        noise.choice([0.1, 0.2, 0.2, 0.2, 0.8, 0.8, 1.6]) * noise.uniform(0.8, 1.2) for _ in range(3000)
    ]
    assert not alerts_of(Record(step, values={"loss": loss}) for step, loss in enumerate(losses))


def valid_curve(valid):
    for step, value in enumerate(valid):
        yield Record(2 * step, values={"loss": 1 / (step + 1)})
        yield Record(2 * step + 1, values={"valid_loss": value})


def test_a_validation_that_zigzags_does_not_drift_and_one_that_rises_does():
    noise = random.Random(1)
    zigzag = [0.6 * math.exp(noise.gauss(0, 0.4)) for _ in range(60)]
    assert not alerts_of(valid_curve(zigzag))
    rising = [2.0 / (n + 1) for n in range(8)] + [0.25 + 0.01 * n + noise.gauss(0, 0.003) for n in range(12)]
    assert ("M801", "") in alerts_of(valid_curve(rising))


def test_a_step_beyond_the_total_says_nothing_about_the_schedule():
    assert not codes(run_panel(lambda s, f: f.update(lr=1e-6 * s), facts=RunFacts(total_steps=15)))


@pytest.mark.parametrize("turn", [200, 400])
def test_who_keeps_the_best_model_only_owes_no_checkpoint(turn):
    """Saved whenever the validation is better, at first."""
    panel = Panel(MonitorSettings(), RunFacts())
    for step in range(0, 400, 10):
        panel.observe(Record(step, values={"loss": 1.0, "valid_loss": 2 + abs(step - turn) / 100}))
        if step <= min(turn, 200):
            panel.observe(Record(step, event="checkpoint"))
    assert ("M701" in codes(panel)) == (turn > 200)


def test_the_launcher_says_which_signal_ended_a_process():
    line = "mpiexec noticed that process rank 8 with PID 11 on node n1 exited on signal 9 (Killed)."
    assert LineParser().parse(line).event == "killed"
