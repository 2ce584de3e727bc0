"""One similarity and one normaliser: numpy and torch, pairs and matrix products, sampling and evaluation agree."""

import numpy as np
import pytest
import torch

from mmldlm.evaluation.retrieval import ranks
from mmldlm.latents import Moments, Normalizer, between, cosine, directions, fit_normalizer, nearest
from tests.stores import write_store

RNG = np.random.default_rng(0)


def latents(num_slots: int, count: int = 5) -> np.ndarray:
    """Slots of very different size, so that a cosine of all slots together would be another number."""
    sizes = 10.0 ** np.arange(num_slots)
    return (RNG.normal(size=(count, num_slots, 4)) * sizes[:, None]).astype(np.float32)


def test_cosine_is_the_mean_over_the_slots():
    left, right = latents(3), latents(3)
    expected = [
        np.mean([a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(x, y, strict=True)])
        for x, y in zip(left.astype(np.float64), right.astype(np.float64), strict=True)
    ]
    together = np.einsum("nsc,nsc->n", left, right)
    together /= np.linalg.norm(left, axis=(1, 2)) * np.linalg.norm(right, axis=(1, 2))
    assert cosine(left, right) == pytest.approx(expected)
    assert cosine(left, right) != pytest.approx(together, abs=0.05)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_matrix_product_and_torch_give_the_same_number(num_slots):
    left, right = latents(num_slots), latents(num_slots)
    product = directions(left) @ directions(right).T
    assert np.diag(product) == pytest.approx(cosine(left, right))
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        tensors = [torch.from_numpy(values).to(dtype) for values in (left, right)]
        assert cosine(*tensors).numpy() == pytest.approx(cosine(left, right), abs=close)


def test_a_slot_of_zeros_has_no_direction():
    zeros, ones = np.zeros((1, 2, 3), np.float32), np.ones((1, 2, 3), np.float32)
    assert cosine(zeros, ones) == pytest.approx([0.0])
    assert cosine(torch.zeros(1, 2, 3), torch.ones(1, 2, 3)).tolist() == [0.0]
    for first, second in ((zeros[0], ones[0]), (ones[0], zeros[0]), (zeros[0], zeros[0])):
        line = [first, 0.5 * (first + second), second]
        assert np.array_equal(between(first, second, 3), line)


def test_normalizer_works_on_numpy_and_torch_alike():
    values = latents(2, 50)
    normalizer = Normalizer.from_json(fit_normalizer([Moments.of(values.reshape(-1, 4))]))
    normal = normalizer.normalize(values)
    assert normal.dtype == np.float32
    assert normal.reshape(-1, 4).std(0) == pytest.approx(np.ones(4), abs=1e-5)
    assert normalizer.denormalize(normal) == pytest.approx(values, abs=1e-4)
    tensor = torch.from_numpy(values)
    assert torch.equal(normalizer.normalize(tensor), torch.from_numpy(normal))
    assert torch.equal(
        normalizer.denormalize(torch.from_numpy(normal)), torch.from_numpy(normalizer.denormalize(normal))
    )
    assert Normalizer.from_json(normalizer.to_json()).scale == pytest.approx(normalizer.scale)


def test_sampling_and_evaluation_measure_the_same_cosine(tmp_path):
    """The nearest pairs that a sampler shows and the ranks that an evaluation counts come from one number."""
    split = write_store(tmp_path / "store", num_slots=3, num_channels=4).split("train")
    positions = np.arange(20)
    truth = split.read(positions).latents
    scaled = truth + 0.1 * latents(3, 20)
    everything = split.read(np.arange(len(split))).latents
    index, near = nearest(scaled, np.array_split(everything, 3), len(split))
    own = cosine(scaled, truth)
    for row, position in enumerate(positions):
        assert near[row][index[row] == position] == pytest.approx(own[row])
    by_hand = 1 + np.array([(near[row] >= own[row] - 1e-12).sum() - 1 for row in range(len(positions))])
    assert ranks(scaled, truth, split, positions).tolist() == by_hand.tolist()
