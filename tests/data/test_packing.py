import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmldlm.config import BatchConfig, BatchStage
from mmldlm.data.packing import Lengths, pack, plan_batches, plan_shape
from mmldlm.errors import UserError


def shape_of(tokens=4096, micro=None, mean=16.0, longest=64, **more):
    batch = BatchConfig(tokens_per_step=tokens, micro_tokens=micro)
    return plan_shape(batch, Lengths(mean, longest, mean / 2, equal=False), **more)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=300),
    st.sampled_from([None, 64, 500, 1024]),
    st.sampled_from([1, 2, 3]),
)
def test_every_document_is_packed_once_and_every_micro_batch_fits(lengths, micro, world_size):
    lengths = np.array(lengths)
    shape = shape_of(micro=micro, world_size=world_size)
    bins = pack(lengths, shape)
    assert len(bins) >= shape.num_micro
    assert shape.num_micro % world_size == 0
    assert sorted(np.concatenate(bins)) == list(range(len(lengths)))
    for members in bins:
        assert lengths[members].sum() <= shape.caps.num_tokens
        assert len(members) <= shape.caps.num_documents


def test_a_full_step_of_sentences_fills_98_percent_without_extra_micro_batches():
    rng = np.random.default_rng(0)
    shape = shape_of(tokens=65536, micro=8192)
    fills = []
    for _ in range(20):
        lengths = np.clip(rng.gamma(3.0, 16 / 3.0, 8000).astype(int), 1, 64)
        lengths = lengths[: np.searchsorted(np.cumsum(lengths), 65536, side="right")]
        bins = pack(lengths, shape)
        assert len(bins) == shape.num_micro
        fills.append(lengths.sum() / (len(bins) * shape.caps.num_tokens))
    assert np.mean(fills) > 0.98


def test_long_documents_that_do_not_fit_open_another_micro_batch():
    shape = shape_of(tokens=300, micro=100, mean=60.0, longest=60)
    bins = pack(np.array([60, 60, 60, 60, 60]), shape)
    assert len(bins) == 5


def test_equal_documents_are_spread_evenly():
    bins = pack(np.full(12, 10), shape_of(tokens=120, micro=40, mean=10.0, longest=10))
    assert [len(members) for members in bins] == [3, 3, 3, 3]


def test_a_step_too_small_for_the_longest_document_is_refused():
    with pytest.raises(UserError, match=r"batch.tokens_per_step=50: the longest document has 64"):
        shape_of(tokens=50)


def test_a_micro_batch_never_exceeds_what_was_asked_for():
    for micro in (64, 100, 1000, 4096, 5000):
        assert shape_of(micro=micro).caps.num_tokens <= micro
    with pytest.raises(UserError, match=r"batch.micro_tokens=50: the longest document has 64"):
        shape_of(micro=50)


def test_a_number_of_documents_that_was_asked_for_is_kept():
    batch = BatchConfig(tokens_per_step=4096, documents_per_step=3000)
    assert plan_shape(batch, Lengths(16.0, 64, 8.0, equal=False)).documents_per_step == 3000


def test_five_deviations_are_enough_for_the_documents_of_a_step():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.gamma(3.0, 16 / 3.0, 100_000).astype(int), 1, 64)
    shape = plan_shape(BatchConfig(tokens_per_step=65536), Lengths.of(lengths, 64))
    counts = [np.searchsorted(np.cumsum(rng.permutation(lengths)), 65536, side="right") for _ in range(50)]
    assert max(counts) < shape.documents_per_step < 1.1 * np.mean(counts)


def test_documents_of_equal_length_make_a_rectangle_without_room_to_spare():
    lengths = Lengths.of(np.full(100, 32), 32)
    shape = plan_shape(BatchConfig(tokens_per_step=None, documents_per_step=8, micro_documents=3), lengths)
    assert (shape.layout, shape.num_micro, shape.caps.num_documents) == ("padded", 3, 3)
    whole = plan_shape(BatchConfig(tokens_per_step=300), lengths)
    assert (whole.documents_per_step, whole.num_micro, whole.caps.num_tokens) == (9, 1, 288)


@pytest.mark.parametrize("micro", [None, 100_000])
@pytest.mark.parametrize("lengths", [Lengths(16.0, 64, 8.0, equal=False), Lengths(64.0, 64, 0.0, equal=True)])
def test_halving_changes_the_micro_batches_and_nothing_else(lengths, micro):
    sizes = BatchConfig(tokens_per_step=4096, micro_tokens=micro)
    whole = plan_shape(sizes, lengths)
    for halvings in range(1, 8):
        shape = plan_shape(sizes, lengths, halvings=halvings)
        assert shape.tokens_per_step == whole.tokens_per_step
        assert shape.documents_per_step == whole.documents_per_step
        assert shape.caps.num_tokens <= max(64, whole.caps.num_tokens >> (halvings - 1))
    assert shape.smallest
    assert shape.caps.num_tokens == 64
    assert not whole.smallest


def test_stages_follow_each_other_and_the_last_stays():
    stages = [BatchStage(until=10, tokens_per_step=512), BatchStage(until=30, micro_tokens=1024)]
    plan = plan_batches(
        BatchConfig(tokens_per_step=4096, schedule=stages), Lengths(16.0, 64, 8.0, equal=False)
    )
    assert [plan.at(step).tokens_per_step for step in (0, 9, 10, 29, 30, 10**6)] == [512, 512, *[4096] * 4]
    assert [plan.at(step).num_micro for step in (10, 29, 30)] == [5, 5, 1]


def test_accumulation_follows_from_the_target_and_what_fits_on_a_device():
    shape = plan_shape(
        BatchConfig(tokens_per_step=None, documents_per_step=128, micro_documents=4),
        Lengths.of(np.full(500, 2048), 2048),
        world_size=2,
    )
    assert shape.num_micro == 128 / 4
    assert shape.num_micro % 2 == 0


def test_batches_counted_in_documents_are_as_large_as_their_documents():
    """Room for the longest document times their number would be three quarters empty; one size for all, a tenth."""
    lengths = np.random.default_rng(0).gamma(3.0, 4.5, 20_000).astype(np.int64).clip(1, 64)
    for documents, least in ((128, 0.94), (1024, 0.97)):
        shape = plan_shape(
            BatchConfig(tokens_per_step=None, documents_per_step=documents), Lengths.of(lengths, 64)
        )
        steps = [lengths[start : start + documents] for start in range(0, 19 * documents, documents)]
        sums = [int(step[part].sum()) for step in steps for part in pack(step, shape)]
        rooms = [shape.caps_for(tokens).num_tokens for tokens in sums]
        assert shape.num_micro == 1
        assert all(room >= tokens for room, tokens in zip(rooms, sums, strict=True))
        assert len(set(rooms)) <= 3  # each one is compiled and recorded
        assert sum(sums) / sum(rooms) > least


def test_batches_counted_in_tokens_have_one_size():
    assert not shape_of().sizes
    batch = BatchConfig(tokens_per_step=4096, documents_per_step=3000)
    assert not plan_shape(batch, Lengths(16.0, 64, 8.0, equal=False)).sizes
