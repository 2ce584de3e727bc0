"""What goes into the JSON of a checkpoint comes back the same, or is refused with its place."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmldlm.json_lines import dump_exact, load_exact

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_round_trip(value: object) -> None:
    content = dump_exact(value)
    json.loads(content, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert load_exact(content) == value


def test_nan_and_arrays_come_back() -> None:
    mean = torch.randn(2, 3)
    found = load_exact(dump_exact({"best": math.inf, "last": math.nan, "mean": mean, "n": np.int64(3)}))
    assert found["best"] == math.inf
    assert math.isnan(found["last"])
    assert found["n"] == 3
    assert found["mean"].dtype == np.float32
    assert np.array_equal(found["mean"], mean.numpy())


@pytest.mark.parametrize(
    "value", [{"a": {1: 2}}, {"a": {"b": object()}}, {"a": {3, 4}}, {"a": np.array(["x"])}]
)
def test_what_json_cannot_hold_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(TypeError, match=r"value\.a"):
        dump_exact(value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80) | st.text(max_size=80).map(str.encode))
@example(b"NaN")
@example(b'{"$float": "nan"}')
@example(b"[1, -Infinity]")
def test_rubbish_is_a_value_error(content: bytes) -> None:
    try:
        value = load_exact(content)
    except ValueError:
        return
    # by what is written: a value that is not a number differs from itself
    written = dump_exact(value)
    assert dump_exact(load_exact(written)) == written
