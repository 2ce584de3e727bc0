"""Drawing by inverting a cumulative sum: evenly spaced numbers must give each value its exact share."""

from __future__ import annotations

import pytest
import torch

from mmldlm.sampling.orders import CHUNK_ROWS, best_of, best_of_blocks, draw, keep_top_p

PROBABILITY = torch.tensor([0.1, 0.4, 0.0, 0.3, 0.2, 0.0])
GRID = (torch.arange(20000) + 0.5) / 20000


def shares(temperature: float, top_p: float) -> torch.Tensor:
    logits = PROBABILITY.log().expand(len(GRID), -1)
    drawn = draw(logits, GRID, temperature, top_p)
    return torch.bincount(drawn, minlength=6) / len(GRID)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_each_value_gets_its_share(temperature: float) -> None:
    expected = PROBABILITY ** (1 / temperature)
    assert torch.allclose(shares(temperature, 1.0), expected / expected.sum(), atol=1e-4)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1.0, [0, 1, 3, 4]), (0.95, [0, 1, 3, 4]), (0.85, [1, 3, 4]), (0.65, [1, 3]), (0.35, [1]), (1e-6, [1])],
)
def test_top_p_keeps_the_smallest_set(top_p: float, kept: list[int]) -> None:
    expected = torch.zeros(6)
    expected[kept] = PROBABILITY[kept]
    assert torch.allclose(shares(1.0, top_p), expected / expected.sum(), atol=1e-4)
    assert torch.equal(keep_top_p(PROBABILITY[None], top_p)[0].nonzero().flatten(), torch.tensor(kept))


def test_temperature_0_is_the_most_probable_value_and_a_high_one_is_even() -> None:
    assert shares(0.0, 0.5).tolist() == [0, 1, 0, 0, 0, 0]
    assert torch.allclose(shares(1e6, 1.0)[[0, 1, 3, 4]], torch.full((4,), 0.25), atol=1e-3)


def test_ends_of_the_interval_give_possible_values() -> None:
    logits = PROBABILITY.log().expand(2, -1)
    assert draw(logits, torch.tensor([0.0, 1.0]), 1.0, 1.0).tolist() == [0, 4]
    first_impossible = torch.tensor([[-torch.inf, 0.0, 0.0]])
    assert draw(first_impossible, torch.tensor([0.0]), 1.0, 1.0).tolist() == [1]


def test_rows_do_not_depend_on_chunks() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2 * CHUNK_ROWS + 7, 11, generator=generator)
    numbers = torch.rand(len(logits), generator=generator)
    whole = draw(logits, numbers, 0.7, 0.8)
    assert torch.equal(
        whole[CHUNK_ROWS - 3 :], draw(logits[CHUNK_ROWS - 3 :], numbers[CHUNK_ROWS - 3 :], 0.7, 0.8)
    )
    assert torch.allclose(best_of(logits).probability, logits.softmax(-1).amax(-1))
    assert len(draw(logits[:0], numbers[:0], 1.0, 1.0)) == len(best_of(logits[:0]).token) == 0


@pytest.mark.parametrize("columns", [2, 3, 10, 11, 64])
def test_the_best_value_does_not_depend_on_blocks_of_columns(columns: int) -> None:
    logits = 20 * torch.randn(300, 11, generator=torch.Generator().manual_seed(0))
    whole, parts = best_of(logits), best_of_blocks(logits.split(columns, dim=1))
    assert torch.equal(whole.token, parts.token)
    assert torch.allclose(whole.probability, parts.probability, rtol=1e-5)
    assert torch.allclose(whole.margin, parts.margin, rtol=1e-5, atol=1e-7)


def test_blocks_show_logits_that_are_not_finite() -> None:
    for bad in (torch.nan, torch.inf):
        logits = torch.randn(2, 6)
        logits[1, 4] = bad
        finite = best_of_blocks(logits.split(2, dim=1)).margin.isfinite()
        assert finite.tolist() == [True, False]
