"""States of predictors and policies survive as JSON and arrays."""

import json
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lbbsp_core import Measurement
from lbbsp_core.registry import PREDICTORS
from lbbsp_core.runtime.checkpoint.checkpoint import from_json, records_of, to_json


def copied(state, *initial):
    arrays = {}
    text = json.dumps(to_json(state, arrays), allow_nan=False)
    return from_json(json.loads(text), arrays, records_of(*initial))


class State(NamedTuple):
    number: float
    rest: object = None


class Other(NamedTuple):
    number: float


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner)
    | st.builds(State, st.floats(), inner),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=100)
@given(value=values)
def test_values_are_kept_exactly(value):
    found = copied(value, State(0.0))
    assert type(found) is type(value)
    assert repr(found) == repr(value), "also of what is no number, and in the same order"


@pytest.mark.parametrize("name", sorted(PREDICTORS))
def test_each_predictor_goes_on_from_its_copied_state(name):
    chosen = PREDICTORS.build(name)
    rng = np.random.default_rng(0)
    pairs = zip(rng.integers(8, 64, 35), rng.uniform(0.1, 0.2, 35), strict=True)
    measurements = [Measurement(int(samples), float(seconds)) for samples, seconds in pairs]
    state = chosen.init()
    for each in measurements[:30]:
        state = chosen.update(state, each)
    copy = copied(state, chosen.init())
    for each in measurements[30:]:
        state, copy = chosen.update(state, each), chosen.update(copy, each)
        assert chosen.predict(copy) == chosen.predict(state)


def test_a_record_of_an_unknown_class_is_refused():
    with pytest.raises(ValueError, match=r"test_serialization:State.*another predictor"):
        copied(State(1.0), Measurement(1, 1.0))
    with pytest.raises(ValueError, match="fields"):
        from_json({"record": "x", "fields": 3}, {}, {"x": Other})
    with pytest.raises(ValueError, match="unexpected keyword"):
        from_json({"record": "x", "fields": {"rest": 1}}, {}, {"x": Other})


def test_other_objects_are_refused_with_their_name():
    with pytest.raises(TypeError, match="cannot hold object objects"):
        to_json((1, object()), {})
    with pytest.raises(TypeError, match="cannot hold ndarray objects"):
        to_json(np.array([object()]), {})
