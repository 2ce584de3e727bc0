import itertools

import numpy as np
import pytest
import torch

from mmldlm.layout import Caps, packed_layout, padded_layout


def documents_of(layout):
    """What each document's stream places hold: rows of cat(text, latents)."""
    bounds = layout.bounds.tolist()
    pieces = [layout.to_stream[a:b].tolist() for a, b in itertools.pairwise(bounds)]
    return pieces[: layout.num_documents]


@pytest.mark.parametrize("caps", [None, Caps(40, 9, 12)])
def test_stream_keeps_slots_and_tokens_of_a_document_together(caps):
    lengths = np.array([3, 12, 1, 7])
    layout = packed_layout(lengths, 2, caps)
    starts = np.cumsum(lengths) - lengths
    for i, places in enumerate(documents_of(layout)[:4]):
        slots = [layout.num_tokens + 2 * i, layout.num_tokens + 2 * i + 1]
        assert places == slots + list(range(starts[i], starts[i] + lengths[i]))


@pytest.mark.parametrize("layout", [
    packed_layout(np.array([3, 12, 1, 7]), 2, Caps(40, 9, 12)),
    packed_layout(np.array([5]), 1),
    packed_layout(np.zeros(0, dtype=np.int64), 1, Caps(64, 4, 16)),
    padded_layout(np.array([3, 0, 5]), 1, 6),
])  # fmt: skip
def test_indices_are_inverse_of_each_other_and_cover_everything(layout):
    size = layout.num_tokens + layout.num_documents * layout.num_slots
    assert torch.equal(layout.to_stream[layout.from_stream], torch.arange(size))
    assert int(layout.bounds[0]) == 0
    assert int(layout.bounds[-1]) == size
    spans = torch.diff(layout.bounds)
    assert spans.min() >= 0
    assert spans.max() <= layout.max_segment
    cells = layout.rows.places.flatten()
    used = layout.rows.cell < cells.numel()
    assert torch.equal(cells[layout.rows.cell[used]], torch.arange(size)[used])
    assert int(layout.real.sum()) == int(layout.lengths.sum())


def test_caps_give_one_shape_for_any_documents():
    caps = Caps(64, 10, 16)
    shapes = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, rng.integers(0, 8))
        layout = packed_layout(lengths, 1, caps)
        shapes.add(
            tuple(
                tuple(part.shape)
                for part in (layout.document, layout.bounds, layout.rows.places, layout.to_stream)
            )
        )
    assert len(shapes) == 1


def test_documents_that_do_not_fit_are_refused():
    with pytest.raises(AssertionError):
        packed_layout(np.array([10, 10]), 1, Caps(16, 4, 10))
