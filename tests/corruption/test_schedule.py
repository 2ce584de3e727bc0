import pytest
import torch

from mmldlm.corruption.joint import LATENT_SCHEDULES, TEXT_SCHEDULES, LatentProcess

TIMES = torch.linspace(0, 1, 101)


@pytest.mark.parametrize("name", TEXT_SCHEDULES)
def test_text_schedule_is_exact_at_the_ends_and_rises(name):
    probability = TEXT_SCHEDULES[name].mask_probability(TIMES)
    assert probability[0] == 0.0
    assert probability[-1] == 1.0
    assert (torch.diff(probability) > 0).all()


@pytest.mark.parametrize("name", TEXT_SCHEDULES)
def test_bound_weight_is_the_logarithmic_derivative(name):
    schedule, time = (
        TEXT_SCHEDULES[name],
        torch.linspace(0.05, 0.95, 19, dtype=torch.float64).requires_grad_(),
    )
    (slope,) = torch.autograd.grad(schedule.mask_probability(time).log().sum(), time)
    torch.testing.assert_close(schedule.bound_weight(time), slope)


@pytest.mark.parametrize("name", TEXT_SCHEDULES)
def test_time_of_inverts_the_schedule(name):
    schedule, time = TEXT_SCHEDULES[name], TIMES.double()
    torch.testing.assert_close(schedule.time_of(schedule.mask_probability(time)), time, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", LATENT_SCHEDULES)
def test_latent_schedule_is_exact_at_the_ends_and_nothing_is_left_of_the_signal(name):
    schedule = LATENT_SCHEDULES[name]
    signal, noise = schedule.signal(TIMES), schedule.noise(TIMES)
    assert (signal[0], noise[0], signal[-1], noise[-1]) == (1.0, 0.0, 0.0, 1.0)
    assert (torch.diff(signal) < 0).all()
    assert (torch.diff(noise) > 0).all()


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_variance_is_preserved(name):
    schedule = LATENT_SCHEDULES[name]
    torch.testing.assert_close(
        schedule.signal(TIMES) ** 2 + schedule.noise(TIMES) ** 2, torch.ones_like(TIMES)
    )


def test_the_velocity_of_the_flow_schedule_is_that_of_its_straight_path():
    process = LatentProcess(LATENT_SCHEDULES["flow"], "velocity")
    clean, noise, time = torch.randn(5, 2, 3), torch.randn(5, 2, 3), torch.rand(5)
    assert torch.equal(process.target(clean, noise, time), noise - clean)


@pytest.mark.parametrize("name", LATENT_SCHEDULES)
def test_a_velocity_gives_clean_and_noise_exactly_at_the_ends(name):
    process = LatentProcess(LATENT_SCHEDULES[name], "velocity")
    clean, noise, ends = torch.zeros(2, 1, 4), torch.randn(2, 1, 4), torch.tensor([0.0, 1.0])
    clean[:] = torch.randint(-4, 5, (4,))  # whole numbers: no sum below is rounded
    noise = noise.round()
    noisy, velocity = process.corrupt(clean, noise, ends), process.target(clean, noise, ends)
    assert torch.equal(process.to_clean(velocity, noisy, ends), clean)
    assert torch.equal(process.to_noise(velocity, noisy, ends), noise)


@pytest.mark.parametrize("schedule", LATENT_SCHEDULES)
@pytest.mark.parametrize("prediction_type", ["clean", "noise", "velocity"])
def test_conversions_round_trip(schedule, prediction_type):
    process = LatentProcess(LATENT_SCHEDULES[schedule], prediction_type)
    generator = torch.Generator().manual_seed(0)
    clean = torch.randn(50, 2, 5, generator=generator, dtype=torch.float64)
    noise = torch.randn(50, 2, 5, generator=generator, dtype=torch.float64)
    time = torch.linspace(0.01, process.latest_time - 1e-3, 50, dtype=torch.float64)
    noisy = process.corrupt(clean, noise, time)
    prediction = process.target(clean, noise, time)
    torch.testing.assert_close(process.to_clean(prediction, noisy, time), clean)
    torch.testing.assert_close(process.to_noise(prediction, noisy, time), noise)


@pytest.mark.parametrize("schedule", LATENT_SCHEDULES)
def test_latent_corruption_is_the_identity_at_time_0_and_pure_noise_at_time_1(schedule):
    process = LatentProcess(LATENT_SCHEDULES[schedule], "clean")
    clean, noise = torch.randn(4, 1, 8), torch.randn(4, 1, 8)
    assert torch.equal(process.corrupt(clean, noise, torch.zeros(4)), clean)
    assert torch.equal(process.corrupt(clean, noise, torch.ones(4)), noise)


@pytest.mark.parametrize("name", TEXT_SCHEDULES)
def test_mean_probability_is_the_mean(name):
    times = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    mean = TEXT_SCHEDULES[name].mask_probability(times).mean().item()
    assert TEXT_SCHEDULES[name].mean_probability == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("schedule", LATENT_SCHEDULES)
@pytest.mark.parametrize("prediction_type", ["clean", "noise", "velocity"])
def test_an_error_of_the_output_is_not_magnified(schedule, prediction_type):
    """At every time of the grid, an error of 0.1 in the network's output moves the clean latent by no more."""
    process = LatentProcess(LATENT_SCHEDULES[schedule], prediction_type)
    time = torch.linspace(0.01, process.latest_time, 40, dtype=torch.float64)
    noisy, output = torch.randn(40, 1, 6, dtype=torch.float64), torch.randn(40, 1, 6, dtype=torch.float64)
    clean = [
        process.to_clean(process.prediction(out, noisy, time), noisy, time) for out in (output, output + 0.1)
    ]
    assert (clean[1] - clean[0]).abs().max() <= 0.1 + 1e-9
