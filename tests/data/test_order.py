import numpy as np

from mmldlm.data.packing import Order, document_keys


def test_every_epoch_holds_every_document_once_in_another_order():
    order = Order(37, seed=3)
    epochs = [order.documents(np.arange(37 * e, 37 * (e + 1))) for e in range(3)]
    for documents in epochs:
        assert sorted(documents) == list(range(37))
    assert not np.array_equal(epochs[0], epochs[1])


def test_a_window_over_the_end_of_an_epoch_is_the_same_as_its_parts():
    order = Order(10, seed=0)
    window = order.documents(np.arange(7, 24))
    assert np.array_equal(window, np.concatenate([order.documents(np.array([p])) for p in range(7, 24)]))


def test_keys_change_with_seed_epoch_document_and_draw():
    ids, epochs = np.array([11, 12]), np.zeros(2, dtype=np.int64)
    base = document_keys(0, epochs, ids)
    others = [
        document_keys(1, epochs, ids),
        document_keys(0, epochs + 1, ids),
        document_keys(0, epochs, ids, draw=1),
    ]
    assert len({*base.tolist(), *(key for other in others for key in other.tolist())}) == 8
    assert np.array_equal(base, document_keys(0, epochs, ids))
