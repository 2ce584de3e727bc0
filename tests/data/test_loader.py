import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import mmldlm
from mmldlm.config import BatchConfig
from mmldlm.data.loader import StepReader, make_loader, plan_steps
from mmldlm.data.packing import Lengths, Order, plan_shape
from mmldlm.types import Counts
from tests.batches import small_corruption
from tests.stores import write_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("store"), num_train=150, num_slots=2, num_channels=5)


def reader_of(store, *, micro=None, rank=0, world_size=1, layout="packed"):
    split, corruption = store.split("train"), small_corruption()
    shape = plan_shape(
        BatchConfig(tokens_per_step=400, micro_tokens=micro),
        Lengths(13.5, 24, 6.0, equal=False),
        world_size=world_size,
        layout=layout,
    )

    def count(positions, lengths, when, derived):
        no_keys = np.zeros(len(positions), np.uint64)
        return corruption.count(lengths, corruption.times(positions, no_keys, when, derived), 2)

    order = Order(len(split), seed=1)
    return StepReader(store, split, order, shape, corruption.corrupt, count, True, rank, world_size)


def steps_of(reader, position=0, step=0):
    return plan_steps(reader.order, reader.split.lengths, reader.plan, position, step)


def contents(batch):
    """Each document of a step as (text time, clean tokens, noisy tokens, noisy latents), in a canonical order."""
    found = []
    for micro in (parcel.open().noisy for parcel in batch.micro_batches):
        for document in range(micro.layout.num_documents):
            mine = (micro.layout.document == document) & micro.layout.real
            if mine.any():
                tokens, noisy = micro.tokens[mine].tolist(), micro.noisy_tokens[mine].tolist()
                found.append(
                    (
                        micro.text_time[document].item(),
                        tokens,
                        noisy,
                        micro.noisy_latents[document].flatten().tolist(),
                    )
                )
    return sorted(found)


def test_steps_follow_each_other_without_gap_and_respect_the_budget(store):
    reader = reader_of(store)
    ranges = list(itertools.islice(steps_of(reader), 30))
    assert ranges[0].start == 0
    for before, after in itertools.pairwise(ranges):
        assert before.end == after.start
    lengths = reader.split.lengths
    for where in ranges:
        taken = lengths[reader.order.documents(np.arange(where.start, where.end))].sum()
        following = lengths[reader.order.documents(np.array([where.end]))][0]
        assert taken <= 400 < taken + following


def test_a_plan_from_the_middle_goes_on_as_the_whole_plan_does(store):
    reader = reader_of(store)
    whole = list(itertools.islice(steps_of(reader), 20))
    assert list(itertools.islice(steps_of(reader, whole[7].start, 7), 13)) == whole[7:]


@pytest.mark.parametrize("micro", [None, 64, 130])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_step_holds_the_same_noisy_documents_however_it_is_cut(store, micro, layout):
    where = next(itertools.islice(steps_of(reader_of(store)), 5, None))
    expected, found = reader_of(store)[where], reader_of(store, micro=micro, layout=layout)[where]
    assert contents(found) == contents(expected)
    assert found.counts == expected.counts


def test_ranks_share_a_step_without_overlap_and_agree_on_the_counts(store):
    where = next(itertools.islice(steps_of(reader_of(store)), 11, None))  # spans the end of an epoch
    expected = reader_of(store)[where]
    parts = [reader_of(store, micro=128, rank=rank, world_size=3)[where] for rank in range(3)]
    assert sorted(itertools.chain(*(contents(part) for part in parts))) == contents(expected)
    assert len({len(part.micro_batches) for part in parts}) == 1
    assert all(part.counts == expected.counts for part in parts)


def test_counts_are_those_of_the_documents(store):
    where = next(steps_of(reader_of(store)))
    batch = reader_of(store)[where]
    micro = batch.micro_batches[0].open().noisy
    target = micro.length_target.bool()
    assert batch.counts == Counts(
        tokens=micro.layout.lengths[target].sum().item(),
        slots=2 * micro.latent_target.sum().item(),
        documents=target.sum().item(),
    )


def test_workers_give_the_same_steps_in_the_same_order(store):
    reader = reader_of(store)

    def first(num_workers):
        loader = make_loader(
            reader,
            itertools.islice(steps_of(reader), 6),
            num_workers=num_workers,
            prefetch=2,
            pin_memory=False,
        )
        return [contents(batch) for batch in loader]

    assert first(0) == first(2)


def test_latents_are_normalised_with_the_training_split(store):
    reader = reader_of(store)
    latents = torch.cat(
        [
            b.latents[b.layout.lengths > 0]
            for w in itertools.islice(steps_of(reader), 5)
            for b in (parcel.open().noisy for parcel in reader[w].micro_batches)
        ]
    )
    assert latents.mean().abs() < 0.15
    assert abs(latents.std() - 1) < 0.15


@pytest.fixture(scope="module")
def derived_store(tmp_path_factory):
    words = "a coil of rope on the quiet lake, the open sea and an old boat"
    texts = [" ".join(words.split()[i % 7 :]) + f", number {i}" for i in range(60)]
    folder = tmp_path_factory.mktemp("derived") / "store"
    return mmldlm.prepare(
        texts, folder, encoder=lambda texts: [[len(t), 1.0] for t in texts], derive=2, max_tokens=24
    )


def test_a_batch_for_an_own_loop_knows_its_derived_documents(derived_store):
    split = derived_store.splits["train"]
    batch = split.batch(range(len(split)))
    noisy = replace(small_corruption(), derived_share=split.derived_share).corrupt(batch)
    joint = (noisy.latent_target * noisy.length_target).bool().numpy()
    assert joint.any()
    assert not joint[split.derived(np.arange(len(split)))].any()
    held_out = derived_store.splits["validation"]
    assert held_out.derived_share == 0
    assert held_out.batch([0]).derived is None


@pytest.mark.parametrize("micro", [None, 64])
def test_joint_takes_whole_documents_alone_and_counts_know_it(derived_store, micro):
    split = derived_store.split("train")
    everything = split.read(np.arange(len(split)))
    derived = split.derived(np.arange(len(split)))
    tokens_of = np.split(everything.tokens, np.cumsum(everything.lengths)[:-1])
    whole = {tokens.tobytes() for tokens, made in zip(tokens_of, derived, strict=True) if not made}
    assert split.derived_share == pytest.approx(derived.mean())
    assert 0.5 < derived.mean() < 1
    assert all(", number " in text for text in split.read_texts(np.flatnonzero(~derived)))
    reader = replace(reader_of(derived_store, micro=micro), split=split)
    corruption = replace(small_corruption(), derived_share=split.derived_share)
    reader.corrupt = corruption.corrupt
    reader.count = lambda positions, lengths, when, derived: corruption.count(
        lengths, corruption.times(positions, positions.astype(np.uint64), when, derived), 1
    )
    num_joint = 0
    for where in itertools.islice(steps_of(reader), 6):
        batch = reader[where]
        tokens = slots = 0.0
        for noisy in (parcel.open().noisy for parcel in batch.micro_batches):
            joint = (noisy.latent_target * noisy.length_target).bool()
            for document in torch.nonzero(joint).flatten():
                ids = noisy.tokens[(noisy.layout.document == document) & noisy.layout.real].numpy()
                assert ids.tobytes() in whole
            num_joint += int(joint.sum())
            tokens += float((noisy.length_target * noisy.layout.lengths).sum())
            slots += float(noisy.latent_target.sum())
        assert (batch.counts.tokens, batch.counts.slots) == (tokens, slots)
    assert num_joint > 10
