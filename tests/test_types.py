"""A batch in one buffer: the same tensors, one piece of memory."""

import pickle

import torch

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


def test_it_travels_as_one_tensor_and_the_same_shapes_have_the_same_slots():
    parcel = Parcel.of(micro_batch())
    again = pickle.loads(pickle.dumps(parcel))
    assert again.slots == parcel.slots
    assert hash(again.slots) == hash(parcel.slots)
    assert all(torch.equal(a, b) for a, b in zip(tensors(again.open()), tensors(parcel.open()), strict=True))
    other = Parcel.of(
        MicroBatch(small_corruption().corrupt(batch_of(small_documents((3, 4)))), parcel.open().counts)
    )
    assert other.slots != parcel.slots
