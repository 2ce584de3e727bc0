"""The bound of hybrid noise against its definition, against discrete time by brute force, and as a loss."""

import itertools

import numpy as np
import pytest
import torch

from mmldlm.config import Config, ObjectiveConfig
from mmldlm.corruption.schedule import TEXT_SCHEDULES
from mmldlm.corruption.text import TextProcess
from mmldlm.layout import Caps
from mmldlm.metrics import read_log
from mmldlm.objective.hybrid import (
    HybridRows,
    hybrid_loss,
    hybrid_loss_of_all,
    posterior_logits,
    row_costs,
    score_bound,
)
from mmldlm.objective.joint import Active, Objective, add_terms
from tests.batches import SHAPE, batch_of, small_corruption, small_denoiser, small_documents
from tests.corruption.test_hybrid import V, marginal, transition
from tests.runs import make_trainer
from tests.stores import write_store

PROCESSES = [TextProcess(TEXT_SCHEDULES[name], V, share) for name in TEXT_SCHEDULES for share in (0.2, 0.8)]
DOCUMENTS = small_documents(lengths=(3, 12, 1, 7, 5, 9, 2, 11))
EYE = torch.eye(V, dtype=torch.float64)


def cost_by_definition(process, x, z, time, logits):
    """w (KL(q_t(.|x) || q_t(.|prediction)) + IS at z), w the forward rate into z over q_t(z|x), by differentiation."""
    time = torch.tensor(time, dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(V, dtype=torch.float64)
    (noise_slope,) = torch.autograd.grad(marginal(process, nothing, time)[z], time)
    clean = process.levels(time)[0]
    (clean_slope,) = torch.autograd.grad(clean, time, retain_graph=True)
    rate = noise_slope - clean_slope / clean * marginal(process, nothing, time)[z]
    q, p = marginal(process, EYE[x], time), marginal(process, logits.softmax(-1), time)
    ratio = q[z] / p[z]
    cost = rate / q[z] * ((q * (q / p).log()).sum() + ratio - ratio.log() - 1)
    return cost, time.detach()


def rows_of(process, x, z, time):
    return HybridRows.of(process, torch.tensor([x]), torch.tensor([z]), time[None])


@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("z", range(V + 1))
def test_cost_and_closed_form_gradient_are_those_of_the_definition(process, z):
    generator = torch.Generator().manual_seed(z)
    for time in (1e-3, 0.3, 0.8, 0.999):
        logits = (3 * torch.randn(V, generator=generator, dtype=torch.float64)).requires_grad_()
        expected, at = cost_by_definition(process, 1, z, time, logits)
        (gradient,) = torch.autograd.grad(expected, logits)
        weight = process.schedule.bound_weight(at)
        rows = rows_of(process, 1, z, at)
        torch.testing.assert_close(weight * row_costs(logits[None], rows)[0], expected)
        found, _, slope, nats = score_bound(
            logits.detach().clone()[None], torch.zeros(V), rows.target, rows.seen, rows.gain,
            weight * rows.divergence, weight * rows.surprise, rows.stray, torch.float64,
        )  # fmt: skip
        torch.testing.assert_close(found[0], expected)
        torch.testing.assert_close(slope[0], gradient, rtol=1e-6, atol=1e-9 * float(weight))
        # nats of the clean token by Bayes' rule from the prediction and the noisy token
        fits = torch.stack([marginal(process, EYE[y], at)[z] for y in range(V)])
        posterior = logits.softmax(-1) * fits
        torch.testing.assert_close(nats[0], -(posterior[1] / posterior.sum()).log())


def prediction_of(z: int, time: torch.Tensor) -> torch.Tensor:
    """Some network: its prediction depends on what it sees and on the time."""
    table = torch.linspace(-1.0, 2.0, V * (V + 1), dtype=torch.float64).reshape(V + 1, V)
    return (table[z] * (1.5 - time) + torch.sin(table[z] * 3)).softmax(-1)


def discrete_bound(process, x: int, num_steps: int) -> float:
    """Negative log-likelihood bound of the chain with so many steps, by Bayes' rule and sums over all states."""
    times = torch.linspace(0, 1, num_steps + 1, dtype=torch.float64)
    total = 0.0
    for next_time, time in itertools.pairwise(times):
        step, q_time, q_next = (
            transition(process, time, next_time),
            *(marginal(process, EYE[x], at) for at in (time, next_time)),
        )
        for z in range(V + 1):
            if q_time[z] <= 0:
                continue
            predicted = prediction_of(z, time)
            true = q_next * step[:, z] / q_time[z]
            model = (
                marginal(process, predicted, next_time) * step[:, z] / marginal(process, predicted, time)[z]
            )
            kept = true > 0
            total += float(q_time[z] * (true[kept] * (true[kept] / model[kept]).log()).sum())
    return total


def continuous_bound(process, x: int, predict=prediction_of, num_nodes: int = 60) -> float:
    """The mean of our cost over all noisy tokens, and over time by quadrature in its root: there is a log at 0."""
    nodes, node_weights = np.polynomial.legendre.leggauss(num_nodes)
    total = 0.0
    for node, node_weight in zip((nodes + 1) / 2, node_weights * (nodes + 1) / 2, strict=True):
        time = torch.tensor(node**2, dtype=torch.float64)
        chance, weight = marginal(process, EYE[x], time), process.schedule.bound_weight(time)
        for z in range(V + 1):
            cost = weight * row_costs(predict(z, time).log()[None], rows_of(process, x, z, time))[0]
            total += float(node_weight * chance[z] * cost)
    return total


@pytest.mark.parametrize("process", PROCESSES[::3])
def test_the_bound_is_the_limit_of_discrete_time(process):
    """Brute force with n and 2 n steps, and what is left at 1/n extrapolated away."""
    coarse, fine = discrete_bound(process, 1, 100), discrete_bound(process, 1, 200)
    found = continuous_bound(process, 1)
    assert abs(fine - found) < abs(coarse - found)
    assert found == pytest.approx(2 * fine - coarse, rel=5e-4)


@pytest.mark.parametrize("process", PROCESSES)
def test_the_exact_predictor_pays_the_information_of_each_token(process):
    prior = torch.tensor([0.15, 0.6, 0.25], dtype=torch.float64)
    for x in range(V):
        found = continuous_bound(process, x, lambda z, time: prior)
        assert found == pytest.approx(-float(prior[x].log()), rel=1e-6)


@pytest.mark.parametrize("weighting", ["bound", "uniform"])
def test_both_weightings_are_smallest_for_the_token_given_the_others(weighting):
    """Two tokens that depend on each other: the gradient of the expected loss is zero at P(first | noisy second)."""
    process, time = PROCESSES[1], torch.tensor(0.4, dtype=torch.float64)
    joint = torch.rand(V, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    joint = joint / joint.sum()
    chances = torch.stack([marginal(process, EYE[x], time) for x in range(V)])
    for other in range(V + 1):
        first = joint @ chances[:, other]  # P(first token, noisy second)
        for z in range(V + 1):
            logits = first.log().requires_grad_()
            loss = torch.zeros((), dtype=torch.float64)
            for x in range(V):
                rows = rows_of(process, x, z, time)
                nats = -posterior_logits(logits[None], rows).log_softmax(-1)[0, x]
                cost = nats if weighting == "uniform" else row_costs(logits[None], rows)[0]
                loss = loss + first[x] * chances[x, z] * cost
            (gradient,) = torch.autograd.grad(loss, logits)
            torch.testing.assert_close(gradient, torch.zeros(V, dtype=torch.float64), atol=1e-12, rtol=0)


def step_loss(denoiser, parts, *, weighting="bound", share=0.5, noise="hybrid", caps=None, **changes):
    """Loss and gradient of one step over micro-batches of documents."""
    corruption = small_corruption(text_noise=noise, uniform_share=share)
    object.__setattr__(corruption, "text_weighting", weighting)
    config = ObjectiveConfig(text_weighting=weighting)
    active = Active.of(Config().corruption, config, length_modelled=True)
    objective = Objective(config, corruption.latent, active, text=corruption.text, **changes)
    whole = batch_of(DOCUMENTS)
    counts = corruption.count(
        DOCUMENTS.lengths, corruption.times(whole.positions, whole.keys), SHAPE.num_slots
    )
    denoiser.zero_grad()
    total = None
    for part in parts:
        terms = objective(denoiser, corruption.corrupt(batch_of(DOCUMENTS, part, caps)), counts)
        terms.loss.backward()
        total = add_terms(total, terms)
    return total, torch.cat([parameter.grad.flatten() for parameter in denoiser.parameters()])


@pytest.mark.parametrize("weighting", ["bound", "uniform"])
def test_loss_does_not_depend_on_how_it_is_computed(weighting):
    denoiser, everything = small_denoiser(), [np.arange(8)]
    expected, expected_grad = step_loss(denoiser, everything, weighting=weighting)
    assert expected.text_by_time[1].sum() == expected.scored
    ways = [
        {"scored_rows": False},
        {"chunk_rows": 3},
        {"parts": [np.array([5, 2]), np.array([1, 3, 4, 6, 7]), np.array([0])], "caps": Caps(64, 9, 12)},
    ]
    for way in ways:
        parts = way.pop("parts", everything)
        found, grad = step_loss(denoiser, parts, weighting=weighting, **way)
        for name in ("loss", "text", "correct", "scored", "text_by_time"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=5e-5, atol=1e-5)
        torch.testing.assert_close(grad, expected_grad, rtol=5e-4, atol=5e-6)


def test_without_random_tokens_it_is_the_bound_of_masked_diffusion():
    denoiser = small_denoiser()
    masked, masked_grad = step_loss(denoiser, [np.arange(8)], noise="mask")
    hybrid, hybrid_grad = step_loss(denoiser, [np.arange(8)], share=1e-9)
    assert (hybrid.correct, hybrid.scored) == (masked.correct, masked.scored)
    torch.testing.assert_close(hybrid.text, masked.text, rtol=1e-5, atol=0)
    torch.testing.assert_close(hybrid.text_by_time, masked.text_by_time, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hybrid_grad, masked_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weighting", ["bound", "uniform"])
def test_rows_that_weigh_nothing_leave_the_gradient_finite(weighting):
    """A clean text beside noisy ones, or filler, whose token the network holds for impossible."""
    process = TextProcess(TEXT_SCHEDULES["linear"], 37, 0.2)
    logits = torch.zeros(3, 37)
    logits[:, 0] = -90.0
    tokens, noisy, time = torch.tensor([0, 0, 5]), torch.tensor([0, 0, 37]), torch.tensor([0.0, 0.5, 0.5])
    logits, weights = logits.requires_grad_(), torch.tensor([0.0, 2.0, 2.0])
    rows = HybridRows.of(process, tokens, noisy, time)
    hybrid_loss_of_all(logits, rows, weights, weights > 0, weighting).weighted.backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[0] == 0).all()
    assert logits.grad[2].abs().max() > 0.1


@pytest.mark.parametrize("weighting", ["bound", "uniform"])
def test_the_head_serves_hybrid_rows_and_compiled_too(weighting):
    """Value and gradients against autograd through the plain formula, with more head rows than tokens."""
    torch.manual_seed(0)
    process = TextProcess(TEXT_SCHEDULES["linear"], 37, 0.3)
    head, hidden = torch.nn.Linear(8, 64), torch.randn(9, 8, requires_grad=True)
    tokens, time, weights = torch.randint(0, 37, (9,)), torch.rand(9), torch.rand(9) * 5
    noisy = torch.where(torch.arange(9) < 3, 37, torch.where(torch.arange(9) < 6, tokens, (tokens + 5) % 37))
    time[4], weights[4] = 0.0, 0.0  # as in rows that fill up
    rows, counted = HybridRows.of(process, tokens, noisy, time), noisy != tokens
    logits = head(hidden)[:, :37]
    nats = torch.nn.functional.cross_entropy(posterior_logits(logits, rows), tokens, reduction="none")
    plain = ((nats if weighting == "uniform" else row_costs(logits, rows)) * weights).sum()
    inputs = (hidden, head.weight, head.bias)
    expected = torch.autograd.grad(2.0 * plain, inputs)
    for compiled in (False, True) if weighting == "bound" else (False,):
        found = hybrid_loss(
            head,
            hidden,
            rows,
            weights,
            counted,
            weighting=weighting,
            vocab_size=37,
            chunk_rows=3,
            compiled=compiled,
        )
        torch.testing.assert_close(found.weighted, plain)
        torch.testing.assert_close(found.nats, nats.detach())
        for ours, theirs in zip(torch.autograd.grad(2.0 * found.weighted, inputs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        hits = (posterior_logits(logits, rows).argmax(-1) == tokens) & counted
        assert (found.correct, found.rows) == (hits.sum(), counted.sum())


def test_a_run_trains_with_hybrid_noise(tmp_path):
    store = write_store(tmp_path / "store", num_train=120, num_slots=2).path
    words = ("corruption.text_noise=hybrid", "sampling.text_sampler=hybrid", "train.steps=6")
    trainer = make_trainer(tmp_path, store, *words)
    trainer.fit()
    lines = [line for line in read_log(trainer.run.training_log) if "text_loss" in line]
    assert all(0 < line["text_loss"] < 20 for line in lines)
    assert all(value is None or 0 < value < 10 for line in lines for value in line["text_loss_by_time"])
