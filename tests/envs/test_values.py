"""Values of specs: their ranges, starts, and the check of values from outside of the stack."""

import pickle

import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from rlstack.checks import WrongKindError
from rlstack.envs.adapters import narrow_spec, space_spec
from rlstack.envs.values import (
    Range,
    counted_from_zero,
    fitted,
    from_zero,
    is_limited,
    own,
    own_spec,
    start_of,
)
from rlstack.types import EnvSpec

CHOICE = specs.DiscreteArray(3)
PIXELS = specs.BoundedArray((2, 2, 3), np.uint8, 0, 255)
FLAG = specs.BoundedArray((), np.bool_, False, True)
REAL = specs.BoundedArray((2,), np.float32, -1.0, 1.0)
FROM_FIVE = narrow_spec(space_spec(spaces.Discrete(3, start=5), False), "")
PAIR = narrow_spec(space_spec(spaces.MultiDiscrete([2, 3], start=[-4, 7]), False), "")
FAR = narrow_spec(space_spec(spaces.Discrete(3, start=2**40), False), "")

LIMITED = {
    "choice": (CHOICE, 0, 2),
    "byte": (specs.BoundedArray((), np.uint8, 3, 200), 3, 200),
    "signed": (specs.BoundedArray((), np.int8, -5, 100), -5, 100),
    "many": (specs.BoundedArray((), np.int32, -(2**31), 5), -(2**31), 5),
    "pair": (specs.BoundedArray((2,), np.int32, [-1, 0], [1, 4]), [-1, 0], [1, 4]),
}


@given(
    name=st.sampled_from(sorted(LIMITED)),
    rows=st.sampled_from([1, 8, 64, 65, 300]),
    dtype=st.sampled_from([None, np.int8, np.uint8, np.int64]),
    value=st.integers(-128, 255),
    data=st.data(),
)
def test_a_range_holds_exactly_the_integers_between_its_bounds(name, rows, dtype, value, data):
    spec, low, high = LIMITED[name]
    array = np.ones((rows, *spec.shape), dtype or spec.dtype) * (3 if name == "byte" else 1)
    limits = np.iinfo(array.dtype)
    array = array.astype(dtype or spec.dtype)
    at = data.draw(st.integers(0, array.size - 1))
    array.flat[at] = min(max(value, limits.min), limits.max)
    allowed = Range(spec)
    wanted = [
        not (lo <= int(x) <= hi)
        for row in array.reshape(rows, -1)
        for x, lo, hi in zip(row, np.ravel(low), np.ravel(high), strict=True)
    ]
    assert allowed.holds(array) == (not any(wanted))
    assert allowed.outside(array).ravel().tolist() == wanted


def test_what_needs_a_check_is_an_integer_with_bounds_of_its_own():
    assert all(is_limited(spec) for spec, *_ in LIMITED.values())
    free = (PIXELS, FLAG, REAL, specs.Array((3,), np.int32), specs.BoundedArray((0,), int, 0, 1))
    assert not any(is_limited(spec) for spec in free)


@pytest.mark.parametrize(
    ("spec", "theirs", "ours", "dtype"),
    [
        (FROM_FIVE, [5, 6, 7], [0, 1, 2], np.int32),
        (PAIR, [[-4, 7], [-3, 9]], [[0, 0], [1, 2]], np.int32),
        (FAR, [2**40, 2**40 + 2], [0, 2], np.int64),
        (CHOICE, [0, 2], [0, 2], np.int32),
    ],
)
def test_values_of_a_space_that_starts_elsewhere(spec, theirs, ours, dtype):
    ours = np.array(ours, np.int32)
    for one in (spec, pickle.loads(pickle.dumps(spec))):
        given_back = own(ours, one)
        np.testing.assert_array_equal(given_back, theirs)
        assert given_back.dtype == own_spec(one).dtype == dtype
        np.testing.assert_array_equal(counted_from_zero(np.array(theirs), one), ours)
        taken = fitted(np.array(theirs), one, "x")
        np.testing.assert_array_equal(taken, ours)
        assert taken.dtype == np.int32
        assert own_spec(one).minimum.min() == np.min(theirs)
        assert own_spec(one).maximum.max() == np.max(theirs)


def test_a_pool_counts_from_zero_and_so_does_a_spec_without_its_start():
    spec = from_zero(EnvSpec({"a": FROM_FIVE, "b": REAL}, (PAIR,)))
    assert isinstance(spec, EnvSpec) and start_of(spec.observation["a"]) == 0
    assert start_of(spec.action[0]) == 0 and spec.observation["a"].num_values == 3
    np.testing.assert_array_equal(spec.action[0].maximum, [1, 2])
    assert spec.observation["b"] is REAL


@pytest.mark.parametrize(
    ("value", "spec", "error", "text"),
    [
        (np.full((2, 2, 3), 0.7, np.float32), PIXELS, TypeError, r"in \[0, 255\]; got real .*0\.7"),
        (np.full((2, 2, 3), 300), PIXELS, ValueError, "got 300"),
        (0.7, CHOICE, TypeError, r"in \[0, 2\]; got real numbers \(float64\), such as 0\.7"),
        (np.nan, CHOICE, TypeError, "got real numbers .*nan"),
        (1.0, CHOICE, TypeError, "got real numbers .* such as 1\\."),
        ([1.0, np.nan], PAIR, TypeError, "such as nan"),
        (7, CHOICE, ValueError, "got 7"),
        (-1, CHOICE, ValueError, "got -1"),
        (4, FROM_FIVE, ValueError, r"in \[5, 7\]; got 4"),
        (0, FROM_FIVE, ValueError, r"in \[5, 7\]; got 0"),
        ([[-4, 9], [-2, 9]], PAIR, ValueError, r"in \[\[-4, 7\], \[-3, 9\]\]; got -2"),
        (2, FLAG, ValueError, r"in \[0, 1\]; got 2"),
        (2**40, specs.Array((), np.int32), ValueError, r"2147483647\]; got 1099511627776"),
        ([0.0, np.nan], REAL, ValueError, "finite numbers; got nan"),
        ([0.0, 1e39], REAL, ValueError, r"numbers that float32 can hold; got 1e\+39"),
    ],
)
def test_values_that_a_cast_would_change_are_refused(value, spec, error, text):
    with pytest.raises(ValueError, match=rf"here must hold .*{text}") as caught:
        fitted(np.asarray(value), spec, "here")
    assert isinstance(caught.value, WrongKindError if error is TypeError else ValueError)


def test_values_that_fit_are_cast_and_bounds_of_real_numbers_may_be_exceeded():
    for value, spec in ((True, CHOICE), (1, FLAG), ([2.0, -3], REAL), ([1, 0], REAL)):
        found = fitted(np.asarray(value), spec, "x")
        np.testing.assert_array_equal(found, value)
        assert found.dtype == spec.dtype
    nothing = fitted(np.asarray([]), specs.BoundedArray((0,), np.int32, 0, 1), "x")
    assert nothing.shape == (0,) and nothing.dtype == np.int32
    kept = fitted(np.array([np.nan, 1e39]), REAL, "x", finite=False)
    np.testing.assert_array_equal(kept, np.float32([np.nan, np.inf]))
