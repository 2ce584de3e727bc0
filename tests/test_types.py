"""A batch in one buffer: the same tensors, one piece of memory."""

import pickle
from dataclasses import replace

import torch

from mmldlm.layout import Caps
from mmldlm.types import Counts, MicroBatch, Parcel
from tests.batches import batch_of, small_corruption, small_documents


def micro_batch():
    noisy = small_corruption().corrupt(batch_of(small_documents()))
    return MicroBatch(noisy, Counts(3.0, 2.0, 1.0).as_tensors())


def tensors(value):
    found = []
    Parcel.of(value)
    for item in vars(value).values():
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif hasattr(item, "__dataclass_fields__"):
            found += tensors(item)
    return found


def test_it_opens_to_what_was_put_in():
    original = micro_batch()
    parcel = Parcel.of(original)
    opened = parcel.open()
    for ours, theirs in zip(tensors(opened), tensors(original), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
        assert ours.untyped_storage().data_ptr() == parcel.buffer.untyped_storage().data_ptr()
    assert opened.noisy.layout.max_segment == original.noisy.layout.max_segment


def test_it_travels_as_one_tensor_and_equal_shapes_have_equal_templates():
    parcel = Parcel.of(micro_batch())
    again = pickle.loads(pickle.dumps(parcel))
    assert again.template == parcel.template
    assert hash(again.template) == hash(parcel.template)
    assert all(torch.equal(a, b) for a, b in zip(tensors(again.open()), tensors(parcel.open()), strict=True))
    other = Parcel.of(
        MicroBatch(small_corruption().corrupt(batch_of(small_documents((3, 4)))), parcel.open().counts)
    )
    assert other.template != parcel.template


def test_what_decides_the_computation_is_part_of_the_template():
    """A rectangle that is full needs no mask; a recording of it must not serve one that is not."""
    corruption = small_corruption()
    full, partly = (
        corruption.corrupt(batch_of(small_documents(lengths), caps=Caps(36, 3, 12), layout="padded"))
        for lengths in ((12, 12, 12), (12, 12, 11))
    )
    counts = Counts(1.0, 1.0, 1.0).as_tensors()
    rows = min(len(full.scored), len(partly.scored))
    same = [
        MicroBatch(replace(noisy, scored=noisy.scored[:rows], scored_real=noisy.scored_real[:rows]), counts)
        for noisy in (full, partly)
    ]
    assert full.layout.full
    assert not partly.layout.full
    assert Parcel.of(same[0]).template != Parcel.of(same[1]).template
